"""Training diagnostics: the gradient variance of the paper's appendix, and statistics of ratios before clipping.

The paper plots a "mean gradient variance" without a formula. Here it is the trace of the covariance of per-trajectory
gradients at ratio 1 and fixed theta, both raw and divided by the squared norm of their mean. The raw figure shrinks
with any rescaling of the advantage (DDPO divides by the reward's std), so only the quotient compares methods.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

QUANTITIES = ("mean", "std", "min", "max", "summed_mean", "summed_std", "clipped", "count")


@dataclass(frozen=True)
class Variance:
    """Noise in the gradient of a single trajectory."""

    trace: float
    """Trace of the covariance over trajectories (divisor n - 1, unbiased)."""
    raw_squared_norm: float
    """|mean|² uncorrected: on average too large by trace / n, so pure noise looks like a signal."""
    mean_squared_norm: float
    """|mean|² - trace / n, an unbiased estimate of the true mean's squared norm; below 0 where noise dominates."""
    normalised: float
    """trace / mean_squared_norm: roughly how many trajectories it takes for the mean's error to equal its length. A
    quotient of unbiased estimates, hence not unbiased itself; infinite where the mean is indistinguishable from 0."""
    raw_normalised: float
    """trace / raw_squared_norm: finite for any non-zero gradient, close to n for pure noise."""


def gradient_variance(per_trajectory_gradients: Float[Tensor, "n p"]) -> Variance:
    """Return the variance over n ≥ 2 trajectories, summed over p parameters; computed in float64."""
    n = len(per_trajectory_gradients)
    if n < 2:
        raise ValueError(f"{n} trajectories; a variance needs at least 2")
    gradients = per_trajectory_gradients.double()
    mean = gradients.mean(0)
    # tr Cov = 1/(n-1) · Σ_i |g_i - mean|²
    trace = float((gradients - mean).square().sum()) / (n - 1)
    raw = float(mean.square().sum())
    # E|mean|² = |E g|² + tr Cov / n
    corrected = raw - trace / n
    return Variance(trace, raw, corrected, _quotient(trace, corrected), _quotient(trace, raw))


def per_trajectory_gradients(
    parameters: Sequence[Tensor],
    log_prob_of: Callable[[int], Tensor],
    weights: Float[Tensor, "m n t"],
    *,
    retain: bool = True,
) -> Float[Tensor, "m n p"]:
    """Return the gradient of Σ_t log_prob_t · A_t for each of m weightings A and n trajectories; `.grad` is untouched.

    All weightings see the same noise. At ratio 1 this is the gradient of the unclipped surrogate. It is a sum over
    steps, so if the graph of all t steps does not fit in memory, call this for subsets of the steps (in `log_prob_of`
    and in `weights`) and add the results.

    Args:
        parameters: the trained parameters, in order; p is their total number of entries.
        log_prob_of: maps a trajectory id to its log-probs (t,) under the current policy, differentiable.
        weights: advantages, no gradient.
        retain: whether all weightings share one forward pass. Must be False for a compiled network, whose backward pass
            reuses the memory of its forward pass.
    """
    once = _gradients if retain else _gradients_anew
    rows = [once(parameters, partial(log_prob_of, i), weights[:, i]) for i in range(weights.shape[1])]
    return torch.stack(rows, 1)


def ratio_statistics(
    log_ratio: Float[Tensor, " k"], index: Int[Tensor, " k"], steps: int, dims: int, clip: float
) -> dict[str, Float[Tensor, " steps"]]:
    """Return per-step statistics of the ratio before clipping; NaN at steps without pairs.

    Args:
        log_ratio: mean over latent dimensions, log pi_theta - log pi_old.
        index: the step of each pair.
        steps: number of denoising steps.
        dims: number of latent dimensions.
        clip: half-width of the range around 1, already scaled by `objective.clip_range`.

    Returns:
        `mean`, `std`, `min`, `max` of the mean-reduced ratio; `summed_mean`, `summed_std` of dims · log_ratio in nats,
        the log of the true ratio, since the mean-reduced ratio looks closer to 1 than it is; `clipped`, the share
        outside the range (as in `PolicyLoss.clipped`); `count`, the number of pairs.
    """
    rows = [_row(log_ratio.detach()[index == t].double(), dims, clip) for t in range(steps)]
    return dict(zip(QUANTITIES, torch.stack(rows, 1).float(), strict=True))


def _gradients(parameters: Sequence[Tensor], log_prob_of: Callable[[], Tensor], weights: Tensor) -> Tensor:
    log_prob, last = log_prob_of(), len(weights) - 1
    rows = []
    for i, row in enumerate(weights):
        # ∂/∂theta Σ_t A_t · log pi_theta(a_t | s_t); the graph is freed after the last weighting
        gradients = torch.autograd.grad(log_prob, parameters, row.to(log_prob), retain_graph=i < last)
        rows.append(torch.cat([gradient.detach().float().flatten() for gradient in gradients]))
    return torch.stack(rows)


def _gradients_anew(parameters: Sequence[Tensor], log_prob_of: Callable[[], Tensor], weights: Tensor) -> Tensor:
    return torch.cat([_gradients(parameters, log_prob_of, row[None]) for row in weights])


def _row(log_ratio: Tensor, dims: int, clip: float) -> Tensor:
    if not len(log_ratio):
        return log_ratio.new_tensor([math.nan] * (len(QUANTITIES) - 1) + [0])
    ratio, summed = log_ratio.exp(), dims * log_ratio  # log of the true ratio: d · mean-reduced log-ratio
    share = ((ratio - 1).abs() > clip).double().mean()
    spread = [ratio.mean(), ratio.std(correction=0), ratio.min(), ratio.max()]
    count = log_ratio.new_tensor(len(log_ratio))
    return torch.stack([*spread, summed.mean(), summed.std(correction=0), share, count])


def _quotient(trace: float, squared_norm: float) -> float:
    return trace / squared_norm if squared_norm > 0 else math.inf
