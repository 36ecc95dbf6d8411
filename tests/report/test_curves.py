"""The curves of a run: numbers to coordinates by hand, nothing drawn that was not measured, whole and escaped SVG."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from cgru.cli import main
from cgru.config import override
from cgru.presets import resolve_config
from cgru.report.draw.curves import draw_curves, percent, points, reward_range, short
from cgru.report.draw.svg import NARROW, PALETTE, Frame, Series, band, curve, end_labels, spread, ticks
from cgru.runs import Run

SVG = "{http://www.w3.org/2000/svg}"
# 100 wide from 10, 50 high from 20; iterations 0..10, values 0..1: (5, 0.25) is at 10 + 50, 20 + 0.75 · 50.
FRAME = Frame(10, 20, 100, 50, (0.0, 10.0), (0.0, 1.0))
LOOK = {"watch/target_share": 0.25, "watch/keep_share": 0.9, "watch/nothing_share": 0.0, "watch/gap": 0.1}


def records(count: int, **first: float) -> list[dict[str, Any]]:
    """Batches whose reward grows by 1 each, with a look in the last iteration; `first` goes into iteration 0."""
    rows: list[dict[str, Any]] = [
        {"iteration": i, "reward/mean": 1.0 + i, "critic/value_error": 4.0, "policy/kl": 0.5} for i in range(count)
    ]
    rows[0] |= first
    rows[-1] |= LOOK
    return rows


def drawn(rows: list[dict[str, Any]], scale: tuple[float, float] | None = (0.0, 10.0)) -> ElementTree.Element:
    """The parsed SVG."""
    return ElementTree.fromstring(draw_curves(rows, "Unlearning Dogs", "cgru, seed 0", scale))


def words(svg: ElementTree.Element) -> list[str]:
    """Every visible text."""
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def paths(series: Series) -> dict[str, str]:
    """class -> d of the lines of a curve."""
    group = ElementTree.fromstring(curve(FRAME, series, short))
    return {path.attrib["class"]: path.attrib["d"] for path in group.iter("path")}


def circles(series: Series) -> list[tuple[str, str]]:
    group = ElementTree.fromstring(curve(FRAME, series, short))
    return [(circle.attrib["cx"], circle.attrib["cy"]) for circle in group.iter("circle")]


def test_numbers_become_coordinates() -> None:
    assert (FRAME.x(5), FRAME.y(0.25)) == (60.0, 57.5)
    assert (FRAME.y(2.0), FRAME.y(-3.0)) == (20.0, 70.0)  # beyond the axis: its edges
    assert paths(Series("", "ink", [(0, 0.0), (1, 1.0), (2, 0.5)])) == {"line": "M10 70L20 20L30 45"}


def test_ticks_are_round_and_span_the_data() -> None:
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.0, 13.6, 3) == [0.0, 5.0, 10.0, 15.0]
    assert ticks(-0.12, 1.0, 3) == [-0.5, 0.0, 0.5, 1.0]
    assert ticks(0.0, 1.0, 1) == [0.0, 1.0]


def test_a_line_over_iterations_that_were_not_measured_is_dashed_and_its_ends_are_marked() -> None:
    looks = Series("", "ink", [(5, 0.0), (10, 1.0)])
    assert paths(looks) == {"line dashed": "M60 70L110 20"}
    assert circles(looks) == [("60", "70"), ("110", "20")]
    assert circles(Series("", "ink", [(1, 0.0), (2, 0.0)])) == []  # a plain line needs no marks


def test_a_value_that_is_no_number_breaks_the_line() -> None:
    rows = [{"iteration": i, "loss": value} for i, value in enumerate([0.0, 0.5, None, float("nan"), 1.0])]
    found = points(rows, "loss")
    assert found == [(0, 0.0), (1, 0.5), (2, None), (3, None), (4, 1.0)]
    assert paths(Series("", "ink", found)) == {"line": "M10 70L20 45"}
    assert circles(Series("", "ink", found)) == [("50", "20")]  # alone behind the break, so it gets a mark


def test_a_value_beyond_the_axis_is_a_triangle_at_its_edge() -> None:
    group = ElementTree.fromstring(curve(FRAME, Series("", "ink", [(0, 0.5), (1, -4.0), (2, 0.5)]), short))
    marks = {path.attrib["d"]: path[0].text for path in group.iter("path") if path.attrib["class"] == "dot"}
    assert marks == {"M20.0 70.0L14.0 60.0L26.0 60.0Z": ", 1: −4"}


def test_the_band_changes_colour_where_the_lines_cross() -> None:
    # The reward falls from 1 to 0 while the detector rises from 0 to 1: they meet at x = 1, y = 0.5.
    found = ElementTree.fromstring(
        f"<g>{band(FRAME, [(0, 1.0), (2, 0.0)], [(0, 0.0), (2, 1.0)], ('red', 'slate'))}</g>"
    )
    tints = [(shape.attrib["class"], shape.attrib["points"]) for shape in found.iter("polygon")]
    assert tints == [("band red", "10,20 20,45 20,45 10,70"), ("band slate", "20,45 30,70 30,20 20,45")]
    assert [bar.attrib["class"] for bar in found.iter("line")] == ["stem red", "stem slate"]


def test_labels_are_moved_apart_and_stay_inside() -> None:
    assert spread([10, 12, 60], 20, 0, 100) == [10, 30, 60]
    assert spread([95, 98], 20, 0, 100) == [80, 100]
    assert spread([-5], 20, 0, 100) == [0]
    found = end_labels(FRAME, [Series("a", "ink", [(0, 0.5)]), Series("b", "ink", [(0, None)])], percent)
    assert [text.text for text in ElementTree.fromstring(found).iter("text")] == ["a 50 %"]  # b has nothing to say


def test_reward_and_detector_stand_on_one_axis() -> None:
    shown = words(drawn(records(3)))
    # The detector sees it in 25 %; the reward believes 0.1 more of the same pictures is gone: 0.75 + 0.1.
    assert "Gone: 85 % says the reward, 75 % the detector" in shown
    assert {"detector 75 %", "reward 85 %", "batch 30 %", "kept 90 %"} <= set(shown)  # batch: 3 of 10
    assert "explored" not in " ".join(shown)
    assert "explored 97 %" in words(drawn(records(3, **{"reward/explored_mean": 9.7})))


def test_looks_stand_behind_their_iteration_and_batches_before_their_update() -> None:
    svg = drawn(records(4))
    groups = {group[0].text: group for group in svg.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None}
    left, right = 74, 74 + 478  # iterations 0..4 over the plot
    assert [float(dot.attrib["cx"]) for dot in groups["detector"].iter(f"{SVG}circle")] == [right]
    steps = groups["batch"].findall(f"{SVG}path")[0].attrib["d"].replace("L", "M").split("M")[1:]
    assert [float(step.split()[0]) for step in steps] == [left, 193.5, 313, 432.5]


def test_alarms_are_marked_counted_and_escaped() -> None:
    rows = records(3)
    assert "no alarm" in " ".join(words(drawn(rows)))
    rows[-1]["watch/alarm"] = "gap 0.40 > 0.30 & <more>"
    svg = drawn(rows)
    assert "▼ 1 alarm" in " ".join(words(svg))
    assert "gap 0.40 > 0.30 & <more>" in [title.text for title in svg.iter(f"{SVG}title")]


def test_words_of_users_cannot_break_the_picture() -> None:
    svg = ElementTree.fromstring(draw_curves(records(1), "<script>&", 'a "b"', (0.0, 10.0)))
    assert words(svg)[:2] == ["<script>&", 'a "b"']
    assert svg[0].text == '<script>&, a "b"'


def test_what_was_not_measured_is_left_out() -> None:
    shown = " ".join(words(drawn([{"iteration": 0, "reward/mean": 2.0}])))
    assert "no outside detector has looked" in shown
    assert not any(name in shown for name in ("Kept", "Critic", "Policy"))
    assert words(drawn([{"iteration": 0}])) == ["Unlearning Dogs", "cgru, seed 0"]
    assert "Gone" not in " ".join(words(drawn([{"iteration": 0, "reward/mean": 1.0, "watch/target_share": 0.5}])))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text"])
def test_a_run_of_one_iteration_without_numbers_is_still_a_picture(value: object) -> None:
    row = records(1)[0]
    broken = draw_curves([dict.fromkeys(row, value) | {"iteration": 0}], "a", "b", (0.0, 10.0))
    assert words(ElementTree.fromstring(broken)) == ["a", "b"]
    whole = draw_curves([row], "a", "b", (0.0, 10.0))
    assert "nan" not in whole and "inf" not in whole


def test_without_a_known_scale_the_batch_has_an_axis_of_its_own() -> None:
    shown = words(drawn(records(3), None))
    assert "Reward of the batch: 1 → 3" in shown
    assert "batch 3" in shown
    assert "detector 75 %" in shown  # the gap is a share whatever the reward's units


def test_the_scale_comes_from_the_config() -> None:
    config = resolve_config("Dogs")
    assert reward_range(override(config, ["reward.scale=4"])) == (0.0, 4.0)
    assert reward_range(override(config, ["reward.name=0.5*concept+0.5*clip"])) is None


def test_explained_variance_is_the_mean_over_steps() -> None:
    row = {"iteration": 0, "critic/explained_variance/t0": 0.2, "critic/explained_variance/t1": 0.6}
    assert "Critic, variance explained: 40 %" in words(drawn([row]))


def test_numbers_for_people() -> None:
    assert [percent(value) for value in (0.0, 1.0, 0.9375, 0.094, 0.000036, -0.0001, -0.5)] == [
        "0 %", "100 %", "94 %", "9.4 %", "0 %", "0 %", "−50 %"
    ]  # fmt: skip
    assert [short(value) for value in (13.57, 0.02034)] == ["13.6", "0.02"]


def test_text_is_readable_in_light_and_dark_and_larger_on_a_phone() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for name in PALETTE.keys() - {"paper", "grid", "axis"}:
        for colour, paper in zip(PALETTE[name], PALETTE["paper"], strict=True):
            dark, light = sorted((luminance(colour), luminance(paper)))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, colour)  # WCAG 2.2, 1.4.3
    text = draw_curves(records(2), "a", "b", None)
    assert "prefers-color-scheme:dark" in text and NARROW in text
    svg = ElementTree.fromstring(text)
    assert svg.attrib["role"] == "img"
    assert {element.attrib["id"] for element in svg if "id" in element.attrib} == {"title", "desc"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, resolve_config("Dogs"))


def test_the_command_draws_a_run_in_progress(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in records(2):
        run.log(row)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "rew')  # being written at this moment
    assert main(["curves", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.path / 'curves.svg'}\n"
    assert f"2 of {run.config.policy.iterations} iterations" in (run.path / "curves.svg").read_text(encoding="utf-8")
    out = tmp_path / "new" / "dogs.svg"
    assert main(["curves", str(run.path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"curves": str(out), "run": str(run.path)}
    assert out.read_bytes() == (run.path / "curves.svg").read_bytes()


def test_mistakes_are_one_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").mkdir()
    cases = {
        "no iteration in": [str(run.path)],
        "no run at": [str(tmp_path / "missing")],
        "a folder and not a run": [str(tmp_path / "plain")],
    }
    for message, arguments in cases.items():
        assert main(["curves", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    run.log(records(1)[0])
    assert main(["curves", str(run.path), "--out", str(tmp_path / "plain")]) == 2
    assert "is a folder" in capsys.readouterr().err
    (run.path / "metrics.jsonl").unlink()
    assert main(["curves", str(run.path)]) == 2
    assert "no metrics at" in capsys.readouterr().err
    assert not (run.path / "curves.svg").exists()
