"""Tokens as points of the probability simplex: projection, sampling, and Adam that can let rows go.

A choice of one token among v is relaxed to a row of v chances. Everything is row by row, so what happens to one prompt
never depends on which others are in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Rows on the simplex (n, k, v) with Adam's two moments; all have taken the same number of steps."""

    rows: Tensor
    first: Tensor
    second: Tensor
    steps: int = 0

    @staticmethod
    def uniform(shape: tuple[int, int, int], device: torch.device) -> Relaxed:
        """Every token equally likely."""
        rows = torch.full(shape, 1 / shape[-1], device=device)
        return Relaxed(rows, torch.zeros_like(rows), torch.zeros_like(rows))

    def descend(self, gradient: Tensor, *, rate: float, decay: float) -> Relaxed:
        """One step of Adam with L2 decay, then back to the simplex."""
        slope = gradient + decay * self.rows
        first = BETAS[0] * self.first + (1 - BETAS[0]) * slope
        second = BETAS[1] * self.second + (1 - BETAS[1]) * slope.square()
        steps = self.steps + 1
        mean, spread = first / (1 - BETAS[0] ** steps), second / (1 - BETAS[1] ** steps)
        return Relaxed(project(self.rows - rate * mean / (spread.sqrt() + EPSILON)), first, second, steps)

    def keep(self, which: Tensor) -> Relaxed:
        """The chosen prompts' rows only."""
        return Relaxed(self.rows[which], self.first[which], self.second[which], self.steps)

    def best(self) -> Tensor:
        """(n, k) the likeliest token of each row."""
        return self.rows.argmax(-1)


def project(points: Tensor) -> Tensor:
    """The nearest point of the simplex, for every last-dimension row; exact, by sorting."""
    falling = points.sort(-1, descending=True).values
    excess = falling.cumsum(-1) - 1
    count = torch.arange(1, points.shape[-1] + 1, device=points.device, dtype=points.dtype)
    is_inside = falling * count > excess
    last = is_inside.sum(-1, keepdim=True) - 1
    return (points - excess.gather(-1, last) / (last + 1)).clamp(min=0)


def draw(rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """(n, k) one token per row, by its chances; each prompt from its own generator."""
    levels = torch.stack([torch.rand(rows.shape[1], 1, generator=generator) for generator in generators])
    reached = rows.cumsum(-1)
    # Scaled to the row's own sum: rounding leaves it a hair off 1, and a token with chance 0 is never to be drawn.
    chosen = torch.searchsorted(reached, levels.to(rows) * reached[..., -1:], right=True)
    return chosen.squeeze(-1).clamp(max=rows.shape[-1] - 1)
