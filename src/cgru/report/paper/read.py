"""Read a folder of `cgru reproduce`: plan.json, cells/*.json, and the runs and evaluations that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cgru.atomic_io import parse_json
from cgru.experiments.cells import Cell, from_record
from cgru.report.run.read import Evaluation, Record, comparable, differing, read_evaluation, read_record


@dataclass(frozen=True)
class Done:
    """A cell and what its files say."""

    cell: Cell
    record: Mapping[str, Any] | None
    """cells/NAME.json; None: not tried yet."""
    run: Record | None
    base: tuple[Evaluation, ...]
    """Evaluations and attacks of the base model."""
    holes: tuple[str, ...] = ()

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Of the run, or of the base: those that the cell made, not what was tried by hand in the same folder."""
        if self.run is None:
            return self.base
        named = {Path(folder).name for folder in self.folders}
        return tuple(found for found in self.run.evaluations if found.folder.name in named)

    @property
    def folders(self) -> list[str]:
        """Where the cell left its evaluations and attacks."""
        record = self.record or {}
        return [*record.get("evaluations", []), *record.get("attacks", [])]

    @property
    def lost(self) -> list[str]:
        """What the cell made and cannot be read any more."""
        if self.run is None:
            return []
        read = {found.folder.name for found in self.evaluations}
        words = [
            f"{folder} is damaged, gone or of another edit" for folder in self.folders if Path(folder).name not in read
        ]
        has_log = self.cell.stage == "critic" or self.run.metrics
        return words if has_log else [*words, "its training log is damaged or gone"]

    def find(self, benchmark: str) -> Evaluation | None:
        """The evaluation by a benchmark; variants are part of its name."""
        named = (found for found in self.evaluations if found.scores["benchmark"].split("-")[0] == benchmark)
        return next(named, None)

    @property
    def state(self) -> str:
        """In words."""
        if self.record is None:
            return "not run yet"
        if "not_run" in self.record:
            return f"not run: needs {self.record['not_run']}"
        return "failed" if "error" in self.record else "done"


@dataclass(frozen=True)
class Reproduction:
    """A plan and its cells."""

    out: Path
    plan: Mapping[str, Any]
    cells: tuple[Done, ...]

    def of(self, experiment: str, *, is_base: bool = False) -> list[Done]:
        """The cells of an experiment: its runs, or the base."""
        return [d for d in self.cells if d.cell.experiment == experiment and (d.cell.concept is None) is is_base]

    @cached_property
    def holes(self) -> list[str]:
        """What is missing, cell by cell."""
        told = [f"{done.cell.name}: {done.state}" for done in self.cells if done.state != "done"]
        return [*told, *(f"{done.cell.name}: {words}" for done in self.cells for words in (*done.holes, *done.lost))]

    def mixed(self, experiment: str, benchmark: str) -> str:
        """Why evaluations of an experiment's runs may not stand in one mean; empty where they may."""
        found = [hit for done in self.of(experiment) if (hit := done.find(benchmark))]
        other = next((hit for hit in found[1:] if _kind(hit) != _kind(found[0])), None)
        if other is None:
            return ""
        keys = ", ".join(differing(found[0].protocol, other.protocol)) or "version"
        return f"Runs were measured by different protocols of {benchmark} ({keys}), so there is no mean over them."


def read_reproduction(out: Path) -> Reproduction:
    """Read the folder of a reproduction, finished or not."""
    path = out / "plan.json"
    if not path.is_file():
        raise FileNotFoundError(f"{str(out)!r} has no plan.json; allowed: a folder that `cgru reproduce` wrote.")
    plan = parse_json(path.read_text(encoding="utf-8"))
    return Reproduction(out, plan, tuple(_done(out, row) for row in plan["cells"]))


def _kind(found: Evaluation) -> tuple[str, str]:
    return found.name, comparable(found.protocol)


def _done(out: Path, row: Mapping[str, Any]) -> Done:
    cell = from_record({key: value for key, value in row.items() if key != "fingerprint"})
    try:
        record = parse_json((out / "cells" / f"{cell.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Done(cell, None, None, ())
    if record.get("fingerprint") != row["fingerprint"]:
        return Done(cell, None, None, (), ("its result is of another definition, so it is left out",))
    if "error" in record or "not_run" in record:
        return Done(cell, record, None, ())
    return _read(out, cell, record)


def _read(out: Path, cell: Cell, record: Mapping[str, Any]) -> Done:
    run, base, holes = None, [], []
    try:
        if record["run"]:
            run = read_record(out / record["run"])
        else:
            base = [read_evaluation(out / folder) for folder in [*record["evaluations"], *record["attacks"]]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        holes.append(f"its files cannot be read: {error}")
    return Done(cell, record, run, tuple(base), tuple(holes))
