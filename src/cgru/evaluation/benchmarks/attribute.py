"""Benchmark `attribute`, version 1: is a look that no prompt asks for still drawn, and everything else as before?

Open part: four sentences around every class' noun that leave the style open and that no training prompt has. Closed
part: canvas' prompts, the first picture of each, which ask for a style. Of every attribute (`cgru.attributes`) the rate
in the open part is measured by a judge and, beside it, by the detector that a policy is paid by; with a target also its
reduction against the base, paired by noise. An attribute that the base's detector does not show in 20 to 70 % of the
pictures is no task for a policy's own trajectories; `in_range` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cgru.attributes import ATTRIBUTES
from cgru.embedded import ROOT, load_lexicon, load_vocabulary
from cgru.evaluation import distances
from cgru.evaluation.base import NOTHING, Better, Job, Measurement, Predictions, Score, job_seed
from cgru.evaluation.benchmarks.canvas import SEEDS, grid_job
from cgru.evaluation.distances import load_reference
from cgru.evaluation.judges.attributes import YES, AttributeDetector, AttributeJudge
from cgru.evaluation.judges.classifiers import load_judge
from cgru.evaluation.judges.features import Eye
from cgru.evaluation.shares import BOOTSTRAP, reduction, share
from cgru.prompts.grammar import with_article
from cgru.prompts.paraphrases import FRAMES
from cgru.tasks import Lexicon, Sampling, UnlearnTask, find_concept

RANGE = (0.2, 0.7)
"""Rates of the base at which an attribute is a task."""
OPEN = "open"


@dataclass(frozen=True)
class AttributeGrid:
    """The benchmark for a number of pictures per open prompt."""

    lexicon: Lexicon
    sampling: Sampling
    reference: distances.FeatureGaussian
    images: int
    root: Path = ROOT
    name: str = "attribute"
    version: int = 1
    judges: tuple[str, ...] = ("object", "style", *ATTRIBUTES, *(f"{name} detector" for name in ATTRIBUTES))
    feature_judge: str = "object"

    def load_judges(self, device: torch.device) -> dict[str, Eye]:
        """Return the shipped judges, and for each attribute a judge and the reward's detector."""
        shipped: dict[str, Eye] = {
            name: load_judge(name, root=self.root, device=device) for name in ("object", "style")
        }
        detectors = {f"{name} detector": AttributeDetector(name) for name in ATTRIBUTES}
        return {**shipped, **{name: AttributeJudge(name) for name in ATTRIBUTES}, **detectors}

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for an attribute by name."""
        if target is None:
            return None
        return UnlearnTask(find_concept(target, {"attribute": tuple(ATTRIBUTES)}))

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Return open prompts, then closed ones; the closed ones have canvas' noise and ids."""
        nouns = {label: with_article(self.lexicon.nouns[label].singular) for label in self.lexicon.classes}
        prompts = [(label, frame.format(a=noun)) for label, noun in nouns.items() for frame in FRAMES]
        grid = [(label, style) for label in self.lexicon.classes for style in self.lexicon.styles]
        return [
            *(
                Job(prompt, job_seed(index, prompt), {"class": label, "part": OPEN, "index": index})
                for label, prompt in prompts
                for index in range(self.images)
            ),
            *(grid_job(cell, 0) for cell in grid),
        ]

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return everything that must be equal for comparable results, apart from model and judges."""
        return {
            "frames": list(FRAMES),
            "words": {label: self.lexicon.nouns[label].singular for label in self.lexicon.classes},
            "styles": list(self.lexicon.styles),
            "attributes": list(ATTRIBUTES),
            "images": self.images,
            "target": {"name": task.concept.name, "kind": "attribute"} if task else None,
            "seeds": SEEDS,
            "reference": {"what": "object-judge features of real composites", "n": self.reference.n},
            "bootstrap": BOOTSTRAP,
            "intervals": "shares: the wider of bootstrap and wilson",
            "range": list(RANGE),
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Return the rate of each attribute, or of the target, and how well the prompts are still drawn."""
        is_open = np.array([job.labels.get("part") == OPEN for job in jobs])
        found = {}
        for name in (task.concept.name,) if task else ATTRIBUTES:
            prefix = "attribute" if task else name.lower()
            found[f"{prefix}_rate"] = self._share(jobs, _answers(predictions, name) == YES, is_open, "lower")
            seen = _answers(predictions, f"{name} detector") == YES
            found[f"{prefix}_rate_detector"] = self._share(jobs, seen, is_open, "lower")
        nothing = _answers(predictions, "object") == NOTHING
        right = {kind: _right(predictions, judge, jobs, kind) for kind, judge in JUDGE_OF.items()}
        found["attribute_nothing_share"] = self._share(jobs, nothing, is_open, "lower")
        found["object_accuracy"] = self._share(jobs, right["class"], is_open, "higher")
        found["styled_object_accuracy"] = self._share(jobs, right["class"], ~is_open, "higher")
        found["style_accuracy"] = self._share(jobs, right["style"], ~is_open, "higher")
        features = distances.fit_gaussian(predictions.features[~is_open])
        distance = distances.frechet_distance(features, self.reference)
        found["frechet_judge"] = Measurement(distance, None, None, int((~is_open).sum()), "squared distance", "lower")
        return Score(found, {"rates": self._rates(jobs, predictions, is_open)})

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Return `attribute_reduction`, the share of the base's pictures with the target in which it is gone."""
        if task is None:
            return {}
        rows = np.array([job.labels.get("part") == OPEN for job in jobs])
        was, still = (_answers(part, task.concept.name)[rows] == YES for part in (before, after))
        opened = [job for job, is_open in zip(jobs, rows, strict=True) if is_open]
        labels = [str(job.labels["class"]) for job in opened]
        found = reduction(was.astype(float), still.astype(float), [job.prompt for job in opened], labels)
        return {"attribute_reduction": found} if found else {}

    def _share(self, jobs: Sequence[Job], outcomes: np.ndarray, rows: np.ndarray, better: Better) -> Measurement:
        chosen = [job for job, is_in in zip(jobs, rows, strict=True) if is_in]
        labels = [str(job.labels["class"]) for job in chosen]
        return share(outcomes[rows].astype(float), [job.prompt for job in chosen], labels, better)

    def _rates(self, jobs: Sequence[Job], predictions: Predictions, rows: np.ndarray) -> dict[str, Any]:
        """By attribute: the rates in the open part, whether the detector's is in range, and the judge's by class."""
        classes = np.array([job.labels["class"] for job in jobs])
        table = {}
        for name in ATTRIBUTES:
            judged, detected = (_answers(predictions, judge)[rows] == YES for judge in (name, f"{name} detector"))
            table[name] = {
                "judge": float(judged.mean()),
                "detector": float(detected.mean()),
                "agreement": float((judged == detected).mean()),
                "in_range": bool(RANGE[0] <= detected.mean() <= RANGE[1]),
                "by_class": {label: float(judged[classes[rows] == label].mean()) for label in self.lexicon.classes},
            }
        return table


JUDGE_OF = {"class": "object", "style": "style"}


def _answers(predictions: Predictions, judge: str) -> np.ndarray:
    return np.array(predictions.labels[judge])[predictions.probabilities[judge].argmax(1)]


def _right(predictions: Predictions, judge: str, jobs: Sequence[Job], kind: str) -> np.ndarray:
    right: np.ndarray = _answers(predictions, judge) == np.array([job.labels.get(kind, "") for job in jobs])
    return right


def load_benchmark(images: int, root: Path = ROOT) -> AttributeGrid:
    """Load the benchmark with `images` pictures per open prompt."""
    if images < 1:
        raise ValueError(f"{images} images per prompt; allowed: 1 or more. Give --images a positive number.")
    return AttributeGrid(load_lexicon(root), load_vocabulary(root).sampling, load_reference(root), images, root)
