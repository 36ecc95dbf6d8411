"""A critic whose vision tower stays as it was loaded: each state goes through it once, updates read what it said.

Ours, for speed. What differs from the paper's critic (`film`): the tower learns nothing, and FiLM acts only after its
last layer, on the one token that the head reads, since whatever lies before must not depend on what is learned. So V is
a linear function of fixed CLIP features, scaled and shifted by time (and prompt, for that kind).
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cgru.critic.film import ClassHead, FilmCritic, Pictures
from cgru.critic.views import View
from cgru.mdp.trajectory import Conditioning

Features = Float[Tensor, "k width"]


class FrozenCritic(nn.Module):
    """V(x_t, c, t) from features of pictures; implements `Critic`, and `ClassCritic` with the classes head."""

    def __init__(self, inner: FilmCritic) -> None:
        """Freeze the tower of a critic, whose FiLM must act after the last layer alone."""
        super().__init__()
        layers = len(inner.tower.encoder.layers)
        assert inner.depths in ((), (layers,)), f"FiLM at {inner.depths} of {layers} layers: features would change"
        self.inner = inner
        inner.tower.requires_grad_(False)
        self.view: View = inner.view
        self.image_size = inner.image_size

    @torch.no_grad()
    def seen(self, pictures: Pictures, *, batch_size: int) -> Features:
        """Return what the tower makes of pictures: computed once for each state, and fed to the critic from then on."""
        return torch.cat([self.inner.hidden(part, {})[:, 0] for part in pictures.split(batch_size)])

    def forward(self, view: Features, time: Int[Tensor, " k"], cond: Conditioning) -> Float[Tensor, " k"]:
        """Return the expected terminal reward of k states, in reward units, from what `seen` returned."""
        value: Tensor = self.inner.head(self._features(view, time, cond))
        return value

    def logits(self, view: Features, time: Int[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "k classes"]:
        """Return the logits of the classes head."""
        assert isinstance(self.inner.head, ClassHead), "a value head names no class"
        return self.inner.head.linear(self._features(view, time, cond)).float()

    def _features(self, view: Tensor, time: Tensor, cond: Conditioning) -> Tensor:
        return self.inner.modulated_features(view.to(self.inner.mean.device), time, cond)
