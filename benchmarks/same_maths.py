"""Is the fast loop the reference's maths, and does the host wait for the device: parts of benchmarks/epoch.py."""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from loops import Loop
from paper_loop import build, peft_lora, shortened, steadied
from torch import Tensor, nn

from cgru.backbones.base import pick_device
from cgru.backbones.sd import StableDiffusion
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan
from cgru.rl.collect import collect
from cgru.rl.state import Learner, Problem
from cgru.rl.update import Update, policy_step

AGREEMENT_PAIRS = 32


def first_ratio(update: Update) -> dict[str, float]:
    """|ratio - 1| in the first update, where the policy is still the one that sampled."""
    off = (update.log_ratio.double().exp() - 1).abs()
    return {"first_ratio_off_max": float(off.max()), "first_ratio_off_mean": float(off.mean())}


def agreement(options: argparse.Namespace) -> dict[str, Any]:
    """Relative error between policy gradients on the same pairs: ours, the reference's micro-batches, and float32."""
    loop = steadied(build(options))
    usual = _with_lora_of(loop, options)
    guided = loop.problem.config.sampling.guidance
    return {f"guidance {guidance:g}": _agreement(options, loop, usual, guidance) for guidance in (guided, 1.0)}


def compiled_agreement(options: argparse.Namespace, loop: Loop) -> dict[str, Any]:
    """The same for a compiled loop, with the guidance that its graphs are made for."""
    guidance = loop.problem.config.sampling.guidance
    return {f"guidance {guidance:g}": _agreement(options, loop, _with_lora_of(loop, options), guidance)}


def _with_lora_of(loop: Loop, options: argparse.Namespace) -> Loop:
    """The reference with the weights of a loop; those of the model are drawn alike."""
    usual = build(options, lora=peft_lora)
    for theirs, own in zip(usual.learner.parameters.values(), loop.learner.parameters.values(), strict=True):
        theirs.data.copy_(own.data)
    return usual


def _agreement(options: argparse.Namespace, loop: Loop, plain: Loop, guidance: float) -> dict[str, Any]:
    free = ("policy.trajectories=2", "policy.clip=10", "policy.gradient_norm=1e9", f"sampling.guidance={guidance}")
    loop, plain = (shortened(each, options.steps, *free) for each in (loop, plain))
    ours = loop.problem
    batch = collect(ours, 0, forget=2)
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, batch.log_prob.shape, generator=draw).to(batch.x) * 2 - 1
    batch, samples, steps = replace(batch, advantage=signs), *batch.policy_pairs()
    some = torch.randperm(len(samples), generator=draw)[:AGREEMENT_PAIRS]
    pairs, small = Plan(samples[some], steps[some]), replace(plain.problem, sizes=replace(ours.sizes, update=2))
    fast, first = gradient(ours, loop.learner.parameters, batch, pairs)
    usual, _ = gradient(small, plain.learner.parameters, batch, pairs)
    exact, _ = gradient(*in_float32(small), batch, pairs)
    return {
        "pairs": len(pairs),
        "ours_to_reference": _relative(fast, usual),
        "ours_to_fp32": _relative(fast, exact),
        "reference_to_fp32": _relative(usual, exact),
        "gradient_norm_fp32": float(exact.norm()),
        **first_ratio(first),
    }


def gradient(
    problem: Problem, parameters: dict[str, nn.Parameter], batch: Trajectory, plan: Plan
) -> tuple[Tensor, Update]:
    """The policy gradient of a plan, which moves nothing."""
    learner = Learner(parameters, torch.optim.SGD(parameters.values(), lr=0.0))
    update = policy_step(problem, learner, batch, plan, None, problem.generator("unused"))
    return torch.cat([p.grad.flatten().double() for p in parameters.values() if p.grad is not None]), update


def in_float32(problem: Problem) -> tuple[Problem, dict[str, nn.Parameter]]:
    """The same problem and LoRA with a denoiser in float32."""
    model = problem.backbone
    assert isinstance(model, StableDiffusion), "the gradients are compared before anything is compiled"
    exact = replace(model, denoiser=copy.deepcopy(model.denoiser).float(), dtype=torch.float32)
    parameters = {name: p for name, p in exact.denoiser.named_parameters() if p.requires_grad}
    return replace(problem, backbone=exact), parameters


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def waits(options: argparse.Namespace) -> dict[str, Any]:
    """How often the host waits for the device: numbers that do not grow are not in the loop."""
    if pick_device(options.device).type != "cuda":
        return {}
    loop, found = steadied(build(options)), {}
    for steps in (2, 4):
        short = shortened(loop, steps)
        problem, n = short.problem, short.problem.config.policy.trajectories
        batch = collect(problem, 0, forget=n)
        batch = replace(batch, advantage=torch.ones_like(batch.log_prob))
        plan = short.plans(batch, 0)[0]
        found[f"sampling, {steps} steps"] = _syncs(partial(collect, problem, 0, forget=n))
        found[f"update, {len(plan)} pairs"] = _syncs(partial(short.step, batch, plan))
    return found


def _syncs(work: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)
