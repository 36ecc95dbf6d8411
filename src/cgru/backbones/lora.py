"""LoRA files on a denoiser: put on for a while, taken off without a trace.

Reads what plain diffusers writes (`pytorch_lora_weights.safetensors`, keys under `unet.`), its older layouts and
kohya's, all brought to peft's layout first. diffusers itself only warns when a file does not match the network; here
that is an error, found before anything is touched. Plain LoRA only: one pair A, B a layer, no DoRA, no biases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers.loaders import StableDiffusionLoraLoaderMixin
from diffusers.utils import convert_unet_state_dict_to_peft
from torch import Tensor, nn

from cgru.backbones.base import one_line

LORA_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "unet"
ADAPTER = "cgru_edit"
PAIR = {"lora_A.weight", "lora_B.weight"}


def read_lora(path: Path) -> dict[str, Any]:
    """What `lora_applied` needs, from a safetensors file in any layout diffusers understands."""
    try:
        weights, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(
            str(path.parent), weight_name=path.name, use_safetensors=True, return_lora_metadata=True
        )
    except Exception as error:  # diffusers re-raises safetensors' own error types, which share no base class
        raise ValueError(
            f"cannot read {str(path)!r} as a LoRA file ({one_line(error)}); give a {LORA_FILE}."
        ) from error
    outside = [key for key in weights if not key.startswith(f"{PREFIX}.")]
    if outside or not weights:
        found = f"it holds {outside[0]!r}" if outside else "it is empty"
        allowed = f"allowed: keys under '{PREFIX}.'. Give a {LORA_FILE}."
        raise ValueError(f"{str(path)!r} is not a denoiser LoRA: {found}; {allowed}")
    # The alphas too: under kohya's names diffusers overlooks those that differ from the commonest one.
    weights, alphas = (convert_unet_state_dict_to_peft(table or {}) for table in (weights, alphas))
    return {"weights": weights, "network_alphas": alphas, "metadata": metadata}


@contextmanager
def lora_applied(denoiser: nn.Module, lora: Mapping[str, Any]) -> Iterator[None]:
    """The denoiser with the LoRA on it; on exit modules, weights, flags and gradients' switches are as before."""
    check_fits(denoiser, lora["weights"])
    switches = [(parameter, parameter.requires_grad) for parameter in denoiser.parameters()]
    mode = denoiser.training
    network: Any = denoiser  # diffusers' mixin methods are not part of nn.Module
    try:
        _put_on(network, lora)
        denoiser.train(mode)
        yield
    finally:
        network.unload_lora()
        for parameter, trains in switches:
            parameter.requires_grad_(trains)


def _put_on(network: Any, lora: Mapping[str, Any]) -> None:  # noqa: ANN401
    settings = {name: lora[name] for name in ("network_alphas", "metadata")}
    try:
        network.load_lora_adapter(dict(lora["weights"]), prefix=PREFIX, adapter_name=ADAPTER, **settings)
    except Exception as error:  # the weights fit, so it is the file's own settings: peft raises almost any type
        raise ValueError(f"diffusers cannot apply the LoRA ({one_line(error)}); save it again.") from error


def check_fits(denoiser: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Every layer the file names must exist, and have a pair A, B of its sizes and of one rank."""
    layers = dict(denoiser.named_modules())
    factors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, factor in weights.items():
        name, dot, side = key.removeprefix(f"{PREFIX}.").partition(".lora_")
        factors[name][f"lora_{side}" if dot else "no LoRA weight"] = factor
    for name, found in factors.items():
        if problem := _misfit(layers.get(name), found):
            raise ValueError(
                f"the LoRA does not fit the model at {name!r} ({problem}); give its own base with --model."
            )


def _misfit(layer: nn.Module | None, found: Mapping[str, Tensor]) -> str | None:
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return "no such layer"
    if found.keys() != PAIR:
        return f"the file has {', '.join(sorted(found))}, allowed: a pair {', '.join(sorted(PAIR))}"
    down, up = (found[side].shape for side in sorted(PAIR))
    size, rank = layer.weight.shape, down[:1]
    # A: (rank, in, *kernel), B: (out, rank, *1)
    fits = down == rank + size[1:] and up == size[:1] + rank + (1,) * len(size[2:]) and 0 not in rank
    return None if fits else f"layer {tuple(size)}, LoRA A {tuple(down)}, B {tuple(up)}"
