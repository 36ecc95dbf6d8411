"""Composing icons into 64-pixel pictures on the training device, in batches.

Icons are kept premultiplied at 128 pixels; a placed icon is sampled at 128 and averaged to 64, so edges are
antialiased. All draws come from the `torch.Generator` that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.emoji_canvas.captions import Scenes
from tools.emoji_canvas.vocabulary import COLOURS

IMAGE_SIZE = 64


@dataclass(frozen=True)
class Placement:
    """Where each icon goes: scale 1 fills the canvas, shift in half-canvas units, angle in radians."""

    scale: Tensor
    shift: Tensor  # (n, 2)
    flip: Tensor  # +1 or -1
    angle: Tensor


class Layout(NamedTuple):
    """Columns of scenes on a device: the icon, a second icon or -1, the ground's colour; each (n,)."""

    first: Tensor
    second: Tensor
    colour: Tensor

    @classmethod
    def of(cls, bank: Scenes, device: torch.device) -> Layout:
        """The pictures' part of captioned scenes."""
        return cls(*(torch.from_numpy(column).to(device) for column in (bank.first, bank.second, bank.colour)))

    def rows(self, chosen: Tensor | slice) -> Layout:
        """Some of the scenes."""
        return Layout(self.first[chosen], self.second[chosen], self.colour[chosen])


def uniform(low: float, high: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform draws on the generator's device."""
    return torch.rand(size, generator=generator, device=generator.device) * (high - low) + low


def sign(size: int, generator: torch.Generator) -> Tensor:
    """+1 or -1 at random."""
    return torch.randint(0, 2, (size,), generator=generator, device=generator.device) * 2.0 - 1.0


class Composer:
    """The icon collection on a device, and the compositions made from it."""

    def __init__(self, icons: np.ndarray, device: torch.device) -> None:
        """Premultiply once: colours of transparent pixels must not bleed into edges."""
        layers = torch.from_numpy(icons).permute(0, 3, 1, 2).to(device).half() / 255
        layers[:, :3] *= layers[:, 3:]
        self.layers = layers
        self.colours = torch.tensor(list(COLOURS.values()), device=device) / 255

    def scenes(self, layout: Layout, generator: torch.Generator) -> Tensor:
        """Training pictures of the generator: one icon, or two side by side where `second` >= 0."""
        first, second, colour = layout
        count = len(first)
        pair = (second >= 0).float()
        side = sign(count, generator) * pair
        jitter = uniform(-1, 1, (2, count, 2), generator)
        scale = torch.where(pair > 0, uniform(0.44, 0.5, (count,), generator), uniform(0.8, 0.98, (count,), generator))
        room = (1 - scale)[:, None]
        offset = torch.stack([side * 0.5, torch.zeros_like(side)], 1)
        spread = torch.where(pair[:, None] > 0, torch.tensor([0.04, 0.3], device=scale.device), room)
        flat = torch.zeros_like(scale)
        ground = self.colours[colour][:, :, None, None].expand(-1, -1, IMAGE_SIZE, IMAGE_SIZE)
        place = Placement(scale, offset + jitter[0] * spread, sign(count, generator), flat)
        image = over(self.place(first, place), ground)
        partner = Placement(scale, -offset + jitter[1] * spread, sign(count, generator), flat)
        layer = self.place(second.clamp(min=0), partner) * pair[:, None, None, None]
        return over(layer, image)

    def place(self, index: Tensor, placement: Placement) -> Tensor:
        """Premultiplied RGBA layers, (n, 4, 64, 64)."""
        cos, sin = torch.cos(placement.angle) / placement.scale, torch.sin(placement.angle) / placement.scale
        rotation = torch.stack(
            [torch.stack([cos * placement.flip, sin * placement.flip], 1), torch.stack([-sin, cos], 1)], 1
        )  # output -> icon coordinates
        theta = torch.cat([rotation, -rotation @ placement.shift[:, :, None]], 2)
        layers = self.layers[index].float()
        grid = F.affine_grid(theta, [len(index), 4, IMAGE_SIZE * 2, IMAGE_SIZE * 2], align_corners=False)
        return F.avg_pool2d(F.grid_sample(layers, grid, align_corners=False), 2)


@torch.no_grad()
def render(composer: Composer, layout: Layout, seed: int, chunk: int = 2048) -> Tensor:
    """All scenes drawn once, uint8 (n, 3, 64, 64): placing icons costs more than a training step of a small network."""
    count = len(layout.first)
    pictures = torch.empty((count, 3, IMAGE_SIZE, IMAGE_SIZE), dtype=torch.uint8, device=composer.colours.device)
    for start in range(0, count, chunk):
        generator = torch.Generator(device=composer.colours.device).manual_seed(seed * 1_000_003 + start)
        part = slice(start, start + chunk)
        pictures[part] = (composer.scenes(layout.rows(part), generator) * 255).round().byte()
    return pictures


def over(layer: Tensor, ground: Tensor) -> Tensor:
    """Porter-Duff over, for a premultiplied layer on an opaque ground; [0, 1]."""
    return (layer[:, :3] + (1 - layer[:, 3:]) * ground).clamp(0, 1)
