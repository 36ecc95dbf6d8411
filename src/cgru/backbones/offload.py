"""Idle networks are moved off the device: text encoders and VAE in the low-memory mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

Move = Callable[[nn.Module, torch.device], object]


def moved(network: nn.Module, place: torch.device) -> None:
    """Move a network with its weights."""
    network.to(place)


@dataclass(eq=False)
class Parking:
    """The networks that are off the device; each is moved only when needed, so a loop over batches moves it once."""

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


def bring(parking: Parking | None, network: nn.Module) -> None:
    """Move the network to its device; without parking it is always there."""
    if parking is not None:
        parking.bring(network)


def park(parking: Parking | None, network: nn.Module) -> None:
    """Let the network wait elsewhere."""
    if parking is not None:
        parking.park(network)


def park_all(parking: Parking, networks: Iterable[nn.Module]) -> Parking:
    """The same parking, with all these networks off the device."""
    for network in networks:
        parking.park(network)
    return parking
