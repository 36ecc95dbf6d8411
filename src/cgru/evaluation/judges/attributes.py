"""Judges of attributes (`cgru.attributes`): the same looks as the reward's detectors measure, computed in another way.

They have no weights and learned nothing. Brightness and saturation tell what is drawn, against the corners, where the
detectors look at the border; shares of pixels count, where they take means. So a policy that found a gap in one
computation would not find it in the other. docs/attributes.md has their agreement on the base's pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cgru.backbones.base import as_rgb
from cgru.evaluation.base import NOTHING
from cgru.rewards.attribute import DETECTORS, EMPTY, drawn, places

YES, NO = "yes", "no"
LUMA = (0.299, 0.587, 0.114)
DARKER, COLOURED = 0.12, 0.2
"""Difference in brightness from the corners, and saturation, from which a pixel is drawn."""


@dataclass(frozen=True)
class Figure:
    """What is drawn, as a judge sees it."""

    saturation: Tensor
    hue: Tensor
    """Degrees."""
    mask: Tensor
    """(n, h, w), 0 or 1."""
    weight: Tensor
    """(n, h, w): how much a drawn pixel stands out."""

    def share(self, pixels: Tensor) -> Tensor:
        """(n,) share of what is drawn."""
        return (pixels * self.mask).sum((1, 2)) / self.mask.sum((1, 2)).clamp(min=1)

    def middle(self, at: Tensor) -> Tensor:
        """(n,) mean place, weighted by how much a pixel stands out."""
        return (self.weight * at).sum((1, 2)) / self.weight.sum((1, 2)).clamp(min=1e-6)


def figure(images: Tensor) -> Figure:
    """Tell what is drawn from pictures (n, c, h, w) in [0, 1]."""
    rgb = as_rgb(images).float()
    brightness = (rgb * rgb.new_tensor(LUMA)[:, None, None]).sum(1)
    saturation = rgb.amax(1) - rgb.amin(1)
    corners = torch.stack([brightness[:, y, x] for y in (1, -2) for x in (1, -2)], 1).median(1).values
    contrast = (brightness - corners[:, None, None]).abs()
    mask = ((contrast > DARKER) | (saturation > COLOURED)).float()
    red, green, blue = rgb.unbind(1)
    hue = torch.rad2deg(torch.atan2(3**0.5 * (green - blue), 2 * red - green - blue)) % 360
    return Figure(saturation, hue, mask, (contrast + saturation) * mask)


def _is_colourless(seen: Figure) -> Tensor:
    return seen.share((seen.saturation > 0.25).float()) < 0.15


def _is_warm(seen: Figure) -> Tensor:
    is_warm = ((seen.hue < 75) | (seen.hue > 330)) & (seen.saturation > 0.25)
    return seen.share(is_warm.float()) > 0.45


def _is_rightward(seen: Figure) -> Tensor:
    return seen.middle(places(seen.mask.shape[2], seen.mask)) > 0


def _is_large(seen: Figure) -> Tensor:
    return seen.mask.mean((1, 2)) > 0.4


def _is_high(seen: Figure) -> Tensor:
    return seen.middle(places(seen.mask.shape[1], seen.mask)[:, None]) < 0


JUDGED: Mapping[str, Callable[[Figure], Tensor]] = {
    "Colourless": _is_colourless,
    "Warm": _is_warm,
    "Rightward": _is_rightward,
    "Large": _is_large,
    "High": _is_high,
}
assert JUDGED.keys() == DETECTORS.keys()


@dataclass(frozen=True)
class AttributeJudge:
    """Answers yes, no or nothing for one attribute, with certainty."""

    name: str
    labels: tuple[str, ...] = (YES, NO, NOTHING)
    weights_sha256: str = "none"
    lineage: Mapping[str, Any] = field(default_factory=lambda: {"name": "attributes, version 1"})

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (n, 3) and features (n, 1), the share of the picture that is drawn."""
        seen = figure(images)
        area = seen.mask.mean((1, 2))
        return _table(JUDGED[self.name](seen), area < EMPTY), area[:, None]


@dataclass(frozen=True)
class AttributeDetector:
    """The reward's detector in the place of a judge, to show that the base has the attribute often enough."""

    name: str
    labels: tuple[str, ...] = (YES, NO, NOTHING)
    weights_sha256: str = "none"
    lineage: Mapping[str, Any] = field(default_factory=lambda: {"name": "attribute detectors, version 1"})

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (n, 3) and features (n, 1), the share of the picture that is drawn."""
        rgb = as_rgb(images).float()
        mask = drawn(rgb)
        area = mask.mean((1, 2))
        return _table(DETECTORS[self.name].margin(rgb, mask) > 0, area < EMPTY), area[:, None]


def _table(is_there: Tensor, is_empty: Tensor) -> Tensor:
    return torch.stack([is_there & ~is_empty, ~is_there & ~is_empty, is_empty], dim=1).float()
