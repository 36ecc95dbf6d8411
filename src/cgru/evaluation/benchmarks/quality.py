"""Benchmarks `fid`, `kid`, `cmmd` and `clipscore`, version 1: picture quality, and agreement of picture and text.

Each has named variants that select the features to compare: on Emoji Canvas `judge` (the object judge) and `clip-eval`,
with canvas' prompts; elsewhere Inception's or CLIP ViT-L/14@336's, with the prompts of a folder in MJHQ-30K's layout.
The variant is part of the names of benchmark and measurement, so figures of two variants are never mixed. The target's
own prompts are left out, because these benchmarks measure retention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cgru.catalog import unknown
from cgru.embedded import ROOT, load_vocabulary
from cgru.evaluation.base import Job, Measurement, Predictions, Score
from cgru.evaluation.benchmarks.canvas import SEEDS
from cgru.evaluation.benchmarks.prompted import CanvasPrompts, ListedPrompts, PromptSource
from cgru.evaluation.benchmarks.quality_metrics import Distance, TextFit
from cgru.evaluation.benchmarks.references import has_captions, read_captions, read_folder
from cgru.evaluation.distances import load_reference
from cgru.evaluation.judges import features
from cgru.tasks import Sampling, UnlearnTask

# Variant -> network whose features it compares; the first of each group is the default.
EMOJI: Mapping[str, str] = {"judge": "object", "clip-eval": features.CLIP_EVAL}
LISTED: Mapping[str, str] = {
    name: name for name in (features.INCEPTION_CLEAN, features.INCEPTION_BILINEAR, features.CLIP_HUB)
}
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "fid": ("judge", "clip-eval", features.INCEPTION_CLEAN, features.INCEPTION_BILINEAR),
    "kid": ("judge", "clip-eval", features.INCEPTION_CLEAN, features.INCEPTION_BILINEAR),
    "cmmd": ("clip-eval", features.CLIP_HUB),
    "clipscore": ("clip-eval", features.CLIP_HUB),
}


class Yardstick(Protocol):
    """What features are compared with."""

    def protocol(self) -> dict[str, Any]:
        """Return everything that must be equal for two results to be comparable."""

    def score(self, jobs: Sequence[Job], features: np.ndarray) -> Score:
        """Score one model."""

    def compare(self, jobs: Sequence[Job], before: np.ndarray, after: np.ndarray) -> Mapping[str, Measurement]:
        """Compare a model with its base on the same noise."""


@dataclass(frozen=True)
class Quality:
    """A benchmark made of prompts, feature networks and a yardstick."""

    metric: str
    variant: str
    prompts: PromptSource
    yardstick: Yardstick
    judges: tuple[str, ...]
    feature_judge: str
    images: int
    version: int = 1

    @property
    def name(self) -> str:
        """Metric and variant; they name the folder and the key of stored predictions."""
        return f"{self.metric}-{self.variant}"

    @property
    def sampling(self) -> Sampling:
        """Sampling of the prompts."""
        return self.prompts.sampling

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for a class or style of Emoji Canvas, whose prompts are left out."""
        return self.prompts.task(target)

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Return every picture to draw."""
        return self.prompts.jobs(task, self.images)

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return features, resize method, number of pictures, prompts and reference."""
        return {
            "metric": self.metric,
            "variant": self.variant,
            "features": {"network": self.feature_judge, "resize": features.RESIZE[self.feature_judge]},
            "images": self.images,
            "pictures": len(self.jobs(task)),
            "target": {"name": task.concept.name, "kind": task.concept.kind} if task else None,
            "target_prompts": "left out" if task else None,
            "seeds": SEEDS,
            **self.prompts.protocol(),
            **self.yardstick.protocol(),
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Score against the reference, or the prompts' texts."""
        return self.yardstick.score(jobs, predictions.features)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Compare with the base's pictures on the same noise."""
        return self.yardstick.compare(jobs, before.features, after.features)


def load_fid(images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None) -> Quality:
    """Load the Fréchet distance; lower is better."""
    return _load_distance("fid", images, root, variant, reference)


def load_kid(images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None) -> Quality:
    """Load the unbiased kernel distance."""
    return _load_distance("kid", images, root, variant, reference)


def load_cmmd(images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None) -> Quality:
    """Load the maximum mean discrepancy of CLIP embeddings."""
    return _load_distance("cmmd", images, root, variant, reference)


def load_clipscore(
    images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None
) -> Quality:
    """Load the agreement of picture and prompt."""
    chosen = _variant("clipscore", variant, reference)
    if chosen in EMOJI and reference is not None:
        raise ValueError(
            f"--reference {str(reference)!r} with clipscore's variant {chosen!r}, which compares pictures with canvas' "
            f"prompts; allowed: none. Leave --reference out, or choose --variant {features.CLIP_HUB}."
        )
    prompts = _prompts("clipscore", chosen, root, reference)
    yardstick = TextFit(_measurement("clipscore", chosen), _network(chosen), root)
    return _assemble("clipscore", chosen, prompts, yardstick, images)


def _load_distance(metric: str, images: int, root: Path, variant: str | None, reference: Path | None) -> Quality:
    chosen = _variant(metric, variant, reference)
    prompts = _prompts(metric, chosen, root, reference)
    folder = read_folder(reference) if reference is not None else None
    shipped = load_reference(root) if folder is None and (metric, chosen) == ("fid", "judge") else None
    yardstick = Distance(metric, _measurement(metric, chosen), _network(chosen), root, folder, shipped)
    return _assemble(metric, chosen, prompts, yardstick, images)


def _assemble(metric: str, variant: str, prompts: PromptSource, yardstick: Yardstick, images: int) -> Quality:
    if images < 1:
        raise ValueError(f"{images} images per prompt; allowed: 1 or more. Give --images a positive number.")
    network = _network(variant)
    # On Emoji Canvas the judges mark misjudged pictures in the grid.
    judges = dict.fromkeys(("object", "style", network) if variant in EMOJI else (network,))
    return Quality(metric, variant, prompts, yardstick, tuple(judges), network, images)


def _variant(metric: str, given: str | None, reference: Path | None) -> str:
    """Return the requested variant; by default Emoji Canvas' first, or with captioned references the others' first."""
    allowed = VARIANTS[metric]
    group = LISTED if has_captions(reference) else EMOJI
    chosen = given or next(name for name in allowed if name in group)
    if chosen not in allowed:
        raise ValueError(unknown(f"variant of {metric}", chosen, allowed, "Give one of these as --variant."))
    return chosen


def _prompts(metric: str, variant: str, root: Path, reference: Path | None) -> PromptSource:
    if variant in EMOJI:
        return CanvasPrompts(load_vocabulary(root))
    if reference is None:
        what = "a folder of pictures and meta_data.json in MJHQ-30K's layout"
        raise ValueError(
            f"no --reference for {metric}'s variant {variant!r}; it needs {what}. Give --reference FOLDER."
        )
    if variant in (features.INCEPTION_CLEAN, features.INCEPTION_BILINEAR):
        features.inception_script()  # report a missing package before the folder is hashed
    return ListedPrompts(tuple(read_captions(reference)))


def _network(variant: str) -> str:
    return {**EMOJI, **LISTED}[variant]


def _measurement(metric: str, variant: str) -> str:
    return f"{metric}_{variant}".replace("-", "_")
