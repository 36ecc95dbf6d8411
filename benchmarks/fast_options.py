"""What each option of the faster path does to UA, IRA and time on Emoji Canvas: `python benchmarks/fast_options.py`.

Quality: concepts × seeds × arms are trained and judged side by side by `python -m tools.sweep` (one line of
OUT/results.jsonl a finished cell; the same command again goes on where it stopped, also inside a run). `best`, `fast`
and `fast-variance` take all seeds, single options the first `--option-seeds`. Differences to `best` are paired over
concept × seed; seeds of a concept are alike, so Student's t interval (95 %) is of the means of the concepts. Time:
`--time` trains each arm alone for a few iterations in this process, since among others it means nothing.

    python benchmarks/fast_options.py --out FOLDER [--workers 14] [--device cuda] [--iterations 60] [--until UNIX-TIME]
    python benchmarks/fast_options.py --out FOLDER --time [--timed 6]
    python benchmarks/fast_options.py --out FOLDER --table
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cgru.atomic_io import atomic_write
from cgru.evaluation.base import stable_hash
from cgru.evaluation.intervals import student
from cgru.pipeline import unlearn
from cgru.presets import resolve_config

ROOT = Path(__file__).resolve().parents[1]
CONCEPTS = ("Bears", "Cats", "Jellyfish", "Statues", "Trees")
"""The reported concepts of docs/results/unlearning.md; `best` was tuned on others."""
BASELINE, HEADLINE = "best", ("best", "fast", "fast-variance")
ARMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    BASELINE: ("best", ()),
    "fast": ("fast", ()),
    "fast-variance": ("fast", ("policy.step_choice=variance",)),
    "steps-each": ("best", ("policy.step_fraction=0.3",)),
    "steps-shared": ("best", ("policy.step_fraction=0.3", "policy.step_choice=shared")),
    "steps-variance": ("best", ("policy.step_fraction=0.3", "policy.step_choice=variance")),
    "decode-half": ("best", ("critic.decode=half",)),
    "decode-quarter": ("best", ("critic.decode=quarter",)),
    "latents": ("best", ("critic.kind=latent",)),
    "tower-frozen": ("best", ("critic.tower=frozen",)),
    "merged": ("best", ("sampling.merged=true",)),
}
"""Arm -> preset and what is changed in it."""
OURS = ("samples_every=0", "checkpoint_every=20", "watch.every=1000")
"""Of every arm: no strips, and one look of the outside detector, at the end. They change no weights."""
MEASURES = ("ua", "ira")

Table = dict[str, Any]


def main() -> None:
    """Train what is left, or time it, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, results.jsonl, time.json, table.json")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--concepts", nargs="+", default=list(CONCEPTS))
    parser.add_argument("--seeds", type=int, default=3, help="of best, fast and fast-variance: 0, 1, ...")
    parser.add_argument("--option-seeds", type=int, default=1, help="of the other arms")
    parser.add_argument("--iterations", type=int, help="None: the preset's own")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings in every arm")
    parser.add_argument("--images", type=int, default=2, help="pictures a prompt of the benchmark")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--until", type=float, help="start no cell after this time (seconds since 1970)")
    parser.add_argument("--time", action="store_true", help="time each arm alone instead")
    parser.add_argument("--timed", type=int, default=6, help="iterations timed, after one to warm up")
    parser.add_argument("--table", action="store_true", help="only the table of what is there")
    options = parser.parse_args()
    if min(options.seeds, options.option_seeds, options.workers, options.timed) < 1:
        parser.error("--seeds, --option-seeds, --workers and --timed must be at least 1")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.time:
        timed(options)
    elif not options.table:
        sweep(options)
    report(options.out)


def jobs(options: argparse.Namespace) -> list[Table]:
    """The cells as `tools.sweep` takes them, those of the headline first."""
    first = [arm for arm in options.arms if arm in HEADLINE]
    others = [arm for arm in options.arms if arm not in first]
    order = [(arm, seed) for seed in range(options.seeds) for arm in first]
    order += [(arm, seed) for seed in range(options.option_seeds) for arm in others]
    changes = [*([f"policy.iterations={options.iterations}"] if options.iterations else []), *options.set]
    return [job(arm, concept, seed, changes) for arm, seed in order for concept in options.concepts]


def job(arm: str, concept: str, seed: int, changes: Sequence[str]) -> Table:
    """One training and its evaluation; its name says what was changed, so that short trials do not pass for it."""
    preset, settings = ARMS[arm]
    name = f"{arm}-{concept.lower()}-s{seed}" + (f"-{stable_hash(list(changes))[:6]}" if changes else "")
    everything = [*settings, *OURS, *changes]
    return {"name": name, "table": arm, "concept": concept, "seed": seed, "preset": preset, "set": everything}


def sweep(options: argparse.Namespace) -> None:
    """Hand the cells to workers and wait for them."""
    plan = options.out / "jobs.json"
    atomic_write(plan, json.dumps(jobs(options), indent=1) + "\n")
    command = [sys.executable, "-m", "tools.sweep", str(plan), "--out", str(options.out), "--device", options.device]
    command += ["--workers", str(options.workers), "--images", str(options.images)]
    command += [] if options.until is None else ["--until", str(options.until)]
    subprocess.run(command, cwd=ROOT, check=True)


def timed(options: argparse.Namespace) -> None:
    """Seconds an iteration of each arm, written after each."""
    path = options.out / "time.json"
    found: Table = json.loads(path.read_text()) if path.exists() else {}
    for arm in options.arms:
        found[arm] = seconds(arm, options)
        print(f"{arm:16}{found[arm]['median']:8.3f} s an iteration", flush=True)
        atomic_write(path, json.dumps(found, indent=1) + "\n")


def seconds(arm: str, options: argparse.Namespace) -> Table:
    """Time between iterations of a run, with logging and without checkpoints; the critic's warm start is left out."""
    preset, settings = ARMS[arm]
    changes = [*settings, *OURS, "checkpoint_every=1000", "critic.trajectories=16", "critic.epochs=1"]
    changes += [*options.set, f"policy.iterations={options.timed + 2}", f"device={options.device}"]
    config = resolve_config(options.concepts[0], preset_name=preset, overrides=changes)
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        unlearn(config, folder, listeners=(lambda _: stamps.append(time.perf_counter()),))
    # From the second stamp: the first iteration checks parity, the last one is followed by a look and a checkpoint.
    spent = [after - before for before, after in zip(stamps[:-2], stamps[1:-1], strict=True)]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    return {"median": statistics.median(spent), "iterations": spent, "device": where, "torch": str(torch.__version__)}


def report(out: Path) -> None:
    """Print the table of what is finished, and write it beside the results."""
    # Of the last plan only: short trials in the same folder have names of their own. The last try of a cell counts.
    planned = (
        {job["name"] for job in json.loads((out / "jobs.json").read_text())} if (out / "jobs.json").exists() else ()
    )
    rows = {row["name"]: row for row in read(out / "results.jsonl") if row["name"] in planned}
    good = [row for row in rows.values() if "error" not in row]
    for name in sorted(rows.keys() - {row["name"] for row in good}):
        print(f"failed: {name}: {rows[name]['error'].strip().splitlines()[-1]}")
    times = json.loads((out / "time.json").read_text()) if (out / "time.json").exists() else {}
    arms = [arm for arm in ARMS if arm in times or any(row["table"] == arm for row in good)]
    table = {arm: {**compared(good, arm), "seconds": times.get(arm, {}).get("median")} for arm in arms}
    print(f"{'arm':16}{'cells':>6}{'UA %':>8}{'IRA %':>8}{'Δ UA [95 %], n':>28}{'Δ IRA [95 %], n':>28}{'s / it.':>9}")
    for arm, row in table.items():
        numbers = "".join(f"{shown(row.get(name)):>8}" for name in MEASURES)
        differences = "".join(f"{interval(row.get(f'{name}_difference')):>28}" for name in MEASURES)
        print(f"{arm:16}{row['cells']:6}{numbers}{differences}{shown(row['seconds'], 1, 3):>9}")
    atomic_write(out / "table.json", json.dumps(table, indent=1) + "\n")


def read(path: Path) -> list[Table]:
    """The lines of a file of JSON lines, none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compared(rows: Sequence[Table], arm: str) -> Table:
    """Means of an arm, and its paired differences to the baseline, in points of a share."""
    own, base = (by_cell(rows, name) for name in (arm, BASELINE))
    found: Table = {"cells": len(own)}
    for name in MEASURES if own else ():
        found[name] = statistics.mean(share(row, name) for row in own.values())
        pairs = {cell: share(own[cell], name) - share(base[cell], name) for cell in sorted(own.keys() & base.keys())}
        if arm != BASELINE and pairs:
            found[f"{name}_difference"] = paired(pairs)
    return found


def by_cell(rows: Sequence[Table], arm: str) -> dict[str, Table]:
    """Concept, seed and what was changed in every arm, as in the cell's name -> the row of an arm."""
    return {row["name"].removeprefix(f"{arm}-"): row for row in rows if row["table"] == arm}


def share(row: Table, name: str) -> float:
    """A measurement of the independent judge, 0..1."""
    value: float = row["measured"]["canvas"][name][0]
    return value


def paired(differences: Mapping[str, float]) -> Table:
    """Mean difference over cells "CONCEPT-sSEED", with the t interval of the concepts' means; none of one concept."""
    concepts: dict[str, list[float]] = {}
    for cell, difference in differences.items():
        concepts.setdefault(re.sub(r"-s\d+.*", "", cell), []).append(difference)
    means = [statistics.mean(found) for found in concepts.values()]
    low, high = student(means) or (None, None)
    about = {"n": len(differences), "concepts": len(means), "pairs": dict(differences)}
    return {"mean": statistics.mean(means), "low": low, "high": high, **about}


def shown(value: float | None, scale: float = 100, digits: int = 1) -> str:
    """A number, or a dash."""
    return "–" if value is None else f"{scale * value:.{digits}f}"


def interval(found: Table | None) -> str:
    """A difference in points with its interval and number of pairs."""
    if found is None:
        return "–"
    ends = "" if found["low"] is None else f" [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    return f"{100 * found['mean']:+.1f}{ends}, {found['n']}"


if __name__ == "__main__":
    main()
