"""Retention, which the paper leaves as future work: a KL to the base policy on states of retain prompts.

The base policy is sampled once, before training; its states and predictions make a bank. Each update draws pairs from
it and adds the gradient of the KL there. Policy gradients are small here (findings.md §2), so a fixed weight easily
drowns them: `balance` limits the KL's gradient to a multiple of the policy gradient's norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cgru import processes
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan, micro_batches, own_share, plans, weight
from cgru.rl.collect import choose, sampled
from cgru.rl.objective import kl_to_base, noise_mse
from cgru.rl.problem import Problem

KlForm = Literal["gaussian", "noise"]


@dataclass(frozen=True, eq=False)
class Bank:
    """Trajectories of the base policy on retain prompts, and what the base predicted at each state."""

    trajectory: Trajectory
    prediction: Tensor  # (n, t, c, h, w)
    steps: Tensor  # (t,) bool
    """Which steps the divergence is defined at: a Gaussian KL needs noise, a difference of predictions does not."""

    def draw(self, count: int, generator: torch.Generator) -> Plan:
        """`count` pairs, at most one step of each trajectory before any gives a second."""
        everything = plans(len(self.trajectory), self.steps, updates=1, generator=generator)[0]
        return Plan(everything.sample_ids[:count], everything.step_ids[:count])


@torch.no_grad()
def make_bank(problem: Problem) -> Bank | None:
    """Sample the base policy (call before the LoRA has learned); None where no KL on retain prompts is asked."""
    retention = problem.config.retention
    if not retention.kl:
        return None
    prompts = choose(problem, "bank", problem.prompts.retain, retention.bank, "bank")
    trajectory = sampled(problem, prompts, "bank")
    steps = trajectory.stochastic | (retention.kl_form == "noise")
    everything = plans(len(trajectory), steps, updates=1, generator=problem.generator("bank"))[0]
    prediction = torch.zeros_like(trajectory.x[:, :-1])

    def predictions(some: slice) -> Tensor:
        found = []
        mine = Plan(everything.sample_ids[some], everything.step_ids[some])
        for part in micro_batches(mine, problem.sizes.rollout):
            pairs = trajectory.steps(part.sample_ids, part.step_ids)
            found.append(problem.backbone.predict(pairs.x, pairs.time, pairs.cond, guidance=trajectory.guidance))
        return torch.cat(found)

    prediction[everything.sample_ids, everything.step_ids] = processes.spread(len(everything), predictions)
    return Bank(trajectory, prediction, steps)


def divergence(
    kernel: ReverseKernel, form: KlForm, prediction: Tensor, base: Tensor, x: Tensor, index: Tensor
) -> Tensor:
    """KL to the base at each state (n,), or DPOK's squared difference of the predictions."""
    if form == "noise":
        return noise_mse(prediction, base)
    return kl_to_base(kernel.step(prediction, x, index), kernel.step(base, x, index))


def bank_backward(problem: Problem, bank: Bank, plan: Plan) -> float:
    """Add the gradient of the mean KL over the plan's pairs to the parameters; returns that mean.

    Among processes: what this one's share of the pairs adds to both.
    """
    total, form = 0.0, problem.config.retention.kl_form
    for part in micro_batches(own_share(plan), problem.sizes.update):
        steps = bank.trajectory.steps(part.sample_ids, part.step_ids)
        base = bank.prediction[part.sample_ids, part.step_ids]
        prediction = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=bank.trajectory.guidance)
        kl = divergence(problem.kernel, form, prediction, base, steps.x, steps.index).mean() * weight(part, plan)
        kl.backward()
        total += kl.item()
    return total


def balanced_weight(policy_norm: float, kl_norm: float, *, kl: float, balance: float) -> float:
    """The KL's weight: `kl`, or less where its gradient would be over `balance` times the policy gradient's (0: any).

    It only ever limits: a weight that always made the two norms equal let the steady pull to the base win over the
    noisy policy gradient, and nothing was forgotten (docs/lab.md).
    """
    return min(kl, balance * policy_norm / max(kl_norm, 1e-12)) if balance else kl


def norm(gradients: Sequence[Tensor]) -> float:
    """Euclidean norm over all gradients."""
    return float(torch.nn.utils.get_total_norm(list(gradients)))
