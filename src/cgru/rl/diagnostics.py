"""What the loop measures about itself: the gradient variance of the paper's appendix, and ratios before clipping.

The paper plots a "mean gradient variance" without a formula. Here it is the trace of the covariance of per-trajectory
gradients at ratio 1 and fixed theta, raw and divided by the squared norm of their mean: the raw figure shrinks with any
rescaling of the advantage (DDPO divides by the reward's std), so only the quotient compares methods.
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
    """How noisy the gradient of one trajectory is."""

    trace: float
    """Trace of the covariance over trajectories (divided by n - 1, unbiased)."""
    raw_squared_norm: float
    """|mean|² as it is: too large by trace / n on average, so pure noise looks like a signal."""
    mean_squared_norm: float
    """|mean|² - trace / n, unbiased for the squared norm of the true mean; may fall below 0 when noise hides it."""
    normalised: float
    """trace / mean_squared_norm: about how many trajectories give a mean as long as its error. A quotient of unbiased
    estimates, itself not unbiased; infinite where the mean cannot be told from 0."""
    raw_normalised: float
    """trace / raw_squared_norm: always finite with any gradient, near n where there is only noise."""


def gradient_variance(per_trajectory_gradients: Float[Tensor, "n p"]) -> Variance:
    """Return the variance over n ≥ 2 trajectories, summed over p parameters; worked out in float64."""
    n = len(per_trajectory_gradients)
    if n < 2:
        raise ValueError(f"{n} trajectories; a variance needs at least 2")
    gradients = per_trajectory_gradients.double()
    mean = gradients.mean(0)
    trace = float((gradients - mean).square().sum()) / (n - 1)
    raw = float(mean.square().sum())
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

    All weightings are compared on the same noise. At ratio 1 this is the
    gradient of the unclipped surrogate. It is a sum over steps: where the graph of t steps does not fit in memory, call
    this for parts of the steps (of `log_prob_of` and of `weights`) and add the results.

    Args:
        parameters: what is trained; p is the number of their entries, in this order.
        log_prob_of: trajectory id -> its log-probs (t,) under the current policy, differentiable.
        weights: advantages, no gradient.
        retain: whether one forward pass may serve all weightings. Not in a compiled network, whose backward pass works
            in the memory of the forward's.
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
        `mean`, `std`, `min`, `max` of the mean-reduced ratio; `summed_mean`, `summed_std` of the log of the true ratio,
        dims · log_ratio in nats, beside them because the mean-reduced ratio flatters; `clipped`, the share outside the
        range (as `PolicyLoss.clipped`); `count`, the pairs.
    """
    rows = [_row(log_ratio.detach()[index == t].double(), dims, clip) for t in range(steps)]
    return dict(zip(QUANTITIES, torch.stack(rows, 1).float(), strict=True))


def _gradients(parameters: Sequence[Tensor], log_prob_of: Callable[[], Tensor], weights: Tensor) -> Tensor:
    log_prob, last = log_prob_of(), len(weights) - 1
    return torch.stack(
        [
            _flat(torch.autograd.grad(log_prob, parameters, row.to(log_prob), retain_graph=i < last))
            for i, row in enumerate(weights)
        ]
    )


def _gradients_anew(parameters: Sequence[Tensor], log_prob_of: Callable[[], Tensor], weights: Tensor) -> Tensor:
    return torch.cat([_gradients(parameters, log_prob_of, row[None]) for row in weights])


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.detach().float().flatten() for gradient in gradients])


def _row(log_ratio: Tensor, dims: int, clip: float) -> Tensor:
    if not len(log_ratio):
        return log_ratio.new_tensor([math.nan] * (len(QUANTITIES) - 1) + [0])
    ratio, summed = log_ratio.exp(), dims * log_ratio
    share = ((ratio - 1).abs() > clip).double().mean()
    spread = [ratio.mean(), ratio.std(correction=0), ratio.min(), ratio.max()]
    count = log_ratio.new_tensor(len(log_ratio))
    return torch.stack([*spread, summed.mean(), summed.std(correction=0), share, count])


def _quotient(trace: float, squared_norm: float) -> float:
    return trace / squared_norm if squared_norm > 0 else math.inf
