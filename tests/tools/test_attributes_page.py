"""docs/attributes.md and docs/lab.md show the figures of their files, and the page every attribute there is."""

import json
from pathlib import Path
from typing import Any

from cgru.attributes import ATTRIBUTES, TUNED_ON

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "attributes.md").read_text(encoding="utf-8").splitlines()
FOUND = json.loads((DOCS / "results" / "attributes.json").read_text(encoding="utf-8"))


def shown(measured: dict[str, Any]) -> str:
    value, low, high = (f"{100 * measured[part]:.1f}" for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def test_every_attribute_is_on_the_page_with_its_use() -> None:
    for name, attribute in ATTRIBUTES.items():
        assert f"| `{name}` | {attribute.meaning} | {'tuning' if name in TUNED_ON else 'reported'} |" in PAGE


def test_the_rates_of_the_base_are_those_of_the_file() -> None:
    assert {*FOUND["base"]["rates"]} == {*ATTRIBUTES}
    for name, row in FOUND["base"]["rates"].items():
        figures = " | ".join(f"{100 * row[key]:.1f}" for key in ("judge", "detector", "agreement"))
        assert f"| `{name}` | {figures} |" in PAGE and row["in_range"]


def test_the_leads_are_those_of_the_file() -> None:
    for row in FOUND["runs"]["rows"]:
        arm = " ".join((row["method"], *(f"`{setting}`" for setting in row["settings"])))
        figures = [shown(row[name]) for name in ("attribute_rate", "attribute_reduction", "object_accuracy")]
        figures += [shown(row["style_accuracy"]), f"{row['frechet_judge']['value']:.1f}"]
        assert f"| {arm} | {' | '.join(figures)} |" in PAGE


def test_the_log_of_pairs_is_that_of_its_file() -> None:
    log = " ".join((DOCS / "lab.md").read_text(encoding="utf-8").split())
    rows = json.loads((DOCS / "results" / "pairs.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert f"UA {shown(row['ua'])}" in log and f"IRA {shown(row['ira'])}" in log
        assert f"CRA {100 * row['cra']['value']:.1f}" in log
    best = rows[0]
    shares = [f"{100 * target:.0f}" for _, target, _, _ in best["looks"]]
    assert shares[:5] == ["94", "72", "16", "3", "0"] and best["looks"][4][2] == 1.0  # as the log says
    assert f"something else {100 * best['replacement_clean']['value']:.1f} %" in log
