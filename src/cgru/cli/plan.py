"""What a run is going to do: checked before anything is written, and counted and timed for `--dry-run`.

The estimate runs the loaded model for a moment: one micro-batch of each kind of work, as large as the run's own, times
how often it will come. It is an estimate: other programs, clocks and the first iterations' compilation are left out.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cgru.backbones.adapter import attach, detach
from cgru.backbones.base import exact_float32
from cgru.backbones.sd import StableDiffusion, resolve_source
from cgru.catalog import resolve
from cgru.config import RunConfig
from cgru.critic.frozen import FrozenCritic
from cgru.critic.views import SHRINKS
from cgru.mdp.trajectory import Conditioning
from cgru.pipeline.critic import HELD_OUT, build_untrained_critic
from cgru.pipeline.observer import SHOWN
from cgru.pipeline.reward import CLIP_B32, PICTURES, needs_heads
from cgru.pipeline.setting import Parts, Setting, all_prompts, build_setting, load_parts, resolve_prompts
from cgru.prompts import Prompt, PromptSets
from cgru.rewards.base import checked, parse_sum
from cgru.rewards.heads import load_tower

SETS = ("policy", "retain", "critic", "critic_retain", "validation_forget", "validation_retain", "reward")
VIEW = 224
"""Pixels: no critic looks at larger pictures."""
MOMENT = 0.3
"""Seconds that each kind of work is measured for, after a first call that is not counted."""


def check_words(config: RunConfig) -> None:
    """Refuse what would stop a run later, as far as it shows without its model: names, files, prompts."""
    for _, name in parse_sum(config.reward.name):
        resolve("reward", name)
    resolve_source(config.model)
    resolve_prompts(config)


def prepare_parts(config: RunConfig) -> Parts:
    """Load model and prompts, and refuse what would stop a run later; cheap checks first, nothing is written."""
    check_words(config)
    parts = load_parts(config)
    if isinstance(parts.backbone, StableDiffusion):
        check_length(parts.prompts, parts.backbone)
    if needs_heads(config, parts.concept):
        load_tower(CLIP_B32, device="cpu")  # a run reads it after its folder is made; without it there should be none
    return parts


def prepare_setting(parts: Parts) -> Setting:
    """Everything the estimate runs; a reward whose heads the run has yet to train is stood in for by `clip`."""
    config = parts.config
    if needs_heads(config, parts.concept):
        config = replace(config, reward=replace(config.reward, name="clip"))
    return build_setting(config, parts=parts)


def check_length(prompts: PromptSets, backbone: StableDiffusion) -> None:
    """Refuse prompts that the model would read only in part."""
    texts = [prompt.text for prompt in all_prompts(prompts)]
    lengths = [len(ids) for ids in backbone.tokenizer(texts, verbose=False)["input_ids"]]
    long = [(text, n) for text, n in zip(texts, lengths, strict=True) if n > backbone.max_tokens]
    if long:
        text, n = long[0]
        raise ValueError(
            f"{len(long)} of {len(texts)} prompts are over the model's limit, first {text[:60]!r} with {n} tokens; "
            f"allowed: {backbone.max_tokens} tokens, start and end included. Shorten or remove them."
        )


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
    config: RunConfig, horizon: int, noisy: int, *, trains_heads: bool = False, has_detector: bool = True
) -> dict[str, Work]:
    """The work of each stage; the kernel has `horizon` denoising steps, `noisy` of which can be learned from."""
    critic, policy, retention, prompts = config.critic, config.policy, config.retention, config.prompts
    has_critic, decodes = critic.kind != "none", critic.kind not in ("none", "latent")
    found: dict[str, Work] = {}
    if trains_heads:
        found["1-reward"] = Work(denoise=2 * PICTURES * horizon, decode=2 * PICTURES, reward=2 * PICTURES)
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
    bank = policy.updates * policy.passes * retention.batch if retention.kl else 0
    one = Work(
        denoise=n * horizon + (pairs if retention.kl_forget else 0),
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


def _steps(config: RunConfig, noisy: int) -> int:
    """Steps of each trajectory that an iteration's updates learn from."""
    return max(1, round(config.policy.step_fraction * noisy))


def _looked_at(config: RunConfig, horizon: int, noisy: int) -> int:
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
    time_of, cond = torch.zeros(len(views), device=x.device, dtype=torch.long), _texts(setting, len(views))

    def value(shown: Tensor) -> Tensor:
        out: Tensor = critic(shown, time_of[: len(shown)], cond[: len(shown)])
        return out

    with torch.no_grad():
        forward = _seconds(lambda k: value(seen(views[:k])), len(views), len(views))
    return {"value": forward, "fit": _seconds(lambda k: value(kept[:k]).sum().backward(), len(views), len(views))}


def _denoise(setting: Setting, n: int, *, learns: bool) -> None:
    problem = setting.problem
    x = torch.randn(n, *problem.backbone.latent_shape, device=problem.backbone.device)
    times = torch.full((n,), 500, device=x.device)
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


def describe_plan(parts: Parts) -> dict[str, Any]:
    """Everything `--dry-run` says, as one record: plan, counts, and the estimate of time and memory."""
    config, setting = parts.config, prepare_setting(parts)
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
        "concept": config.concept,
        "kind": parts.concept.kind if parts.concept else "text",
        "model": config.model,
        "device": str(parts.backbone.device),
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
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
