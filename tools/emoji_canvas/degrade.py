"""Augmentation for judges: pictures that are still recognisable, and pictures that are not.

A judge must forgive what a generator does to a picture (soft edges, grain, odd colours) and must call a collapsed
picture nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.emoji_canvas.canvas import uniform


def recognisable(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image softened, recoloured, grained and partly covered, each by a random mild amount."""
    count = len(images)
    images = _soften(images, uniform(0, 0.9, (count, 1, 1, 1), generator))
    gain = uniform(0.8, 1.2, (count, 3, 1, 1), generator)
    shift = uniform(-0.1, 0.1, (count, 3, 1, 1), generator)
    some = (uniform(0, 1, (count, 1, 1, 1), generator) < 0.5).float()
    images = torch.lerp(images, (images - 0.5) * gain + 0.5 + shift, some)
    grain = torch.randn(images.shape, generator=generator, device=images.device)
    images = images + grain * uniform(0, 1, (count, 1, 1, 1), generator) ** 3 * 0.12
    return _cover(images, generator).clamp(0, 1)


def _soften(images: Tensor, amount: Tensor) -> Tensor:
    """Blend with the picture at half size, as a soft decoder does."""
    size = images.shape[-1]
    small = F.interpolate(images, size=(size // 2, size // 2), mode="area")
    return torch.lerp(images, F.interpolate(small, size=(size, size), mode="bilinear"), amount)


def _cover(images: Tensor, generator: torch.Generator) -> Tensor:
    """A patch of up to a quarter of the width and height painted over, on a third of the images."""
    count, _, height, width = images.shape
    box = uniform(0, 1, (count, 4, 1, 1), generator)
    rows = torch.linspace(0, 1, height, device=images.device)[None, :, None]
    columns = torch.linspace(0, 1, width, device=images.device)[None, None, :]
    inside = ((rows - box[:, 0]).abs() < box[:, 2] * 0.13) & ((columns - box[:, 1]).abs() < box[:, 3] * 0.13)
    chosen = uniform(0, 1, (count, 1, 1), generator) < 0.33
    paint = uniform(0, 1, (count, 3, 1, 1), generator)
    return torch.where((inside & chosen)[:, None], paint, images)


def unrecognisable(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures with nothing to recognise, five kinds in turn: plain, smooth noise, blur, shuffled patches, ghosts."""
    kinds = [_plain, _smooth_noise, _blurred, _shuffled, _ghost]
    parts = [kind(images[index :: len(kinds)], generator) for index, kind in enumerate(kinds)]
    grain = uniform(0, 0.05, (1,), generator)
    result = torch.cat(parts)
    return (result + grain * torch.randn(result.shape, generator=generator, device=result.device)).clamp(0, 1)


def _plain(images: Tensor, generator: torch.Generator) -> Tensor:
    corner = uniform(0, 1, (2, len(images), 3, 1, 1), generator)
    ramp = torch.linspace(0, 1, images.shape[-1], device=images.device)
    white = (uniform(0, 1, (len(images), 1, 1, 1), generator) < 0.4).float()
    return torch.lerp(torch.lerp(corner[0], corner[1], ramp).expand_as(images), torch.ones_like(images), white)


def _smooth_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    total = torch.zeros_like(images)
    for size in (2, 4, 8, 16, 32, 64):
        noise = torch.randn((len(images), 3, size, size), generator=generator, device=images.device)
        weight = uniform(0, 0.5, (len(images), 1, 1, 1), generator)
        total = total + weight * F.interpolate(noise, size=images.shape[-2:], mode="bicubic")
    return (total + uniform(0.2, 1, (len(images), 3, 1, 1), generator)).clamp(0, 1)


def _blurred(images: Tensor, generator: torch.Generator) -> Tensor:
    small = F.interpolate(images, size=(4, 4), mode="area")
    return F.interpolate(small, size=images.shape[-2:], mode="bicubic").clamp(0, 1)


def _shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    """8-pixel patches in random order: the colours of the object without its shape."""
    count, channels, height, width = images.shape
    patches = F.unfold(images, 8, stride=8)  # (n, 3*64, 64)
    order = uniform(0, 1, (count, 1, patches.shape[2]), generator).argsort(-1).expand_as(patches)
    return F.fold(patches.gather(2, order), (height, width), 8, stride=8)


def _ghost(images: Tensor, generator: torch.Generator) -> Tensor:
    """The picture under strong noise, too faint to see."""
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    coarse = F.interpolate(F.avg_pool2d(noise, 4) * 4, size=images.shape[-2:], mode="bilinear")
    mixed = torch.where(uniform(0, 1, (len(images), 1, 1, 1), generator) < 0.5, noise, coarse)
    return (0.05 * images + 0.5 + 0.35 * mixed).clamp(0, 1)
