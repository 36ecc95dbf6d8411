"""The records of a benchmark: jobs, predictions and measurements.

A job is one picture to draw. Its seed is a hash of (picture index, prompt), so that every model and method draws the
same prompt from the same initial noise, whatever else the benchmark contains: differences between models are then
paired, which makes their intervals much narrower than those of independent samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from cgru.tasks import Sampling, UnlearnTask

Better = Literal["higher", "lower"]
MOST_PICTURES = 10_000
"""Of a prompt, and of a batch; and prompts to attack."""
NOTHING = "nothing"
"""Label of every judge for a picture in which it recognises nothing."""
BASE_REFERENCE: Mapping[str, Any] = {"what": "the base model's pictures on the same noise"}
"""`reference` in the protocol of a benchmark without another one: it needs a base model to compare with."""


@dataclass(frozen=True)
class Job:
    """One picture: the prompt, the seed of its noise, and the labels it should show."""

    prompt: str
    seed: int
    labels: Mapping[str, str | int]
    guidance: float | None = None
    """Guidance of this picture alone; None means the benchmark's."""

    @property
    def id(self) -> str:
        """16 hex digits of a hash of prompt, seed and own guidance: equal in every run and on every machine."""
        own = [] if self.guidance is None else [self.guidance]
        return stable_hash([self.prompt, self.seed, *own])[:16]


@dataclass(frozen=True)
class Detection:
    """One object that a detector found in a picture."""

    label: str
    score: float
    box: tuple[int, int, int, int]
    """Left, top, width, height in pixels of the picture."""


@dataclass(frozen=True)
class Predictions:
    """The judges' answers, with rows in job order."""

    labels: Mapping[str, tuple[str, ...]]
    """Label list of each judge."""
    probabilities: Mapping[str, np.ndarray]
    """(n, labels) float64 for each judge."""
    features: np.ndarray
    """(n, d) float32 features from the judge that the benchmark names for its Fréchet distance."""
    broken: int = 0
    """Number of pictures with non-finite pixels; each is replaced by a blank one and judged NOTHING."""
    detections: Mapping[str, Sequence[Sequence[Detection]]] = field(default_factory=dict)
    """Detector -> the detections in each picture; none in a broken picture."""


@dataclass(frozen=True)
class Measurement:
    """A measured value with its 95 % interval, n, unit and direction."""

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str
    better: Better
    interval: str | None = None
    """Name of the method that gave low and high."""
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> interval, for the intervals from which `low` and `high` were chosen."""
    meaning: str = ""
    """A few words for the report and the terminal; those of the shipped benchmarks are in report/run/families.py."""

    def record(self) -> dict[str, Any]:
        """Return the measurement as written to scores.json."""
        fixed = {"value": self.value, "low": self.low, "high": self.high, "n": self.n, "unit": self.unit}
        parts: dict[str, Any] = {name: list(bounds) for name, bounds in self.parts.items()}
        parts |= {"meaning": self.meaning} if self.meaning else {}
        return {**fixed, "better": self.better, "interval": self.interval, **parts}


@dataclass(frozen=True)
class Score:
    """A benchmark's result: named measurements, and tables stored beside them in scores.json."""

    measurements: Mapping[str, Measurement]
    tables: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Benchmark(Protocol):
    """A versioned set of jobs, and the rules that turn their predictions into measurements."""

    @property
    def name(self) -> str:
        """Return its name in the catalog."""

    @property
    def version(self) -> int:
        """Return its version, which changes with prompts, seeds, sampling, judges or scoring."""

    @property
    def sampling(self) -> Sampling:
        """Return how pictures are drawn."""

    @property
    def judges(self) -> tuple[str, ...]:
        """Return the names of its judges."""

    @property
    def feature_judge(self) -> str:
        """Return the judge whose features are stored."""

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for a target concept given by name."""

    def jobs(self, task: UnlearnTask | None) -> Sequence[Job]:
        """Return every picture to draw; with a target there are more of them."""

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return everything that must be equal for two results to be comparable."""

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Return measurements and tables."""

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Return measurements that need both base and model, paired by noise; empty if there are none."""


def job_seed(index: int, prompt: str) -> int:
    """Return the noise seed of picture `index` of a prompt: 48 bits, which JSON readers in any language keep exact.

    torch's CPU generator, which draws the noise, uses only the low 32 bits: the chance that two of 1000 jobs share
    their noise is about 1 in 10,000.
    """
    return int(stable_hash([index, prompt])[:12], 16)


def stable_hash(value: object) -> str:
    """Return the sha256 of a JSON value, equal on every machine and in every session (unlike Python's hash)."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
