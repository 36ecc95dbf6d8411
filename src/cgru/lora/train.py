"""The trainable LoRA on a denoiser, which the policy learns; added with diffusers and peft, saved in diffusers' format.

The LoRA of a network that is not from diffusers is saved in the same format, though no pipeline can load it.

`rank` and `alpha` are stored in the file's metadata, so `pipe.load_lora_weights(folder)` scales the LoRA as we do. The
factors are float32 whatever the network's dtype, because an optimiser step of 3e-4 is below bf16's resolution. Their
products are in the network's dtype (`fused`). B starts at zero, so the policy starts as the base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from cgru.edit_folder import LORA_FILE
from cgru.lora.file import TRANSFORMER, UNET, prefix_of
from cgru.lora.fused import ADAPTER, JointLinear, join_projections, part_projections
from cgru.lora.plain import is_plain, switch, take_off

LAYERS = (nn.Linear, nn.Conv2d)
UNET_TARGETS: Mapping[str, str] = {
    "attention": r".*attn[12]\.(to_q|to_k|to_v|to_out\.0)",
    "cross-attention": r".*attn2\.(to_q|to_k|to_v|to_out\.0)",
    "cross-attention-kv": r".*attn2\.(to_k|to_v)",
    "attention+ff": r".*(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))",
}
# The picture and the text of Stable Diffusion 3 attend to each other in one product (`attn`; 3.5 has a second one for
# the picture alone): the text's own projections stand for cross-attention.
PICTURE, TEXT = r"to_q|to_k|to_v|to_out\.0", r"add_q_proj|add_k_proj|add_v_proj|to_add_out"
TRANSFORMER_TARGETS: Mapping[str, str] = {
    "attention": rf".*attn2?\.({PICTURE}|{TEXT})",
    "cross-attention": rf".*attn\.({TEXT})",
    "cross-attention-kv": r".*attn\.(add_k_proj|add_v_proj)",
    "attention+ff": rf".*(attn2?\.({PICTURE}|{TEXT})|ff(_context)?\.net\.(0\.proj|2))",
}
TARGETS: Mapping[str, Mapping[str, str]] = {UNET: UNET_TARGETS, TRANSFORMER: TRANSFORMER_TARGETS}
PIPELINES: Mapping[str, Any] = {UNET: StableDiffusionPipeline, TRANSFORMER: StableDiffusion3Pipeline}
"""Which write the files; SDXL's are like those of Stable Diffusion 1.x."""


def attach(denoiser: nn.Module, *, rank: int, alpha: float, targets: str, seed: int) -> dict[str, nn.Parameter]:
    """Add a new LoRA to the denoiser and return its parameters by name, in the order of the network.

    Args:
        denoiser: a network of diffusers or any other, frozen.
        rank: of every pair A, B.
        alpha: the LoRA counts alpha / rank times.
        targets: a name of TARGETS for this denoiser, or a regular expression over module names.
        seed: of A's first values.
    """
    check_targets(denoiser, targets)
    network: Any = denoiser  # diffusers' mixin methods are not part of nn.Module
    pattern = TARGETS[prefix_of(denoiser)].get(targets, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=pattern, init_lora_weights="gaussian")
    config._register_custom_module({nn.Linear: JointLinear})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed accelerators, for good
        inject_adapter_in_model(config, network, ADAPTER) if is_plain(network) else network.add_adapter(config, ADAPTER)
    parameters = {name: p for name, p in denoiser.named_parameters() if f".{ADAPTER}." in name}
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    join_projections(denoiser)
    return parameters


def detach(denoiser: nn.Module) -> None:
    """Remove the LoRA; the base weights were never changed."""
    network: Any = denoiser
    take_off(network) if is_plain(network) else network.unload_lora()
    part_projections(denoiser)
    denoiser.requires_grad_(False)


@contextmanager
def base_policy(denoiser: nn.Module) -> Iterator[None]:
    """The denoiser with its LoRA switched off inside the `with` block."""
    switch(denoiser, is_on=False)
    try:
        yield
    finally:
        switch(denoiser, is_on=True)


@contextmanager
def merged(denoiser: nn.Module) -> Iterator[None]:
    """The denoiser with its LoRA merged into the weights inside the `with` block; then every bit is restored.

    Without a LoRA nothing happens. Not for updates: merged factors get no gradient.
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
    """Other values in the same LoRA inside the `with` block: averaged weights, or those of the best validation
    check."""
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
    prefix = prefix_of(denoiser)
    layers = get_peft_model_state_dict(network, adapter_name=ADAPTER)
    tables = {f"{prefix}_lora_layers": layers, f"{prefix}_lora_adapter_metadata": metadata}
    PIPELINES[prefix].save_lora_weights(folder, weight_name=LORA_FILE, **tables)
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
    """Refuse targets that match no layer, or a layer that cannot have a LoRA, before anything is changed."""
    named = TARGETS[prefix_of(denoiser)]
    allowed = f"allowed: {', '.join(named)} or a regular expression over module names"
    try:
        compiled = re.compile(named.get(targets, targets))
    except re.error as error:
        raise ValueError(f"LoRA targets {targets!r} are no regular expression ({error}); {allowed}.") from error
    layers = [name for name, module in denoiser.named_modules() if isinstance(module, LAYERS)]
    matched = [name for name, _ in denoiser.named_modules() if compiled.fullmatch(name)]
    if not matched:
        likely = re.compile(named["cross-attention-kv"])
        example = next((name for name in layers if likely.fullmatch(name)), next(iter(layers), "none"))
        raise ValueError(f"LoRA targets {targets!r} match no layer of the model; {allowed}, e.g. {example!r}.")
    if unfit := sorted(set(matched) - set(layers)):
        raise ValueError(f"LoRA targets {targets!r} match {unfit[0]!r}, which is no linear or conv layer; {allowed}.")
