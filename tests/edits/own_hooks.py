"""Hooks of a user's own, at a tiny size: away from a word, blind to the prompt, and some that are none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cgru.backbones.base import Backbone
from cgru.backbones.hooked import Hooked
from cgru.mdp.trajectory import Conditioning


def away(backbone: Backbone, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Backbone:
    """Negative guidance: e - strength · (e(word) - e(∅)); differentiable."""
    word = backbone.encode_text([settings["word"]])

    def prediction(x: Tensor, time: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        given = backbone.predict(x, time, cond, guidance=guidance)
        one = torch.zeros(len(x), dtype=torch.long)
        toward = backbone.predict(x, time, word[one], guidance=1.0)
        empty = backbone.predict(x, time, backbone.encode_text([""])[one], guidance=1.0)
        return given - settings["strength"] * (toward - empty)

    return Hooked(backbone, prediction=prediction)


def shifted(backbone: Backbone, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Backbone:
    """Text embeddings moved by a stored vector."""
    return Hooked(
        backbone, embed=lambda cond: replace(cond, tensors={"embeddings": cond.embeddings + tensors["shift"]})
    )


def blind(backbone: Backbone, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Backbone:
    """Says of itself that it has no gradient."""
    return Hooked(backbone, no_gradient="it goes by the words of the prompt")


def nothing(backbone: Backbone, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """No backbone."""


def of_another_shape(backbone: Backbone) -> Backbone:
    """Too few parameters."""
    return backbone
