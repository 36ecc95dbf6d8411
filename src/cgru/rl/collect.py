"""Collect a batch: sample under theta_old, score the images, evaluate the critic (Alg. 2, "generate").

Exploration (ours, method `anchored`): a policy that is sure of its concept hardly ever draws anything else, and the
noise around it reveals little about how to. A share of the trajectories is therefore sampled for a retain prompt of the
same style and relabelled with the forget prompt, as hindsight replay relabels goals (arXiv 1707.01495). Of these,

- states, actions and pictures come from the prompt that was sampled (`Trajectory.sampled_for`);
- reward, x̂0 and so V are those of the forget prompt: V stays a function of the state and prompt it is given;
- log-probs under theta_old are those of either (`sampling.explore_ratio`): of the sampled prompt, clipping acts on the
  ratio between the two prompts; of the forget prompt, on that between two policies, as for any other trajectory.

With several processes, each samples, scores and evaluates its share, and the results are gathered in all. Prompts and
seeds depend on the position in the batch only, so the batch is the same for any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cgru import distributed
from cgru.critic.film import FilmCritic
from cgru.critic.fit import values
from cgru.critic.frozen import FrozenCritic
from cgru.critic.views import SHRINKS, Critic, decoded_views
from cgru.lora.train import merged
from cgru.mdp.kernel import DDIMKernel, ReverseKernel
from cgru.mdp.rollout import rollout
from cgru.mdp.trajectory import Trajectory
from cgru.prompts import Prompt
from cgru.rewards.base import checked
from cgru.rl.batches import Plan, micro_batches
from cgru.rl.state import Problem
from cgru.seeds import child_random

SAMPLED = ("x", "log_prob", "seeds", "x0_hat")
"""Fields of a trajectory that a rollout fills, one row per prompt."""


def collect(problem: Problem, *names: str | int, forget: int, retain: int = 0) -> Trajectory:
    """Sample trajectories of policy prompts with log-probs under the current policy; `names` seed the random choices.

    The first `explored(problem, forget)` of the forget trajectories explore.
    """
    if problem.config.sampling.pairs:
        return paired(problem, *names, count=forget)
    # Retain prompts without a reward of their own cannot be scored and stay out of the batch.
    kept = tuple(prompt for prompt in problem.prompts.retain if prompt.text in problem.rewarded)
    prompts = choose(problem, "forget", problem.prompts.policy, forget, *names)
    prompts += choose(problem, "retain", kept, retain, *names)
    others = counterparts(problem, prompts[: explored(problem, forget)], problem.prompts.retain, *names)
    # Where steps are chosen, only those with noise are looked at.
    return relabelled(problem, prompts, others, *names, noisy_only=problem.config.policy.step_choice != "each")


def counterparts(problem: Problem, prompts: list[str], pool: tuple[Prompt, ...], *names: str | int) -> list[str]:
    """Draw for each forget prompt one prompt of the pool with the same context (e.g. style), or any if none has it."""
    known = {prompt.text: prompt.context for prompt in (*problem.prompts.policy, *problem.prompts.critic)}
    order = child_random(problem.config.seed, "prompts", "explore", *names)
    everything = [prompt.text for prompt in pool]
    return [
        order.choice([prompt.text for prompt in pool if prompt.context == known[text]] or everything)
        for text in prompts
    ]


def relabelled(
    problem: Problem, prompts: list[str], others: list[str], *names: str | int, noisy_only: bool = False
) -> Trajectory:
    """Sample one trajectory per prompt, using `others` in place of the first prompts, and label all with `prompts`."""
    trajectory = sampled(problem, [*others, *prompts[len(others) :]], *names)
    if not others:
        return trajectory
    trajectory = replace(trajectory, cond=problem.encode(prompts), sampled_for=trajectory.cond.prompts)
    return under_own_prompt(problem, trajectory, len(others), noisy_only=noisy_only)


@torch.no_grad()
def under_own_prompt(problem: Problem, trajectory: Trajectory, count: int, *, noisy_only: bool) -> Trajectory:
    """Predict the states of the first `count` trajectories again, for the prompt they are learned for.

    x̂0 becomes what that prompt implies (NaN at steps left out by `noisy_only`) and, with `sampling.explore_ratio=own`,
    so do the log-probs, in the batches of updates so that the first ratio is 1.
    """
    is_own = problem.config.sampling.explore_ratio == "own"
    if trajectory.x0_hat is None and not is_own:
        return trajectory
    looked_at = trajectory.stochastic if noisy_only else torch.ones_like(trajectory.stochastic)
    steps = looked_at.nonzero().flatten().cpu()
    samples = torch.arange(count)

    def predicted(some: slice) -> dict[str, Tensor]:
        mine = samples[some]
        pairs = Plan(mine.repeat_interleave(len(steps)), steps.repeat(len(mine)))
        log_prob, x0 = [], []
        for part in micro_batches(pairs, problem.sizes.update):
            at = trajectory.steps(part.sample_ids, part.step_ids)
            prediction = problem.backbone.predict(at.x, at.time, at.cond, guidance=trajectory.guidance)
            log_prob.append(problem.kernel.step(prediction, at.x, at.index).log_prob(at.next_x))
            x0.append(problem.kernel.x0(prediction, at.x, at.index))
        found = {"log_prob": torch.cat(log_prob), "x0_hat": torch.cat(x0)}
        return {name: rows.unflatten(0, (len(mine), len(steps))) for name, rows in found.items()}

    found = distributed.spread(count, predicted)
    log_prob, x0_hat, at = trajectory.log_prob, trajectory.x0_hat, steps.to(trajectory.x.device)
    if is_own:
        log_prob = log_prob.clone()
        log_prob[:count, at] = found["log_prob"]
    if x0_hat is not None:
        x0_hat = x0_hat.clone()
        x0_hat[:count] = torch.nan
        x0_hat[:count, at] = found["x0_hat"]
    return replace(trajectory, log_prob=log_prob, x0_hat=x0_hat)


def shuffled(trajectory: Trajectory, generator: torch.Generator) -> Trajectory:
    """Exchange rewards at random among the relabelled trajectories (`sampling.explore_credit=shuffled`)."""
    assert trajectory.reward is not None
    theirs = trajectory.relabelled.nonzero().flatten()
    reward = trajectory.reward.clone()
    reward[theirs] = reward[theirs[torch.randperm(len(theirs), generator=generator)]]
    return replace(trajectory, reward=reward)


def explored(problem: Problem, forget: int) -> int:
    """Return how many of `forget` trajectories explore."""
    return round(problem.config.sampling.explore * forget)


def paired(problem: Problem, *names: str | int, count: int) -> Trajectory:
    """Sample `count` trajectories, 2i and 2i + 1 alike but for the sign of the noise in one step (`sampling.pairs`)."""
    kernel = problem.kernel
    assert isinstance(kernel, DDIMKernel), "checked with the sampling: rl.build"
    noisy = kernel.stochastic.nonzero().flatten().tolist()
    step = child_random(problem.config.seed, "noisy step", *names).choice(noisy)
    prompts = [prompt for prompt in choose(problem, "forget", problem.prompts.policy, count // 2, *names) for _ in "+-"]
    seeds = [problem.seed("rollout", *names, i // 2) for i in range(count)]
    return _drawn(problem, prompts, seeds, kernel.only(step), mirrored=[i % 2 == 1 for i in range(count)])


def sampled(problem: Problem, prompts: list[str], *names: str | int) -> Trajectory:
    """Sample one trajectory per prompt."""
    seeds = [problem.seed("rollout", *names, i) for i in range(len(prompts))]
    return _drawn(problem, prompts, seeds, problem.kernel)


def _drawn(
    problem: Problem, prompts: list[str], seeds: list[int], kernel: ReverseKernel, mirrored: Sequence[bool] = ()
) -> Trajectory:
    device, guidance = problem.backbone.device, problem.config.sampling.guidance
    cond = problem.encode(prompts)

    def drawn(some: slice) -> dict[str, Tensor]:
        # With the LoRA merged into the weights, sampling costs no extra matrix products.
        with merged(problem.backbone.denoiser) if problem.config.sampling.merged else nullcontext():
            trajectory = rollout(
                problem.backbone,
                cond[some],
                seeds[some],
                kernel=kernel,
                guidance=guidance,
                batch_size=problem.sizes.rollout,
                mirrored=mirrored[some],
                keep_x0=problem.config.critic.kind not in ("none", "latent") and problem.config.critic.view == "clean",
            )
        return {name: value for name in SAMPLED if (value := getattr(trajectory, name)) is not None}

    rows: dict[str, Any] = dict(distributed.spread(len(prompts), drawn))
    return Trajectory(
        time=kernel.timesteps.to(device),
        stochastic=kernel.stochastic.to(device),
        cond=cond,
        guidance=guidance,
        **rows,
    )


def choose(problem: Problem, kind: str, pool: tuple[Prompt, ...], count: int, *names: str | int) -> list[str]:
    """Draw `count` prompts so that the numbers of times two prompts appear differ by at most one."""
    assert pool or not count, f"{count} {kind} prompts wanted from none"
    texts = [prompt.text for prompt in pool]
    order = child_random(problem.config.seed, "prompts", kind, *names)
    # Whole shuffled rounds of the pool, the last one cut short.
    rounds = [order.sample(texts, len(texts)) for _ in range(math.ceil(count / max(len(texts), 1)))]
    return [text for texts in rounds for text in texts][:count]


@torch.no_grad()
def scored(problem: Problem, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with its terminal reward r(x_0, c)."""
    size = problem.sizes.decode

    def rewards(some: slice) -> Tensor:
        found, part = [], trajectory[some]
        for start in range(0, len(part), size):
            images = problem.backbone.decode(part.final[start : start + size])
            found.append(checked(problem.reward, images, part.cond.prompts[start : start + size]))
        return torch.cat(found).to(trajectory.x.device)

    return replace(trajectory, reward=distributed.spread(len(trajectory), rewards))


@torch.no_grad()
def viewed(problem: Problem, critic: Critic, trajectory: Trajectory) -> Tensor:
    """Return the critic's inputs, decoded once for evaluation and training; for a frozen tower, its features."""
    size, resize = None, None
    if isinstance(critic, FilmCritic | FrozenCritic):
        size, resize = critic.image_size, critic.resized
    batch, shrink = problem.sizes.decode, SHRINKS[problem.config.critic.decode]

    def decoded(some: slice) -> Tensor:
        part = trajectory[some]
        views = decoded_views(
            problem.backbone, part, critic.view, batch_size=batch, size=size, resize=resize, shrink=shrink
        )
        if not isinstance(critic, FrozenCritic):
            return views
        return critic.seen(views.flatten(0, 1), batch_size=problem.sizes.score).unflatten(0, views.shape[:2])

    if critic.view == "latent":
        # Nothing to decode, and every process already holds the states.
        return decoded(slice(None))
    return distributed.spread(len(trajectory), decoded)


def valued(problem: Problem, critic: Critic, views: Tensor, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with V(x_t, c, t) from the critic before it is trained on these rewards."""

    def found(some: slice) -> Tensor:
        return values(critic, views[some], trajectory[some], batch_size=problem.sizes.score)

    return replace(trajectory, value=distributed.spread(len(trajectory), found))
