"""Merge an edit into its model and save the result as a plain diffusers pipeline.

The edit exists only in the weights, so it cannot be removed. Sums are computed in float32 and stored in the precision
of each part of the base, or in a given one; all other parts are saved unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from safetensors import safe_open
from torch import nn

from cgru.backbones.base import one_line
from cgru.backbones.families import Family
from cgru.backbones.foreign_code import refuse_code
from cgru.backbones.loading import absent_in, family_in, no_progress_bars, resolve_source

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


Merge = Callable[[Mapping[str, nn.Module]], None]
"""Changes networks permanently; they are given by role: "denoiser", "text_encoder", ..."""


def save_merged(
    source: str | Path, merge: Merge, folder: Path, *, changed: Collection[str], dtype: torch.dtype | None = None
) -> None:
    """Write the model with the edit in its weights to `folder`, safetensors in the diffusers layout.

    Args:
        source: the base: `emoji-canvas`, a folder or a hub id.
        merge: an edit's.
        folder: where to; made if it is not there.
        changed: roles of the networks that it changes.
        dtype: of the stored weights; None: as the base stores them, part by part.
    """
    origin = _local(resolve_source(source))
    family = family_in(origin)
    kept = {part: dtype or stored_dtype(origin / part) for part in family.networks()}
    parts = {family.denoiser if role == "denoiser" else role for role in changed}
    summed = dict.fromkeys(parts, torch.float32)
    pipeline = _pipeline(origin, family, {**kept, **summed, "default": dtype or torch.float32})
    networks = {part: getattr(pipeline, part) for part in kept if getattr(pipeline, part) is not None}
    merge({"denoiser" if part == family.denoiser else part: network for part, network in networks.items()})
    for part in parts:
        for tensor in (*networks[part].parameters(), *networks[part].buffers()):
            if tensor.is_floating_point():  # not the text encoder's position ids
                tensor.data = tensor.data.to(kept[part])
    with no_progress_bars():
        pipeline.save_pretrained(folder, safe_serialization=True)


def stored_dtype(part: Path) -> torch.dtype:
    """The precision of a part's weights on disk; float32 if they are not safetensors or have another dtype."""
    for file in sorted(part.glob("*.safetensors")):
        with contextlib.suppress(StopIteration), safe_open(file, "pt") as tensors:
            names = (tensors.get_slice(key).get_dtype() for key in tensors.keys())
            return next(STORED[name] for name in names if name in STORED)
    return torch.float32


def _local(origin: Path | str) -> Path:
    if isinstance(origin, Path):
        return origin
    try:
        return Path(DiffusionPipeline.download(origin, trust_remote_code=False))
    except Exception as error:  # no network, no such id, a gated model: the hub has many error types
        raise FileNotFoundError(f"{origin!r} could not be read from the hub ({one_line(error)}); try again.") from error


def _pipeline(folder: Path, family: Family, dtypes: Mapping[str, torch.dtype]) -> Any:  # noqa: ANN401 - untyped
    for part in (folder, *(path for path in folder.glob("*/"))):
        refuse_code(part)
    try:
        with no_progress_bars():
            absent = dict.fromkeys(absent_in(folder))  # diffusers must be told that T5 is not wanted
            return family.pipeline.from_pretrained(folder, **absent, dtype=dict(dtypes), trust_remote_code=False)
    except Exception as error:  # on files that contradict each other the libraries raise almost any type
        reason = one_line(error).rstrip(".")
        raise ValueError(f"cannot read the model in {str(folder)!r}: {reason}. Save or download it again.") from error
