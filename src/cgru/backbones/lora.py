"""LoRA files on a denoiser: put on for a while, taken off without a trace.

Reads what plain diffusers writes (`pytorch_lora_weights.safetensors`, keys under `unet.`). diffusers itself only warns
when a file does not match the network; here that is an error, found before anything is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import StableDiffusionLoraLoaderMixin
from torch import Tensor, nn

LORA_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "unet"
ADAPTER = "cgru_edit"


def read_lora(path: Path) -> dict[str, Any]:
    """What `lora_applied` needs, from a safetensors file in any layout diffusers understands."""
    try:
        weights, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(
            str(path.parent), weight_name=path.name, use_safetensors=True, return_lora_metadata=True
        )
    except Exception as error:  # diffusers re-raises safetensors' own error types, which share no base class
        raise ValueError(f"cannot read {str(path)!r} as a LoRA file ({error}); give a {LORA_FILE}.") from error
    outside = [key for key in weights if not key.startswith(f"{PREFIX}.")]
    if outside or not weights:
        found = f"it holds {outside[0]!r}" if outside else "it is empty"
        allowed = f"allowed: keys under '{PREFIX}.'. Give a {LORA_FILE}."
        raise ValueError(f"{str(path)!r} is not a denoiser LoRA: {found}; {allowed}")
    return {"weights": weights, "network_alphas": alphas, "metadata": metadata}


@contextmanager
def lora_applied(denoiser: nn.Module, lora: Mapping[str, Any]) -> Iterator[None]:
    """The denoiser with the LoRA on it; on exit modules, weights, flags and gradients' switches are as before."""
    check_fits(denoiser, lora["weights"])
    switches = [(parameter, parameter.requires_grad) for parameter in denoiser.parameters()]
    mode = denoiser.training
    network: Any = denoiser  # diffusers' mixin methods are not part of nn.Module
    try:
        network.load_lora_adapter(
            dict(lora["weights"]),
            prefix=PREFIX,
            adapter_name=ADAPTER,
            network_alphas=lora["network_alphas"],
            metadata=lora["metadata"],
        )
        denoiser.train(mode)
        yield
    finally:
        network.unload_lora()
        for parameter, trains in switches:
            parameter.requires_grad_(trains)


def check_fits(denoiser: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Every layer the file names must exist with the right sizes."""
    layers = dict(denoiser.named_modules())
    for key, factor in weights.items():
        name, found, side = key.removeprefix(f"{PREFIX}.").partition(".lora_")
        if not found:
            continue  # an older layout: diffusers converts it and checks its shapes on loading
        base = layers.get(name)
        weight = base.weight if isinstance(base, nn.Linear | nn.Conv2d) else None
        if weight is None or not _matches(weight, factor, side):
            size = "no such layer" if weight is None else f"layer {tuple(weight.shape)}, LoRA {tuple(factor.shape)}"
            raise ValueError(f"the LoRA does not fit the model at {name!r} ({size}); give its own base with --model.")


def _matches(weight: Tensor, factor: Tensor, side: str) -> bool:
    if side.startswith("A"):
        return torch.Size(factor.shape[1:]) == torch.Size(weight.shape[1:])
    return factor.shape[0] == weight.shape[0]
