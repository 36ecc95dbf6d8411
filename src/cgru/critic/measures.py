"""Accuracy of a critic: pure functions of values or logits, per timestep where time matters.

The value error is what Alg. 1 minimises. Explained variance is the share of the reward's variance that the baseline
removes. Calibration compares predicted with achieved reward. Accuracy and macro precision are the metrics of the
paper's FiLM ablation (§5, App. E).
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


def value_error(value: Float[Tensor, "n t"], rewards: Float[Tensor, " n"]) -> Float[Tensor, " t"]:
    """Return the mean squared error between V and the terminal reward at each timestep."""
    # mean_i (V(x_t, c, t) - r)²
    return (value - rewards.to(value)[:, None]).square().mean(0)


def explained_variance(value: Float[Tensor, "n t"], rewards: Float[Tensor, " n"]) -> Float[Tensor, " t"]:
    """Return 1 - Var(r - V_t) / Var(r) at each timestep: 1 is perfect, 0 as good as a constant, below 0 worse.

    NaN where all rewards are equal, since there is no variance to explain.
    """
    r = rewards.to(value)
    # EV_t = 1 - Var(r - V_t) / Var(r)
    explained = 1 - (r[:, None] - value).var(0, correction=0) / r.var(correction=0)
    # Compare the range, because the computed variance of equal numbers need not be exactly 0.
    return torch.where(r.max() > r.min(), explained, torch.nan)


@dataclass(frozen=True)
class Calibration:
    """A reliability diagram for a range of timesteps: states are sorted by V and cut into equal parts."""

    first: int
    """Step index of the first timestep; 0 is pure noise."""
    last: int
    predicted: tuple[float, ...]
    """Mean V of each part, increasing."""
    achieved: tuple[float, ...]
    """Mean terminal reward of the same states."""
    spread: tuple[float, ...]
    """Standard deviation of that reward within the part."""
    counts: tuple[int, ...]
    """Number of states in each part; those of one trajectory share a reward, so fewer are independent."""


def calibration(
    value: Float[Tensor, "n t"], rewards: Float[Tensor, " n"], *, windows: int = 4, parts: int = 5
) -> list[Calibration]:
    """Return predicted and achieved reward for up to `windows` ranges of timesteps, early to late.

    All parts hold equally many states, at least 4 each so that their means are meaningful; with few states there are
    fewer parts.
    """
    steps = torch.arange(value.shape[1]).tensor_split(min(windows, value.shape[1]))
    return [_calibrated(value[:, step], rewards, int(step[0]), int(step[-1]), parts) for step in steps]


def _calibrated(value: Tensor, rewards: Tensor, first: int, last: int, parts: int) -> Calibration:
    predicted, order = value.double().flatten().sort()
    achieved = rewards.to(value).double()[:, None].expand_as(value).flatten()[order]
    cuts = max(1, min(parts, len(order) // 4))
    pairs = list(zip(predicted.tensor_split(cuts), achieved.tensor_split(cuts), strict=True))
    return Calibration(
        first,
        last,
        tuple(float(part.mean()) for part, _ in pairs),
        tuple(float(part.mean()) for _, part in pairs),
        tuple(float(part.std(correction=0)) for _, part in pairs),
        tuple(len(part) for part, _ in pairs),
    )


def accuracy_and_macro_precision(logits: Float[Tensor, "k classes"], labels: Int[Tensor, " k"]) -> tuple[float, float]:
    """Return the metrics of the paper's ablation, 0 to 1.

    Macro precision is the mean over classes that occur or are predicted; a class that is never predicted counts as 0.
    """
    predicted = logits.argmax(1)
    is_right = (predicted == labels).double()
    seen = torch.cat([predicted, labels]).unique()
    # precision_c = (correct predictions of c) / (predictions of c)
    precision = [is_right[predicted == c].mean() if bool((predicted == c).any()) else torch.zeros(()) for c in seen]
    return float(is_right.mean()), float(sum(precision)) / len(seen)
