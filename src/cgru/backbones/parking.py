"""Networks that wait off the device while nobody asks them: the text encoder and the VAE in the low-memory mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

Move = Callable[[nn.Module, torch.device], object]


def moved(network: nn.Module, place: torch.device) -> None:
    """Move a network with its weights."""
    network.to(place)


@dataclass(eq=False)
class Parking:
    """Which networks are away; each is moved only when that changes, so that a loop over batches moves it once."""

    home: torch.device
    """Where networks work."""
    away: torch.device
    """Where they wait."""
    move: Move = moved
    waiting: list[nn.Module] = field(default_factory=list)

    def bring(self, network: nn.Module) -> None:
        """Have the network at home."""
        if network in self.waiting:
            self.move(network, self.home)
            self.waiting.remove(network)

    def park(self, network: nn.Module) -> None:
        """Have the network away."""
        if network not in self.waiting:
            self.move(network, self.away)
            self.waiting.append(network)
