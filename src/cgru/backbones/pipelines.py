"""Build the backbone for the family of a model folder or hub id."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cgru.backbones import sd, sd3, sdxl
from cgru.backbones.base import Backbone
from cgru.backbones.families import SD, SD3, SDXL
from cgru.backbones.loading import Loaded, load_parts

BUILD: Mapping[str, Callable[[Loaded], Backbone]] = {SD.name: sd.build, SDXL.name: sdxl.build, SD3.name: sd3.build}


def load_pipeline(
    name: str | Path, *, device: str | torch.device, dtype: str | torch.dtype, revision: str | None
) -> Backbone:
    """Load Stable Diffusion 1.x, 2.x, XL or 3, frozen and in eval mode; the arguments are `load_model`'s."""
    loaded = load_parts(name, device=device, dtype=dtype, revision=revision)
    return BUILD[loaded.family.name](loaded)
