"""One policy update (Alg. 2 and 3, inner loop): clipped surrogate over a plan, KL to the base, one AdamW step.

Log-probs under theta_old are those stored by the rollout. A non-finite gradient stops the run before the optimiser
step, so the weights and the last checkpoint stay valid. With several processes, each handles its share of the pairs and
gradients are summed before they are used: norms, KL weight, clipping and the step are then identical in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cgru import distributed
from cgru.lora.train import base_policy
from cgru.mdp.kernel import Gaussian
from cgru.mdp.rollout import policy as policy_at
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan, micro_batches, own_share, weight
from cgru.rl.objective import clip_range, policy_loss
from cgru.rl.retention import Bank, balanced_weight, bank_backward, controlled_weight, divergence, norm
from cgru.rl.state import Learner, Problem

TOLERANCE = 1.05
"""How far above `policy.kl_limit` an update may end."""


class TrainingError(ValueError):
    """Training cannot continue (for example because of a NaN); the last checkpoint is intact."""


@dataclass(frozen=True, eq=False)
class Update:
    """Result of one update; per-pair tensors are on the CPU, in the order of the plan."""

    log_ratio: Tensor  # (k,)
    sample: Tensor  # (k,)
    index: Tensor  # (k,)
    loss: float
    gradient_norm: float
    """Before clipping, including the KL terms."""
    policy_gradient_norm: float
    kl: float
    """Mean divergence from the base on the bank's pairs; 0 without a bank."""
    kl_weight: float
    kl_forget: float


@dataclass(frozen=True)
class Move:
    """How far an update moved the policy; both are 0 and 1 without `policy.kl_limit`."""

    kl: float = 0.0
    """Mean KL of the whole optimiser step on the update's pairs, per latent dimension."""
    share: float = 1.0
    """What was kept of the step."""


@dataclass(frozen=True, eq=False)
class _Part:
    # Contribution of one micro-batch: its log-ratios and its share of loss and KL. They stay on the device until the
    # last micro-batch: reading one back would make the host wait before it can queue the next.
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
    """Take one optimiser step on the pairs of the plan; `generator` draws the bank's pairs."""
    found = gradient(problem, learner, trajectory, plan, bank, generator)
    take_step(problem, learner, trajectory, plan, found)
    return found


def gradient(
    problem: Problem,
    learner: Learner,
    trajectory: Trajectory,
    plan: Plan,
    bank: Bank | None,
    generator: torch.Generator,
) -> Update:
    """First half of `policy_step`: write the clipped gradient to `.grad` and return the update's statistics.

    It starts from a zero gradient and changes nothing else, so it can be repeated after a failure.
    """
    policy, parameters = problem.config.policy, list(learner.parameters.values())
    learner.optimiser.zero_grad()
    with distributed.failing_alike():
        mine = micro_batches(own_share(plan), problem.sizes.update)
        parts = [_surrogate(problem, trajectory, part, weight(part, plan)) for part in mine]
    loss, kl_forget = distributed.add_up(parameters, *_losses(parts))
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
    log_ratio = distributed.joined(ratios, len(plan))
    return Update(log_ratio, plan.sample_ids, plan.step_ids, loss, total, policy_norm, kl, kl_weight, kl_forget)


def take_step(problem: Problem, learner: Learner, trajectory: Trajectory, plan: Plan, update: Update) -> Move:
    """Second half of `policy_step`: one optimiser step along `.grad`, within the trust region where one is set."""
    policy, retention = problem.config.policy, problem.config.retention
    if policy.warmup:
        # Linear warm-up: lr · min(1, (k + 1) / warmup) in update k
        for group in learner.optimiser.param_groups:
            group["lr"] = policy.learning_rate * min(1.0, (learner.updates + 1) / policy.warmup)
    move = _limited_step(problem, learner, trajectory, plan) if policy.kl_limit else Move()
    if not policy.kl_limit:
        learner.optimiser.step()
    learner.updates += 1
    learner.averaged(policy.average)
    if retention.kl_target and update.kl_weight:
        weight = learner.kl_weight or retention.kl
        learner.kl_weight = controlled_weight(weight, update.kl, kl=retention.kl, target=retention.kl_target)
    return move


@torch.no_grad()
def _limited_step(problem: Problem, learner: Learner, trajectory: Trajectory, plan: Plan) -> Move:
    # The KL grows about with the square of the step, which says how much of it to keep; repeats correct that guess.
    limit, before = problem.config.policy.kl_limit, [p.detach().clone() for p in learner.parameters.values()]
    part = next(micro_batches(plan, problem.sizes.update))
    old = _policies(problem, trajectory, part)
    learner.optimiser.step()
    kl = first = float(_policies(problem, trajectory, part).kl(old).mean())
    share = 1.0
    for _ in range(3):
        if not kl > limit * TOLERANCE:
            break
        shorter = math.sqrt(limit / kl)
        for parameter, start in zip(learner.parameters.values(), before, strict=True):
            parameter.copy_(start.lerp(parameter, shorter))
        share *= shorter
        kl = float(_policies(problem, trajectory, part).kl(old).mean())
    return Move(first, share)


def _policies(problem: Problem, trajectory: Trajectory, part: Plan) -> Gaussian:
    def now(some: slice) -> dict[str, Tensor]:
        steps = trajectory.steps(part.sample_ids[some], part.step_ids[some])
        found = policy_at(problem.backbone, steps, kernel=problem.kernel, guidance=trajectory.guidance)
        return {"mean": found.mean, "std": found.std}

    return Gaussian(**distributed.spread(len(part), now))


def _losses(parts: list[_Part]) -> tuple[float, float]:
    # Sum loss and KL over the parts with a single read-back from the device.
    if not parts:
        return 0.0, 0.0
    found = torch.stack([torch.stack([part.loss, part.kl]) for part in parts]).cpu().double().sum(0)
    return float(found[0]), float(found[1])


def _surrogate(problem: Problem, trajectory: Trajectory, part: Plan, share: float) -> _Part:
    """Run the backward pass of one micro-batch, which holds `share` of its plan's pairs."""
    policy, retention = problem.config.policy, problem.config.retention
    steps = trajectory.steps(part.sample_ids, part.step_ids)
    assert steps.advantage is not None, "the trajectory has no advantage yet"
    base = None
    if retention.kl_forget:
        # Before the policy's forward pass, so that the LoRA is not switched off while its graph is alive.
        with torch.no_grad(), base_policy(problem.backbone.denoiser):
            base = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=trajectory.guidance)
    # log pi_theta(x_{t-1} | x_t, c) of the stored action
    prediction = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=trajectory.guidance)
    log_prob = problem.kernel.step(prediction, steps.x, steps.index).log_prob(steps.next_x)
    clip = clip_range(policy.clip, problem.dimensions)
    result = policy_loss(log_prob, steps.log_prob, steps.advantage, clip, policy.clip_mode)
    # L = reward_weight · mean_k(w_t · L_clip), scaled by this part's share of the plan
    loss = policy.reward_weight * (result.loss * problem.step_weights[steps.index]).mean() * share
    kl = torch.zeros_like(loss)
    if base is not None:
        kl = divergence(problem.kernel, retention.kl_form, prediction, base, steps.x, steps.index).mean() * share
    # DPOK (Alg. 3): L + kl_forget · KL(pi_theta || pi_base) on the same states
    (loss + retention.kl_forget * kl).backward()
    return _Part(log_prob.detach() - steps.log_prob, loss.detach(), kl.detach())


def _add_bank(
    problem: Problem, learner: Learner, bank: Bank, generator: torch.Generator, policy_norm: float
) -> tuple[float, float]:
    """Add the weighted gradient of the bank's KL to the policy gradient; return the KL and its weight."""
    retention, parameters = problem.config.retention, list(learner.parameters.values())
    before = _gradients(parameters)
    learner.optimiser.zero_grad()
    plan = bank.draw(retention.batch, generator)
    (kl,) = distributed.add_up(parameters, distributed.alike(lambda: bank_backward(problem, bank, plan)))
    gradients = _gradients(parameters)
    wanted = learner.kl_weight if learner.kl_weight is not None else retention.kl
    kl_weight = balanced_weight(policy_norm, norm(gradients), kl=wanted, balance=retention.balance)
    # g = g_policy + kl_weight · g_KL
    for parameter, own, pull in zip(parameters, before, gradients, strict=True):
        parameter.grad = own + kl_weight * pull
    return kl, kl_weight


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
