"""A LoRA merged into the model it belongs to, saved as a plain diffusers pipeline: W + (alpha / rank) · B · A.

Nothing of the LoRA is left beside the weights, so it cannot be dropped. Sums are made in float32 and stored in the
precision that each part of the base was stored in, or in a given one; all other parts are saved as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from safetensors import safe_open

from cgru.backbones.base import one_line
from cgru.backbones.lora import lora_applied
from cgru.backbones.parts import WITH_WEIGHTS
from cgru.backbones.quiet import no_progress_bars
from cgru.backbones.sd import resolve_source

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_merged(source: str | Path, lora: Mapping[str, Any], folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the model with the LoRA in its weights to `folder`, safetensors in the diffusers layout.

    Args:
        source: the base: `emoji-canvas`, a folder or a hub id.
        lora: from `read_lora`.
        folder: where to; made if it is not there.
        dtype: of the stored weights; None: as the base stores them, part by part.
    """
    origin = _local(resolve_source(source))
    kept = {part: dtype or stored_dtype(origin / part) for part in WITH_WEIGHTS}
    pipeline = _pipeline(origin, {**kept, "unet": torch.float32, "default": dtype or torch.float32})
    denoiser: Any = pipeline.unet
    with lora_applied(denoiser, lora):
        denoiser.fuse_lora()  # into the layers that remain when the LoRA is taken off
    for tensor in (*denoiser.parameters(), *denoiser.buffers()):
        tensor.data = tensor.data.to(kept["unet"])
    with no_progress_bars():
        pipeline.save_pretrained(folder, safe_serialization=True)


def stored_dtype(part: Path) -> torch.dtype:
    """The precision a part's weights lie in on disk; float32 where it is not safetensors or not one of ours."""
    for file in sorted(part.glob("*.safetensors")):
        with contextlib.suppress(StopIteration), safe_open(file, "pt") as tensors:
            names = (tensors.get_slice(key).get_dtype() for key in tensors.keys())
            return next(STORED[name] for name in names if name in STORED)
    return torch.float32


def _local(origin: Path | str) -> Path:
    if isinstance(origin, Path):
        return origin
    try:
        return Path(DiffusionPipeline.download(origin))
    except Exception as error:  # no network, no such id, a gated model: the hub has many error types
        raise FileNotFoundError(f"{origin!r} could not be read from the hub ({one_line(error)}); try again.") from error


def _pipeline(folder: Path, dtypes: Mapping[str, torch.dtype]) -> StableDiffusionPipeline:
    try:
        with no_progress_bars():
            return StableDiffusionPipeline.from_pretrained(folder, dtype=dict(dtypes))
    except Exception as error:  # on files that contradict each other the libraries raise almost any type
        reason = one_line(error).rstrip(".")
        raise ValueError(f"cannot read the model in {str(folder)!r}: {reason}. Save or download it again.") from error
