"""LoRA files on a denoiser: applied for a while and removed without a trace.

Reads the files of plain diffusers (`pytorch_lora_weights.safetensors`, keys under `unet.` or `transformer.`), for UNets
also its older layouts and kohya's; all are converted to peft's layout first. diffusers only warns if a file does not
match the network; here this is an error, found before anything is changed. Only plain LoRA is supported: one pair A, B
per layer, no DoRA, no biases.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers import SD3Transformer2DModel
from diffusers.loaders import SD3LoraLoaderMixin, StableDiffusionLoraLoaderMixin
from diffusers.utils import convert_unet_state_dict_to_peft
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn

from cgru.backbones.base import one_line
from cgru.edit_folder import LORA_FILE
from cgru.lora.plain import is_plain, put_on, take_off

UNET, TRANSFORMER = "unet", "transformer"
"""Prefixes of the keys in a file: the pipeline's name for its denoiser."""
ADAPTER = "cgru_edit"
PAIR = {"lora_A.weight", "lora_B.weight"}


def read_lora(path: Path) -> dict[str, Any]:
    """Read the input of `lora_applied` from a safetensors file in any layout that diffusers understands."""
    try:
        with safe_open(path, "pt") as file:
            is_transformer = any(key.startswith(f"{TRANSFORMER}.") for key in file.keys())
        options = {"weight_name": path.name, "use_safetensors": True, "return_lora_metadata": True}
        if is_transformer:
            weights, metadata = SD3LoraLoaderMixin.lora_state_dict(str(path.parent), **options)
            prefix, alphas = TRANSFORMER, None
        else:
            weights, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(str(path.parent), **options)
            prefix = UNET
    except Exception as error:  # diffusers re-raises safetensors' own error types, which share no base class
        raise ValueError(
            f"cannot read {str(path)!r} as a LoRA file ({one_line(error)}); give a {LORA_FILE}."
        ) from error
    outside = [key for key in weights if not key.startswith(f"{prefix}.")]
    if outside or not weights:
        found = f"it holds {outside[0]!r}" if outside else "it is empty"
        allowed = f"allowed: keys under '{prefix}.'. Give a {LORA_FILE}."
        raise ValueError(f"{str(path)!r} is not a denoiser LoRA: {found}; {allowed}")
    # The alphas too: with kohya's names diffusers ignores those that differ from the most frequent one.
    weights, alphas = (convert_unet_state_dict_to_peft(table or {}) for table in (weights, alphas))
    return {"weights": weights, "network_alphas": alphas, "metadata": metadata, "prefix": prefix}


def prefix_of(denoiser: nn.Module) -> str:
    """The prefix of the keys in the network's LoRA file."""
    return TRANSFORMER if isinstance(denoiser, SD3Transformer2DModel) else UNET


@contextmanager
def lora_applied(denoiser: nn.Module, lora: Mapping[str, Any]) -> Iterator[None]:
    """The denoiser with the LoRA; on exit modules, weights, flags and `requires_grad` are as before.

    Blocks can be nested: both LoRAs then count. Leave the blocks in reverse order.
    """
    check_fits(denoiser, lora)
    before = list(getattr(denoiser, "peft_config", {}))  # diffusers keeps the adapters by name, where there are some
    own = f"{ADAPTER}_{len(before)}"
    switches = [(parameter, parameter.requires_grad) for parameter in denoiser.parameters()]
    mode = denoiser.training
    network: Any = denoiser  # diffusers' mixin methods are not part of nn.Module
    try:
        _put_on(network, lora, own)
        if before and not is_plain(network):
            network.set_adapters([*before, own])
        denoiser.train(mode)
        yield
    finally:
        if is_plain(network):
            take_off(network, own if before else None)
        elif before:
            network.delete_adapters(own)
        else:
            network.unload_lora()
        for parameter, trains in switches:
            parameter.requires_grad_(trains)


def _put_on(network: Any, lora: Mapping[str, Any], name: str) -> None:  # noqa: ANN401
    settings = {name: lora[name] for name in ("network_alphas", "metadata")}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several LoRAs are meant to add up
            if is_plain(network):
                prefix = lora["prefix"]
                weights = {key.removeprefix(f"{prefix}."): factor for key, factor in lora["weights"].items()}
                put_on(network, weights, settings["metadata"][f"{prefix}.lora_alpha"], name)
            else:
                network.load_lora_adapter(dict(lora["weights"]), prefix=lora["prefix"], adapter_name=name, **settings)
    except Exception as error:  # the weights fit, so the file's settings are wrong; peft raises almost any type
        library = "peft" if is_plain(network) else "diffusers"
        raise ValueError(f"{library} cannot apply the LoRA ({one_line(error)}); save it again.") from error


def fuse_lora(denoiser: nn.Module, lora: Mapping[str, Any]) -> None:
    """Add the LoRA to the weights permanently: W + (alpha / rank) · B · A."""
    network: Any = denoiser
    with lora_applied(denoiser, lora):
        network.fuse_lora()  # into the layers that remain when the LoRA is taken off


def check_fits(denoiser: nn.Module, lora: Mapping[str, Any]) -> None:
    """Check that every named layer exists and has one pair A, B of matching sizes and a single rank."""
    if lora["prefix"] != (own := prefix_of(denoiser)):
        raise ValueError(
            f"the LoRA does not fit the model: its keys are under '{lora['prefix']}.', those for this "
            f"{type(denoiser).__name__} under '{own}.'; give its own base with --model."
        )
    layers = dict(denoiser.named_modules())
    factors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, factor in lora["weights"].items():
        name, dot, side = key.removeprefix(f"{own}.").partition(".lora_")
        factors[name][f"lora_{side}" if dot else "no LoRA weight"] = factor
    for name, found in factors.items():
        if problem := _misfit(layers.get(name), found):
            raise ValueError(
                f"the LoRA does not fit the model at {name!r} ({problem}); give its own base with --model."
            )


def _misfit(layer: nn.Module | None, found: Mapping[str, Tensor]) -> str | None:
    if isinstance(layer, LoraLayer):
        layer = layer.get_base_layer()  # another LoRA is on it
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return "no such layer"
    if found.keys() != PAIR:
        return f"the file has {', '.join(sorted(found))}, allowed: a pair {', '.join(sorted(PAIR))}"
    down, up = (found[side].shape for side in sorted(PAIR))
    if not all(factor.is_floating_point() for factor in found.values()):
        return f"its factors are {next(iter(found.values())).dtype}; allowed: fp32, bf16 or fp16"
    size, rank = layer.weight.shape, down[:1]
    # A: (rank, in, *kernel), B: (out, rank, *1)
    fits = down == rank + size[1:] and up == size[:1] + rank + (1,) * len(size[2:]) and 0 not in rank
    return None if fits else f"layer {tuple(size)}, LoRA A {tuple(down)}, B {tuple(up)}"
