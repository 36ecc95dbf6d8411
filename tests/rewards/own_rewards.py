"""What a user may pass as "own_rewards:...": rewards, factories, and mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Constant:
    """A reward that gives the same to every picture; as a class it is also its own factory."""

    low, high = 0.0, 4.0

    def __init__(self, backbone: object, scale: float = 2.0) -> None:
        self.value = scale
        self.lineage = {"name": "constant", "weights": ["w"], "started_from": ["s"]}

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.full((len(images),), self.value)


ready = Constant(None, scale=1.0)
number = 3


def with_everything(backbone: object, **settings: Any) -> Constant:  # noqa: ANN401
    return Constant(backbone, scale=settings["scale"] + settings["own"])


def without_range(backbone: object) -> object:
    reward = Constant(backbone)
    reward.low = reward.high
    return reward


def scores(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.zeros(len(images))
