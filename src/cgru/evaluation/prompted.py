"""Which pictures the benchmarks of quality ask for: canvas' prompts, or those of a folder in MJHQ-30K's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cgru.evaluation.assets import Vocabulary
from cgru.evaluation.base import Job, Sampling, job_seed, stable_hash
from cgru.evaluation.canvas import TEMPLATE, grid_job
from cgru.evaluation.references import Caption
from cgru.tasks import UnlearnTask, find_concept

STABLE_DIFFUSION = Sampling(50, 7.5, 0.0)
"""Of prompts outside Emoji Canvas: diffusers' defaults with DDIM."""


class Prompts(Protocol):
    """What pictures are asked for."""

    @property
    def sampling(self) -> Sampling:
        """How they are drawn."""

    def task(self, target: str | None) -> UnlearnTask | None:
        """The task for a target given by name."""

    def jobs(self, task: UnlearnTask | None, images: int) -> list[Job]:
        """`images` pictures of each prompt."""

    def protocol(self) -> dict[str, Any]:
        """Which prompts these are."""


@dataclass(frozen=True)
class CanvasPrompts:
    """Canvas' prompts, all classes × styles."""

    vocabulary: Vocabulary

    @property
    def sampling(self) -> Sampling:
        """The embedded model's own."""
        return self.vocabulary.sampling

    def task(self, target: str | None) -> UnlearnTask | None:
        """A class or a style by name."""
        if target is None:
            return None
        return UnlearnTask(find_concept(target, {"class": self.vocabulary.classes, "style": self.vocabulary.styles}))

    def jobs(self, task: UnlearnTask | None, images: int) -> list[Job]:
        """Class by class, without the target's."""
        cells = [(label, style) for label in self.vocabulary.classes for style in self.vocabulary.styles]
        kept = [cell for cell in cells if task is None or task.concept.name not in cell]
        return [grid_job(cell, index) for cell in kept for index in range(images)]

    def protocol(self) -> dict[str, Any]:
        """Template, classes and styles."""
        known = self.vocabulary
        return {"template": TEMPLATE, "classes": list(known.classes), "styles": list(known.styles)}


@dataclass(frozen=True)
class ListedPrompts:
    """The prompts of a folder in MJHQ-30K's layout."""

    captions: tuple[Caption, ...]
    sampling: Sampling = STABLE_DIFFUSION

    def task(self, target: str | None) -> UnlearnTask | None:
        """None: nobody knows which of these prompts name a concept."""
        if target is not None:
            raise ValueError(f"--target {target!r} with prompts of a folder; allowed: none. Leave --target out.")
        return None

    def jobs(self, task: UnlearnTask | None, images: int) -> list[Job]:
        """One or more pictures of each prompt; a prompt that is listed twice is drawn once."""
        first = {caption.prompt: caption for caption in reversed(self.captions)}
        ordered = sorted(first.values(), key=lambda caption: caption.id)
        return [_listed_job(caption, index) for caption in ordered for index in range(images)]

    def protocol(self) -> dict[str, Any]:
        """How many, and their hash."""
        rows = [[caption.id, caption.category, caption.prompt] for caption in self.captions]
        return {"prompts": {"listed": len(rows), "sha256": stable_hash(rows)}}


def _listed_job(caption: Caption, index: int) -> Job:
    labels: dict[str, str | int] = {"category": caption.category, "picture": caption.id, "index": index}
    return Job(caption.prompt, job_seed(index, caption.prompt), labels)
