"""The trainable LoRA on a denoiser: what a policy learns. Put on with diffusers and peft, saved as diffusers saves it.

`rank` and `alpha` go into the file's metadata, so `pipe.load_lora_weights(folder)` scales it as we do. The factors are
float32 whatever the network's dtype: an optimiser step of 3e-4 is below bf16's resolution. Their products are in the
network's dtype (`joint`). B starts at zero, so the policy starts as the base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from cgru.backbones.joint import ADAPTER, JointLinear, join_projections, part_projections
from cgru.backbones.lora import LORA_FILE, PREFIX

LAYERS = (nn.Linear, nn.Conv2d)
TARGETS: Mapping[str, str] = {
    "attention": r".*attn[12]\.(to_q|to_k|to_v|to_out\.0)",
    "cross-attention": r".*attn2\.(to_q|to_k|to_v|to_out\.0)",
    "cross-attention-kv": r".*attn2\.(to_k|to_v)",
    "attention+ff": r".*(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))",
}


def attach(denoiser: nn.Module, *, rank: int, alpha: float, targets: str, seed: int) -> dict[str, nn.Parameter]:
    """Put a fresh LoRA on the denoiser and return its parameters by name, in the order of the network.

    Args:
        denoiser: a diffusers network, frozen.
        rank: of every pair A, B.
        alpha: the LoRA counts alpha / rank times.
        targets: a name of TARGETS, or a regular expression over module names.
        seed: of A's first values.
    """
    check_targets(denoiser, targets)
    network: Any = denoiser  # diffusers' mixin methods are not part of nn.Module
    pattern = TARGETS.get(targets, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=pattern, init_lora_weights="gaussian")
    config._register_custom_module({nn.Linear: JointLinear})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed accelerators, for good
        network.add_adapter(config, ADAPTER)
    parameters = {name: p for name, p in denoiser.named_parameters() if f".{ADAPTER}." in name}
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    join_projections(denoiser)
    return parameters


def detach(denoiser: nn.Module) -> None:
    """Take the LoRA off; the base weights were never touched."""
    network: Any = denoiser
    network.unload_lora()
    part_projections(denoiser)
    denoiser.requires_grad_(False)


@contextmanager
def base_policy(denoiser: nn.Module) -> Iterator[None]:
    """The denoiser without its LoRA, for a while."""
    network: Any = denoiser
    network.disable_adapters()
    try:
        yield
    finally:
        network.enable_adapters()


@contextmanager
def merged(denoiser: nn.Module) -> Iterator[None]:
    """The denoiser with its LoRA added into the weights, for a while; then they are the same bits as before.

    Without a LoRA nothing happens. Not for updates: in the merged form its factors have no gradient.
    """
    layers = [module for module in denoiser.modules() if isinstance(module, LoraLayer)]
    kept = [layer.get_base_layer().weight.data for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.merge(safe_merge=True, adapter_names=[ADAPTER])  # into a tensor of its own
        yield
    finally:
        for layer, weight in zip(layers, kept, strict=True):
            layer.merged_adapters.clear()  # peft's own unmerging subtracts, which leaves rounding behind
            layer.get_base_layer().weight.data = weight


@contextmanager
def weights_swapped(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in the same LoRA for a while: averaged weights, or those of the best look."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter.data)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def save_adapter(denoiser: nn.Module, folder: Path) -> Path:
    """Write the LoRA in diffusers' own layout and return the file's path."""
    network: Any = denoiser
    settings = network.peft_config[ADAPTER].to_dict()
    # Only what the scale depends on: the rest differs between versions of peft, and equal runs should give equal bytes.
    metadata = {key: settings[key] for key in ("r", "lora_alpha", "target_modules")}
    StableDiffusionPipeline.save_lora_weights(
        folder,
        unet_lora_layers=get_peft_model_state_dict(network, adapter_name=ADAPTER),
        unet_lora_adapter_metadata=metadata,
        weight_name=LORA_FILE,
    )
    assert PREFIX == "unet", "the file's keys are under the pipeline's name for the denoiser"
    _order_header(folder / LORA_FILE)
    return folder / LORA_FILE


def _order_header(path: Path) -> None:
    # safetensors writes the metadata in a new random order each time. Layout: length (8 bytes), JSON header, data.
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:end])
    metadata = dict(sorted(table.pop("__metadata__").items()))
    header = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # the data must stay aligned
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def check_targets(denoiser: nn.Module, targets: str) -> None:
    """Refuse targets that match nothing, or something that can carry no LoRA, before anything is put on."""
    allowed = f"allowed: {', '.join(TARGETS)} or a regular expression over module names"
    try:
        compiled = re.compile(TARGETS.get(targets, targets))
    except re.error as error:
        raise ValueError(f"LoRA targets {targets!r} are no regular expression ({error}); {allowed}.") from error
    layers = [name for name, module in denoiser.named_modules() if isinstance(module, LAYERS)]
    matched = [name for name, _ in denoiser.named_modules() if compiled.fullmatch(name)]
    if not matched:
        example = next((name for name in layers if "attn2.to_k" in name), next(iter(layers), "none"))
        raise ValueError(f"LoRA targets {targets!r} match no layer of the model; {allowed}, e.g. {example!r}.")
    if unfit := sorted(set(matched) - set(layers)):
        raise ValueError(f"LoRA targets {targets!r} match {unfit[0]!r}, which is no linear or conv layer; {allowed}.")
