"""Low-memory mode of a model: recompute activations in the backward pass, move idle networks off the device.

Checkpointing is diffusers' own, block by block; it is active whenever gradients are needed, independently of training
mode, which stays off. The weights must be the same in the second forward pass, which runs during the backward pass:
weights swapped in only for the first (`torch.func.functional_call`) would be missing.
"""

from __future__ import annotations

import torch

from cgru.backbones.base import Backbone, SavesMemory
from cgru.backbones.offload import Move, Parking, moved

CPU = torch.device("cpu")


def low_memory(backbone: Backbone, *, away: torch.device = CPU, move: Move = moved) -> Backbone:
    """Return the model with checkpointing (in place), and with text encoders and VAE off the device until needed.

    A text encoder moves back after each list of prompts, the VAE at the next call of the denoiser.

    Args:
        backbone: its denoiser may have a LoRA or not.
        away: device of idle networks.
        move: function that moves a network to a device.
    """
    if not isinstance(backbone, SavesMemory):
        raise ValueError(
            f"memory=low, but the model {backbone.name!r} ({type(backbone).__name__}) lacks `saving_memory`, which "
            "turns checkpointing on and lets idle networks wait off the device. Set memory=fast."
        )
    return backbone.saving_memory(Parking(backbone.device, away, move))
