"""CGRU beside ESD, UCE and SLD on Emoji Canvas: `python benchmarks/erasers.py --out FOLDER`.

Every arm forgets every concept with the settings below, and the independent judges score it: `canvas` for UA, IRA, CRA
and Fréchet distance, `paraphrase` for words that no training prompt has. The same command again continues. It writes
FOLDER/erasers.json (one row per cell and one mean per arm), FOLDER/tables.md (the tables of docs/erasers.md),
FOLDER/page.html (the comparison page of `cgru report`) and FOLDER/cats.png (the pictures of the first concept), both of
the first seed, and prints the means. Seconds are those of the training of a cell, model loading included, on the device
and beside the number of workers that the file names.

    python benchmarks/erasers.py --out FOLDER [--arms uce esd-x sld anchored] [--concepts Cats Bears] [--workers 2]

`--tune` tries the settings of TUNED on the tuning concepts instead, by `canvas` alone, and ranks them by the mean of UA
and IRA over these concepts; the winner becomes the method's default for Emoji Canvas.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cgru.atomic_io import atomic_write
from cgru.embedded import EMBEDDED
from cgru.evaluation.intervals import student
from cgru.evaluation.picture_grid import before_after, save_png
from cgru.experiments.cells import Cell, Measure
from cgru.experiments.local_runner import Order, Record, reproduce
from cgru.report.run.page import build
from cgru.report.run.read import read_record

CONCEPTS = ("Cats", "Bears", "Jellyfish", "Trees", "Statues")
"""The reported concepts."""
TUNING = ("Dogs", "Horses", "Flowers")
"""The only concepts that settings are chosen on."""
Arm = tuple[str, str, tuple[str, ...]]
"""Method, preset ("": the method's defaults) and settings."""
ARMS: Mapping[str, Arm] = {
    "uce": ("uce", "", ()),
    "esd-x": ("esd", "", ("train=x",)),
    "esd-u": ("esd", "", ("train=u",)),
    "sld": ("sld", "", ()),
    "anchored": ("anchored", "best", ()),
    "anchored-demo": ("anchored", "demo", ()),
    "cgru": ("cgru", "on-policy", ()),
    "ddpo": ("ddpo", "on-policy", ()),
}
ESD = (
    ("negative_guidance=1", "learning_rate=1e-4", "iterations=150"),
    ("negative_guidance=3", "learning_rate=1e-4", "iterations=150"),
    ("negative_guidance=1", "learning_rate=3e-4", "iterations=150"),
    ("negative_guidance=3", "learning_rate=3e-4", "iterations=150"),
    ("negative_guidance=3", "learning_rate=3e-5", "iterations=150"),
    ("negative_guidance=1", "learning_rate=3e-4", "iterations=150", "prompts=sentences"),
    ("negative_guidance=3", "learning_rate=1e-4", "iterations=150", "prompts=sentences"),
    ("negative_guidance=3", "learning_rate=1e-4", "iterations=300", "prompts=sentences"),
)
ESD_X = (
    *ESD,
    ("negative_guidance=2", "learning_rate=1e-4", "iterations=150"),
    ("negative_guidance=2", "learning_rate=2e-4", "iterations=150"),
    ("negative_guidance=3", "learning_rate=1e-4", "iterations=100"),
    ("negative_guidance=1", "learning_rate=2e-4", "iterations=300"),
)
ESD_U = (
    *ESD,
    ("negative_guidance=1", "learning_rate=3e-5", "iterations=150"),
    ("negative_guidance=1", "learning_rate=1e-5", "iterations=300"),
    ("negative_guidance=3", "learning_rate=1e-5", "iterations=150"),
    ("negative_guidance=3", "learning_rate=1e-5", "iterations=300"),
)
SLD = (
    *(("strength=" + strength, "words=1") for strength in ("weak", "medium", "strong", "max", "negative")),
    *(("strength=" + strength, "words=8") for strength in ("strong", "max", "negative")),
    ("strength=max", "words=1", "threshold=0.1"),
    ("strength=max", "words=1", "threshold=0.3"),
    ("strength=max", "words=1", "warmup=0.2"),
    ("strength=max", "words=1", "momentum=0", "decay=0"),
)
UCE = (
    *((f"preserve={preserve}", f"ridge={ridge}") for preserve in (1, 3, 10) for ridge in (1, 3, 10)),
    ("preserve=3", "ridge=3", "templates=4"),
    ("preserve=3", "ridge=3", "templates=56"),
    ("preserve=3", "ridge=3", "tokens=last"),
)
TUNED: Mapping[str, Sequence[tuple[str, ...]]] = {"uce": UCE, "sld": SLD, "esd-x": ESD_X, "esd-u": ESD_U}
"""Arm -> the settings that are tried, twelve each, beside those of ARMS; ESD's last four after a look at the first."""
FIGURES = {
    "canvas": ("ua", "ira", "cra", "frechet_judge", "target_nothing_share"),
    "paraphrase": ("paraphrase_ua", "paraphrase_ira"),
}
"""Benchmark -> the measurements that are kept."""
COLUMNS = {
    "ua": ("UA ↑", 100, 1),
    "ira": ("IRA ↑", 100, 1),
    "cra": ("CRA ↑", 100, 1),
    "paraphrase_ua": ("UA in other words ↑", 100, 1),
    "paraphrase_ira": ("IRA in other words ↑", 100, 1),
    "frechet_judge": ("Fréchet ↓", 1, 2),
    "seconds": ("seconds", 1, 0),
}
"""Measurement -> its heading, factor and digits."""
AGAINST = "anchored"
"""The arm that the others are compared with."""
Table = dict[str, Any]


def main() -> None:
    """Do what is left, then write the table and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="try the settings of TUNED on the tuning concepts")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all; with --tune, those of TUNED")
    parser.add_argument("--concepts", nargs="+", help=f"default: {' '.join(CONCEPTS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--images", type=int, default=1, help="pictures a prompt")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every arm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    arms = dict(tuned(options.arms or TUNED)) if options.tune else {name: ARMS[name] for name in options.arms or ARMS}
    concepts = options.concepts or (TUNING if options.tune else CONCEPTS)
    planned = cells(arms, concepts, options)
    order = Order(options.out.resolve(), options.device, 1 if options.device == "cpu" and options.workers > 1 else None)
    about = {"what": "erasers", "workers": options.workers, "device": options.device}
    found: dict[str, Record] = {}

    def told(cell: Cell, record: Record) -> None:
        error = f"failed: {record['error'].strip().splitlines()[-1]}" if "error" in record else ""
        print(f"{cell.name}: {error or record['seconds']}", flush=True)
        found[cell.name] = record
        save()

    def save() -> Table:  # after each cell, so that a command that is cut off leaves what it had
        rows = [row(cell, found[cell.name], order.out) for cell in planned if cell.concept and cell.name in found]
        table = {**about, "images": options.images, "rows": rows, "arms": means(rows)}
        atomic_write(options.out / "erasers.json", json.dumps(table, indent=1) + "\n")
        atomic_write(options.out / "tables.md", tables(rows))
        return table

    records = reproduce(planned, order, options.workers, told, about=about)
    found |= {cell.name: record for cell, record in zip(planned, records, strict=True)}
    shown = [found[cell.name].get("run") for cell in planned if cell.seed == options.seeds[0]]
    if pages := [read_record(order.out / run) for run in shown if run]:
        atomic_write(options.out / "page.html", build(pages))
        draw(planned, found, order.out, concepts[0], options.seeds[0])
    show(save()["arms"])


def tuned(arms: Iterable[str]) -> Iterator[tuple[str, Arm]]:
    """The settings to try, each as an arm named after them."""
    for arm in arms:
        method, preset, fixed = ARMS[arm]
        for settings in TUNED[arm]:
            yield " ".join((arm, *settings)), (method, preset, (*fixed, *settings))


def cells(arms: Mapping[str, Arm], concepts: Sequence[str], options: argparse.Namespace) -> list[Cell]:
    """The base first, whose pictures the others reuse, then arm by arm."""
    benchmarks = ("canvas",) if options.tune else tuple(FIGURES)
    found = [Cell("base", "erasers", EMBEDDED, measures=tuple(Measure(name, options.images) for name in benchmarks))]
    for arm, (method, preset, settings) in arms.items():
        for concept in concepts:
            measures = tuple(Measure(name, options.images, concept) for name in benchmarks)
            for seed in options.seeds:
                name = f"{arm.replace(' ', '-').replace('=', '-')}-{concept.lower()}-s{seed}"
                chosen = (*settings, *options.set)
                found.append(
                    Cell(name, arm, EMBEDDED, concept, method, preset, seed, settings=chosen, measures=measures)
                )
    return found


def row(cell: Cell, record: Record, out: Path) -> Table:
    """A cell's figures with their intervals; its error where it failed."""
    about: Table = {"arm": cell.experiment, "concept": cell.concept, "seed": cell.seed}
    if "error" in record:
        return {**about, "error": record["error"].strip().splitlines()[-1]}
    about |= {"seconds": record["seconds"]["training"], "device": record["device"], "commit": record["commit"]}
    for folder in record["evaluations"]:
        scores = json.loads((out / folder / "scores.json").read_text(encoding="utf-8"))
        for name in FIGURES[scores["benchmark"]]:
            found = scores["measurements"][name]
            about[name] = {part: found.get(part) for part in ("value", "low", "high", "n")}
    return about


def means(rows: Sequence[Table]) -> Table:
    """Arm -> mean of each figure over its cells, and how many there are."""
    found: Table = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm and "error" not in row]
        keys = dict.fromkeys(key for row in own for key in row if isinstance(row[key], dict))
        values = {key: [row[key]["value"] for row in own if key in row] for key in keys}
        values["seconds"] = [row["seconds"] for row in own]
        found[arm] = {"cells": len(own), **{key: sum(some) / len(some) for key, some in values.items() if some}}
    return found


def tables(rows: Sequence[Table]) -> str:
    """The arms, their difference from AGAINST, and the concepts, as tables in Markdown."""
    done = [row for row in rows if "error" not in row]
    arms = sorted(
        {row["arm"] for row in done}, key=lambda arm: -sum(mean(done, arm, name) or 0 for name in ("ua", "ira"))
    )
    heads = [head for head, _, _ in COLUMNS.values()]
    lines = [*table_head("arm", "cells", *heads)]
    for arm in arms:
        count = sum(row["arm"] == arm for row in done)
        lines.append(line(arm, str(count), *(number(mean(done, arm, name), name) for name in COLUMNS)))
    kept = [name for name in COLUMNS if name != "seconds"]
    lines += ["", *table_head(f"minus {AGAINST}", *(COLUMNS[name][0] for name in kept))]
    lines += [line(arm, *(difference(done, arm, name) for name in kept)) for arm in arms if arm != AGAINST]
    lines += ["", *table_head("arm", "concept", "seeds", *heads)]
    for arm in arms:
        for concept in dict.fromkeys(row["concept"] for row in done):
            own = [row for row in done if row["concept"] == concept]
            count = sum(row["arm"] == arm for row in own)
            lines.append(line(arm, concept, str(count), *(number(mean(own, arm, name), name) for name in COLUMNS)))
    return "\n".join(lines) + "\n"


def draw(planned: Sequence[Cell], found: Mapping[str, Record], out: Path, concept: str, seed: int) -> None:
    """Write OUT/CONCEPT.png: the same prompts and noise without an edit and with that of each arm."""
    done = [cell for cell in planned if (cell.concept, cell.seed) == (concept, seed) and "run" in found[cell.name]]
    folders = {cell.experiment: out / found[cell.name]["evaluations"][0] for cell in done}  # of canvas
    save_png(out / f"{concept.lower()}.png", before_after(next(iter(folders.values())), folders))


def line(*cells: str) -> str:
    """A row in Markdown."""
    return f"| {' | '.join(cells)} |"


def table_head(*names: str) -> tuple[str, str]:
    """The first two lines of a table in Markdown."""
    return line(*names), "|" + "---|" * len(names)


def value_of(row: Table, name: str) -> float | None:
    """A measurement of a cell; None where it was not taken."""
    found = row.get(name)
    return found["value"] if isinstance(found, dict) else found


def mean(rows: Sequence[Table], arm: str, name: str) -> float | None:
    """Of a measurement over an arm's cells."""
    values = [value for row in rows if row["arm"] == arm and (value := value_of(row, name)) is not None]
    return sum(values) / len(values) if values else None


def number(value: float | None, name: str) -> str:
    """A measurement in its unit, or a dash."""
    _, factor, digits = COLUMNS[name]
    return "–" if value is None else f"{factor * value:.{digits}f}"


def difference(rows: Sequence[Table], arm: str, name: str) -> str:
    """Of the same cells, with Student's t interval (95 %) of the concepts' means."""
    concepts: dict[str, list[float]] = {}
    before = {(row["concept"], row["seed"]): value_of(row, name) for row in rows if row["arm"] == AGAINST}
    for row in rows:
        value, other = value_of(row, name), before.get((row["concept"], row["seed"]))
        if row["arm"] == arm and value is not None and other is not None:
            concepts.setdefault(row["concept"], []).append(value - other)
    if not concepts:
        return "–"
    means = [statistics.mean(found) for found in concepts.values()]  # seeds of a concept are alike
    _, factor, digits = COLUMNS[name]
    low, high = student(means) or (None, None)
    ends = "" if low is None or high is None else f" [{factor * low:+.{digits}f}, {factor * high:+.{digits}f}]"
    return f"{factor * statistics.mean(means):+.{digits}f}{ends}"


def show(arms: Table) -> None:
    """The means as a table."""
    columns = ("ua", "ira", "cra", "paraphrase_ua", "frechet_judge", "seconds")
    width = max(map(len, arms), default=0) + 2
    print(f"{'arm':{width}}{'cells':>6}" + "".join(f"{name:>15}" for name in columns))
    # best first, by the mean of UA and IRA
    for arm, found in sorted(arms.items(), key=lambda row: -(row[1].get("ua", 0) + row[1].get("ira", 0))):
        shown = [found.get(name) for name in columns]
        scale = [100 if name not in ("frechet_judge", "seconds") else 1 for name in columns]
        words = ["-" if value is None else f"{value * by:.1f}" for value, by in zip(shown, scale, strict=True)]
        print(f"{arm:{width}}{found['cells']:>6}" + "".join(f"{word:>15}" for word in words))


if __name__ == "__main__":
    main()
