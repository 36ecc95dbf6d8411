"""DPOK's critic: an MLP on the raw latent x_t and the prompt, which needs no decode (arXiv 2305.16381, `ValueMulti`).

flatten(x_t) ⊕ text feature -> three layers y = γ(t) ⊙ (W x + b), width 256, ReLU -> one number. γ is FiLM's scale
without a shift: one learned vector per time, uniform(0, 1) at the start. What differs from the released code: γ is
looked up by time in 50 equal buckets instead of by step index, so any number of steps is served (the same thing at 50
steps); the text feature is the pooled output of the policy's own text encoder instead of CLIP ViT-L/14's; and the
output starts at the mean reward, in units of the reward's scale (`film.ValueHead`), instead of near zero.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cgru.critic.film import ValueHead, pooled_text
from cgru.critic.views import View
from cgru.mdp.trajectory import Conditioning

TRAIN_TIMES = 1000  # times that the denoiser receives are 0..999
BUCKETS = 50  # DPOK: one per step of its 50-step sampler
WIDTH = 256  # DPOK
LAYERS = 3  # DPOK


class ConditionalLinear(nn.Module):
    """y = γ(t) ⊙ (W x + b)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build the layer; γ starts as in DPOK."""
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.gamma = nn.Embedding(BUCKETS, outputs)
        nn.init.uniform_(self.gamma.weight)

    def forward(self, features: Float[Tensor, "k inputs"], bucket: Int[Tensor, " k"]) -> Float[Tensor, "k outputs"]:
        """Return the layer's output before the ReLU."""
        return self.gamma(bucket) * self.linear(features)


class LatentCritic(nn.Module):
    """V(x_t, c, t) from the latent; implements `Critic`."""

    view: View = "latent"

    def __init__(self, latent_shape: tuple[int, ...], text_width: int, *, scale: float, prior: float = 0.0) -> None:
        """Build a critic for latents (c, h, w) and text embeddings of a width; scale and prior as in `ValueHead`."""
        super().__init__()
        widths = [math.prod(latent_shape) + text_width, *[WIDTH] * LAYERS]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nn.ModuleList(ConditionalLinear(inputs, outputs) for inputs, outputs in pairs)
        self.head = ValueHead(WIDTH, prior=prior, scale=scale)

    def forward(
        self, view: Float[Tensor, "k c h w"], time: Int[Tensor, " k"], cond: Conditioning
    ) -> Float[Tensor, " k"]:
        """Return the expected terminal reward of k states, in reward units."""
        device = self.head.prior.device
        bucket = time.to(device) * BUCKETS // TRAIN_TIMES
        features = torch.cat([view.flatten(1).float().to(device), pooled_text(cond).to(device)], 1)
        for layer in self.layers:
            features = layer(features, bucket).relu()
        value: Tensor = self.head(features)
        return value
