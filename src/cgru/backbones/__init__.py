"""Text-to-image models behind one protocol (`base.Backbone`); diffusers is imported only in this folder."""

from pathlib import Path

import torch

from cgru.backbones.base import Backbone


def load_model(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "fp32",
    revision: str | None = None,
) -> Backbone:
    """Load a text-to-image model, frozen and ready to sample.

    Args:
        name: `emoji-canvas`, a folder in the diffusers layout, or a hub id `owner/name`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        dtype: `fp32`, `bf16` or `fp16`.
        revision: branch, tag or commit of a hub id.
    """
    # diffusers takes seconds to import: only when a model is wanted
    from cgru.backbones.sd import load_stable_diffusion

    return load_stable_diffusion(name, device=device, dtype=dtype, revision=revision)
