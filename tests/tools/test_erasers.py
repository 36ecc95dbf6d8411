"""The arithmetic of benchmarks/erasers.py, and that docs/erasers.md shows what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.erasers import ARMS, TUNED, TUNING, difference, means, tables
from cgru.presets import resolve_config

DOCS = Path(__file__).parents[2] / "docs"


def cell(arm: str, concept: str, ua: float, seed: int = 0, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"arm": arm, "concept": concept, "seed": seed, "seconds": 10.0, "ua": {"value": ua, "n": 80}, **more}


def test_the_page_shows_the_tables_of_its_results() -> None:
    rows = json.loads((DOCS / "results" / "erasers" / "erasers.json").read_text(encoding="utf-8"))["rows"]
    page = (DOCS / "erasers.md").read_text(encoding="utf-8")
    for line in tables(rows).splitlines():
        assert line in page.splitlines(), line


def test_differences_are_of_the_same_cells_and_concepts_vary() -> None:
    # Cats: (0.1 + 0.3) / 2 = 0.2; Bears: 0.4; mean 0.3, sd 0.1414, half a width 12.706 · 0.1414 / √2 = 1.27.
    rows = [
        *(cell("anchored", "Cats", 0.5, seed) for seed in (0, 1)),
        cell("anchored", "Bears", 0.5),
        *(cell("uce", "Cats", ua, seed) for seed, ua in enumerate((0.6, 0.8, 0.0))),  # anchored has no seed 2
        cell("uce", "Bears", 0.9),
    ]
    assert difference(rows, "uce", "ua") == "+30.0 [-97.1, +157.1]"
    assert difference(rows, "uce", "ira") == "–"


def test_a_failed_cell_is_in_no_mean() -> None:
    rows = [cell("uce", "Cats", 0.5), {"arm": "uce", "concept": "Bears", "seed": 0, "error": "no memory"}]
    assert means(rows)["uce"] == {"cells": 1, "ua": 0.5, "seconds": 10.0}
    assert tables(rows).splitlines()[2].startswith("| uce | 1 | 50.0 | – |")


@pytest.mark.parametrize("arm", TUNED)
def test_all_methods_are_tuned_alike(arm: str) -> None:
    method, preset, fixed = ARMS[arm]
    assert len(set(TUNED[arm])) == 12
    for settings in TUNED[arm]:
        for concept in TUNING:
            resolve_config(concept, method=method, preset_name=preset or None, overrides=[*fixed, *settings])


@pytest.mark.parametrize("arm", TUNED)
def test_the_best_setting_is_the_default(arm: str) -> None:
    tried = json.loads((DOCS / "results" / "erasers" / "tuning.json").read_text(encoding="utf-8"))["arms"][arm]
    best = max(tried, key=lambda name: tried[name]["ua"] + tried[name]["ira"])
    method, _, fixed = ARMS[arm]
    chosen = resolve_config("Dogs", method=method, overrides=[*fixed, *best.split()[1:]])
    default = resolve_config("Dogs", method=method, overrides=list(fixed))
    assert chosen == default or (arm == "sld" and best == "sld strength=max words=1")  # words=0: 1 for a class
