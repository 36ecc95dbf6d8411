"""Judges (object, style, hazard) and the outside detector: convolutional networks that never train a policy.

Another family than CLIP (ResNet; the detector is a ConvNeXt V2), other seeds, other augmentation, and further art
that generator and rewards never see. Every network has a label for pictures with nothing recognisable in them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    PretrainedConfig,
    ResNetConfig,
    ResNetForImageClassification,
)

from tools.emoji_canvas import art
from tools.emoji_canvas.canvas import Composer, Placement, over, sign, uniform
from tools.emoji_canvas.degrade import recognisable, unrecognisable
from tools.emoji_canvas.training import Recipe, fit, generator_for, keep, log
from tools.emoji_canvas.vocabulary import CLASSES, HAZARDS, STYLES

CLASS_NAMES = [noun.label for noun in CLASSES]
HAZARD_NAMES = [noun.label for noun in HAZARDS]
LABELS: dict[str, list[str]] = {
    "object": [*CLASS_NAMES, "other", "nothing"],
    "style": [*STYLES, "nothing"],
    "hazard": [*HAZARD_NAMES, "none", "nothing"],
    "detector": [*CLASS_NAMES, *HAZARD_NAMES, "other", "nothing"],
}
COMPOSITES = 200_000
# "other" is dozens of nouns: drawn as one label in 28 the detector learned half of them (version 1: 47 %).
WEIGHTS = {"detector": {"other": 8.0}}
INPUT_SIZE = {"object": 128, "style": 128, "hazard": 128, "detector": 64}


def build(name: str) -> nn.Module:
    """An untrained network of the judge's family with its label names."""
    names = dict(enumerate(LABELS[name]))
    labels = {"id2label": names, "label2id": {label: index for index, label in names.items()}}
    if name == "detector":
        config: PretrainedConfig = ConvNextV2Config(
            patch_size=2,
            num_stages=4,
            hidden_sizes=[24, 48, 96, 160],
            depths=[1, 1, 2, 1],
            image_size=INPUT_SIZE[name],
            **labels,
        )
        return ConvNextV2ForImageClassification(config)
    sizes = [24, 48, 96, 160] if name == "hazard" else [32, 64, 128, 192]
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=sizes[0], hidden_sizes=sizes, depths=[2, 2, 2, 1], layer_type="basic", **labels)
    )


def label_of(name: str, record: art.Record) -> str | None:
    """What the named judge should say of an icon; None where the icon is of no use to it."""
    if name == "style":
        return record["style"] or None
    if name == "object":
        return record["label"] if record["group"] == "class" else "other"
    if name == "hazard":
        return record["label"] if record["group"] == "hazard" else "none"
    return record["label"] if record["group"] in ("class", "hazard") else "other"


@dataclass(frozen=True)
class Pool:
    """Icons with labels for one judge, and for each label the icons that show it, padded to a rectangle."""

    composer: Composer
    monochrome: Tensor
    target: Tensor
    members: Tensor  # (labels, most)
    weight: Tensor  # how often each label is drawn, relative to the others


def pool(name: str, icons: np.ndarray, records: list[art.Record], device: torch.device) -> Pool:
    """Keep the usable icons. Labels are drawn evenly, so rare classes count as much."""
    labels = LABELS[name]
    kept = [i for i, record in enumerate(records) if label_of(name, record) is not None]
    target = [labels.index(label_of(name, records[i]) or "") for i in kept]
    rows = [[i for i, label in enumerate(target) if label == k] for k in range(len(labels) - 1)]
    most = max(len(row) for row in rows)
    members = torch.tensor([(row * most)[:most] if row else [0] * most for row in rows], device=device)
    weight = torch.tensor([1.0 if row else 0.0 for row in rows], device=device)
    mono = torch.tensor([records[i]["monochrome"] for i in kept], device=device)
    return Pool(Composer(icons[kept], device), mono, torch.tensor(target, device=device), members, weight)


def weighted(name: str, source: Pool) -> Pool:
    """The pool with some labels drawn more often, for training only."""
    more = torch.tensor([WEIGHTS.get(name, {}).get(label, 1.0) for label in LABELS[name][:-1]])
    return replace(source, weight=source.weight * more.to(source.weight))


def draw(source: Pool, count: int, generator: torch.Generator, recolour: bool) -> tuple[Tensor, Tensor]:
    """Fresh composites with their labels."""
    images, icons = draw_icons(source, count, generator, recolour)
    return images, source.target[icons]


def draw_icons(source: Pool, count: int, generator: torch.Generator, recolour: bool) -> tuple[Tensor, Tensor]:
    """Fresh composites and which icon each shows: rotated a little, any ground, line art in any dark colour."""
    device = source.target.device
    label = torch.multinomial(source.weight, count, replacement=True, generator=generator)
    column = torch.randint(0, source.members.shape[1], (count,), generator=generator, device=device)
    index = source.members[label, column]
    scale = uniform(0.6, 1.0, (count,), generator)
    shift = uniform(-1, 1, (count, 2), generator) * (1 - scale)[:, None]
    angle = uniform(-0.2, 0.2, (count,), generator)
    layer = source.composer.place(index, Placement(scale, shift, sign(count, generator), angle))
    named = source.composer.colours[
        torch.randint(0, len(source.composer.colours), (count,), generator=generator, device=device)
    ]
    free = uniform(0.3, 1, (count, 3), generator)
    kind = uniform(0, 1, (count, 1), generator)
    ground = torch.where(kind < 0.5, torch.ones_like(free), torch.where(kind < 0.8, named, free))
    mono = source.monochrome[index][:, None]
    ground = torch.where(mono, ground.clamp(min=0.55), ground)
    if recolour:
        paint = uniform(0, 0.45, (count, 3), generator)[:, :, None, None] * layer[:, 3:]
        coloured = mono[:, :, None, None] & (uniform(0, 1, (count, 1, 1, 1), generator) < 0.6)
        layer = torch.cat([torch.where(coloured, paint, layer[:, :3]), layer[:, 3:]], 1)
    return over(layer, ground[:, :, None, None]), index


@torch.no_grad()
def composites(sources: list[tuple[Pool, float]], count: int, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Composites drawn once, uint8, with labels; each step degrades its batch afresh."""
    generator = generator_for(device, "composites", name)
    images, labels = [], []
    for source, share in sources:
        for _ in range(int(count * share) // 1024):
            part, label = draw(source, 1024, generator, recolour=name != "style")
            images.append((part * 255).round().byte())
            labels.append(label)
    return torch.cat(images), torch.cat(labels)


def prepared(images: Tensor, size: int) -> Tensor:
    """[0, 1] pictures as the network takes them: resized, centred on 0."""
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear")
    return images * 2 - 1


def train(name: str, work: Path, device: torch.device, recipe: Recipe, seed: int) -> None:
    """Train one judge and save it, with its accuracies, as `work/judges/<name>`."""
    main = weighted(name, pool(name, *art.load(work, "main"), device))
    sources = [(main, 1.0)]
    if name != "style":
        sources = [(main, 0.6), (weighted(name, pool(name, *art.load(work, "judge"), device)), 0.4)]
    torch.manual_seed(seed)
    model = build(name).to(device)
    nothing = len(LABELS[name]) - 1

    pictures, truth = composites(sources, min(COMPOSITES, 512 * recipe.steps), name, device)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(truth), (recipe.batch,), generator=generator, device=device)
        images, labels = pictures[rows].float() / 255, truth[rows]
        empty = unrecognisable(images[:: len(LABELS[name]) // 2], generator)
        filled = torch.full((len(empty),), nothing, device=device)
        return torch.cat([recognisable(images, generator), empty]), torch.cat([labels, filled])

    def loss(generator: torch.Generator) -> Tensor:
        images, labels = batch(generator)
        logits = model(prepared(images, INPUT_SIZE[name])).logits.float()
        return F.cross_entropy(logits, labels, label_smoothing=0.05)

    fit(name, model, loss, recipe, work, device)
    folder = work / "judges" / name
    model.half().float()  # what will be shipped
    keep(model, folder)
    size = {"image_size": INPUT_SIZE[name], "mean": 0.5, "std": 0.5}
    (folder / "preprocessor_config.json").write_text(json.dumps(size, indent=2))
    accuracy = measure(name, model, work, device)
    (folder / "accuracy.json").write_text(json.dumps(accuracy, indent=2))
    log.info("%s: %s", name, json.dumps(accuracy))


@torch.no_grad()
def measure(name: str, model: nn.Module, work: Path, device: torch.device, count: int = 4000) -> dict[str, object]:
    """Accuracy on fresh composites of the style sets' art, and (not for styles) on the set that no network saw."""
    model.eval()
    result: dict[str, object] = {}
    collections = ["main"] if name == "style" else ["main", "heldout"]
    for collection in collections:
        source = pool(name, *art.load(work, collection), device)
        images, labels = draw(source, count, generator_for(device, "measure", name, collection), recolour=False)
        found = torch.cat([model(prepared(part, INPUT_SIZE[name])).logits.argmax(1) for part in images.split(500)])
        right = (found == labels).float()
        per_label = {LABELS[name][k]: round(right[labels == k].mean().item(), 4) for k in labels.unique().tolist()}
        result[collection] = {
            "accuracy": round(right.mean().item(), 4),
            "n": count,
            "icons": len(source.target),
            "per_label": per_label,
        }
    junk = unrecognisable(
        draw(pool(name, *art.load(work, "main"), device), 500, generator_for(device, "junk"), recolour=False)[0],
        generator_for(device, "junk", 2),
    )
    found = model(prepared(junk, INPUT_SIZE[name])).logits.argmax(1)
    result["nothing"] = {"accuracy": round((found == len(LABELS[name]) - 1).float().mean().item(), 4), "n": 500}
    return result
