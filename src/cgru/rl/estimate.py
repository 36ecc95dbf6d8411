"""What a policy-gradient run is going to do, counted and timed for `--dry-run`.

The estimate runs the loaded model for a moment: one micro-batch of each kind of work, as large as the run's own, times
how often it will come. It is an estimate: other programs, clocks and the first iterations' compilation are left out.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cgru.backbones.base import exact_float32
from cgru.config import RLConfig
from cgru.critic.frozen import FrozenCritic
from cgru.critic.views import SHRINKS
from cgru.lora.train import attach, detach
from cgru.mdp.trajectory import Conditioning
from cgru.prompts import Prompt, PromptSets
from cgru.rewards.base import checked
from cgru.rl.build import Prepared, Setting
from cgru.rl.callbacks import SHOWN
from cgru.rl.critic_stage import HELD_OUT, build_untrained_critic
from cgru.rl.reward_stage import PICTURES, drawn_labels, needs_heads

SETS = ("policy", "retain", "critic", "critic_retain", "validation_forget", "validation_retain", "reward")
VIEW = 224
"""Pixels: no critic looks at larger pictures."""
MOMENT = 0.3
"""Seconds that each kind of work is measured for, after a first call that is not counted."""


@dataclass(frozen=True)
class Work:
    """How much of each kind of work a stage is, in samples."""

    denoise: int = 0
    """Denoiser calls forward, guidance inside."""
    update: int = 0
    """Denoiser calls forward and backward: (trajectory, step) pairs."""
    decode: int = 0
    """Latents turned into pictures."""
    reward: int = 0
    """Pictures scored."""
    value: int = 0
    """Critic passes forward."""
    fit: int = 0
    """Critic passes forward and backward."""


def stages(
    config: RLConfig, horizon: int, noisy: int, *, trains_heads: bool = False, has_detector: bool = True
) -> dict[str, Work]:
    """The work of each stage; the kernel has `horizon` denoising steps, `noisy` of which can be learned from."""
    critic, policy, retention, prompts = config.critic, config.policy, config.retention, config.prompts
    has_critic, decodes = critic.kind != "none", critic.kind not in ("none", "latent")
    found: dict[str, Work] = {}
    if trains_heads:
        drawn = PICTURES * len(drawn_labels(config))  # reading a folder is not counted
        found["1-reward"] = Work(denoise=drawn * horizon, decode=drawn, reward=drawn)
    if has_critic:
        n = critic.trajectories
        views = n * horizon * decodes // SHRINKS[critic.decode] ** 2
        fitted = round((n - max(1, n // HELD_OUT)) * horizon * critic.epochs) if n else 0
        found["2-critic"] = Work(n * horizon, 0, n + views, n, n * horizon, fitted)
    if retention.kl:
        found["bank"] = Work(denoise=2 * retention.bank * horizon)
    n, steps, looked = policy.trajectories, _steps(config, noisy), _looked_at(config, horizon, noisy)
    shown = n * looked // SHRINKS[critic.decode] ** 2 if decodes else 0  # in whole pictures
    pairs = max(n, policy.window) * steps * policy.passes
    explored = round(config.sampling.explore * (n - round(retention.share * n)))  # predicted for two prompts
    is_again = config.sampling.explore_ratio == "own" or (decodes and critic.view == "clean")
    again = explored * (horizon if policy.step_choice == "each" else noisy) if is_again else 0
    bank = policy.updates * policy.passes * retention.batch if retention.kl else 0
    one = Work(
        denoise=n * horizon + again + (pairs if retention.kl_forget else 0),
        update=pairs + bank,
        decode=n + shown,
        reward=n,
        value=n * looked * has_critic,
        fit=critic.online_updates * min(critic.batch, n * looked) * has_critic,
    )
    found["3-policy"] = Work(**{name: policy.iterations * count for name, count in vars(one).items()})
    strips = math.ceil(policy.iterations / config.samples_every) + 1 if config.samples_every else 0
    looks = (
        math.ceil(policy.iterations / config.watch.every) * 2 * prompts.validation
        if has_detector and config.watch.every
        else 0
    )
    seen = looks + strips * SHOWN
    found["looks"] = Work(denoise=seen * horizon, decode=seen, reward=looks // 2)
    return found


def _steps(config: RLConfig, noisy: int) -> int:
    """Steps of each trajectory that an iteration's updates learn from."""
    return max(1, round(config.policy.step_fraction * noisy))


def _looked_at(config: RLConfig, horizon: int, noisy: int) -> int:
    """States of each trajectory that the critic sees in an iteration."""
    return horizon if config.policy.step_choice == "each" else _steps(config, noisy)


def measure(setting: Setting) -> dict[str, float]:
    """Seconds per sample of each kind of work on this machine, with the run's own sizes, LoRA on."""
    problem = setting.problem
    policy, sizes = problem.config.policy, problem.sizes
    attach(problem.backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets=policy.targets, seed=0)
    try:
        with exact_float32():
            found = {
                "denoise": _seconds(lambda n: _denoise(setting, n, learns=False), sizes.rollout, policy.trajectories),
                "update": _seconds(lambda n: _denoise(setting, n, learns=True), sizes.update, policy.trajectories * 10),
            }
            return found | _measure_pictures(setting)
    finally:
        detach(problem.backbone.denoiser)


def _measure_pictures(setting: Setting) -> dict[str, float]:
    problem = setting.problem
    n = min(problem.sizes.decode, problem.config.policy.trajectories)
    x = torch.randn(n, *problem.backbone.latent_shape, device=problem.backbone.device)
    with torch.no_grad():
        images = problem.backbone.decode(x)
        decode = _seconds(lambda k: problem.backbone.decode(x[:k]), n, n)
        prompts = [problem.prompts.policy[0].text] * n
        reward = _seconds(lambda k: checked(problem.reward, images[:k], prompts[:k]), n, n)
    return {"decode": decode, "reward": reward} | _measure_critic(setting, x, images)


def _measure_critic(setting: Setting, x: Tensor, images: Tensor) -> dict[str, float]:
    problem = setting.problem
    if problem.config.critic.kind == "none":
        return {"value": 0.0, "fit": 0.0}
    critic = build_untrained_critic(setting, 0.0)
    views = x if problem.config.critic.kind == "latent" else images

    def seen(pictures: Tensor) -> Tensor:
        return critic.seen(pictures, batch_size=len(pictures)) if isinstance(critic, FrozenCritic) else pictures

    kept = seen(views)
    time_of, cond = problem.kernel.timesteps[-1:].to(x.device).expand(len(views)), _texts(setting, len(views))

    def value(shown: Tensor) -> Tensor:
        out: Tensor = critic(shown, time_of[: len(shown)], cond[: len(shown)])
        return out

    with torch.no_grad():
        forward = _seconds(lambda k: value(seen(views[:k])), len(views), len(views))
    return {"value": forward, "fit": _seconds(lambda k: value(kept[:k]).sum().backward(), len(views), len(views))}


def _denoise(setting: Setting, n: int, *, learns: bool) -> None:
    problem = setting.problem
    x = torch.randn(n, *problem.backbone.latent_shape, device=problem.backbone.device)
    times = problem.kernel.timesteps[:1].to(x.device).expand(n)
    with torch.set_grad_enabled(learns):
        out = problem.backbone.predict(x, times, _texts(setting, n), guidance=problem.config.sampling.guidance)
        if learns:
            out.square().mean().backward()


def _texts(setting: Setting, n: int) -> Conditioning:
    return setting.problem.encode([setting.problem.prompts.policy[0].text] * n)


def _seconds(work: Callable[[int], object], size: int, most: int) -> float:
    n = max(1, min(size, most))
    work(n)
    _wait()
    begun, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - begun < MOMENT:
        work(n)
        _wait()
        calls += 1
    return (time.perf_counter() - begun) / (calls * n)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe_plan(prepared: Prepared) -> dict[str, Any]:
    """Counts, and the estimate of time and memory."""
    parts = prepared.parts
    config, setting = parts.config, prepared.setting
    problem = setting.problem
    trains_heads = needs_heads(config, parts.concept)
    work = stages(
        config,
        len(problem.kernel),
        int(problem.kernel.stochastic.sum()),
        trains_heads=trains_heads,
        has_detector=setting.detector is not None,
    )
    costs = measure(setting)
    seconds = {stage: sum(costs[kind] * count for kind, count in vars(done).items()) for stage, done in work.items()}
    return {
        "reward": config.reward.name + (" (the run trains its head first)" if trains_heads else ""),
        "reward_range": [problem.reward.low, problem.reward.high],
        "detector": setting.detector.lineage["name"] if setting.detector else None,
        "prompts": {
            name: {"count": len(found), "example": found[0].text}
            for name in SETS
            if (found := _set(parts.prompts, name))
        },
        "stages": {stage: dict(vars(done)) for stage, done in work.items()},
        "trajectories": config.policy.iterations * config.policy.trajectories,
        "updates": config.policy.iterations * config.policy.updates * config.policy.passes,
        "seconds_per_sample": costs,
        "seconds": seconds,
        "seconds_in_all": sum(seconds.values()),
        "memory_gib": round(_peak_memory() + _stored(setting), 2),
    }


def _stored(setting: Setting) -> float:
    """GiB of what an iteration keeps: states and x̂0 in float32, and the critic's views of them as bytes."""
    problem = setting.problem
    policy, critic, steps = problem.config.policy, problem.config.critic, len(problem.kernel)
    latents = 2 * problem.dimensions * (steps + 1) * max(policy.trajectories, policy.window)
    looked = _looked_at(problem.config, steps, int(problem.kernel.stochastic.sum()))
    states = max(policy.trajectories * looked, critic.trajectories * steps)  # of an iteration, or of the warm start
    with torch.no_grad():
        side = problem.backbone.decode(torch.zeros(1, *problem.backbone.latent_shape, device=problem.backbone.device))
    views = 0 if critic.kind in ("none", "latent") else states * 3 * min(VIEW, side.shape[-1]) ** 2
    return (4 * latents + views) / 2**30


def _peak_memory() -> float:
    """GiB at most in use so far: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _set(prompts: PromptSets, name: str) -> tuple[Prompt, ...]:
    table: dict[str, tuple[Prompt, ...]] = vars(prompts)
    return table[name]
