"""The low-memory mode of a model: activations computed again in the backward pass, idle networks off the device.

Checkpointing is diffusers' own, block by block; since 0.32 it needs no training mode, so nothing else changes. Our part
is the function it calls: a LoRA cast for a half-precision network is swapped in for the forward pass only
(`sd.StableDiffusion`), and the second forward pass, which runs in the backward pass, must see the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from cgru.backbones.base import Backbone
from cgru.backbones.parking import Move, Parking, moved
from cgru.backbones.sd import StableDiffusion

CPU = torch.device("cpu")

Output = Tensor | tuple[Tensor, ...]


def low_memory(backbone: Backbone, *, away: torch.device = CPU, move: Move = moved) -> Backbone:
    """The model with checkpointing on (in place) and its text encoder and VAE away until they are asked.

    The text encoder goes back after each list of prompts, the VAE when the denoiser is next asked.

    Args:
        backbone: its denoiser may be with or without a LoRA.
        away: where idle networks wait.
        move: what takes a network to a device.
    """
    if not isinstance(backbone, StableDiffusion):
        raise ValueError(
            f"memory=low and a model of type {type(backbone).__name__}; allowed: Stable Diffusion. Set memory=fast."
        )
    backbone.denoiser.enable_gradient_checkpointing(checkpointed)
    parking = Parking(backbone.device, away, move)
    for network in (backbone.text_encoder, backbone.vae):
        parking.park(network)
    return replace(backbone, parking=parking)


def checkpointed(block: nn.Module, *args: object) -> Output:
    """What a block makes of its input; of all that lies between, nothing is kept for the backward pass."""
    weights: dict[str, Tensor] = {
        name: value for name, value in block.named_parameters() if not isinstance(value, nn.Parameter)
    }
    # A compiler sees both passes at once, so it needs no help. There is no dropout: no random state to keep either.
    run = block if torch.compiler.is_compiling() or not weights else _with(block, weights)
    output: Output = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    return output


def _with(block: nn.Module, weights: dict[str, Tensor]) -> Callable[..., Output]:
    def run(*args: object) -> Output:
        output: Output = functional_call(block, weights, args, tie_weights=False)
        return output

    return run
