"""How well a critic predicts: pure functions of values or logits, per timestep where time matters.

Value error is what Alg. 1 minimises; explained variance is the share of the reward's variance that the baseline takes
away; accuracy and macro precision are the paper's ablation of FiLM (§5, App. E).
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

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


def accuracy_and_macro_precision(logits: Float[Tensor, "k classes"], labels: Int[Tensor, " k"]) -> tuple[float, float]:
    """Return the paper's ablation metrics, 0..1.

    Macro precision is the mean over classes that occur or are predicted; a class never predicted counts 0.
    """
    predicted = logits.argmax(1)
    is_right = (predicted == labels).double()
    seen = torch.cat([predicted, labels]).unique()
    precision = [is_right[predicted == c].mean() if bool((predicted == c).any()) else torch.zeros(()) for c in seen]
    return float(is_right.mean()), float(sum(precision)) / len(seen)
