"""Choose the denoising steps an iteration trains on (ours): fewer steps mean fewer updates, decodes and critic calls.

`each` leaves the choice to the plans, which draw steps per trajectory; the critic is then evaluated at all states.
`shared` draws one set for the whole batch, so only those states are decoded. The expected gradient of r - V is that of
`each`, with more variance because all trajectories share their steps; GAE goes from one chosen step to the next.
`variance` prefers steps where r - V was large. It is a heuristic: updates are not weighted by 1 / p, so those steps
also count for more in the mean gradient.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cgru.critic.measures import value_error
from cgru.mdp.trajectory import Trajectory
from cgru.rl.state import Learner, Problem

FLOOR = 0.1
"""Share of the probability that is spread evenly, so that every step keeps being visited."""


def chosen(problem: Problem, learner: Learner, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with this iteration's steps, redrawn each time; `each` keeps all of them."""
    policy = problem.config.policy
    if policy.step_choice == "each":
        return trajectory
    errors = learner.step_errors if policy.step_choice == "variance" else {}
    generator = problem.generator("steps", learner.iteration)
    return replace(trajectory, chosen=draw(trajectory.stochastic, policy.step_fraction, errors, generator))


def draw(
    stochastic: Bool[Tensor, " t"], fraction: float, errors: Mapping[int, float], generator: torch.Generator
) -> tuple[int, ...]:
    """Draw a share of the stochastic steps, at least one, without replacement, in increasing order.

    Args:
        stochastic: which steps have noise.
        fraction: above 0, at most 1.
        errors: a step's probability is proportional to its error; empty means uniform.
        generator: on the CPU.
    """
    steps = stochastic.nonzero().flatten().cpu()
    kept = max(1, round(fraction * len(steps)))
    places = torch.multinomial(probabilities(steps.tolist(), errors), kept, generator=generator)
    return tuple(sorted(steps[places].tolist()))


def probabilities(steps: list[int], errors: Mapping[int, float]) -> Float[Tensor, " k"]:
    """Return each step's probability of being drawn first, never 0; a step not visited yet gets the mean error."""
    even = torch.full((len(steps),), 1 / len(steps), dtype=torch.float64)
    seen = [errors[step] for step in steps if step in errors]
    mean = sum(seen) / len(seen) if seen else 0.0
    if not mean > 0:
        return even
    # p_t = (1 - FLOOR) · e_t / Σ e + FLOOR / T
    weights = torch.tensor([errors.get(step, mean) for step in steps], dtype=torch.float64)
    return (1 - FLOOR) * weights / weights.sum() + FLOOR * even


def remember(learner: Learner, trajectory: Trajectory) -> None:
    """Store the mean squared r - V of the steps this iteration visited, for the next choice."""
    if trajectory.value is not None and trajectory.reward is not None:
        errors = value_error(trajectory.value[:, trajectory.learned], trajectory.reward).tolist()
        learner.step_errors |= dict(zip(trajectory.learned, errors, strict=True))
