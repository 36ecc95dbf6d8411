"""A backbone with a function around its text embedding or its prediction, for edits that act during inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cgru.backbones.base import Backbone
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Conditioning

Embed = Callable[[Conditioning], Conditioning]
"""Maps the model's text embeddings to those that it should draw with."""
Predict = Callable[[Tensor, Tensor, Conditioning, float], Tensor]
"""(x, time, conditioning, guidance) -> prediction with guidance applied, float32."""


def _same(cond: Conditioning) -> Conditioning:
    return cond


@dataclass(frozen=True, eq=False)
class Hooked:
    """A `Backbone` around another, whose networks it shares."""

    inner: Backbone
    embed: Embed = _same
    prediction: Predict | None = None
    """None: the inner model's."""
    begin: Callable[[ReverseKernel], object] = lambda kernel: None
    """Called with every kernel before pictures are drawn with it."""
    no_gradient: str | None = None
    """Why a white-box attack is refused; None if `embed` and `prediction` are differentiable and do not read
    prompts."""

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self.inner.name

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        return self.inner.latent_shape

    @property
    def denoiser(self) -> nn.Module:
        """What policies and edits touch."""
        return self.inner.denoiser

    @property
    def decoder(self) -> nn.Module:
        """The network that draws images from latents."""
        return self.inner.decoder

    @property
    def device(self) -> torch.device:
        """Where all parts live."""
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision its networks run in."""
        return self.inner.dtype

    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts, and the empty prompt for guidance."""
        return self.embed(self.inner.encode_text(prompts))

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the hook's prediction."""
        if self.prediction is None:
            return self.inner.predict(x, time, cond, guidance=guidance)
        return self.prediction(x, time, cond, guidance)

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> ReverseKernel:
        """Return the reverse kernel for a number of steps."""
        kernel = self.inner.kernel(steps, eta=eta, noisy_steps=noisy_steps)
        self.begin(kernel)
        return kernel

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable."""
        return self.inner.decode(x, batch_size=batch_size)

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents (the posterior's mean)."""
        return self.inner.encode(images, batch_size=batch_size)
