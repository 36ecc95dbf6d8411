"""The policy loop: Algorithms 2 and 3 of the paper. DDPO and DPOK are this loop with other arguments (cgru.presets).

CGRU: advantage r - V(x_t, c, t). DDPO: no critic, advantage `batch` or `per-prompt`. DPOK: latent critic, hard clip, a
replay window and a KL to the base on the same states. Retention, averaging and the outside watch are optional.
"""

# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from cgru import distributed
from cgru.critic.fit import CriticLoss, regress
from cgru.critic.measures import explained_variance, value_error
from cgru.mdp.rollout import rescore
from cgru.mdp.trajectory import Trajectory
from cgru.rl import advantage as advantages
from cgru.rl.batches import Plan, micro_batches, plans
from cgru.rl.collect import collect, explored, scored, shuffled, valued, viewed
from cgru.rl.diagnostics import gradient_variance, per_trajectory_gradients, ratio_statistics
from cgru.rl.objective import clip_range
from cgru.rl.oom_retry import Memory
from cgru.rl.retention import Bank
from cgru.rl.state import Learner, Problem, Sizes
from cgru.rl.step_selection import chosen, remember
from cgru.rl.update import Move, TrainingError, Update, gradient, take_step

logger = logging.getLogger(__name__)

Record = dict[str, float | int | str]
PARITY = 1e-5
"""Allowed |ratio - 1| right after collection in float32; in half precision a tenth of the clip range."""


@dataclass(frozen=True, eq=False)
class Iteration:
    """What one iteration did: its flat record for metrics.jsonl, and the batch it learned from."""

    record: Record
    trajectory: Trajectory


def train(
    problem: Problem,
    learner: Learner,
    bank: Bank | None,
    *,
    after: Callable[[Iteration], bool] = lambda _: False,
    after_halving: Callable[[Problem], None] = lambda _: None,
) -> None:
    """Run the iterations that are left.

    Args:
        problem: what is to be learned.
        learner: changed in place.
        bank: for the KL on retain prompts.
        after: called after each iteration (log, checkpoint, outside look); returns True to stop.
        after_halving: called with the problem in smaller batches after an out-of-memory retry.
    """
    memory = Memory(problem, after_halving)
    while learner.iteration < problem.config.policy.iterations:
        done = iterate(memory, learner, bank)
        learner.iteration += 1
        if after(done):
            break


def iterate(memory: Memory, learner: Learner, bank: Bank | None) -> Iteration:
    """One iteration of Alg. 2: collect under theta_old, learn V, update theta K times.

    Each `for attempt` block is done once, or again in half the batches when CUDA runs out of memory in it.
    """
    problem, index = memory.problem, learner.iteration
    policy, config = problem.config.policy, problem.config
    retain = round(config.retention.share * policy.trajectories)
    forget = policy.trajectories - retain

    # generate: x_T, ..., x_0 with log-probs under theta_old
    for attempt in memory.attempts("rollouts"):
        with attempt as problem:
            trajectory = collect(problem, index, forget=forget, retain=retain)
    collected = problem.sizes
    own = slice(explored(problem, forget), None)  # drawn under their own prompt, so that their ratio is 1 now
    # terminal reward r(x_0, c)
    for attempt in memory.attempts("rewards", of="pictures"):
        with attempt as problem:
            trajectory = scored(problem, trajectory)
    if config.sampling.explore_credit == "shuffled":
        trajectory = shuffled(trajectory, problem.generator("shuffle", index))
    trajectory = chosen(problem, learner, trajectory)

    # V(x_t, c, t) BEFORE the critic moves, then the critic's K_V updates on (V - r)^2
    critic_loss = None
    if (critic := learner.critic) is not None:
        for attempt in memory.attempts("decoding", of="pictures"):
            with attempt as problem:
                views = viewed(problem, critic, trajectory)
        for attempt in memory.attempts("values", of="pictures"):
            with attempt as problem:
                trajectory = valued(problem, critic, views, trajectory)
        critic_loss = _regress(problem, learner, views, trajectory)
    if policy.step_choice == "variance":
        remember(learner, trajectory)
    # A_t = r - V(x_t, c, t), or another advantage
    trajectory = replace(trajectory, advantage=advantage(problem, learner, trajectory))
    record: Record = {"iteration": index, **describe(problem, trajectory, critic_loss)}

    # Before theta moves every ratio is 1. Checked once per start, as a run may be resumed on another device; where the
    # LoRA is merged for rollouts, in each iteration, since a fresh LoRA merges to nothing.
    if index == 0 or config.sampling.merged or not learner.is_parity_checked:
        looked_at = trajectory[own] if index == 0 else trajectory[own][:1]
        for attempt in memory.attempts("the parity check"):
            with attempt as problem:
                parity = check_parity(
                    problem, rounded_alike(looked_at, collected, problem, first=0), is_first=index == 0
                )
        record |= {"policy/parity": parity} if index == 0 or config.sampling.merged else {}
        learner.is_parity_checked = True
    if config.diagnostics.every and index % config.diagnostics.every == 0:
        for attempt in memory.attempts("diagnostics"):
            with attempt as problem:
                variance = measure_variance(problem, learner, trajectory[own])
        record |= variance

    # K updates of theta on shuffled (sample, step) pairs
    batch = windowed(learner, trajectory, policy.window)
    first = own.start if config.sampling.explore_ratio == "sampled" else 0
    updates, moves = [], []
    for k, plan in enumerate(_plans(problem, batch, index)):
        for attempt in memory.attempts("an update"):
            with attempt as problem:
                if k == 0:  # theta has not moved, so log-probs under theta_old can still be had in smaller batches
                    batch = rounded_alike(batch, collected, problem, first=first)
                update = gradient(problem, learner, batch, plan, bank, problem.generator("bank", index, k))
        updates.append(update)
        moves.append(take_step(problem, learner, batch, plan, update))
    record |= summarise(problem, updates, batch.relabelled) | _moved(moves)
    return Iteration(record, trajectory)


@torch.no_grad()
def rounded_alike(trajectory: Trajectory, collected: Sizes, problem: Problem, *, first: int) -> Trajectory:
    """Recompute log-probs at the new batch size after an out-of-memory retry.

    In float32 the batch hardly matters; in half precision ratios would be off by more than the clip range. Not done for
    trajectories before `first`, whose log-probs are another prompt's, nor in a replay window.
    """
    is_exact = problem.backbone.dtype == torch.float32
    if is_exact or problem.sizes.update == collected.update or problem.config.policy.window:
        return trajectory
    samples, steps = trajectory[first:].policy_pairs()
    everything = Plan(samples + first, steps)
    log_prob = trajectory.log_prob.clone()
    log_prob[everything.sample_ids, everything.step_ids] = _rescored(problem, trajectory, everything)
    return replace(trajectory, log_prob=log_prob)


def _rescored(problem: Problem, trajectory: Trajectory, plan: Plan) -> Tensor:
    """Log-probs of a plan's pairs under the policy as it is, in the micro-batches of updates; each process a share."""

    def now(some: slice) -> Tensor:
        found = []
        for part in micro_batches(Plan(plan.sample_ids[some], plan.step_ids[some]), problem.sizes.update):
            steps = trajectory.steps(part.sample_ids, part.step_ids)
            found.append(rescore(problem.backbone, steps, kernel=problem.kernel, guidance=trajectory.guidance))
        return torch.cat(found)

    return distributed.spread(len(plan), now)


def advantage(problem: Problem, learner: Learner, trajectory: Trajectory) -> Tensor:
    """The advantage that the config names, (n, t); with a critic NaN at steps that are not learned from."""
    found = _advantage(problem, learner, trajectory)
    is_constant = problem.config.sampling.explore_credit == "constant"
    return advantages.alike(found, trajectory.relabelled) if is_constant else found


def _advantage(problem: Problem, learner: Learner, trajectory: Trajectory) -> Tensor:
    policy = problem.config.policy
    if policy.advantage == "batch":
        return advantages.batch_advantage(trajectory, policy.advantage_clamp)
    if policy.advantage == "per-prompt":
        assert trajectory.reward is not None
        learner.statistics.update(trajectory.cond.prompts, trajectory.reward)
        return advantages.per_prompt_advantage(trajectory, learner.statistics, policy.advantage_clamp)
    scale = problem.reward.high - problem.reward.low
    if policy.advantage == "pair":
        found = advantages.pair_advantage(trajectory)
        return advantages.normalised(found, policy.normalise_floor * scale) if policy.normalise else found
    if problem.config.critic.trust == "measured":
        trajectory = replace(trajectory, value=advantages.measured_value(trajectory)[0])
    found = (
        advantages.gae_advantage(trajectory, policy.gae_lambda)
        if policy.advantage == "gae"
        else advantages.critic_advantage(trajectory)
    )
    return advantages.normalised(found, policy.normalise_floor * scale) if policy.normalise else found


@torch.no_grad()
def check_parity(problem: Problem, trajectory: Trajectory, *, is_first: bool = True) -> float:
    """max |ratio - 1| over all steps that updates go by, before an update; too large is an error.

    The log-probs are those kept from the rollout: if they were not what the update computes, every ratio would lie.
    Only of the policy's own trajectories: those that explore were drawn under another prompt, so their ratio is not 1.
    """
    everything = plans(len(trajectory), trajectory.trained, updates=1, generator=problem.generator("parity"))[0]
    before = trajectory.log_prob[everything.sample_ids, everything.step_ids]
    off = ((_rescored(problem, trajectory, everything) - before).exp() - 1).abs()
    worst = float(off.max())  # NaN if any is, which Python's max would pass over
    is_exact = problem.backbone.dtype == torch.float32
    allowed = PARITY if is_exact else clip_range(problem.config.policy.clip, problem.dimensions) / 10
    if not worst <= allowed:
        raise TrainingError(
            f"before the update max |ratio - 1| is {worst:.2g}: the rollout's log-probs are not the update's; "
            f"allowed: {allowed:.2g} in {problem.config.dtype}. {_advice(problem, is_first)}"
        )
    logger.info("parity: max |ratio - 1| = %.2g over %d pairs (allowed %.2g)", worst, len(everything), allowed)
    return worst


def _advice(problem: Problem, is_first: bool) -> str:
    config, size = problem.config, problem.sizes.update
    if config.sampling.merged:
        return "Set sampling.merged=false."
    if not is_first:  # settings that decide how a run rounds cannot be changed any more
        return "Go on with it on a device of the kind it began on, or begin another run."
    is_unsafe = config.dtype != "fp32" and size & (size - 1) != 0  # no power of two: see rl.batch_size
    return "Set policy.micro_batch to a power of two." if is_unsafe else "Raise policy.clip, or run in fp32."


def measure_variance(problem: Problem, learner: Learner, trajectory: Trajectory) -> Record:
    """Gradient variance on the same trajectories for r - V, r - mean and DDPO's advantage (paper, appendix)."""
    some = trajectory[: problem.config.diagnostics.trajectories]
    assert some.reward is not None
    centred = (some.reward - some.reward.mean())[:, None].expand(-1, some.horizon)
    weightings = {"mean": centred, "ddpo": advantages.batch_advantage(some)}
    if some.value is not None:
        weightings["critic"] = advantages.critic_advantage(some)
    weights = torch.stack(list(weightings.values()))

    def rows(mine: slice) -> Tensor:  # a trajectory each, as shares are
        return _gradient_rows(problem, learner, some[mine], weights[:, mine]).transpose(0, 1)

    gradients = distributed.spread(len(some), rows).transpose(0, 1)
    record: Record = {}
    for name, found in zip(weightings, gradients, strict=True):
        variance = gradient_variance(found)
        record[f"variance/{name}"] = variance.trace
        record[f"variance/{name}_normalised"] = variance.normalised
        record[f"variance/{name}_raw_normalised"] = variance.raw_normalised
    return record


def _gradient_rows(problem: Problem, learner: Learner, some: Trajectory, weights: Tensor) -> Tensor:
    # (weightings, n, p). In parts of the steps: the graph of all 50 of Stable Diffusion fits in no memory.
    parts, parameters = some.trained.nonzero().flatten().cpu().split(problem.sizes.update), learner.parameters
    gradients = sum(
        per_trajectory_gradients(
            list(parameters.values()),
            _log_prob_of(problem, some, part),
            weights[:, :, part],
            retain=not problem.config.compile,
        )
        for part in parts
    )
    assert isinstance(gradients, Tensor), "every sampler of a policy has noise"
    return gradients


def _log_prob_of(problem: Problem, trajectory: Trajectory, steps: Tensor) -> Callable[[int], Tensor]:
    def log_prob_of(sample: int) -> Tensor:
        pairs = trajectory.steps(torch.full_like(steps, sample), steps)
        return rescore(problem.backbone, pairs, kernel=problem.kernel, guidance=trajectory.guidance)

    return log_prob_of


def describe(problem: Problem, trajectory: Trajectory, critic_loss: CriticLoss | None) -> Record:
    """Reward, advantage and critic of a batch, before the updates."""
    assert trajectory.reward is not None and trajectory.advantage is not None
    reward, steps = trajectory.reward, trajectory.learned
    is_retain = torch.tensor([prompt in problem.rewarded for prompt in trajectory.cond.prompts], device=reward.device)
    forget, exploring = reward[~is_retain], explored(problem, int((~is_retain).sum()))
    record: Record = {
        "reward/mean": float(forget[exploring:].mean()),
        "reward/std": float(reward.std(correction=0)),
        "advantage/std": float(trajectory.advantage[:, steps].std(correction=0)),
    }
    if bool(is_retain.any()):
        record["reward/retain_mean"] = float(reward[is_retain].mean())
    if exploring:
        record["reward/explored_mean"] = float(forget[:exploring].mean())
    if critic_loss is not None:
        record |= {"critic/loss": critic_loss.mean, "critic/gradient_norm": critic_loss.gradient_norm}
    if trajectory.value is not None:
        value = trajectory.value[:, steps]
        error, explained = value_error(value, reward), explained_variance(value, reward)
        record["critic/value_error"] = float(error.mean())
        if problem.config.critic.trust == "measured":
            record["critic/trust"] = float(advantages.measured_value(trajectory)[1][steps].mean())
        record |= {f"critic/value_error/t{t}": float(x) for t, x in zip(steps, error, strict=True)}
        record |= {f"critic/explained_variance/t{t}": float(x) for t, x in zip(steps, explained, strict=True)}
    return record


def summarise(problem: Problem, updates: list[Update], relabelled: Bool[Tensor, " n"]) -> Record:
    """The updates of an iteration: ratios before clipping, per step and over all, KL, gradient norms.

    Ratios are those of the policy's own trajectories; of relabelled ones, the mean stands apart.
    """
    clip, steps = clip_range(problem.config.policy.clip, problem.dimensions), len(problem.kernel)
    is_relabelled = relabelled[torch.cat([u.sample for u in updates])]
    log_ratio, index = torch.cat([u.log_ratio for u in updates]), torch.cat([u.index for u in updates])
    other = log_ratio[is_relabelled].exp()
    log_ratio, index = log_ratio[~is_relabelled], index[~is_relabelled]
    ratio = log_ratio.exp()
    record: Record = {
        "policy/loss": _mean([u.loss for u in updates]),
        "policy/gradient_norm": _mean([u.policy_gradient_norm for u in updates]),
        "policy/total_gradient_norm": _mean([u.gradient_norm for u in updates]),
        "policy/ratio_mean": float(ratio.mean()),
        "policy/ratio_max": float((ratio - 1).abs().max()),
        "policy/summed_log_ratio": float(log_ratio.abs().mean()) * problem.dimensions,
        "policy/clipped": float(((ratio - 1).abs() > clip).float().mean()),
        "policy/kl": _mean([u.kl for u in updates]),
        "policy/kl_weight": _mean([u.kl_weight for u in updates]),
        "policy/kl_forget": _mean([u.kl_forget for u in updates]),
    }
    if len(other):
        record["policy/ratio_relabelled_mean"] = float(other.mean())
    per_step = ratio_statistics(log_ratio, index, steps, problem.dimensions, clip)
    for name in ("mean", "std", "summed_std", "clipped"):
        record |= {f"ratio/{name}/t{t}": float(x) for t, x in enumerate(per_step[name])}
    return record


def _moved(moves: list[Move]) -> Record:
    if not any(move.kl for move in moves):
        return {}
    return {"policy/step_kl": _mean([m.kl for m in moves]), "policy/step_share": _mean([m.share for m in moves])}


def _regress(problem: Problem, learner: Learner, views: Tensor, trajectory: Trajectory) -> CriticLoss | None:
    critic, config = learner.critic, problem.config.critic
    assert critic is not None and learner.critic_optimiser is not None and trajectory.reward is not None
    if not config.online_updates:
        return None
    return regress(
        critic,
        learner.critic_optimiser,
        views,
        trajectory.reward,
        trajectory.time[trajectory.learned],
        trajectory.cond,
        updates=config.online_updates,
        batch=config.batch,
        generator=problem.generator("critic", learner.iteration),
    )


def _plans(problem: Problem, batch: Trajectory, iteration: int) -> list[Plan]:
    policy = problem.config.policy
    return plans(
        len(batch),
        batch.trained,
        updates=policy.updates,
        passes=policy.passes,
        step_fraction=policy.step_fraction if batch.chosen is None else 1.0,  # else the share was taken already
        generator=problem.generator("plans", iteration),
    )


def windowed(learner: Learner, trajectory: Trajectory, window: int) -> Trajectory:
    """This batch with the newest earlier ones, `window` trajectories at most (DPOK's replay); 0: this batch alone."""
    if not window:
        return trajectory
    learner.window.append(trajectory)
    while sum(map(len, learner.window[1:])) >= window:
        learner.window.pop(0)
    joined = Trajectory.cat(learner.window)
    return joined[max(0, len(joined) - window) :]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
