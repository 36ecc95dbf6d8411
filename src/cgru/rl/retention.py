"""Retention, which the paper leaves as future work: a KL to the base policy on states of retain prompts.

The base policy is sampled once, before training; its states and predictions form a bank. Each update draws pairs from
the bank and adds the gradient of the KL there. Policy gradients are small here (norms of 0.01 to 0.05), so a fixed KL
weight easily drowns them: `balance` limits the KL's gradient to a multiple of the policy gradient's norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cgru import distributed
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan, micro_batches, own_share, plans, weight
from cgru.rl.collect import choose, sampled
from cgru.rl.objective import kl_to_base, noise_mse
from cgru.rl.state import Problem

KlForm = Literal["gaussian", "noise"]
GAIN, REACH = 0.1, 30.0


@dataclass(frozen=True, eq=False)
class Bank:
    """Trajectories of the base policy on retain prompts, with the base's prediction at each state."""

    trajectory: Trajectory
    prediction: Tensor  # (n, t, c, h, w)
    steps: Tensor  # (t,) bool
    """Steps at which the divergence is defined: a Gaussian KL needs noise, a difference of predictions does not."""

    def draw(self, count: int, generator: torch.Generator) -> Plan:
        """Draw `count` pairs; no trajectory gives a second step before every other has given one."""
        # A plan goes through all trajectories once per step, so its first pairs are spread over trajectories.
        everything = plans(len(self.trajectory), self.steps, updates=1, generator=generator)[0]
        return Plan(everything.sample_ids[:count], everything.step_ids[:count])


@torch.no_grad()
def make_bank(problem: Problem) -> Bank | None:
    """Sample the base policy (call before the LoRA is trained); None if the config sets no KL on retain prompts."""
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

    prediction[everything.sample_ids, everything.step_ids] = distributed.spread(len(everything), predictions)
    return Bank(trajectory, prediction, steps)


def divergence(
    kernel: ReverseKernel, form: KlForm, prediction: Tensor, base: Tensor, x: Tensor, index: Tensor
) -> Tensor:
    """Return the KL to the base at each state (n,), or DPOK's squared difference of predictions for form `noise`."""
    # `noise`: 1/d · |eps - eps_base|²;  `gaussian`: |mu - mu_base|² / (2 d sigma²)
    if form == "noise":
        return noise_mse(prediction, base)
    return kl_to_base(kernel.step(prediction, x, index), kernel.step(base, x, index))


def bank_backward(problem: Problem, bank: Bank, plan: Plan) -> float:
    """Add the gradient of the mean KL over the plan's pairs to the parameters; return that mean.

    With several processes, both are this process's share and must be summed over all.
    """
    total, form = 0.0, problem.config.retention.kl_form
    for part in micro_batches(own_share(plan), problem.sizes.update):
        steps = bank.trajectory.steps(part.sample_ids, part.step_ids)
        base = bank.prediction[part.sample_ids, part.step_ids]
        prediction = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=bank.trajectory.guidance)
        # Micro-batches add up to the plan's mean: Σ_parts (len(part) / len(plan)) · mean(KL)
        kl = divergence(problem.kernel, form, prediction, base, steps.x, steps.index).mean() * weight(part, plan)
        kl.backward()
        total += kl.item()
    return total


def balanced_weight(policy_norm: float, kl_norm: float, *, kl: float, balance: float) -> float:
    """Return the KL's weight: `kl`, reduced so that its gradient is at most `balance` times the policy's (0: no limit).

    The weight is never raised above `kl`: making the two norms equal in every update let the steady pull to the base
    win over the noisy policy gradient, and nothing was forgotten (docs/lab.md).
    """
    # min(kl, balance · |g_policy| / |g_KL|)
    return min(kl, balance * policy_norm / max(kl_norm, 1e-12)) if balance else kl


def controlled_weight(weight: float, measured: float, *, kl: float, target: float) -> float:
    """Return the KL's weight after an update that measured a divergence: up while it is above the target, else down.

    The weight moves by at most a tenth of an e-fold an update and stays within a thirtieth and thirty times `kl`.
    """
    # log w += 0.1 · clamp(log(KL / target), -1, 1)
    off = max(-1.0, min(1.0, math.log(max(measured, 1e-12) / target)))
    return max(kl / REACH, min(kl * REACH, weight * math.exp(GAIN * off)))


def norm(gradients: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all gradients."""
    return float(torch.nn.utils.get_total_norm(list(gradients)))
