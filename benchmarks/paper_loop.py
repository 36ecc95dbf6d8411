"""The loop of `paper-object` around random weights: model, reward, critic and LoRA of the real classes and sizes.

Built as `cgru.rl.build` builds it, but for the weights, which there come from files or the hub.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from loops import Loop
from peft import LoraConfig
from sd15 import CLIP_MEAN, CLIP_STD, random_clip_b32, random_sd15
from torch import nn

from cgru.backbones.base import parse_dtype, pick_device
from cgru.config import RLConfig, as_rl, override
from cgru.critic import build_critic
from cgru.critic.film import text_width
from cgru.critic.tower import Tower as CriticTower
from cgru.fast.fixed_batch import steady_backbone
from cgru.lora.train import UNET_TARGETS, attach
from cgru.presets import preset
from cgru.rewards.concept import ConceptReward
from cgru.rewards.heads import ClassHeads, Tower
from cgru.rl.batch_size import sized
from cgru.rl.build import all_prompts, resolve_prompts
from cgru.rl.state import Problem, Sizes, make_learner

CONCEPT = "Dogs"
LoraMaker = Callable[[Problem], dict[str, nn.Parameter]]


def settings(options: argparse.Namespace) -> RLConfig:
    """The preset, with what the options change."""
    changes = [f"dtype={options.dtype}", f"sampling.steps={options.steps}", f"policy.micro_batch={options.update}"]
    return override(as_rl(preset("paper-object", CONCEPT)), [*changes, f"policy.trajectories={options.trajectories}"])


def fast_settings(config: RLConfig) -> RLConfig:
    """The same epoch with what the preset `fast` leaves out."""
    fast = as_rl(preset("fast", CONCEPT, model=config.model))
    policy = replace(config.policy, step_fraction=fast.policy.step_fraction, step_choice=fast.policy.step_choice)
    return replace(config, policy=policy, critic=replace(config.critic, decode=fast.critic.decode))


def our_lora(problem: Problem) -> dict[str, nn.Parameter]:
    """A LoRA as runs have it."""
    policy = problem.config.policy
    return attach(problem.backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets=policy.targets, seed=0)


def peft_lora(problem: Problem) -> dict[str, nn.Parameter]:
    """A LoRA as DDPO implementations have it: peft's, in float32, and so are its products."""
    policy = problem.config.policy
    network: Any = problem.backbone.denoiser  # diffusers' mixin methods are not part of nn.Module
    targets = UNET_TARGETS.get(policy.targets, policy.targets)
    network.add_adapter(LoraConfig(r=policy.rank, lora_alpha=policy.alpha, target_modules=targets))
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
    return parameters


def build(options: argparse.Namespace, *changes: str, sizes: Sizes | None = None, lora: LoraMaker = our_lora) -> Loop:
    """A loop with model, reward, LoRA and critic of its own; None sizes it as a run on this machine is sized."""
    config, device = override(settings(options), changes), pick_device(options.device)
    model = random_sd15(device, parse_dtype(options.dtype), tiny=options.tiny)
    backbone, chosen = sized(config, model, sizes)
    problem = Problem(
        backbone=backbone,
        kernel=backbone.kernel(config.sampling.steps, eta=config.sampling.eta),
        reward=random_reward(config, device, tiny=options.tiny),
        prompts=resolve_prompts(config)[1],
        config=config,
        sizes=replace(chosen, decode=options.decode or chosen.decode) if sizes is None else chosen,
    )
    problem.encode([prompt.text for prompt in all_prompts(problem.prompts)])
    critic = random_critic(problem, tiny=options.tiny)
    return Loop(problem, make_learner(problem, nudged(lora(problem)), critic), by_timestep=sizes is not None)


def nudged(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """A LoRA as after some updates: with B at zero, A would have no gradient."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters.values():
        parameter.data += 1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return parameters


def random_reward(config: RLConfig, device: torch.device, *, tiny: bool) -> ConceptReward:
    """The paper's: CLIP ViT-B/32 with a class head."""
    network, labels = random_clip_b32(0, tiny=tiny), (CONCEPT, "other")
    lineage = {"name": "random", "weights": [], "started_from": []}
    tower = Tower(network, image_size=network.config.image_size, mean=CLIP_MEAN, std=CLIP_STD, lineage=lineage)
    heads = ClassHeads(tower, {"object": nn.Linear(tower.width, len(labels))}, {"object": labels}).to(device)
    return ConceptReward((heads,), "object", (CONCEPT,), scale=config.reward.scale)


def random_critic(problem: Problem, *, tiny: bool) -> nn.Module:
    """The paper's: CLIP ViT-B/32 with FiLM."""
    config = problem.config.critic
    return build_critic(
        config.kind,
        config.head,
        config.view,
        tower=CriticTower(random_clip_b32(1, tiny=tiny), CLIP_MEAN, CLIP_STD),
        scale=problem.reward.high - problem.reward.low,
        prior=5.0,
        latent_shape=problem.backbone.latent_shape,
        text_width=text_width(problem.encode([""])),
        dtype=problem.backbone.dtype,
    ).to(problem.backbone.device)


def shortened(loop: Loop, steps: int, *changes: str) -> Loop:
    """The same with fewer steps."""
    problem = loop.problem
    config = override(problem.config, [f"sampling.steps={steps}", *changes])
    kernel = problem.backbone.kernel(steps, eta=config.sampling.eta)
    return replace(loop, problem=replace(problem, kernel=kernel, config=config))


def steadied(loop: Loop) -> Loop:
    """In half precision with predictions of one shape, as a run has them."""
    problem, sizes = loop.problem, loop.problem.sizes
    if problem.backbone.dtype == torch.float32:
        return loop
    steady = steady_backbone(problem.backbone, batch=sizes.update, decode_batch=sizes.decode)
    return replace(loop, problem=replace(problem, backbone=steady))
