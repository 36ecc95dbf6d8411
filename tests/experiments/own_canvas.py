"""What a user may pass as "own_canvas:load": canvas on four prompts of one step, its judges whole.

It has no target, whatever is asked for: a target would get 80 pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cgru.embedded import ROOT
from cgru.evaluation.base import Job, Measurement, Predictions, Score
from cgru.evaluation.benchmarks.canvas import Canvas, load_benchmark
from cgru.tasks import Sampling, UnlearnTask


@dataclass(frozen=True)
class Few:
    """A benchmark around another."""

    inner: Canvas
    name: str = "few"
    version: int = 1

    @property
    def sampling(self) -> Sampling:
        return self.inner.sampling

    @property
    def judges(self) -> tuple[str, ...]:
        return self.inner.judges

    @property
    def feature_judge(self) -> str:
        return self.inner.feature_judge

    def task(self, target: str | None) -> None:
        return None

    def jobs(self, task: UnlearnTask | None) -> Sequence[Job]:
        return self.inner.jobs(task)

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        return self.inner.protocol(task)

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        return self.inner.score(task, jobs, predictions)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        return self.inner.compare(task, jobs, before, after)


def load(images: int, root: Path = ROOT) -> Few:
    """2 classes × 2 styles."""
    whole = load_benchmark(images, root)
    few = replace(whole.vocabulary, classes=("Cats", "Dogs"), styles=whole.vocabulary.styles[:2])
    return Few(replace(whole, vocabulary=replace(few, sampling=Sampling(1, 3.0, 0.0))))
