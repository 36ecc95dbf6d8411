"""How well a critic predicts: pure functions of values or logits, per timestep where time matters.

Value error is what Alg. 1 minimises; explained variance is the share of the reward's variance that the baseline takes
away; calibration holds the reward that was foretold against the one that came; accuracy and macro precision are the
paper's ablation of FiLM (§5, App. E).
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


def value_error(value: Float[Tensor, "n t"], rewards: Float[Tensor, " n"]) -> Float[Tensor, " t"]:
    """Return the mean squared error of V to the terminal reward at each timestep."""
    return (value - rewards.to(value)[:, None]).square().mean(0)


def explained_variance(value: Float[Tensor, "n t"], rewards: Float[Tensor, " n"]) -> Float[Tensor, " t"]:
    """Return 1 - Var(r - V_t) / Var(r) at each timestep: 1 is perfect, 0 a constant, below 0 worse than a constant.

    NaN where all rewards are equal: there is nothing to explain.
    """
    r = rewards.to(value)
    explained = 1 - (r[:, None] - value).var(0, correction=0) / r.var(correction=0)
    # by the range: the variance of equal numbers need not round to 0
    return torch.where(r.max() > r.min(), explained, torch.nan)


@dataclass(frozen=True)
class Calibration:
    """A reliability diagram of some timesteps: states sorted by V and cut into equal parts."""

    first: int
    """Step index of the first timestep, 0 is pure noise."""
    last: int
    predicted: tuple[float, ...]
    """Mean V of each part, rising."""
    achieved: tuple[float, ...]
    """Mean terminal reward of the same states."""
    spread: tuple[float, ...]
    """Standard deviation of that reward inside the part."""
    counts: tuple[int, ...]
    """States of each part; those of one trajectory share a reward, so fewer are independent."""


def calibration(
    value: Float[Tensor, "n t"], rewards: Float[Tensor, " n"], *, windows: int = 4, parts: int = 5
) -> list[Calibration]:
    """Return predicted against achieved reward for up to `windows` ranges of timesteps, early to late.

    Parts hold equally many states, at least 4 each, so that a mean means something; few states make fewer parts.
    """
    steps = torch.arange(value.shape[1]).tensor_split(min(windows, value.shape[1]))
    return [_calibrated(value[:, step], rewards, int(step[0]), int(step[-1]), parts) for step in steps]


def _calibrated(value: Tensor, rewards: Tensor, first: int, last: int, parts: int) -> Calibration:
    foretold, order = value.double().flatten().sort()
    came = rewards.to(value).double()[:, None].expand_as(value).flatten()[order]
    cuts = max(1, min(parts, len(order) // 4))
    pairs = list(zip(foretold.tensor_split(cuts), came.tensor_split(cuts), strict=True))
    return Calibration(
        first,
        last,
        tuple(float(part.mean()) for part, _ in pairs),
        tuple(float(part.mean()) for _, part in pairs),
        tuple(float(part.std(correction=0)) for _, part in pairs),
        tuple(len(part) for part, _ in pairs),
    )


def accuracy_and_macro_precision(logits: Float[Tensor, "k classes"], labels: Int[Tensor, " k"]) -> tuple[float, float]:
    """Return the paper's ablation metrics, 0..1.

    Macro precision is the mean over classes that occur or are predicted; a class never predicted counts 0.
    """
    predicted = logits.argmax(1)
    is_right = (predicted == labels).double()
    seen = torch.cat([predicted, labels]).unique()
    precision = [is_right[predicted == c].mean() if bool((predicted == c).any()) else torch.zeros(()) for c in seen]
    return float(is_right.mean()), float(sum(precision)) / len(seen)
