"""Collecting a batch: sample under theta_old, score the pictures, value the states (Alg. 2, "generate").

Exploration (ours): a policy that is sure of its concept hardly ever draws anything else, and noise around it says next
to nothing about how to. So a share of the trajectories are sampled for a retain prompt of the same style and relabelled
with their forget prompt, as hindsight replay relabels goals (arXiv 1707.01495): the reward says what they are worth
there, and their log-probs stay those of the prompt that drew them, so the clip acts on the ratio to that.

Among processes each samples, scores and values its share; then all hold the whole batch. Prompts and seeds go by the
place in the batch, so it is the same batch whatever their number.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cgru import processes
from cgru.backbones.adapter import merged
from cgru.critic.film import FilmCritic
from cgru.critic.fit import values
from cgru.critic.frozen import FrozenCritic
from cgru.critic.views import SHRINKS, Critic, decoded_views
from cgru.mdp.rollout import rollout
from cgru.mdp.trajectory import Trajectory
from cgru.prompts import Prompt
from cgru.rewards.base import checked
from cgru.rl.problem import Problem
from cgru.seeds import child_random

SAMPLED = ("x", "log_prob", "seeds", "x0_hat")
"""Fields of a trajectory that a rollout makes, a row for each prompt."""


def collect(problem: Problem, *names: str | int, forget: int, retain: int = 0) -> Trajectory:
    """Sample trajectories of policy prompts, with log-probs under the current policy; `names` name the draw.

    Of the forget trajectories the first `explored(problem, forget)` explore.
    """
    kept = tuple(prompt for prompt in problem.prompts.retain if prompt.text in problem.rewarded)
    prompts = choose(problem, "forget", problem.prompts.policy, forget, *names)
    prompts += choose(problem, "retain", kept, retain, *names)
    others = counterparts(problem, prompts[: explored(problem, forget)], problem.prompts.retain, *names)
    return relabelled(problem, prompts, others, *names)


def counterparts(problem: Problem, prompts: list[str], pool: tuple[Prompt, ...], *names: str | int) -> list[str]:
    """For each forget prompt one of the pool with the same context (the same style, say), if any has it."""
    known = {prompt.text: prompt.context for prompt in (*problem.prompts.policy, *problem.prompts.critic)}
    order = child_random(problem.config.seed, "prompts", "explore", *names)
    everything = [prompt.text for prompt in pool]
    return [
        order.choice([prompt.text for prompt in pool if prompt.context == known[text]] or everything)
        for text in prompts
    ]


def relabelled(problem: Problem, prompts: list[str], others: list[str], *names: str | int) -> Trajectory:
    """Sample one trajectory for each prompt, the first ones under `others`, and label all with `prompts`."""
    trajectory = sampled(problem, [*others, *prompts[len(others) :]], *names)
    return replace(trajectory, cond=problem.encode(prompts)) if others else trajectory


def explored(problem: Problem, forget: int) -> int:
    """How many of `forget` trajectories explore."""
    return round(problem.config.sampling.explore * forget)


def sampled(problem: Problem, prompts: list[str], *names: str | int) -> Trajectory:
    """Sample one trajectory for each prompt."""
    kernel, device, guidance = problem.kernel, problem.backbone.device, problem.config.sampling.guidance
    cond = problem.encode(prompts)
    seeds = [problem.seed("rollout", *names, i) for i in range(len(prompts))]

    def drawn(some: slice) -> dict[str, Tensor]:
        with merged(problem.backbone.denoiser) if problem.config.sampling.merged else nullcontext():
            trajectory = rollout(
                problem.backbone,
                cond[some],
                seeds[some],
                kernel=kernel,
                guidance=guidance,
                batch_size=problem.sizes.rollout,
                keep_x0=problem.config.critic.kind not in ("none", "latent") and problem.config.critic.view == "clean",
            )
        return {name: value for name in SAMPLED if (value := getattr(trajectory, name)) is not None}

    rows: dict[str, Any] = dict(processes.spread(len(prompts), drawn))
    return Trajectory(
        time=kernel.timesteps.to(device),
        stochastic=kernel.stochastic.to(device),
        cond=cond,
        guidance=guidance,
        **rows,
    )


def choose(problem: Problem, kind: str, pool: tuple[Prompt, ...], count: int, *names: str | int) -> list[str]:
    """`count` prompts, each as often as any other, give or take one."""
    assert pool or not count, f"{count} {kind} prompts wanted from none"
    texts = [prompt.text for prompt in pool]
    order = child_random(problem.config.seed, "prompts", kind, *names)
    rounds = [order.sample(texts, len(texts)) for _ in range(math.ceil(count / max(len(texts), 1)))]
    return [text for texts in rounds for text in texts][:count]


@torch.no_grad()
def scored(problem: Problem, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its terminal reward r(x_0, c)."""
    size = problem.sizes.decode

    def rewards(some: slice) -> Tensor:
        found, part = [], trajectory[some]
        for start in range(0, len(part), size):
            images = problem.backbone.decode(part.final[start : start + size])
            found.append(checked(problem.reward, images, part.cond.prompts[start : start + size]))
        return torch.cat(found).to(trajectory.x.device)

    return replace(trajectory, reward=processes.spread(len(trajectory), rewards))


@torch.no_grad()
def viewed(problem: Problem, critic: Critic, trajectory: Trajectory) -> Tensor:
    """What the critic looks at, decoded once for values and updates alike; features where its tower is frozen."""
    size = critic.image_size if isinstance(critic, FilmCritic | FrozenCritic) else None
    batch, shrink = problem.sizes.decode, SHRINKS[problem.config.critic.decode]

    def decoded(some: slice) -> Tensor:
        part = trajectory[some]
        views = decoded_views(problem.backbone, part, critic.view, batch_size=batch, size=size, shrink=shrink)
        if not isinstance(critic, FrozenCritic):
            return views
        return critic.seen(views.flatten(0, 1), batch_size=problem.sizes.score).unflatten(0, views.shape[:2])

    if critic.view == "latent":  # nothing to decode: every process has the states
        return decoded(slice(None))
    return processes.spread(len(trajectory), decoded)


def valued(problem: Problem, critic: Critic, views: Tensor, trajectory: Trajectory) -> Trajectory:
    """The trajectory with V(x_t, c, t), from the critic as it is before it sees these rewards."""

    def found(some: slice) -> Tensor:
        return values(critic, views[some], trajectory[some], batch_size=problem.sizes.score)

    return replace(trajectory, value=processes.spread(len(trajectory), found))
