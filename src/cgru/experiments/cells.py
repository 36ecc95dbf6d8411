"""A cell: one model of an experiment (a run to train, or the base) and all of its measurements.

Cells are plain data, equal on every machine. They are written to plan.json and hashed, so that a result can be matched
with the definition that produced it. A cell also lists the commands that give the same result by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cgru.evaluation.base import stable_hash

Options = tuple[tuple[str, str], ...]
"""Fields of the request beside those named here, such as ("variant", "paper"); a tuple, so that cells can be hashed."""


@dataclass(frozen=True)
class Measure:
    """One evaluation."""

    benchmark: str
    images: int | None = 1
    """None: the benchmark's own number."""
    target: str | None = None
    options: Options = ()

    @property
    def words(self) -> list[str]:
        """As `cgru evaluate` takes them."""
        target = [] if self.target is None else ["--target", self.target]
        count = [] if self.images is None else ["--images", str(self.images)]
        return ["--benchmark", self.benchmark, *target, *count, *_words(self.options)]


@dataclass(frozen=True)
class Assault:
    """One campaign of UnlearnDiffAtk."""

    target: str
    prompts: int
    schedule: str = "short"
    tokens: int = 3
    without_word: bool = False
    options: Options = ()

    @property
    def words(self) -> list[str]:
        """As `cgru attack` takes them."""
        counts = ["--prompts", str(self.prompts), "--schedule", self.schedule, "--tokens", str(self.tokens)]
        flag = ["--without-word"] if self.without_word else []
        return ["--target", self.target, *counts, *flag, *_words(self.options)]


@dataclass(frozen=True)
class Cell:
    """A model and its measurements; without a concept it is the base model, which is not trained."""

    name: str
    """Of its files; unique in a plan."""
    experiment: str
    model: str
    concept: str | None = None
    method: str = "cgru"
    preset: str = "demo"
    """Empty for a method without presets."""
    seed: int = 0
    settings: tuple[str, ...] = ()
    """key=value, laid over the preset."""
    stage: Literal["critic", "policy"] = "policy"
    """How much of the run is trained; the critics' ablation needs no policy."""
    measures: tuple[Measure, ...] = ()
    assaults: tuple[Assault, ...] = ()
    missing: str = ""
    """Missing data; if not empty, the cell is not run, and the page lists what is missing."""

    @property
    def fingerprint(self) -> str:
        """A hash of the definition; a result with another fingerprint is not used for this cell."""
        return stable_hash(asdict(self))[:16]

    def commands(self, run: Path | None, device: str) -> list[str]:
        """The commands that give the same result by hand; `run` is the folder of the cell's run."""
        subject, where = str(run or self.model), ["--device", device]
        trained = [] if run is None else [self._unlearn(run.parent, where)]
        measured = [["evaluate", subject, *measure.words, *where] for measure in self.measures]
        attacked = [["attack", subject, *assault.words, *where] for assault in self.assaults]
        return [shlex.join(["cgru", *words]) for words in (*trained, *measured, *attacked)]

    def _unlearn(self, out: Path, where: list[str]) -> list[str]:
        assert self.concept is not None
        preset = ["--preset", self.preset] if self.preset else []
        names = ["--model", self.model, "--method", self.method, *preset, "--seed", str(self.seed)]
        # A critic is fitted at the start of a run; the command then trains a policy, for which one iteration is enough.
        least = ["policy.iterations=1"] if self.stage == "critic" else []
        return ["unlearn", self.concept, *names, *where, "--out", str(out), *self.settings, *least]


def from_record(record: Mapping[str, Any]) -> Cell:
    """A cell as plan.json and the cells' own files hold it."""
    measures = tuple(Measure(**{**row, "options": _pairs(row["options"])}) for row in record["measures"])
    assaults = tuple(Assault(**{**row, "options": _pairs(row["options"])}) for row in record["assaults"])
    cell = Cell(**{**record, "settings": tuple(record["settings"]), "measures": (), "assaults": ()})
    return replace(cell, measures=measures, assaults=assaults)


def _pairs(rows: list[list[str]]) -> Options:
    return tuple((key, value) for key, value in rows)


def _words(options: Options) -> list[str]:
    return [word for key, value in options for word in (f"--{key.replace('_', '-')}", value)]
