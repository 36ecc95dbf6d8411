"""Benchmark `canvas`, version 2: UnlearnCanvas' protocol on Emoji Canvas (evals/unlearncanvas.md, section 7).

Prompts "A {class} image in {style} style" for every class, style and n pictures; an object and a style judge; hard
argmax as headline, probabilities ("soft") as second. Label accuracies are averaged unweighted. CRA counts the target's
pictures too, as the official code does (its README says otherwise): `cra_strict` leaves them out.
A target's extra pictures, drawn so that it has at least 80, count for UA only; all else uses the first n of each cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.evaluation import metrics
from cgru.evaluation.answers import Answers, confusion_tables, forgetting, proportion_of
from cgru.evaluation.assets import ROOT, Vocabulary, load_reference, load_vocabulary
from cgru.evaluation.base import Job, Measurement, Predictions, Sampling, Score, job_seed
from cgru.evaluation.shares import BOOTSTRAP
from cgru.tasks import Concept, Kind, UnlearnTask, find_concept

TEMPLATE = "A {class} image in {style} style"
TARGET_IMAGES = 80
SEEDS = "first 48 bits of sha256 of the JSON [index, prompt]; see jobs.jsonl"


@dataclass(frozen=True)
class Canvas:
    """The benchmark for one number of pictures per prompt."""

    vocabulary: Vocabulary
    reference: metrics.Gaussian
    images: int
    name: str = "canvas"
    version: int = 2
    judges: tuple[str, ...] = ("object", "style")
    feature_judge: str = "object"

    @property
    def sampling(self) -> Sampling:
        """The embedded model's own steps, guidance and eta."""
        return self.vocabulary.sampling

    def task(self, target: str | None) -> UnlearnTask | None:
        """A class or a style by name; hazards have no place in this grid."""
        if target is None:
            return None
        return UnlearnTask(find_concept(target, {"class": self.vocabulary.classes, "style": self.vocabulary.styles}))

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """The grid, class by class; picture `index` of a prompt has the same noise whatever n or the target is."""
        cells = [(label, style) for label in self.vocabulary.classes for style in self.vocabulary.styles]
        concept = task.concept if task else None
        return [grid_job(cell, index) for cell in cells for index in range(self._pictures(cell, concept))]

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Everything that must be equal for two results to be comparable, apart from model and judges."""
        return {
            "template": TEMPLATE,
            "classes": list(self.vocabulary.classes),
            "styles": list(self.vocabulary.styles),
            "missing_cells": [list(cell) for cell in self.vocabulary.missing_cells],
            "images": self.images,
            "target": {"name": task.concept.name, "kind": task.concept.kind} if task else None,
            "target_images": self._target_images(task),
            "seeds": SEEDS,
            "reference": {"what": "object-judge features of real composites", "n": self.reference.n},
            "bootstrap": BOOTSTRAP,
            "intervals": "shares: the wider of bootstrap and wilson; soft measurements: bootstrap",
            "cra": "includes the target's pictures (official code); cra_strict leaves them out",
            "ua": "all pictures of the target; every other measurement uses the first `images` of each cell",
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Measurements of a model, and of forgetting when there is a target; confusion matrices."""
        every = Answers.collect(jobs, predictions)
        grid = every.where(every.index < self.images)
        found = self._model_measurements(grid)
        rows: dict[Kind, Sequence[str]] = {"class": self.vocabulary.classes, "style": self.vocabulary.styles}
        tables: dict[str, Any] = {"confusion": confusion_tables(grid, rows, predictions.labels)}
        if task:
            target, kind = every.of(task.concept), task.concept.kind
            found |= forgetting(task.concept, target, grid, grid)
            found["target_nothing_share"] = proportion_of(target.is_nothing(kind), target, kind, "lower")
            tables["target"] = {"name": task.concept.name, "kind": task.concept.kind, "predicted": target.tally()}
        return Score(found, tables)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Nothing beyond the two models' own measurements."""
        return {}

    def _pictures(self, cell: tuple[str, str], concept: Concept | None) -> int:
        if concept is None or concept.name != (cell[0] if concept.kind == "class" else cell[1]):
            return self.images
        cells = len(self.vocabulary.styles if concept.kind == "class" else self.vocabulary.classes)
        return max(self.images, -(-TARGET_IMAGES // cells))  # ceil: 80 / 8 styles = 10 pictures each

    def _target_images(self, task: UnlearnTask | None) -> int | None:
        if task is None:
            return None
        return sum(job.labels[task.concept.kind] == task.concept.name for job in self.jobs(task))

    def _model_measurements(self, grid: Answers) -> dict[str, Measurement]:
        distance = metrics.frechet_distance(metrics.fit_gaussian(grid.features), self.reference)
        n = len(grid.features)
        return {
            "object_accuracy": proportion_of(grid.correct("class"), grid, "class", "higher"),
            "style_accuracy": proportion_of(grid.correct("style"), grid, "style", "higher"),
            # No interval: the distance is biased in n, and a bootstrap of it more so (evals/statistics.md).
            "frechet_judge": Measurement(distance, None, None, n, "squared distance", "lower"),
            "nothing_share": proportion_of(grid.is_nothing("class"), grid, "class", "lower"),
        }


def load_benchmark(images: int, root: Path = ROOT) -> Canvas:
    """The benchmark with `images` pictures per prompt."""
    if images < 1:
        raise ValueError(f"{images} images per prompt; allowed: 1 or more. Give --images a positive number.")
    return Canvas(load_vocabulary(root), load_reference(root), images)


def grid_job(cell: tuple[str, str], index: int) -> Job:
    """Picture `index` of a (class, style)."""
    label, style = cell
    prompt = TEMPLATE.format_map({"class": label, "style": style})
    return Job(prompt, job_seed(index, prompt), {"class": label, "style": style, "index": index})
