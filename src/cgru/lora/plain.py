"""LoRA on any `nn.Module`, with peft alone; diffusers' own networks have methods for this."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.utils import delete_adapter_layers, recurse_remove_peft_layers, set_weights_and_activate_adapters
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import set_peft_model_state_dict
from torch import Tensor, nn


def is_plain(network: nn.Module) -> bool:
    """Whether a network lacks diffusers' methods for adapters."""
    return not isinstance(network, PeftAdapterMixin)


def put_on(network: Any, weights: Mapping[str, Tensor], alpha: float, name: str) -> None:  # noqa: ANN401 - an nn.Module
    """Add a LoRA to a network; LoRAs already present stay active.

    Args:
        network: with the layers that the weights name.
        weights: `layer.lora_A.weight` and `layer.lora_B.weight`, one rank for all.
        alpha: it counts alpha / rank times.
        name: of the adapter.
    """
    layers = sorted({key.partition(".lora_")[0] for key in weights})
    ranks = {len(factor) for key, factor in weights.items() if key.endswith("lora_A.weight")}
    if len(ranks) != 1:
        raise ValueError(f"it has the ranks {sorted(ranks)}; allowed: one rank for all layers")
    before = list(getattr(network, "peft_config", {}))
    pattern = "|".join(re.escape(layer) for layer in layers)
    inject_adapter_in_model(LoraConfig(r=ranks.pop(), lora_alpha=alpha, target_modules=pattern), network, name)
    set_peft_model_state_dict(network, dict(weights), name)
    set_weights_and_activate_adapters(network, [*before, name], [1.0] * (len(before) + 1))


def take_off(network: Any, name: str | None = None) -> None:  # noqa: ANN401
    """Remove one LoRA, or with None all of them; the layers are then the same objects as before."""
    if name is None:
        recurse_remove_peft_layers(network)
        vars(network).pop("peft_config", None)  # not there if the LoRA could not be put on
        return
    delete_adapter_layers(network, name)
    network.peft_config.pop(name, None)


def switch(network: nn.Module, *, is_on: bool) -> None:
    """Have the LoRAs count or not."""
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            layer.enable_adapters(is_on)
