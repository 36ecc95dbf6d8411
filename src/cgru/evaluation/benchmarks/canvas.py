"""Benchmark `canvas`, version 2: UnlearnCanvas' protocol (arXiv 2402.11846) on Emoji Canvas.

Prompts "A {class} image in {style} style" for every class and style, n pictures each; an object and a style judge; the
judge's argmax gives the main figures, its probabilities the "soft" ones. Label accuracies are averaged unweighted. CRA
includes the target's pictures, as in the official code (its README says otherwise); `cra_strict` leaves them out. A
target gets extra pictures so that it has at least 80; they count for UA and for what is drawn instead. Everything else
uses the first n of each cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.embedded import ROOT, Vocabulary, load_vocabulary
from cgru.evaluation import distances
from cgru.evaluation.base import Job, Measurement, Predictions, Score, job_seed
from cgru.evaluation.distances import load_reference
from cgru.evaluation.grid_scores import (
    OWN_JUDGE,
    Answers,
    clean_table,
    clean_tally,
    confusion_tables,
    forgetting,
    proportion_of,
    replacement_distance,
)
from cgru.evaluation.shares import BOOTSTRAP
from cgru.prompts.benchmark_prompts import TEMPLATE
from cgru.tasks import Concept, Kind, Sampling, UnlearnTask, find_concept

TARGET_IMAGES = 80
SEEDS = "first 48 bits of sha256 of the JSON [index, prompt]; see jobs.jsonl"


@dataclass(frozen=True)
class Canvas:
    """The benchmark for a number of pictures per prompt."""

    vocabulary: Vocabulary
    reference: distances.FeatureGaussian
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
        """Return the task for a class or style by name; hazards are not part of this grid."""
        if target is None:
            return None
        return UnlearnTask(find_concept(target, {"class": self.vocabulary.classes, "style": self.vocabulary.styles}))

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Return the grid, class by class; picture `index` of a prompt has the same noise for any n and target."""
        cells = [(label, style) for label in self.vocabulary.classes for style in self.vocabulary.styles]
        concept = task.concept if task else None
        return [grid_job(cell, index) for cell in cells for index in range(self._pictures(cell, concept))]

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return everything that must be equal for comparable results, apart from model and judges."""
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
        """Return the model's measurements, those of forgetting if there is a target, and confusion matrices."""
        every = Answers.collect(jobs, predictions)
        grid = every.where(every.index < self.images)
        found = self._model_measurements(grid)
        tables: dict[str, Any] = {
            "confusion": confusion_tables(grid, self._labels, predictions.labels),
            "clean": {judge: clean_table(grid, kind, self._labels[kind]) for kind, judge in OWN_JUDGE.items()},
        }
        if task:
            target, kind = every.of(task.concept), task.concept.kind
            others = self._others(task.concept)
            found |= forgetting(task.concept, target, grid, grid)
            found["target_nothing_share"] = proportion_of(target.is_nothing(kind), target, kind, "lower")
            found["replacement_clean"] = proportion_of(target.is_clean(kind, others), target, kind, "higher")
            tables["target"] = {
                "name": task.concept.name,
                "kind": kind,
                "predicted": target.tally(),
                "clean": clean_tally(target, kind, others),
            }
        return Score(found, tables)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Return how far target pictures are from the base's pictures of other labels; the base's own beside it."""
        if task is None:
            return {}
        pair = [Answers.collect(jobs, predictions) for predictions in (before, after)]
        others = pair[0].where(pair[0].index < self.images)
        ours, theirs = (replacement_distance(task.concept, part.of(task.concept), others) for part in reversed(pair))
        return {"replacement_frechet": ours, "replacement_frechet_base": theirs}

    @property
    def _labels(self) -> dict[Kind, Sequence[str]]:
        return {"class": self.vocabulary.classes, "style": self.vocabulary.styles}

    def _others(self, concept: Concept) -> list[str]:
        """The other labels of a concept's kind; `other` and `nothing`, which judges know too, are none of them."""
        return [label for label in self._labels[concept.kind] if label != concept.name]

    def _pictures(self, cell: tuple[str, str], concept: Concept | None) -> int:
        if concept is None or concept.name != (cell[0] if concept.kind == "class" else cell[1]):
            return self.images
        cells = len(self.vocabulary.styles if concept.kind == "class" else self.vocabulary.classes)
        return max(self.images, -(-TARGET_IMAGES // cells))  # ceiling: 80 / 8 styles = 10 pictures each

    def _target_images(self, task: UnlearnTask | None) -> int | None:
        if task is None:
            return None
        return sum(job.labels[task.concept.kind] == task.concept.name for job in self.jobs(task))

    def _model_measurements(self, grid: Answers) -> dict[str, Measurement]:
        distance = distances.frechet_distance(distances.fit_gaussian(grid.features), self.reference)
        n = len(grid.features)
        clean = grid.correct("class") * grid.is_clean("class", self.vocabulary.classes)
        return {
            "object_accuracy": proportion_of(grid.correct("class"), grid, "class", "higher"),
            "style_accuracy": proportion_of(grid.correct("style"), grid, "style", "higher"),
            # No interval: the distance is biased in n, and a bootstrap of it, which repeats pictures, even more.
            "frechet_judge": Measurement(distance, None, None, n, "squared distance", "lower"),
            "clean_share": proportion_of(clean, grid, "class", "higher"),
            "nothing_share": proportion_of(grid.is_nothing("class"), grid, "class", "lower"),
        }


def load_benchmark(images: int, root: Path = ROOT) -> Canvas:
    """Load the benchmark with `images` pictures per prompt."""
    if images < 1:
        raise ValueError(f"{images} images per prompt; allowed: 1 or more. Give --images a positive number.")
    return Canvas(load_vocabulary(root), load_reference(root), images)


def grid_job(cell: tuple[str, str], index: int) -> Job:
    """Return the job for picture `index` of a (class, style)."""
    label, style = cell
    prompt = TEMPLATE.format_map({"class": label, "style": style})
    return Job(prompt, job_seed(index, prompt), {"class": label, "style": style, "index": index})
