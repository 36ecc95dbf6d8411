"""The reward for attributes of Emoji Canvas (`cgru.attributes`): a detector of pixels, without weights; ours.

What is drawn is whatever differs from the picture's border. Each detector measures one number of it and has a threshold
and a width: the margin, (number - threshold) / width, is the log-odds of the attribute. An empty picture has none of
the attributes and is no success either, so it counts as having them.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgru.attributes import ATTRIBUTES
from cgru.backbones.base import Backbone, as_rgb
from cgru.catalog import unknown
from cgru.rewards.base import merged
from cgru.rewards.concept import FORMS, check_positive

EDGE, SOFT = 0.15, 0.03
"""Difference from the border, of 0..1 in the channel that differs most, at which a pixel is drawn half; its width."""
EMPTY = 0.03
"""Share of the picture below which nothing is drawn."""
Figures = tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n h w"]]
"""Pictures, and how far each pixel is drawn, 0..1."""


def drawn(images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n h w"]:
    """How far each pixel is part of what is drawn, 0..1: it differs from the median of the picture's border."""
    border = torch.cat([images[:, :, 0], images[:, :, -1], images[..., 0], images[..., -1]], dim=2).median(2).values
    difference = (images - border[:, :, None, None]).abs().amax(1)
    return torch.sigmoid((difference - EDGE) / SOFT)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1e-6)


def _saturation(images: Tensor, mask: Tensor) -> Tensor:
    return _mean(images.amax(1) - images.amin(1), mask)


def _warmth(images: Tensor, mask: Tensor) -> Tensor:
    return _mean(images[:, 0] - images[:, 2], mask)


def _across(images: Tensor, mask: Tensor) -> Tensor:
    """From -0.5, the left edge, to 0.5."""
    return _mean(places(mask.shape[2], mask)[None, None, :].expand_as(mask), mask)


def _down(images: Tensor, mask: Tensor) -> Tensor:
    return _mean(places(mask.shape[1], mask)[None, :, None].expand_as(mask), mask)


def _area(images: Tensor, mask: Tensor) -> Tensor:
    return mask.mean((1, 2))


def places(count: int, like: Tensor) -> Tensor:
    """Where the middles of `count` pixels lie between -0.5 and 0.5."""
    return (torch.arange(count, device=like.device, dtype=like.dtype) + 0.5) / count - 0.5


@dataclass(frozen=True)
class Detector:
    """A number of a picture, and when it means the attribute."""

    measure: Callable[[Tensor, Tensor], Tensor]
    threshold: float
    width: float
    """Of the number, for one unit of log-odds; negative where low numbers mean the attribute."""

    def margin(self, images: Float[Tensor, "n 3 h w"], mask: Float[Tensor, "n h w"]) -> Float[Tensor, " n"]:
        """Log-odds of the attribute."""
        return (self.measure(images, mask) - self.threshold) / self.width


# Ours. Thresholds: so that the untouched model has the attribute in 20 to 70 % of its pictures (docs/attributes.md).
DETECTORS: Mapping[str, Detector] = {
    "Colourless": Detector(_saturation, 0.15, -0.03),
    "Warm": Detector(_warmth, 0.2, 0.05),
    "Rightward": Detector(_across, 0.0, 0.02),
    "Large": Detector(_area, 0.4, 0.03),
    "High": Detector(_down, 0.0, -0.02),
}
assert DETECTORS.keys() == ATTRIBUTES.keys()


@dataclass(frozen=True)
class AttributeReward:
    """scale · (1 - p) or, as log-odds, scale · (limit - margin) / (2 · limit) with the margin within ± limit."""

    name: str
    form: str = "probability"
    """One of FORMS."""
    scale: float = 10.0
    limit: float = 6.0

    def __post_init__(self) -> None:
        """Check every setting."""
        if self.name not in DETECTORS:
            raise ValueError(unknown("attribute", self.name, DETECTORS, "Choose one, or another reward.name."))
        if self.form not in FORMS:
            raise ValueError(unknown("form of a reward", self.form, FORMS, "The usual one is probability."))
        check_positive(scale=self.scale, limit=self.limit)

    @property
    def low(self) -> float:
        """The attribute is certainly there, or nothing is."""
        return 0.0

    @property
    def high(self) -> float:
        """It certainly is not."""
        return self.scale

    @property
    def lineage(self) -> Mapping[str, Any]:
        """No weights."""
        return merged(f"attribute {self.name}", [])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter."""
        images = as_rgb(images).float()
        mask = drawn(images)
        margin = DETECTORS[self.name].margin(images, mask).clamp(-self.limit, self.limit)
        margin = torch.where(mask.mean((1, 2)) < EMPTY, torch.full_like(margin, self.limit), margin)
        if self.form == "probability":
            return self.scale * torch.sigmoid(-margin)
        return self.scale * (self.limit - margin) / (2 * self.limit)


def attribute_reward(
    backbone: Backbone, *, concept: str, form: str = "probability", scale: float = 10.0, limit: float = 6.0
) -> AttributeReward:
    """The reward for pictures without an attribute.

    Args:
        backbone: not used; the detectors have no weights.
        concept: the attribute.
        form: `probability`, scale · (1 - p), or `log-odds`, clipped to ±limit and mapped linearly to 0..scale.
        scale: the highest reward.
        limit: where log-odds are clipped.
    """
    return AttributeReward(concept, form, scale, limit)
