"""Which (sample, step) pairs make up one update. Plans are plain data, so re-batching does not change the maths.

The paper's epoch is 16 trajectories and 2 updates: two plans of 8 trajectories × all steps, with samples and times each
shuffled as in DDPO, and one optimiser step per plan. The number of pairs per forward pass affects only speed: the loss
of a plan is the mean over its pairs for any micro-batch size (`weight`).
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cgru import distributed


@dataclass(frozen=True, eq=False)
class Plan:
    """The pairs (sample_ids[k], step_ids[k]) of one update, on the CPU; the arguments of `Trajectory.steps`."""

    sample_ids: Int[Tensor, " k"]
    step_ids: Int[Tensor, " k"]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.sample_ids)


def plans(
    n: int,
    stochastic: Bool[Tensor, " t"],
    *,
    updates: int,
    passes: int = 1,
    step_fraction: float = 1.0,
    generator: torch.Generator,
) -> list[Plan]:
    """Return passes × updates plans in the order in which to use them.

    In each pass the samples are permuted and split into `updates` disjoint groups whose sizes differ by at most one.
    Steps are permuted separately for each sample.

    Args:
        n: number of trajectories.
        stochastic: which steps have noise; the others have no density and are left out.
        updates: groups per pass, i.e. optimiser steps per pass.
        passes: how often to go through all trajectories.
        step_fraction: share of each trajectory's steps, redrawn in each pass without replacement; at least one step.
        generator: on the CPU.
    """
    steps = stochastic.nonzero().flatten().cpu()
    _check(n, len(steps), updates, passes, step_fraction)
    kept = max(1, round(step_fraction * len(steps)))
    return [
        _plan(group, steps, kept, generator)
        for _ in range(passes)
        for group in torch.randperm(n, generator=generator).tensor_split(updates)
    ]


def own_share(plan: Plan) -> Plan:
    """Return the pairs of a plan that this process works on: all in a single process, possibly none among many."""
    mine = distributed.share(len(plan))
    return Plan(plan.sample_ids[mine], plan.step_ids[mine])


def micro_batches(plan: Plan, size: int) -> Iterator[Plan]:
    """Cut a plan into consecutive parts of `size` pairs (the last may be smaller); yields nothing for an empty plan."""
    if size < 1:
        raise ValueError(f"micro-batch is {size} pairs; it must be at least 1")
    if not len(plan):
        return  # torch would return one empty part, whose mean is NaN
    for samples, steps in zip(plan.sample_ids.split(size), plan.step_ids.split(size), strict=True):
        yield Plan(samples, steps)


def weight(part: Plan, plan: Plan) -> float:
    """Return the share of the plan's pairs that a part holds.

    Calling `(loss.mean() * weight(part, plan)).backward()` for all parts in all processes accumulates the gradient of
    the plan's mean loss.
    """
    return len(part) / len(plan)


def _plan(samples: Tensor, steps: Tensor, kept: int, generator: torch.Generator) -> Plan:
    # Sorting random numbers gives a permutation. float64, because float32 has so few values that ties are likely.
    draws = torch.rand(len(samples), len(steps), dtype=torch.float64, generator=generator)
    chosen = steps[draws.argsort(dim=1)[:, :kept]]  # (samples, kept)
    # Samples vary fastest, so that a micro-batch mixes both trajectories and times.
    return Plan(samples.repeat(kept), chosen.T.flatten())


def _check(n: int, steps: int, updates: int, passes: int, step_fraction: float) -> None:
    if updates < 1 or passes < 1:
        raise ValueError(f"{updates} updates in {passes} passes; both must be at least 1")
    if updates > n:
        raise ValueError(
            f"{updates} updates for {n} trajectories; use at most {n} updates or collect more trajectories"
        )
    if not 0 < step_fraction <= 1:
        raise ValueError(f"step fraction is {step_fraction}; it must be above 0 and at most 1 (all steps)")
    if not steps:
        raise ValueError("no step of this sampler has noise, so the policy has no density; use eta above 0")
