"""A critic with a frozen vision tower: each state passes through it once, and updates read the stored features.

Ours, for speed. Differences from the paper's critic (`film`): the tower is not trained, and FiLM acts only after its
last layer, on the one token that the head reads, because everything before must not depend on trained weights. V is
then a linear function of fixed CLIP features, scaled and shifted by time (and prompt, for that kind).
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from cgru.critic.film import ClassHead, FilmCritic, Pictures
from cgru.critic.views import View
from cgru.mdp.trajectory import Conditioning

Features = Float[Tensor, "k width"]


class FrozenCritic(nn.Module):
    """V(x_t, c, t) from precomputed features; implements `Critic`, and `ClassCritic` with the classes head."""

    def __init__(self, inner: FilmCritic) -> None:
        """Freeze the tower of a critic whose FiLM acts only after the last layer."""
        super().__init__()
        layers = len(inner.tower.encoder.layers)
        assert inner.depths in ((), (layers,)), f"FiLM at {inner.depths} of {layers} layers: features would change"
        self.inner = inner
        inner.tower.requires_grad_(False)
        self.view: View = inner.view
        self.image_size = inner.image_size

    def resized(self, images: Float[Tensor, "k c h w"]) -> Float[Tensor, "k c s s"]:
        """Return images at the tower's size."""
        return self.inner.resized(images)

    @torch.no_grad()
    def seen(self, pictures: Pictures, *, batch_size: int) -> Features:
        """Return the tower's features of images: compute them once per state, then feed them to the critic."""
        # Token 0 is CLIP's class token, the only one that the head reads.
        return torch.cat([self.inner.hidden(part, {})[:, 0] for part in pictures.split(batch_size)])

    def forward(self, view: Features, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, " k"]:
        """Return the expected terminal reward of k states, in reward units, from what `seen` returned."""
        value: Tensor = self.inner.head(self._features(view, time, cond))
        return value

    def logits(self, view: Features, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "k classes"]:
        """Return the logits of the classes head."""
        assert isinstance(self.inner.head, ClassHead), "a value head names no class"
        return self.inner.head.linear(self._features(view, time, cond)).float()

    def _features(self, view: Tensor, time: Tensor, cond: Conditioning) -> Tensor:
        return self.inner.modulated_features(view.to(self.inner.mean.device), time, cond)
