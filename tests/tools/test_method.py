"""The arithmetic of benchmarks/method.py, and that both arms are tuned alike on the tuning concepts alone."""

import argparse
from typing import Any

import pytest

from benchmarks.method import ARMS, FROZEN, TASKS, cells, difference, learning, primary, tabled
from cgru.attributes import TUNED_ON
from cgru.presets import resolve_config


def row(arm: str, concept: str, ua: float, seed: int = 0, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A cell with IRA 0.8 and nothing on target 0.5, so that its primary measure is 0.4 · UA."""
    values = {"ua": ua, "ira": 0.8, "nothing": 0.5}
    figures = {name: {"value": value} for name, value in values.items()}
    about = {"cell": f"{arm}-{concept}-{seed}", "arm": arm, "concept": concept, "seed": seed}
    return {**about, **figures, "iterations": 100, "commit": "abc", **more}


def options(**given: Any) -> argparse.Namespace:  # noqa: ANN401
    plain = {"task": "objects", "tune": False, "tried": None, "arms": [*ARMS], "concepts": None, "seeds": [0]}
    return argparse.Namespace(**{**plain, "images": 2, **given})


def test_the_primary_measure_counts_noise_as_not_forgotten() -> None:
    assert primary(row("cgru", "Cats", 1.0)) == pytest.approx(1.0 * 0.5 * 0.8)
    look = {"reduction": {"value": 0.9}, "object_accuracy": {"value": 0.95}}
    assert primary(look) == pytest.approx(0.855)
    assert primary({**look, "reduction": None}) is None


def test_the_difference_is_paired_and_concepts_vary() -> None:
    # Cats: 0.4 · (0.2 + 0.4) / 2 = 0.12; Bears: 0.4 · 0.5 = 0.2.
    # Mean 0.16, sd 0.0566, half a width 12.706 · 0.0566 / √2 = 0.508.
    rows = [row("ddpo", "Cats", 0.5, 0), row("ddpo", "Cats", 0.5, 1), row("ddpo", "Bears", 0.5)]
    rows += [row("cgru", "Cats", 0.7, 0), row("cgru", "Cats", 0.9, 1), row("cgru", "Cats", 0.0, 2)]
    rows += [row("cgru", "Bears", 1.0)]
    found = difference(rows, *ARMS)
    assert found is not None and found["concepts"] == 2
    assert (found["value"], found["low"], found["high"]) == pytest.approx((0.16, -0.348, 0.668), abs=1e-3)
    assert difference(rows[:3], *ARMS) is None


def test_a_failed_cell_is_in_no_mean_and_is_named() -> None:
    failed = {"cell": "cgru-bears-s0", "arm": "cgru", "concept": "Bears", "seed": 0, "error": "no memory"}
    table = tabled([row("cgru", "Cats", 1.0), failed], TASKS["objects"], settings_tried=8)
    assert table["failed"] == ["cgru-bears-s0"] and table["difference"] is None
    assert table["arms"]["cgru"] == {
        "ua": 1.0, "ira": 0.8, "nothing": 0.5, "primary": pytest.approx(0.4), "cells": 1, "trajectories": 6400,
        "settings_tried": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "lasting"),
    [([1.0, 0.1, 0.05], 20), ([0.05, 0.5, 0.1], 30), ([0.05, 0.0, 0.11], None), ([], None), ([0.1], 10)],
)
def test_learning_lasts_from_the_first_look_after_which_none_falls(shares: list[float], lasting: int | None) -> None:
    metrics: list[dict[str, float]] = [{"iteration": i, "reward/mean": 1.0} for i in range(10 * len(shares))]
    for k, share in enumerate(shares, 1):
        metrics[10 * k - 1]["watch/target_share"] = share
    assert learning(metrics)["lasting"] == lasting


@pytest.mark.parametrize("name", TASKS)
def test_settings_are_tried_alike_on_the_tuning_concepts_and_are_valid(name: str) -> None:
    planned = [cell for cell in cells(TASKS[name], options(task=name, tune=True)) if cell.concept]
    by_arm = {arm: [(c.concept, c.settings) for c in planned if c.method == arm] for arm in ARMS}
    assert by_arm["cgru"] == by_arm["ddpo"] and len(set(TASKS[name].tried)) == len(TASKS[name].tried)
    allowed = set(TUNED_ON) if name == "attributes" else {"Dogs", "Horses", "Flowers"}
    assert {cell.concept for cell in planned} == allowed
    for cell in planned:
        assert cell.concept
        resolve_config(cell.concept, method=cell.method, preset_name=cell.preset, overrides=cell.settings)
    reported = [cell for cell in cells(TASKS[name], options(task=name, seeds=[0, 1, 2])) if cell.concept]
    assert not allowed & {cell.concept for cell in reported} and len(reported) == 2 * 3 * len(TASKS[name].reported)
    assert all(settings in TASKS[name].tried for settings in FROZEN[name].values())
