"""The low-memory mode of a model: activations computed again in the backward pass, idle networks off the device.

Checkpointing is diffusers' own, block by block; it goes by whether gradients are asked for, not by the training mode,
which stays off. Weights must be the same in the second forward pass, which runs in the backward pass: what is swapped
in for the first alone (`torch.func.functional_call`) would not be there.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cgru.backbones.base import Backbone
from cgru.backbones.parking import Move, Parking, moved
from cgru.backbones.sd import StableDiffusion

CPU = torch.device("cpu")


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
    backbone.denoiser.enable_gradient_checkpointing()
    parking = Parking(backbone.device, away, move)
    for network in (backbone.text_encoder, backbone.vae):
        parking.park(network)
    return replace(backbone, parking=parking)
