"""The arithmetic of benchmarks/fast_options.py: which cells there are, and paired differences with their interval."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fast_options import ARMS, compared, jobs, paired, report
from cgru.presets import resolve_config


def asked(**changes: Any) -> argparse.Namespace:  # noqa: ANN401
    plain = {"arms": ["best", "merged", "fast"], "concepts": ["Cats", "Trees"], "seeds": 2, "option_seeds": 1}
    return argparse.Namespace(**{**plain, "iterations": None, "set": [], **changes})


def row(arm: str, cell: str, ua: float, ira: float) -> dict[str, Any]:
    found = {"ua": [ua, 0.0, 1.0, 80], "ira": [ira, 0.0, 1.0, 304]}
    return {"name": f"{arm}-{cell}", "table": arm, "measured": {"canvas": found}}


def test_best_and_fast_come_first_and_have_every_seed() -> None:
    names = [job["name"] for job in jobs(asked())]
    assert names == [
        *("best-cats-s0", "best-trees-s0", "fast-cats-s0", "fast-trees-s0"),
        *("best-cats-s1", "best-trees-s1", "fast-cats-s1", "fast-trees-s1"),
        *("merged-cats-s0", "merged-trees-s0"),
    ]


def test_a_short_trial_has_another_name() -> None:
    whole, short, other = (jobs(asked(**changes))[0] for changes in ({}, {"iterations": 2}, {"set": ["policy.rank=2"]}))
    assert len({whole["name"], short["name"], other["name"]}) == 3 and "policy.iterations=2" in short["set"]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_config(arm: str) -> None:
    job = jobs(asked(arms=[arm]))[0]
    assert resolve_config(job["concept"], preset_name=job["preset"], overrides=job["set"]).samples_every == 0


def test_differences_are_paired_and_concepts_are_what_varies() -> None:
    rows = [
        row("best", "cats-s0-ab", 0.9, 0.9),
        row("best", "cats-s1-ab", 0.8, 0.9),
        row("best", "trees-s0-ab", 0.7, 0.9),
    ]
    rows += [row("fast", "trees-s0-ab", 0.74, 0.9), row("fast", "cats-s0-ab", 0.92, 0.9)]
    rows += [row("fast", "cats-s1-ab", 0.78, 0.9)]
    found = compared(rows, "fast")
    # UA: +2 and -2 points on Cats, so 0; +4 on Trees. Mean 2, deviation 2.828; 1 degree: ± 12.706 · 2.828 / √2 = 25.412
    difference = found["ua_difference"]
    assert (difference["mean"], difference["n"], difference["concepts"]) == (pytest.approx(0.02), 3, 2)
    assert [difference["low"], difference["high"]] == pytest.approx([-0.23412, 0.27412], abs=1e-5)
    assert found["ua"] == pytest.approx(0.8133, abs=1e-4) and found["ira_difference"]["mean"] == 0.0
    assert "ua_difference" not in compared(rows, "best") and compared(rows, "merged") == {"cells": 0}


def test_one_concept_has_no_interval() -> None:
    found = paired({"cats-s0": 0.02, "cats-s1": 0.04})
    assert (found["mean"], found["low"], found["high"], found["n"]) == (pytest.approx(0.03), None, None, 2)


def test_a_trial_in_the_same_folder_is_not_counted(tmp_path: Path) -> None:
    rows = [row("best", "cats-s0", 0.9, 0.9), row("best", "cats-s0-ab12cd", 0.1, 0.9)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(found) + "\n" for found in rows))
    (tmp_path / "jobs.json").write_text(json.dumps([{"name": "best-cats-s0"}]))
    report(tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())["best"] == {
        "cells": 1,
        "ua": 0.9,
        "ira": 0.9,
        "seconds": None,
    }
