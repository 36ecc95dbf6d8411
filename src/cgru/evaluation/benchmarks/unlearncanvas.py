"""Benchmark `unlearncanvas`, version 1: 20 classes × 50 styles and photos, judged by the official ViTs.

Zhang et al. 2024 (arXiv 2402.11846, github.com/OPTML-Group/UnlearnCanvas); scoring is shared with canvas
(grid_scores.py). Official: 5 pictures per prompt, DDIM with 100 steps, guidance 9, JPEG. Variants: `official`,
`official-50` (without photos) and `paper` (CGRU's template and 20 pictures; what that paper leaves open is as in
`official`). One difference to the official samplers: a picture's noise depends on its seed alone, not on what was drawn
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import cached_file

from cgru.backbones.base import one_line
from cgru.backbones.hub import check_reachable
from cgru.catalog import unknown
from cgru.embedded import ROOT, load_lexicon
from cgru.evaluation import distances
from cgru.evaluation.base import Job, Measurement, Predictions, Score
from cgru.evaluation.grid_scores import (
    CROSS_KIND,
    Answers,
    confusion_tables,
    forgetting,
    label_tables,
    mean_of,
    proportion_of,
)
from cgru.evaluation.judges.features import Eye
from cgru.evaluation.judges.vit import JPEG, load_vit
from cgru.evaluation.shares import BOOTSTRAP
from cgru.rewards.weights import HUB_ID
from cgru.tasks import Kind, Sampling, UnlearnTask, find_concept

# In the order of the judges' outputs.
CLASSES = tuple(
    "Architectures Bears Birds Butterfly Cats Dogs Fishes Flame Flowers Frogs Horses Human Jellyfish Rabbits "
    "Sandwiches Sea Statues Towers Trees Waterfalls".split()
)
STYLES = tuple(
    "Abstractionism Artist_Sketch Blossom_Season Bricks Byzantine Cartoon Cold_Warm Color_Fantasy Comic_Etch Crayon "
    "Cubism Dadaism Dapple Defoliation Early_Autumn Expressionism Fauvism French Glowing_Sunset Gorgeous_Love "
    "Greenfield Impressionism Ink_Art Joy Liquid_Dreams Magic_Cube Meta_Physics Meteor_Shower Monet Mosaic Neon_Lines "
    "On_Fire Pastel Pencil_Drawing Picasso Pop_Art Red_Blue_Ink Rust Seed_Images Sketch Sponge_Dabbed Structuralism "
    "Superstring Surrealism Ukiyoe Van_Gogh Vibrant_Flow Warm_Love Warm_Smear Watercolor Winter".split()
)
PHOTOS = "Seed_Images"
"""Pseudo-style of the photos from which all styles were made: drawn and judged, but never a target, and not counted in
IRA and CRA over styles."""
SEEDS = (188, 288, 588, 688, 888)
SAMPLING = Sampling(steps=100, guidance=9.0, eta=0.0)
FILES = {"object": "style50_cls", "style": "style50"}
"""Judge -> name of its official checkpoint."""
STARTED_FROM = "timm/vit_large_patch16_224.augreg_in21k"
WHERE = (
    "allowed: a folder with style50.pth (styles) and style50_cls.pth (classes), or a hub id that has both. The README "
    "of OPTML-Group/UnlearnCanvas links to them (folder cls_model), on a drive that cgru cannot read: fetch them there."
)


@dataclass(frozen=True)
class UnlearnCanvasVariant:
    """What differs between variants of the benchmark."""

    template: str
    images: int
    """Default number of pictures per prompt."""
    has_photos: bool


VARIANTS: Mapping[str, UnlearnCanvasVariant] = {
    "official": UnlearnCanvasVariant("A {class} image in {style} style.", 5, has_photos=True),
    "official-50": UnlearnCanvasVariant("A {class} image in {style} style.", 5, has_photos=False),
    "paper": UnlearnCanvasVariant("A {class} image in {style} style", 20, has_photos=True),
}


@dataclass(frozen=True)
class UnlearnCanvas:
    """The benchmark in one variant."""

    variant: str
    images: int
    checkpoints: Mapping[str, Path]
    """Checkpoint of each judge."""
    classes: tuple[str, ...]
    styles: tuple[str, ...]
    aliases: Mapping[str, str]
    sampling: Sampling = SAMPLING
    name: str = "unlearncanvas"
    version: int = 1
    judges: tuple[str, ...] = ("object", "style")
    feature_judge: str = "object"

    def load_judges(self, device: torch.device) -> dict[str, Eye]:
        """Load the official ViTs."""
        outputs = {"object": CLASSES, "style": STYLES}
        return {
            judge: load_vit(self.checkpoints[judge], labels, _lineage(judge), device=device)
            for judge, labels in outputs.items()
        }

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for a class or style by name; photos are not a style."""
        if target is None:
            return None
        names: dict[Kind, Sequence[str]] = {"class": self.classes, "style": self._real_styles}
        try:
            return UnlearnTask(find_concept(target, names, self.aliases))
        except ValueError:  # its message suggests listing Emoji Canvas' styles
            every = (*self.classes, *self._real_styles)
            raise ValueError(unknown("class or style", target, every, "Give one of these as --target.")) from None

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Return the grid, style by style as in the official code; a target gets no extra pictures."""
        cells = [(label, style) for style in self.styles for label in self.classes]
        return [self._job(cell, index) for cell in cells for index in range(self.images)]

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return everything that must be equal for comparable results, apart from model and judges' weights."""
        return {
            "variant": self.variant,
            "template": VARIANTS[self.variant].template,
            "underscores": "spaces",
            "classes": list(self.classes),
            "styles": list(self.styles),
            "images": self.images,
            "target": {"name": task.concept.name, "kind": task.concept.kind} if task else None,
            "target_images": self._target_images(task),
            "seeds": f"{', '.join(map(str, seeds(self.images)))}: one per picture, its noise shared by all prompts",
            "jpeg": JPEG,
            "judge_input": "JPEG, 8 bits, to 224 × 224 with Pillow's bilinear filter, (x - 0.5) / 0.5",
            "judge_lineage": {judge: _lineage(judge) for judge in FILES},
            "bootstrap": BOOTSTRAP,
            "intervals": "shares: the wider of bootstrap and wilson; soft measurements: bootstrap",
            "cra": "includes the target's pictures (official code); cra_strict leaves them out",
            "photos": f"{PHOTOS} counts for classes, not for styles",
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Return accuracies, UA, IRA and CRA of a target, confusion matrices and a row per label."""
        grid = Answers.collect(jobs, predictions)
        rows: dict[Kind, Sequence[str]] = {"class": self.classes, "style": self.styles}
        styled = self._counted(grid, "style")
        found = {
            "object_accuracy": proportion_of(grid.correct("class"), grid, "class", "higher"),
            "style_accuracy": proportion_of(styled.correct("style"), styled, "style", "higher"),
        }
        tables: dict[str, Any] = {
            "confusion": confusion_tables(grid, rows, predictions.labels),
            "labels": label_tables(grid, rows),
        }
        if task:
            found |= self._forgetting(task, grid)
            target = {"name": task.concept.name, "kind": task.concept.kind}
            tables["target"] = {**target, "predicted": grid.of(task.concept).tally()}
        return Score(found, tables)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Return how far retained pictures moved: noise would have the best UA, and these judges cannot detect it."""
        pair = [Answers.collect(jobs, predictions) for predictions in (before, after)]
        kept = [answers.without(task.concept) if task else answers for answers in pair]
        gaussians = [distances.fit_gaussian(answers.features) for answers in kept]
        distance = distances.frechet_distance(*gaussians)
        # No interval: the distance is biased in n, and a bootstrap of it, which repeats pictures, even more.
        return {"frechet_to_base": Measurement(distance, None, None, gaussians[1].n, "squared distance", "lower")}

    def _forgetting(self, task: UnlearnTask, grid: Answers) -> dict[str, Measurement]:
        concept, other_kind = task.concept, CROSS_KIND[task.concept.kind]
        own, cross = self._counted(grid, concept.kind), self._counted(grid, other_kind)
        found = forgetting(concept, grid.of(concept), own, cross)
        found["cra_soft"] = mean_of(cross.confidence[other_kind], cross, other_kind, "higher")
        # Both averages are in use: the CGRU paper's of two, UnlearnCanvas' and SAeUron's of three.
        averages = {"average_ua_ira": ("ua", "ira"), "average_ua_ira_cra": ("ua", "ira", "cra")}
        pictures = len(grid.index)
        return found | {name: _average([found[part] for part in parts], pictures) for name, parts in averages.items()}

    def _counted(self, grid: Answers, kind: Kind) -> Answers:
        return grid.where(grid.prompted["style"] != PHOTOS) if kind == "style" else grid

    def _job(self, cell: tuple[str, str], index: int) -> Job:
        label, style = cell
        words = {"class": label, "style": style.replace("_", " ")}
        prompt = VARIANTS[self.variant].template.format_map(words)
        return Job(prompt, seeds(index + 1)[index], {"class": label, "style": style, "index": index})

    def _target_images(self, task: UnlearnTask | None) -> int | None:
        if task is None:
            return None
        return self.images * len(self.styles if task.concept.kind == "class" else self.classes)

    @property
    def _real_styles(self) -> tuple[str, ...]:
        return tuple(style for style in self.styles if style != PHOTOS)


def load_benchmark(
    images: int | None = None, root: Path = ROOT, *, variant: str | None = None, judges: str | None = None
) -> UnlearnCanvas:
    """Load the benchmark in a variant (None: official) with `images` pictures per prompt (None: the variant's).

    Args:
        images: pictures per prompt.
        root: the asset folder, for words of the classes.
        variant: a name of VARIANTS.
        judges: a folder or a hub id with the official checkpoints.
    """
    chosen = variant or "official"
    if chosen not in VARIANTS:
        message = unknown("variant of unlearncanvas", chosen, VARIANTS, "Give one of these as --variant.")
        raise ValueError(message)
    count = VARIANTS[chosen].images if images is None else images
    if count < 1:
        raise ValueError(f"{count} images per prompt; allowed: 1 or more. Give --images a positive number.")
    styles = tuple(style for style in STYLES if style != PHOTOS or VARIANTS[chosen].has_photos)
    found = find_checkpoints(judges)
    return UnlearnCanvas(chosen, count, found, CLASSES, styles, load_lexicon(root).aliases)


def seeds(count: int) -> tuple[int, ...]:
    """Return the official five seeds; further ones continue in steps of 100 (ours; CGRU's 20 are not published).

    >>> seeds(7)
    (188, 288, 588, 688, 888, 988, 1088)
    """
    more = max(0, count - len(SEEDS))
    return (*SEEDS[:count], *(SEEDS[-1] + 100 * (i + 1) for i in range(more)))


def find_checkpoints(source: str | None) -> dict[str, Path]:
    """Return each judge's checkpoint, in a folder (.pth, else .safetensors) or of a hub id (.pth)."""
    if source is None:
        raise ValueError(f"no --judges for unlearncanvas; {WHERE}")
    folder = Path(source)
    if folder.is_dir():
        return {judge: _in_folder(folder, stem) for judge, stem in FILES.items()}
    # `judges/uc` next to a folder `judges` is a mistyped path, not worth 30 s of retries on the hub.
    if not HUB_ID.fullmatch(source) or folder.parent.is_dir():
        raise FileNotFoundError(f"no folder {source!r} for --judges; {WHERE}")
    try:
        check_reachable(source, f"{next(iter(FILES.values()))}.pth")
        return {judge: Path(cached_file(source, f"{stem}.pth")) for judge, stem in FILES.items()}
    except OSError as error:
        raise FileNotFoundError(f"no --judges {source!r} here or on the hub ({one_line(error)}); {WHERE}") from error


def _in_folder(folder: Path, stem: str) -> Path:
    for path in (folder / f"{stem}.pth", folder / f"{stem}.safetensors"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no file '{stem}.pth' in --judges {str(folder)!r}; {WHERE}")


def _lineage(judge: str) -> dict[str, Any]:
    return {"name": f"unlearncanvas-{judge} ({FILES[judge]})", "started_from": [STARTED_FROM]}


def _average(parts: Sequence[Measurement], pictures: int) -> Measurement:
    """Average without an interval, since the parts come from the same pictures."""
    value = float(np.mean([part.value for part in parts]))
    return Measurement(value, None, None, pictures, "proportion", "higher")
