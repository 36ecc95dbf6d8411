"""DPOK's critic: an MLP on the raw latent x_t and the prompt, which needs no decoding (arXiv 2305.16381, `ValueMulti`).

flatten(x_t) ⊕ text feature -> three layers y = γ(t) ⊙ (W x + b), width 256, ReLU -> one number. γ is FiLM's scale
without a shift: one learned vector per time, initialised uniformly in (0, 1). Differences from the released code: γ is
looked up by time in 50 equal buckets instead of by step index, so any number of steps works (identical at 50 steps);
the text feature is the pooled output of the policy's own text encoder instead of CLIP ViT-L/14's; the output starts at
the mean reward, in units of the reward's scale (`film.ValueHead`), instead of near zero.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

import math

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from cgru.critic.film import TIME_RANGE, ValueHead, pooled_text
from cgru.critic.views import View
from cgru.mdp.trajectory import Conditioning

BUCKETS = 50  # DPOK: one per step of its 50-step sampler
WIDTH = 256  # DPOK
LAYERS = 3  # DPOK


class ConditionalLinear(nn.Module):
    """y = γ(t) ⊙ (W x + b)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build the layer; γ is initialised as in DPOK."""
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

    def __init__(
        self,
        latent_shape: tuple[int, ...],
        text_width: int,
        *,
        scale: float,
        prior: float = 0.0,
        time_range: float = TIME_RANGE,
    ) -> None:
        """Build a critic for latents of any shape, text features of a width and times of 0 to `time_range`.

        Scale and prior are as in `ValueHead`; a text width of 0 ignores the prompt.
        """
        super().__init__()
        self.time_range = time_range
        widths = [math.prod(latent_shape) + text_width, *[WIDTH] * LAYERS]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nn.ModuleList(ConditionalLinear(inputs, outputs) for inputs, outputs in pairs)
        self.head = ValueHead(WIDTH, prior=prior, scale=scale)

    def forward(self, view: Float[Tensor, "k *d"], time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, " k"]:
        """Return the expected terminal reward of k states, in reward units."""
        device = self.head.prior.device
        # the end of the range itself belongs to the last bucket
        bucket = (time.to(device) * BUCKETS / self.time_range).long().clamp(max=BUCKETS - 1)
        features = torch.cat([view.flatten(1).float().to(device), pooled_text(cond).to(device)], 1)
        for layer in self.layers:
            features = layer(features, bucket).relu()
        value: Tensor = self.head(features)
        return value
