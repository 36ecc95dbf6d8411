"""docs/attributes.md shows the figures of docs/results/attributes.json and every attribute there is."""

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
