"""What a benchmark is made of: jobs, predictions and measurements, as plain records.

A job is one picture to draw. Its seed comes from a hash of (seed index, prompt), so every model and method draws the
same prompt from the same initial noise, whatever else is in the benchmark (evals/statistics.md, paired comparison).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from cgru.tasks import UnlearnTask

Better = Literal["higher", "lower"]
NOTHING = "nothing"
"""The label every judge has for a picture in which it recognises nothing."""
BASE_REFERENCE: Mapping[str, Any] = {"what": "the base model's pictures on the same noise"}
"""`reference` in the protocol of a benchmark that has no other: it measures nothing without a base."""


@dataclass(frozen=True)
class Job:
    """One picture: the prompt, the seed of its noise, and what it is meant to show."""

    prompt: str
    seed: int
    labels: Mapping[str, str | int]
    guidance: float | None = None
    """Of this picture alone; None: the benchmark's."""

    @property
    def id(self) -> str:
        """16 hex digits of prompt, seed and own guidance, if any: the same in every run and on every machine."""
        own = [] if self.guidance is None else [self.guidance]
        return stable_hash([self.prompt, self.seed, *own])[:16]


@dataclass(frozen=True)
class Sampling:
    """How pictures are drawn: part of a benchmark's version."""

    steps: int
    guidance: float
    eta: float


@dataclass(frozen=True)
class Detection:
    """One thing that a detector found in a picture."""

    label: str
    score: float
    box: tuple[int, int, int, int]
    """Left, top, width, height in pixels of the picture."""


@dataclass(frozen=True)
class Predictions:
    """What the judges said about each job, rows in job order."""

    labels: Mapping[str, tuple[str, ...]]
    """The judge's label list, by judge."""
    probabilities: Mapping[str, np.ndarray]
    """(n, labels) float64, by judge."""
    features: np.ndarray
    """(n, d) float32, of the judge the benchmark names for its Fréchet distance."""
    broken: int = 0
    """How many of the pictures were not finite; a blank one, judged NOTHING, stands for each."""
    detections: Mapping[str, Sequence[Sequence[Detection]]] = field(default_factory=dict)
    """All that each detector found in each picture, by detector; a broken picture has none."""


@dataclass(frozen=True)
class Measurement:
    """A number nobody has to take on trust: value, 95 % interval, n, unit and which way is better."""

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str
    better: Better
    interval: str | None = None
    """How low and high were found."""
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The intervals that `low` and `high` were chosen from, by name."""

    def record(self) -> dict[str, Any]:
        """As written to scores.json."""
        fixed = {"value": self.value, "low": self.low, "high": self.high, "n": self.n, "unit": self.unit}
        parts = {name: list(bounds) for name, bounds in self.parts.items()}
        return {**fixed, "better": self.better, "interval": self.interval, **parts}


@dataclass(frozen=True)
class Score:
    """What a benchmark finds: named measurements, and tables that belong beside them in scores.json."""

    measurements: Mapping[str, Measurement]
    tables: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Benchmark(Protocol):
    """A versioned set of jobs and how their predictions become measurements."""

    @property
    def name(self) -> str:
        """As in the catalog."""

    @property
    def version(self) -> int:
        """Raised by any change to prompts, seeds, sampling, judges or scoring."""

    @property
    def sampling(self) -> Sampling:
        """How pictures are drawn."""

    @property
    def judges(self) -> tuple[str, ...]:
        """Names of the judges."""

    @property
    def feature_judge(self) -> str:
        """The judge whose features are kept."""

    def task(self, target: str | None) -> UnlearnTask | None:
        """The task for a target concept given by name."""

    def jobs(self, task: UnlearnTask | None) -> Sequence[Job]:
        """Every picture to draw; a target gets more of them."""

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """What must be equal for two results to be comparable."""

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Measurements and tables."""

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """What only base and model together tell, picture by picture on the same noise; empty where there is none."""


def job_seed(index: int, prompt: str) -> int:
    """The noise seed of picture `index` of a prompt: 48 bits, so that JSON readers of any language keep it exact.

    torch's CPU generator, which draws the noise, keeps the low 32 bits only: two of 1000 jobs share their noise with a
    chance of about 1 in 10,000.
    """
    return int(stable_hash([index, prompt])[:12], 16)


def stable_hash(value: object) -> str:
    """sha256 of a JSON value, the same on every machine and in every session (unlike Python's hash)."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
