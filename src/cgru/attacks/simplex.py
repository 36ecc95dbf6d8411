"""Tokens as points of the probability simplex: projection, sampling, and an Adam step that can drop rows.

The choice of one token among v is relaxed to a row of v probabilities. All operations are per row, so the result for
one prompt never depends on the others in its batch.
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
        """Start with equal probabilities for all tokens."""
        rows = torch.full(shape, 1 / shape[-1], device=device)
        return Relaxed(rows, torch.zeros_like(rows), torch.zeros_like(rows))

    def descend(self, gradient: Tensor, *, rate: float, decay: float) -> Relaxed:
        """Take one step of Adam with L2 decay, then project back to the simplex."""
        # g = gradient + decay · p
        slope = gradient + decay * self.rows
        # m = beta1 · m + (1 - beta1) · g;  v = beta2 · v + (1 - beta2) · g²
        first = BETAS[0] * self.first + (1 - BETAS[0]) * slope
        second = BETAS[1] * self.second + (1 - BETAS[1]) * slope.square()
        steps = self.steps + 1
        # Bias correction, then p = project(p - rate · m̂ / (√v̂ + eps))
        mean, spread = first / (1 - BETAS[0] ** steps), second / (1 - BETAS[1] ** steps)
        return Relaxed(project(self.rows - rate * mean / (spread.sqrt() + EPSILON)), first, second, steps)

    def keep(self, which: Tensor) -> Relaxed:
        """Return the rows of the chosen prompts only."""
        return Relaxed(self.rows[which], self.first[which], self.second[which], self.steps)

    def best(self) -> Tensor:
        """Return (n, k) the most probable token of each row."""
        return self.rows.argmax(-1)


def project(points: Tensor) -> Tensor:
    """Return the nearest point of the simplex for every row of the last dimension; exact, by sorting."""
    # x = max(p - theta, 0), theta = (Σ_{i≤r} p_(i) - 1) / r, r the last index with r · p_(r) > Σ_{i≤r} p_(i) - 1
    falling = points.sort(-1, descending=True).values
    excess = falling.cumsum(-1) - 1
    count = torch.arange(1, points.shape[-1] + 1, device=points.device, dtype=points.dtype)
    is_inside = falling * count > excess
    last = is_inside.sum(-1, keepdim=True) - 1
    return (points - excess.gather(-1, last) / (last + 1)).clamp(min=0)


def draw(rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw (n, k) one token per row by its probability; each prompt uses its own generator."""
    levels = torch.stack([torch.rand(rows.shape[1], 1, generator=generator) for generator in generators])
    reached = rows.cumsum(-1)
    # Scaled to the row's actual sum: rounding leaves it slightly off 1, and a token of probability 0 must not be drawn.
    chosen = torch.searchsorted(reached, levels.to(rows) * reached[..., -1:], right=True)
    return chosen.squeeze(-1).clamp(max=rows.shape[-1] - 1)
