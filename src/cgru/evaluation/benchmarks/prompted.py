"""Prompts of the quality benchmarks: canvas' prompts, or those of a folder in MJHQ-30K's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cgru.embedded import Vocabulary
from cgru.evaluation.base import Job, job_seed, stable_hash
from cgru.evaluation.benchmarks.canvas import grid_job
from cgru.evaluation.benchmarks.references import CaptionedPicture
from cgru.prompts.benchmark_prompts import TEMPLATE
from cgru.tasks import Sampling, UnlearnTask, find_concept

STABLE_DIFFUSION = Sampling(50, 7.5, 0.0)
"""Sampling for prompts outside Emoji Canvas: diffusers' defaults with DDIM."""


class PromptSource(Protocol):
    """The prompts to draw pictures for."""

    @property
    def sampling(self) -> Sampling:
        """Return how pictures are drawn."""

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for a target given by name."""

    def jobs(self, task: UnlearnTask | None, images: int) -> list[Job]:
        """Return `images` jobs for each prompt."""

    def protocol(self) -> dict[str, Any]:
        """Return which prompts these are."""


@dataclass(frozen=True)
class CanvasPrompts:
    """Canvas' prompts, all classes × styles."""

    vocabulary: Vocabulary

    @property
    def sampling(self) -> Sampling:
        """The embedded model's own sampling."""
        return self.vocabulary.sampling

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for a class or style by name."""
        if target is None:
            return None
        return UnlearnTask(find_concept(target, {"class": self.vocabulary.classes, "style": self.vocabulary.styles}))

    def jobs(self, task: UnlearnTask | None, images: int) -> list[Job]:
        """Return jobs class by class, without the target's."""
        cells = [(label, style) for label in self.vocabulary.classes for style in self.vocabulary.styles]
        kept = [cell for cell in cells if task is None or task.concept.name not in cell]
        return [grid_job(cell, index) for cell in kept for index in range(images)]

    def protocol(self) -> dict[str, Any]:
        """Return template, classes and styles."""
        known = self.vocabulary
        return {"template": TEMPLATE, "classes": list(known.classes), "styles": list(known.styles)}


@dataclass(frozen=True)
class ListedPrompts:
    """Prompts of a folder in MJHQ-30K's layout."""

    captions: tuple[CaptionedPicture, ...]
    sampling: Sampling = STABLE_DIFFUSION

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return None: which of these prompts name a concept is unknown."""
        if target is not None:
            raise ValueError(f"--target {target!r} with prompts of a folder; allowed: none. Leave --target out.")
        return None

    def jobs(self, task: UnlearnTask | None, images: int) -> list[Job]:
        """Return one or more jobs per prompt; a prompt listed twice is drawn once."""
        first = {caption.prompt: caption for caption in reversed(self.captions)}
        ordered = sorted(first.values(), key=lambda caption: caption.id)
        return [_listed_job(caption, index) for caption in ordered for index in range(images)]

    def protocol(self) -> dict[str, Any]:
        """Return the number of prompts and their hash."""
        rows = [[caption.id, caption.category, caption.prompt] for caption in self.captions]
        return {"prompts": {"listed": len(rows), "sha256": stable_hash(rows)}}


def _listed_job(caption: CaptionedPicture, index: int) -> Job:
    labels: dict[str, str | int] = {"category": caption.category, "picture": caption.id, "index": index}
    return Job(caption.prompt, job_seed(index, caption.prompt), labels)
