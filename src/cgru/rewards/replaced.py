"""A reward for what is drawn instead: high for a clean picture of any label but the concept (ours, not the paper's).

`concept` pays as much for mush without the concept as for a clean picture of something else. Here all networks must be
sure of one and the same other label; the concept itself, `other`, `none` and `nothing` pay nothing. A hazard is to be
replaced by one of the 20 classes, not by another hazard; a class by another class, a style by another style.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgru.backbones.base import Backbone
from cgru.catalog import unknown
from cgru.rewards.base import merged
from cgru.rewards.concept import (
    FILLERS,
    FORMS,
    LARGEST_LIMIT,
    check_positive,
    column_of,
    find_target,
    probabilities,
)
from cgru.rewards.heads import ClassHeads, load_networks

INSTEAD = {"hazard": "object"}
"""Head of a concept -> head with the labels that may replace it; by default its own."""


@dataclass(frozen=True, eq=False)
class ReplacedReward:
    """scale · p, or log-odds of p mapped to 0..scale; p is the chance of the likeliest other label."""

    networks: tuple[ClassHeads, ...]
    head: str
    labels: tuple[str, ...]
    """What may be drawn instead."""
    form: str = "probability"
    """One of FORMS."""
    scale: float = 10.0
    temperature: float = 1.0
    limit: float = 6.0
    views: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every setting, and that every network knows every label."""
        if self.form not in FORMS:
            raise ValueError(unknown("form of a reward", self.form, FORMS, "The usual one is probability."))
        check_positive(scale=self.scale, temperature=self.temperature, limit=self.limit, views=self.views)
        if self.limit > LARGEST_LIMIT:
            raise ValueError(f"limit is {self.limit}; log-odds in float32 allow at most {LARGEST_LIMIT:g}")
        if not self.labels:
            allowed = "allowed: networks with another label than the concept, other, none and nothing"
            raise ValueError(f"the {self.head} head has no label to replace the concept by; {allowed}. Use others.")
        for network in self.networks:
            for label in self.labels:
                column_of(network, self.head, label)

    @property
    def low(self) -> float:
        """When nothing else is certainly there."""
        return 0.0

    @property
    def high(self) -> float:
        """When one other label certainly is."""
        return self.scale

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of all networks together."""
        return merged("replaced", [network.lineage for network in self.networks])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter. For each label the least sure network counts, then the best label."""
        p = torch.stack([self._seen(network, images) for network in self.networks]).amin(0).amax(1).clamp(0, 1)
        if self.form == "probability":
            return self.scale * p
        log_odds = torch.logit(p, eps=1e-7).clamp(-self.limit, self.limit)
        return self.scale * (log_odds + self.limit) / (2 * self.limit)

    def _seen(self, network: ClassHeads, images: Tensor) -> Tensor:
        """(n, labels) probabilities."""
        tables = probabilities(network, images, temperature=self.temperature, count=self.views, seed=self.seed)
        return tables[self.head][:, [column_of(network, self.head, label) for label in self.labels]]


def replaced_reward(
    backbone: Backbone,
    *,
    concept: str,
    form: str = "probability",
    scale: float = 10.0,
    temperature: float = 1.0,
    limit: float = 6.0,
    networks: Sequence[str | Path] = ("clip",),
    views: int = 1,
    seed: int = 0,
) -> ReplacedReward:
    """The reward for drawing something else than a concept that the networks have a label for, and drawing it well.

    Args:
        backbone: its device is used.
        concept: a label of the networks, or `hazard`.
        form: `probability`, scale · p, or `log-odds`, clipped to ±limit and mapped linearly to 0..scale.
        scale: the highest reward.
        temperature: divides the logits; above 1 softens p.
        limit: where log-odds are clipped, 0 to 15.
        networks: `clip`, `swin` or heads folders; all must see the same label.
        views: pictures averaged, the picture itself first.
        seed: of the augmented views.
    """
    loaded = load_networks(networks, device=backbone.device)
    own, targets = find_target(concept, loaded[0])
    head = INSTEAD.get(own, own)
    labels = tuple(label for label in loaded[0].labels.get(head, ()) if label not in (*FILLERS, *targets))
    return ReplacedReward(loaded, head, labels, form, scale, temperature, limit, views, seed)
