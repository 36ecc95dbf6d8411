"""CGRU against DDPO on their own trajectories, each tuned alike: `python benchmarks/method.py TASK --out FOLDER`.

TASK is `objects` (benchmark `canvas`), `unstopped` (the same without the stop by the outside detector, 150 iterations)
or `attributes` (benchmark `attribute`). With `--tune` the task's settings are tried on the tuning concepts, one seed;
without it the settings of FROZEN are run on the reported ones. Both arms are the preset `on-policy` of their method, so
clip, rate, KL and the rule of stopping are alike where no setting differs.

    python benchmarks/method.py objects --tune --out FOLDER --device cuda --workers 16
    python benchmarks/method.py objects --seeds 0 1 2 --out FOLDER --device cuda --workers 16 [--known ROWS.json]

The same command again continues. FOLDER/rows.json has a row per cell, saved after each; `--known` takes the rows of an
earlier machine, whose cells are not run again. FOLDER/method.json is the table: arms -> name -> figures as shares of
0..1, and the difference of CGRU against DDPO in the primary measure, UA · (1 - nothing on target) · IRA or, of
attributes, reduction · object accuracy: seeds averaged within a concept, Student's t interval (95 %) over the concepts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.atomic_io import atomic_write, parse_json
from cgru.attributes import ATTRIBUTES, TUNED_ON
from cgru.embedded import EMBEDDED
from cgru.evaluation.intervals import student
from cgru.experiments.cells import Cell, Measure
from cgru.experiments.local_runner import Order, Record, reproduce
from cgru.runs import read_metrics

Row = dict[str, Any]
ARMS = ("cgru", "ddpo")
ON_OBJECTS: tuple[tuple[str, ...], ...] = (
    (),
    ("policy.learning_rate=1e-3",),
    ("policy.kl_limit=1e-4",),
    ("policy.learning_rate=1e-3", "policy.kl_limit=1e-4"),
    ("policy.beta2=0.99",),
    ("retention.kl_target=1e-3",),
    ("policy.clip=3e-3",),
    ("policy.updates=1",),
    # Both arms keep their own advantage: what members of a pair have in common cancels in either.
    ("sampling.pairs=true",),
    ("sampling.pairs=true", "policy.learning_rate=1e-3"),
)
ON_LOOKS: tuple[tuple[str, ...], ...] = (
    (),
    ("retention.kl=0.03",),
    ("retention.kl=0.03", "policy.updates=4"),
    ("retention.kl=0.1", "policy.updates=4"),
    ("sampling.pairs=true",),
    ("sampling.pairs=true", "retention.kl=0.1"),
)
LASTING = 0.9
"""Validation UA by the detector that a run must reach and keep to its last look."""


@dataclass(frozen=True)
class Task:
    """What is unlearned, how, and what is kept of its scores."""

    benchmark: str
    tuning: tuple[str, ...]
    reported: tuple[str, ...]
    settings: tuple[str, ...]
    """Of every arm."""
    tried: tuple[tuple[str, ...], ...]
    """Settings that are tried for every arm, beside those of the preset."""
    figures: Mapping[str, str]
    """Measurement -> its name in method.json."""


OBJECTS = {"ua": "ua", "ira": "ira", "cra": "cra", "target_nothing_share": "nothing", "frechet_judge": "frechet"}
OBJECTS |= {"replacement_clean": "replacement"}
LOOKS = {"attribute_reduction": "reduction", "attribute_rate": "rate", "object_accuracy": "object_accuracy"}
LOOKS |= {"style_accuracy": "style_accuracy", "attribute_nothing_share": "nothing", "frechet_judge": "frechet"}
CONCEPTS = ("Cats", "Bears", "Jellyfish", "Trees", "Statues")
TASKS: Mapping[str, Task] = {
    "objects": Task("canvas", ("Dogs", "Horses", "Flowers"), CONCEPTS, (), ON_OBJECTS, OBJECTS),
    "unstopped": Task(
        "canvas",
        ("Dogs", "Horses", "Flowers"),
        CONCEPTS,
        ("policy.iterations=150", "watch.stop=false"),
        ON_OBJECTS,
        OBJECTS,
    ),
    "attributes": Task(
        "attribute",
        TUNED_ON,
        tuple(name for name in ATTRIBUTES if name not in TUNED_ON),
        ("policy.iterations=25", "watch.every=0"),  # 1,600 trajectories; no detector looks at attributes
        ON_LOOKS,
        LOOKS,
    ),
}
FROZEN: Mapping[str, Mapping[str, tuple[str, ...]]] = {task: dict.fromkeys(ARMS, ()) for task in TASKS}
"""Task -> arm -> the settings it reports with, of `tried`, committed before the first reported run."""


def main() -> None:
    """Run what is left, then write rows and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="try the task's settings on the tuning concepts")
    parser.add_argument("--tried", type=int, nargs="+", help="numbers of these settings; default: all")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--concepts", nargs="+", help="default: the task's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--images", type=int, default=2, help="pictures a prompt")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="rows.json of earlier shards")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    task = TASKS[options.task]
    rows = [row for file in options.known for row in parse_json(file.read_text(encoding="utf-8"))["rows"]]
    done = {row["cell"] for row in rows if "error" not in row}
    planned = [cell for cell in cells(task, options) if cell.name not in done]
    threads = 1 if options.device == "cpu" and options.workers > 1 else None
    order = Order(options.out.resolve(), options.device, threads)
    about = {"what": f"method {options.task}", "device": options.device, "images": options.images}

    def told(cell: Cell, record: Record) -> None:
        if cell.concept:
            rows.append(row_of(cell, record, order.out, task))
            print(json.dumps(rows[-1]), flush=True)
        save()

    def save() -> None:  # after each cell, so that a command that is cut off leaves what it had
        atomic_write(options.out / "rows.json", json.dumps({**about, "rows": rows}, indent=1) + "\n")

    before = reproduce(planned, order, options.workers, told, about=about)
    known = {row["cell"] for row in rows}
    for cell, record in zip(planned, before, strict=True):  # done by an earlier command in this folder
        if cell.concept and cell.name not in known:
            rows.append(row_of(cell, record, order.out, task))
    save()
    table = {**about, **tabled(rows, task, 1 if options.tune else len(task.tried))}
    atomic_write(options.out / "method.json", json.dumps(table, indent=1) + "\n")
    show(table)


def cells(task: Task, options: argparse.Namespace) -> list[Cell]:
    """The base first, whose pictures the others reuse, then arm by arm."""
    found = [Cell("base", "method", EMBEDDED, measures=(Measure(task.benchmark, options.images),))]
    concepts = options.concepts or (task.tuning if options.tune else task.reported)
    numbers = options.tried if options.tried else range(len(task.tried))
    for arm in options.arms:
        tried = {f"{arm}-{k}": task.tried[k] for k in numbers} if options.tune else {arm: FROZEN[options.task][arm]}
        for name, settings in tried.items():
            for concept in concepts:
                for seed in options.seeds:
                    measures = (Measure(task.benchmark, options.images, concept),)
                    chosen = (*task.settings, *settings)
                    label = f"{name}-{concept.lower()}-s{seed}"
                    found.append(
                        Cell(label, name, EMBEDDED, concept, arm, "on-policy", seed, chosen, measures=measures)
                    )
    return found


def row_of(cell: Cell, record: Record, out: Path, task: Task) -> Row:
    """A cell's figures with their intervals and how it learned; its error where it failed."""
    about: Row = {"cell": cell.name, "arm": cell.experiment, "concept": cell.concept, "seed": cell.seed}
    about["settings"] = list(cell.settings)
    if "error" in record:
        return {**about, "error": record["error"].strip().splitlines()[-1]}
    about |= {"seconds": record["seconds"]["training"], "device": record["device"], "commit": record["commit"]}
    scores = json.loads((out / record["evaluations"][0] / "scores.json").read_text(encoding="utf-8"))
    measured = {**scores["measurements"], **scores["change"]}  # a change is against the base
    for name, short in task.figures.items():
        found = measured.get(name)
        about[short] = found and {part: found.get(part) for part in ("value", "low", "high", "n")}
    return about | learning(read_metrics(out / record["run"] / "metrics.jsonl"))


def learning(metrics: Sequence[Mapping[str, Any]]) -> Row:
    """Rewards, the detector's looks, and the iteration from which all looks are at LASTING or above; None if never."""
    looks = [(m["iteration"] + 1, 1 - m["watch/target_share"]) for m in metrics if "watch/target_share" in m]
    lasting = None
    for iteration, ua in reversed(looks):
        if ua < LASTING:
            break
        lasting = iteration
    rewards = [round(m["reward/mean"], 3) for m in metrics]
    return {"iterations": len(metrics), "rewards": rewards, "looks": looks, "lasting": lasting}


def primary(row: Row) -> float | None:
    """The one measure by which arms are compared; None where the base has no picture with the attribute."""
    if "ua" in row:
        return float(row["ua"]["value"] * (1 - row["nothing"]["value"]) * row["ira"]["value"])
    found = row.get("reduction")
    return None if found is None else float(found["value"] * row["object_accuracy"]["value"])


def tabled(rows: Sequence[Row], task: Task, settings_tried: int) -> Row:
    """The means of the arms and, with both of them, the paired difference."""
    done = [row for row in rows if "error" not in row]
    arms = {}
    for arm in dict.fromkeys(row["arm"] for row in done):
        own = [row for row in done if row["arm"] == arm]
        figures = {
            short: statistics.mean(values)
            for short in task.figures.values()
            if (values := [row[short]["value"] for row in own if row.get(short)])
        }
        scores = [score for row in own if (score := primary(row)) is not None]
        arms[arm] = {
            **figures,
            "primary": statistics.mean(scores) if scores else None,
            "cells": len(own),
            "trajectories": 64 * max(row["iterations"] for row in own),
            "settings_tried": settings_tried,
        }
    return {
        "arms": arms,
        "difference": difference(done, *ARMS),
        "commit": sorted({row["commit"] for row in done}),
        "seeds": sorted({row["seed"] for row in done}),
        "failed": [row["cell"] for row in rows if "error" in row],
    }


def difference(rows: Iterable[Row], arm: str, other: str) -> Row | None:
    """Of the primary measure in the same cells: seeds averaged within a concept, t interval over the concepts."""
    scores = {(row["arm"], row["concept"], row["seed"]): primary(row) for row in rows}
    concepts: dict[str, list[float]] = {}
    for (name, concept, seed), score in scores.items():
        against = scores.get((other, concept, seed))
        if name == arm and score is not None and against is not None:
            concepts.setdefault(concept, []).append(score - against)
    if not concepts:
        return None
    means = [statistics.mean(found) for found in concepts.values()]
    low, high = student(means) or (None, None)
    return {"value": statistics.mean(means), "low": low, "high": high, "concepts": len(means)}


def show(table: Row) -> None:
    """The means, best first, and the difference."""
    for arm, found in sorted(table["arms"].items(), key=lambda row: -(row[1]["primary"] or 0)):
        figures = "  ".join(f"{name} {value:.3f}" for name, value in found.items() if isinstance(value, float))
        print(f"{arm:12}{found['cells']:>4} cells  {figures}")
    if found := table["difference"]:
        ends = "" if found["low"] is None else f" [{found['low']:+.3f}, {found['high']:+.3f}]"
        print(f"{ARMS[0]} - {ARMS[1]}: {found['value']:+.3f}{ends}, {found['concepts']} concepts")


if __name__ == "__main__":
    main()
