"""Latents of diffusers' `AutoencoderKL` as the denoiser sees them: (z - shift) · scale, in float32."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor


def latent_shape(denoiser: Any) -> tuple[int, int, int]:  # noqa: ANN401 - a UNet or a transformer
    """Shape of one latent (c, h, w)."""
    size = denoiser.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return (denoiser.config.in_channels, height, width)


def image_size(vae: AutoencoderKL, shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width in pixels of the picture that a latent of this shape is."""
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    return (shape[1] * scale, shape[2] * scale)


def decoded(vae: AutoencoderKL, x: Tensor, batch_size: int | None) -> Tensor:
    """Turn latents into images; differentiable."""

    def images(part: Tensor) -> Tensor:
        # z = x / scale + shift
        z = part / vae.config.scaling_factor
        z = z if vae.config.shift_factor is None else z + vae.config.shift_factor
        found: Tensor = vae.decode(z.to(vae.dtype), return_dict=False)[0].float()
        return (found / 2 + 0.5).clamp(0, 1)

    return _in_batches(images, x, batch_size)


def encoded(vae: AutoencoderKL, images: Tensor, batch_size: int | None) -> Tensor:
    """Turn images into latents: the mean of the posterior, no noise."""

    def latents(part: Tensor) -> Tensor:
        posterior = vae.encode((part * 2 - 1).to(vae.dtype), return_dict=False)[0]
        z: Tensor = posterior.mode().float()
        z = z if vae.config.shift_factor is None else z - vae.config.shift_factor
        return z * vae.config.scaling_factor

    return _in_batches(latents, images, batch_size)


def _in_batches(apply: Callable[[Tensor], Tensor], x: Tensor, batch_size: int | None) -> Tensor:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    return torch.cat([apply(part) for part in x.split(batch_size or max(len(x), 1))])
