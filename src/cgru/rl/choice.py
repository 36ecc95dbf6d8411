"""Which denoising steps an iteration learns from (ours): fewer of them cost fewer updates, decodes and values.

`each` leaves it to the plans, which draw steps for every trajectory on its own; the critic then looks at all states.
`shared` draws one set for the whole batch, so that only its states are decoded: of r - V the same expected gradient as
`each`, with more variance, as the steps of a batch are alike; GAE goes from one chosen step to the next. `variance`
prefers steps where r - V was large; a heuristic: its updates are not weighted by 1 / p, so such steps also count for
more in the mean gradient.
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
from cgru.rl.problem import Learner, Problem

FLOOR = 0.1
"""Share of the probability that is spread evenly, so that every step goes on being looked at."""


def chosen(problem: Problem, learner: Learner, trajectory: Trajectory) -> Trajectory:
    """The trajectory with the steps that this iteration learns from; drawn anew in each, none left out by `each`."""
    policy = problem.config.policy
    if policy.step_choice == "each":
        return trajectory
    errors = learner.step_errors if policy.step_choice == "variance" else {}
    generator = problem.generator("steps", learner.iteration)
    return replace(trajectory, chosen=draw(trajectory.stochastic, policy.step_fraction, errors, generator))


def draw(
    stochastic: Bool[Tensor, " t"], fraction: float, errors: Mapping[int, float], generator: torch.Generator
) -> tuple[int, ...]:
    """Return a share of the steps with noise, at least one, rising; without replacement.

    Args:
        stochastic: which steps have noise.
        fraction: above 0, at most 1.
        errors: a step's share of the probability is in proportion to its error; empty: all alike.
        generator: on the CPU.
    """
    steps = stochastic.nonzero().flatten().cpu()
    kept = max(1, round(fraction * len(steps)))
    places = torch.multinomial(probabilities(steps.tolist(), errors), kept, generator=generator)
    return tuple(sorted(steps[places].tolist()))


def probabilities(steps: list[int], errors: Mapping[int, float]) -> Float[Tensor, " k"]:
    """Return how likely each step is to be drawn first, never 0; one not looked at yet counts as the mean of others."""
    even = torch.full((len(steps),), 1 / len(steps), dtype=torch.float64)
    seen = [errors[step] for step in steps if step in errors]
    mean = sum(seen) / len(seen) if seen else 0.0
    if not mean > 0:
        return even
    weights = torch.tensor([errors.get(step, mean) for step in steps], dtype=torch.float64)
    return (1 - FLOOR) * weights / weights.sum() + FLOOR * even


def remember(learner: Learner, trajectory: Trajectory) -> None:
    """Keep the mean squared r - V of the steps that were looked at, for the next choice."""
    if trajectory.value is not None and trajectory.reward is not None:
        errors = value_error(trajectory.value[:, trajectory.learned], trajectory.reward).tolist()
        learner.step_errors |= dict(zip(trajectory.learned, errors, strict=True))
