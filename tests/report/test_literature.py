"""The literature block: numbers as printed, everything computed again, differences shown, apart from measurements."""

from decimal import Decimal
from pathlib import Path

import pytest
from test_report_page import add_scores, make_run, page_of, scores, words

from cgru.report.paper.literature import FOLDER, TABLES, TOTAL, block, literature_table, read_printed


def test_every_file_is_shown_and_says_where_it_is_from() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(TABLES)
    for name in TABLES:
        found = read_printed(name)
        assert found.label.startswith(("tab:", "fig:")) and found.notes
        assert found.label in words(literature_table(found).text)


@pytest.mark.parametrize(
    ("name", "rows", "wrong"),
    [
        ("objects", 11, []),
        ("classes", 20, []),
        ("nudity", 13, ["AdvUn", "MACE"]),
        ("attack", 12, []),
        ("critic", 2, []),
    ],
)
def test_totals_that_the_paper_sums_otherwise(name: str, rows: int, wrong: list[str]) -> None:
    found = read_printed(name)
    assert len(found.rows) == rows
    assert [row for row in found.rows if found.differs(row)] == wrong


def test_a_wrong_total_stands_beside_the_computed_one() -> None:
    found = read_printed("nudity")
    assert found.value("AdvUn", TOTAL) == 8 + 0 + 0 + 13 + 1 + 1 + 0 + 0 == 23
    text = words(literature_table(found).text)
    assert "23 [printed 28]" in text and "109 [printed 111]" in text
    assert "AdvUn: printed 28, its own numbers give 23." in text


def test_means_are_exact_decimals() -> None:
    found = read_printed("objects")
    assert found.value("CGRU", TOTAL) == Decimal("88.505")  # printed 88.50: within half a digit, and a note says so
    assert "88.505" in words(literature_table(found).text)


def test_ranks_and_bold_are_computed_not_copied() -> None:
    found = read_printed("attack")
    post = next(column for column in found.columns if column.key == "post_asr")
    assert found.best(post) == ["Erasediff"] and found.bold["post_asr"] == ("CGRU",)
    assert [found.rank(row) for row in ("Erasediff", "SHS", "CGRU", "SalUn")] == [1, 2, 3, 4]
    html = literature_table(found).text
    assert "<strong>2.11</strong>" in html and "<strong>9.67</strong>" not in html
    assert "Post-ASR: bold in the paper CGRU; best by its numbers Erasediff." in words(html)


def test_base_models_are_neither_ranked_nor_best() -> None:
    found = read_printed("nudity")
    clipscore = next(column for column in found.columns if column.key == "clipscore")
    assert found.rank("SD v2.1") is None
    assert found.best(clipscore) == ["CA"]  # 31.37; SD v2.1 has 31.53
    assert [found.rank(row) for row in ("CPE", "CGRU")] == [3, 3]  # 40 each, behind 18 and 23


def test_means_over_classes_are_held_against_the_other_table() -> None:
    found = read_printed("classes")
    mean = sum((row["ua"] for row in found.rows.values()), Decimal(0)) / 20
    assert mean == Decimal("95.371") and f"{mean:.3f}" in words(literature_table(found).text)


def test_the_block_stands_behind_every_measured_number(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_scores(run, scores())
    page = page_of(run)
    before, after = page.split('class="literature"')
    assert "95.37" not in words(before) and "95.37" in words(after)
    assert "Nothing here was measured" in words(after)
    assert page.count("tab:unlearn_overview") == block("x").text.count("tab:unlearn_overview")
