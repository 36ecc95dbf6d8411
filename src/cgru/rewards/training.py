"""Train class heads where none are shipped: from a folder of pictures, or from pictures the base model makes itself.

The paper's reward is CLIP with a class head (§5). By default the tower stays frozen and only the linear head learns,
on features computed once; `is_full` trains the tower too. For a concept that is just a text, the labels are
[concept, "other"], and the pictures of "other" come from retain prompts; `cgru.rl.head_classes` has the other choices.
Part of the pictures of every label is held out, and the accuracy on those is returned and logged.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from cgru.backbones.base import Backbone
from cgru.image_files import class_folders, read_rgb
from cgru.mdp.rollout import sample
from cgru.rewards.heads import ClassHeads, Tower
from cgru.rewards.pictures import centre_crop

logger = logging.getLogger(__name__)

BATCH = 64
"""Pictures that go through a network at once."""

Pictures = Mapping[str, Tensor]
"""Label -> pictures [0, 1], n×3×h×w, all of one size."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """Trained heads and how often they were right on held-out pictures."""

    heads: ClassHeads
    accuracy: float
    """Mean over labels, 0..1, so that a large "other" counts no more than the concept."""
    held_out: int
    """Pictures it was measured on."""


def pictures_from_folder(folder: Path, resized: Callable[[Tensor], Tensor]) -> dict[str, Float[Tensor, "n 3 s s"]]:
    """Read `folder/<label>/*.png|jpg`; `resized` makes them squares of one size, such as a tower's `resized`."""
    files = class_folders(folder)
    return {label: torch.cat([_read_picture(path, resized) for path in paths]) for label, paths in files.items()}


def _read_picture(path: Path, resized: Callable[[Tensor], Tensor]) -> Tensor:
    pixels = torch.from_numpy(np.array(read_rgb(path)))
    return resized(pixels.permute(2, 0, 1)[None].float() / 255)


def _cropped(images: Tensor) -> Tensor:
    side = min(images.shape[-2:])
    return centre_crop(images.float(), (side, side))


@torch.no_grad()
def pictures_from_model(
    backbone: Backbone,
    prompts_by_label: Mapping[str, Sequence[str]],
    per_label: int,
    *,
    seed: int,
    steps: int,
    guidance: float,
    eta: float = 0.0,
    resized: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 16,
    decode_batch: int | None = None,
) -> dict[str, Float[Tensor, "n c h w"]]:
    """Let the base model draw `per_label` pictures for every label, going round its prompts.

    Args:
        backbone: the model before anything is unlearned.
        prompts_by_label: at least one prompt each.
        per_label: pictures per label.
        seed: root seed; each picture has a child of its own.
        steps: denoising steps.
        guidance: classifier-free guidance.
        eta: noise of the sampler, 0 to 1.
        resized: makes them the squares that are kept, such as a tower's `resized`; None keeps the model's own size.
        batch_size: pictures drawn at once.
        decode_batch: latents decoded at once; None: the model's own number.
    """
    if empty := [label for label, prompts in prompts_by_label.items() if not prompts]:
        raise ValueError(f"no prompts for the label {empty[0]!r}; give at least one for each label.")
    kernel = backbone.kernel(steps, eta=eta)
    result = {}
    for label, prompts in prompts_by_label.items():
        chosen = [prompts[k % len(prompts)] for k in range(per_label)]
        seeds = [_child(seed, label, k) for k in range(per_label)]
        parts = []
        for start in range(0, per_label, batch_size):
            part = slice(start, start + batch_size)
            cond = backbone.encode_text(chosen[part])
            latents = sample(backbone, cond, seeds[part], kernel=kernel, guidance=guidance)
            images = backbone.decode(latents, batch_size=decode_batch)
            parts.append((resized or _cropped)(images).cpu())
        result[label] = torch.cat(parts)
        logger.info("reward pictures: %d of %r", per_label, label)
    return result


def _child(seed: int, label: str, number: int) -> int:
    # Named children of the root seed: a picture stays the same when other labels or more pictures are asked for.
    return int.from_bytes(hashlib.sha256(f"reward/{seed}/{label}/{number}".encode()).digest()[:4])


def fit_heads(
    tower: Tower,
    pictures_by_label: Pictures,
    *,
    head: str = "object",
    epochs: int = 60,
    batch: int = 64,
    learning_rate: float | None = None,
    weight_decay: float = 0.01,
    held_out: float = 0.2,
    seed: int = 0,
    is_full: bool = False,
) -> Fitted:
    """Train one linear head, with AdamW, on a tower; labels weigh the same whatever their number of pictures.

    Args:
        tower: left as it is; with `is_full` a copy of it is trained.
        pictures_by_label: at least 2 pictures of each of at least 2 labels.
        head: name of the head.
        epochs: passes over the training pictures.
        batch: pictures per optimiser step.
        learning_rate: None: 3e-3 for a head alone, 1e-5 with the tower (ours; the paper gives none).
        weight_decay: AdamW's.
        held_out: share of each label's pictures that is not trained on.
        seed: of split and shuffling.
        is_full: train the tower too.
    """
    _check(pictures_by_label, held_out)
    generator = torch.Generator().manual_seed(seed)
    train, test = _split(pictures_by_label, held_out, generator)
    tower = copy.deepcopy(tower) if is_full else tower
    linear = nn.Linear(tower.width, len(pictures_by_label)).to(next(tower.parameters()).device)
    nn.init.zeros_(linear.weight)  # a head at zero says "all labels alike": no draw, the same start for everyone
    nn.init.zeros_(linear.bias)
    model = ClassHeads(tower, {head: linear}, {head: tuple(pictures_by_label)})
    rate = learning_rate or (1e-5 if is_full else 3e-3)
    if is_full:
        network = model.requires_grad_(True)
        _optimise(network, lambda x: network(x)[head], *train, epochs, batch, rate, weight_decay, generator)
    else:
        linear.requires_grad_(True)
        _optimise(linear, linear, _features(tower, train[0]), train[1], epochs, batch, rate, weight_decay, generator)
    model.requires_grad_(False)
    accuracy = _accuracy(model, head, *test)
    logger.info("reward head %r: %.3f right on %d held-out pictures", head, accuracy, len(test[1]))
    return Fitted(model, accuracy, len(test[1]))


def _check(pictures_by_label: Pictures, held_out: float) -> None:
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}; it must lie between 0 and 1")
    if len(pictures_by_label) < 2:
        raise ValueError(
            f"labels are {list(pictures_by_label)}; a head needs at least 2, such as a concept and 'other'"
        )
    if few := [label for label, pictures in pictures_by_label.items() if len(pictures) < 2]:
        raise ValueError(f"the label {few[0]!r} has fewer than 2 pictures; one to train on and one to hold out")


def _split(
    pictures_by_label: Pictures, held_out: float, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    train: list[tuple[Tensor, int]] = []
    test: list[tuple[Tensor, int]] = []
    for label, pictures in enumerate(pictures_by_label.values()):
        order = torch.randperm(len(pictures), generator=generator)
        count = min(max(1, round(held_out * len(pictures))), len(pictures) - 1)
        test.append((pictures[order[:count]], label))
        train.append((pictures[order[count:]], label))
    return _joined(train), _joined(test)


def _joined(parts: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    truth = [torch.full((len(pictures),), label) for pictures, label in parts]
    return torch.cat([pictures for pictures, _ in parts]), torch.cat(truth)


def _optimise(
    module: nn.Module,
    logits: Callable[[Tensor], Tensor],
    inputs: Tensor,
    truth: Int[Tensor, " n"],
    epochs: int,
    batch: int,
    learning_rate: float,
    weight_decay: float,
    generator: torch.Generator,
) -> None:
    device = next(module.parameters()).device
    counts = torch.bincount(truth)
    weight = (len(truth) / (len(counts) * counts)).to(device)
    optimiser = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=weight_decay)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(truth), generator=generator).split(batch):
                optimiser.zero_grad()
                output = logits(inputs[rows].to(device))
                functional.cross_entropy(output, truth[rows].to(device), weight=weight).backward()
                optimiser.step()


@torch.no_grad()
def _features(tower: Tower, images: Tensor) -> Tensor:
    device = next(tower.parameters()).device
    return torch.cat([tower(part.to(device)).cpu() for part in images.split(BATCH)])


@torch.no_grad()
def _accuracy(model: ClassHeads, head: str, images: Tensor, truth: Tensor) -> float:
    device = next(model.parameters()).device
    guess = torch.cat([model(part.to(device))[head].argmax(1).cpu() for part in images.split(BATCH)])
    right = (guess == truth).float()
    return float(torch.stack([right[truth == label].mean() for label in truth.unique()]).mean())
