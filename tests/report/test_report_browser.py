"""The report in a real browser: the slider by key and mouse, tabs, both themes, a phone's width, no console message."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chrome import Tab, chromium, opened
from test_benchmarks import add_attack, attack_scores
from test_report_page import add_pictures, add_scores, make_run, page_of, scores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed: apt-get install -y chromium"),
]
LEFT, RIGHT = ("ArrowLeft", 37), ("ArrowRight", 39)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with pictures."""
    folder = tmp_path_factory.mktemp("page")
    runs = [make_run(folder, seed=seed) for seed in range(2)]
    for run in runs:
        add_pictures(add_scores(run, scores()))
        add_attack(run, attack_scores())
    (folder / "report.html").write_text(page_of(*runs), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture
def tab(page: Path, tmp_path: Path) -> Iterator[Tab]:
    with opened(page, tmp_path / "profile") as found:
        yield found


def cut(tab: Tab) -> str:
    return str(tab.value("getComputedStyle(document.querySelector('.over')).clipPath"))


def test_the_slider_moves_by_key_and_mouse(tab: Tab) -> None:
    assert tab.value("document.querySelector('.slider').value") == "50"
    tab.value("document.querySelector('.slider').focus()")
    before = cut(tab)
    for _ in range(10):
        tab.press(*RIGHT)
    assert tab.value("document.querySelector('.slider').value") == "60"
    assert tab.value("document.querySelector('.compare').style.getPropertyValue('--cut')") == "60%"
    assert cut(tab) != before
    tab.click(".pair")  # its middle
    assert tab.value("document.querySelector('.slider').value") in ("49", "50", "51")
    assert tab.value("[...document.querySelectorAll('.slider')][1].value") == "50"  # the other run's stays
    assert tab.complaints() == []


def test_tabs_show_one_panel_by_click_and_key(tab: Tab) -> None:
    shown = "[...document.querySelectorAll('#r0-pictures-panel-0, #r0-pictures-panel-1')].map(e => e.checkVisibility())"
    assert tab.value(shown) == [True, False]
    tab.click("#r0-pictures-tab-1")
    assert tab.value(shown) == [False, True]
    tab.press(*LEFT)
    assert tab.value(shown) == [True, False]
    assert tab.value("document.activeElement.id") == "r0-pictures-tab-0"
    assert tab.complaints() == []


def test_the_literature_unfolds(tab: Tab) -> None:
    shown = "document.querySelector('.literature table').checkVisibility()"
    assert tab.value(shown) is False
    tab.click(".literature summary")
    assert tab.value(shown) is True
    assert tab.complaints() == []


def test_nothing_is_loaded_and_every_picture_is_whole(tab: Tab, page: Path) -> None:
    assert page.stat().st_size < 8_000_000
    assert tab.requests() == [page.resolve().as_uri()]
    broken = "[...document.images].filter(e => e.complete && !e.naturalWidth).length"
    assert tab.value(broken) == 0 and tab.value("document.images.length") > 10
    assert tab.complaints() == []


def test_light_and_dark(tab: Tab) -> None:
    papers = []
    for scheme in ("light", "dark"):
        tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        papers.append(tab.value("getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 25, 31)"]


def test_a_phone_scrolls_tables_not_the_page(page: Path, tmp_path: Path) -> None:
    with opened(page, tmp_path / "profile", width=360, height=740) as tab:
        assert tab.value("document.documentElement.scrollWidth") == 360
        assert tab.complaints() == []
