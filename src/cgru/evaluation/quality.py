"""Benchmarks `fid`, `kid`, `cmmd` and `clipscore`, version 1: how good pictures are, and how well they fit the text.

Each has named variants, which say whose features are compared: on Emoji Canvas `judge` (the object judge) and
`clip-eval`, on canvas' prompts; elsewhere Inception's or CLIP ViT-L/14@336's, on the prompts of a folder in MJHQ-30K's
layout. The variant is part of the benchmark's and the measurement's name, so that figures of two variants never meet.
A target's own prompts are left out: these benchmarks tell what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cgru.catalog import unknown
from cgru.evaluation import eyes
from cgru.evaluation.assets import ROOT, load_reference, load_vocabulary
from cgru.evaluation.base import Job, Measurement, Predictions, Sampling, Score
from cgru.evaluation.canvas import SEEDS
from cgru.evaluation.prompted import CanvasPrompts, ListedPrompts, Prompts
from cgru.evaluation.references import has_captions, read_captions, read_folder
from cgru.evaluation.yardsticks import Distance, TextFit
from cgru.tasks import UnlearnTask

# Variant -> the network whose features it compares; the first of each group is the default.
EMOJI: Mapping[str, str] = {"judge": "object", "clip-eval": eyes.CLIP_EVAL}
LISTED: Mapping[str, str] = {name: name for name in (eyes.INCEPTION_CLEAN, eyes.INCEPTION_BILINEAR, eyes.CLIP_HUB)}
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "fid": ("judge", "clip-eval", eyes.INCEPTION_CLEAN, eyes.INCEPTION_BILINEAR),
    "kid": ("judge", "clip-eval", eyes.INCEPTION_CLEAN, eyes.INCEPTION_BILINEAR),
    "cmmd": ("clip-eval", eyes.CLIP_HUB),
    "clipscore": ("clip-eval", eyes.CLIP_HUB),
}


class Yardstick(Protocol):
    """What features are held against."""

    def protocol(self) -> dict[str, Any]:
        """What must be equal for two results to be comparable."""

    def score(self, jobs: Sequence[Job], features: np.ndarray) -> Score:
        """Of one model."""

    def compare(self, jobs: Sequence[Job], before: np.ndarray, after: np.ndarray) -> Mapping[str, Measurement]:
        """Of a model beside its base, on the same noise."""


@dataclass(frozen=True)
class Quality:
    """A benchmark: prompts, the networks that look, and a yardstick."""

    metric: str
    variant: str
    prompts: Prompts
    yardstick: Yardstick
    judges: tuple[str, ...]
    feature_judge: str
    images: int
    version: int = 1

    @property
    def name(self) -> str:
        """Metric and variant: the folder and the key of stored predictions follow it."""
        return f"{self.metric}-{self.variant}"

    @property
    def sampling(self) -> Sampling:
        """Of the prompts."""
        return self.prompts.sampling

    def task(self, target: str | None) -> UnlearnTask | None:
        """A class or style of Emoji Canvas, whose prompts are left out."""
        return self.prompts.task(target)

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Every picture to draw."""
        return self.prompts.jobs(task, self.images)

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Features, resize, number of pictures, prompts and reference."""
        return {
            "metric": self.metric,
            "variant": self.variant,
            "features": {"network": self.feature_judge, "resize": eyes.RESIZE[self.feature_judge]},
            "images": self.images,
            "pictures": len(self.jobs(task)),
            "target": {"name": task.concept.name, "kind": task.concept.kind} if task else None,
            "target_prompts": "left out" if task else None,
            "seeds": SEEDS,
            **self.prompts.protocol(),
            **self.yardstick.protocol(),
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Against the reference, or the prompts' texts."""
        return self.yardstick.score(jobs, predictions.features)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Against the base's pictures on the same noise."""
        return self.yardstick.compare(jobs, before.features, after.features)


def load_fid(images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None) -> Quality:
    """Fréchet distance; the smaller the better."""
    return _load_distance("fid", images, root, variant, reference)


def load_kid(images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None) -> Quality:
    """Kernel distance, unbiased."""
    return _load_distance("kid", images, root, variant, reference)


def load_cmmd(images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None) -> Quality:
    """Maximum mean discrepancy of CLIP embeddings."""
    return _load_distance("cmmd", images, root, variant, reference)


def load_clipscore(
    images: int, root: Path = ROOT, *, variant: str | None = None, reference: Path | None = None
) -> Quality:
    """Fit of picture and prompt."""
    chosen = _variant("clipscore", variant, reference)
    if chosen in EMOJI and reference is not None:
        raise ValueError(
            f"--reference {str(reference)!r} with clipscore's variant {chosen!r}, which compares pictures with canvas' "
            f"prompts; allowed: none. Leave --reference out, or choose --variant {eyes.CLIP_HUB}."
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


def _assemble(metric: str, variant: str, prompts: Prompts, yardstick: Yardstick, images: int) -> Quality:
    if images < 1:
        raise ValueError(f"{images} images per prompt; allowed: 1 or more. Give --images a positive number.")
    network = _network(variant)
    # On Emoji Canvas the judges frame what the grid shows wrong.
    judges = dict.fromkeys(("object", "style", network) if variant in EMOJI else (network,))
    return Quality(metric, variant, prompts, yardstick, tuple(judges), network, images)


def _variant(metric: str, given: str | None, reference: Path | None) -> str:
    """What was asked for; else Emoji Canvas' own, with a reference that has captions the first of the others."""
    allowed = VARIANTS[metric]
    group = LISTED if has_captions(reference) else EMOJI
    chosen = given or next(name for name in allowed if name in group)
    if chosen not in allowed:
        raise ValueError(unknown(f"variant of {metric}", chosen, allowed, "Give one of these as --variant."))
    return chosen


def _prompts(metric: str, variant: str, root: Path, reference: Path | None) -> Prompts:
    if variant in EMOJI:
        return CanvasPrompts(load_vocabulary(root))
    if reference is None:
        what = "a folder of pictures and meta_data.json in MJHQ-30K's layout"
        raise ValueError(
            f"no --reference for {metric}'s variant {variant!r}; it needs {what}. Give --reference FOLDER."
        )
    if variant in (eyes.INCEPTION_CLEAN, eyes.INCEPTION_BILINEAR):
        eyes.inception_script()  # said before the folder is hashed
    return ListedPrompts(tuple(read_captions(reference)))


def _network(variant: str) -> str:
    return {**EMOJI, **LISTED}[variant]


def _measurement(metric: str, variant: str) -> str:
    return f"{metric}_{variant}".replace("-", "_")
