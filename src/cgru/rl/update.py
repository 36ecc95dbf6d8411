"""One update of the policy (Alg. 2 and 3, inner loop): clipped surrogate over a plan, KL to the base, one AdamW step.

Log-probs under theta_old are those kept from the rollout. A gradient that is not finite stops the run before the step,
so the weights and the last checkpoint are good. Among processes each takes its share of the pairs, and gradients are
summed before anything is made of them: norms, KL weight, clipping and the step are then the same in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cgru import processes
from cgru.backbones.adapter import base_policy
from cgru.mdp.trajectory import Steps, Trajectory
from cgru.rl.batches import Plan, micro_batches, own_share, weight
from cgru.rl.objective import clip_range, policy_loss
from cgru.rl.problem import Learner, Problem
from cgru.rl.retention import Bank, balanced_weight, bank_backward, divergence, norm


class TrainingError(ValueError):
    """Training cannot go on (a NaN, say); the last checkpoint is intact."""


@dataclass(frozen=True, eq=False)
class Update:
    """What one update did; per pair on the CPU, in the order of the plan."""

    log_ratio: Tensor  # (k,)
    index: Tensor  # (k,)
    loss: float
    gradient_norm: float
    """Before clipping, KL included."""
    policy_gradient_norm: float
    kl: float
    """Mean divergence from the base on the bank's pairs; 0 without a bank."""
    kl_weight: float
    kl_forget: float


@dataclass(frozen=True, eq=False)
class _Part:
    # What one micro-batch added: its log-ratios, and its share of loss and KL. They stay on the device until all are
    # done: reading one back would make the host wait before it can queue the next micro-batch.
    log_ratio: Tensor
    loss: Tensor
    kl: Tensor


def policy_step(
    problem: Problem,
    learner: Learner,
    trajectory: Trajectory,
    plan: Plan,
    bank: Bank | None,
    generator: torch.Generator,
) -> Update:
    """Take one optimiser step on the pairs of the plan; `generator` draws the bank's."""
    found = gradient(problem, learner, trajectory, plan, bank, generator)
    take_step(problem, learner)
    return found


def gradient(
    problem: Problem,
    learner: Learner,
    trajectory: Trajectory,
    plan: Plan,
    bank: Bank | None,
    generator: torch.Generator,
) -> Update:
    """The first half of `policy_step`: the clipped gradient in `.grad`, from nothing, and what the update is.

    It changes nothing else, so it can be begun again.
    """
    policy, parameters = problem.config.policy, list(learner.parameters.values())
    learner.optimiser.zero_grad()
    parts = processes.alike(lambda: _surrogates(problem, trajectory, plan))
    loss, kl_forget = processes.add_up(parameters, *_losses(parts))
    policy_norm, kl, kl_weight = norm(_gradients(parameters)), 0.0, 0.0
    if bank is not None:
        kl, kl_weight = _add_bank(problem, learner, bank, generator, policy_norm)
    total = float(nn.utils.clip_grad_norm_(parameters, policy.gradient_norm))
    if not math.isfinite(total) or not math.isfinite(loss):
        raise TrainingError(
            f"the policy's gradient in iteration {learner.iteration} is not finite (norm {total}, loss {loss}); "
            "allowed: finite numbers. The last checkpoint is intact: lower policy.learning_rate, or run in fp32."
        )
    ratios = torch.cat([part.log_ratio for part in parts]).cpu() if parts else torch.empty(0)
    log_ratio = processes.joined(ratios, len(plan))
    return Update(log_ratio, plan.step_ids, loss, total, policy_norm, kl, kl_weight, kl_forget)


def take_step(problem: Problem, learner: Learner) -> None:
    """The second half: one optimiser step along `.grad`."""
    policy = problem.config.policy
    _warm_up(learner, policy.learning_rate, policy.warmup)
    learner.optimiser.step()
    learner.updates += 1
    learner.averaged(policy.average)


def _surrogates(problem: Problem, trajectory: Trajectory, plan: Plan) -> list[_Part]:
    """Backward of this process's share of a plan, in micro-batches."""
    parts = micro_batches(own_share(plan), problem.sizes.update)
    return [_surrogate(problem, trajectory, part, weight(part, plan)) for part in parts]


def _losses(parts: list[_Part]) -> tuple[float, float]:
    # Sums of loss and KL, read back at once.
    if not parts:
        return 0.0, 0.0
    found = torch.stack([torch.stack([part.loss, part.kl]) for part in parts]).cpu().double().sum(0)
    return float(found[0]), float(found[1])


def _surrogate(problem: Problem, trajectory: Trajectory, part: Plan, share: float) -> _Part:
    """Backward of one micro-batch, `share` of its plan."""
    policy, retention = problem.config.policy, problem.config.retention
    steps = trajectory.steps(part.sample_ids, part.step_ids)
    assert steps.advantage is not None, "the trajectory has no advantage yet"
    # First, because taking the LoRA off and on again is better not done under a live graph.
    base = _base_prediction(problem, steps, trajectory.guidance) if retention.kl_forget else None
    prediction = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=trajectory.guidance)
    log_prob = problem.kernel.step(prediction, steps.x, steps.index).log_prob(steps.next_x)
    clip = clip_range(policy.clip, problem.dimensions)
    result = policy_loss(log_prob, steps.log_prob, steps.advantage, clip, policy.clip_mode)
    loss = policy.reward_weight * (result.loss * problem.step_weights[steps.index]).mean() * share
    kl = torch.zeros_like(loss)
    if base is not None:
        kl = divergence(problem.kernel, retention.kl_form, prediction, base, steps.x, steps.index).mean() * share
    (loss + retention.kl_forget * kl).backward()
    return _Part(log_prob.detach() - steps.log_prob, loss.detach(), kl.detach())


@torch.no_grad()
def _base_prediction(problem: Problem, steps: Steps, guidance: float) -> Tensor:
    with base_policy(problem.backbone.denoiser):
        return problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=guidance)


def _add_bank(
    problem: Problem, learner: Learner, bank: Bank, generator: torch.Generator, policy_norm: float
) -> tuple[float, float]:
    """Add the gradient of the bank's KL to that of the policy; returns the KL and its weight."""
    retention, parameters = problem.config.retention, list(learner.parameters.values())
    before = _gradients(parameters)
    learner.optimiser.zero_grad()
    plan = bank.draw(retention.batch, generator)
    (kl,) = processes.add_up(parameters, processes.alike(lambda: bank_backward(problem, bank, plan)))
    gradients = _gradients(parameters)
    kl_weight = balanced_weight(policy_norm, norm(gradients), kl=retention.kl, balance=retention.balance)
    for parameter, own, pull in zip(parameters, before, gradients, strict=True):
        parameter.grad = own + kl_weight * pull
    return kl, kl_weight


def _warm_up(learner: Learner, rate: float, warmup: int) -> None:
    # Linear from rate / warmup at the first update; without a warm-up the optimiser keeps its own rate.
    if warmup:
        for group in learner.optimiser.param_groups:
            group["lr"] = rate * min(1.0, (learner.updates + 1) / warmup)


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
