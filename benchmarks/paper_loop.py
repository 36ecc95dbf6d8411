"""The loop of `paper-object` around random weights: model, reward, critic and LoRA of the real classes and sizes.

Built as `cgru.pipeline.setting` builds it, but for the weights, which there come from files or the hub.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from loops import Loop
from sd15 import CLIP_MEAN, CLIP_STD, random_clip_b32, random_sd15
from torch import nn

from cgru.backbones.adapter import attach
from cgru.backbones.base import parse_dtype, pick_device
from cgru.config import RunConfig, override
from cgru.critic import build_critic
from cgru.critic.tower import Tower as CriticTower
from cgru.pipeline.setting import all_prompts, resolve_prompts
from cgru.pipeline.sizes import sized
from cgru.presets import preset
from cgru.rewards.concept import ConceptReward
from cgru.rewards.heads import ClassHeads, Tower
from cgru.rl.problem import Problem, Sizes, make_learner

CONCEPT = "Dogs"


def settings(options: argparse.Namespace) -> RunConfig:
    """The preset, with what the options change."""
    changes = [f"dtype={options.dtype}", f"sampling.steps={options.steps}", f"policy.micro_batch={options.update}"]
    return override(preset("paper-object", CONCEPT), [*changes, f"policy.trajectories={options.trajectories}"])


def fast_settings(config: RunConfig) -> RunConfig:
    """The same epoch with what the preset `fast` leaves out."""
    fast = preset("fast", CONCEPT, model=config.model)
    policy = replace(config.policy, step_fraction=fast.policy.step_fraction, step_choice=fast.policy.step_choice)
    return replace(config, policy=policy, critic=replace(config.critic, decode=fast.critic.decode))


def build(options: argparse.Namespace, *changes: str, sizes: Sizes | None = None) -> Loop:
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
    return Loop(problem, make_learner(problem, nudged(problem), critic), by_timestep=sizes is not None)


def nudged(problem: Problem) -> dict[str, nn.Parameter]:
    """A LoRA as after some updates: with B at zero, A would have no gradient."""
    policy, generator = problem.config.policy, torch.Generator().manual_seed(1)
    parameters = attach(problem.backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets=policy.targets, seed=0)
    for parameter in parameters.values():
        parameter.data += 1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return parameters


def random_reward(config: RunConfig, device: torch.device, *, tiny: bool) -> ConceptReward:
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
        text_width=int(problem.encode([""]).embeddings.shape[-1]),
        dtype=problem.backbone.dtype,
    ).to(problem.backbone.device)


def shortened(loop: Loop, steps: int, *changes: str) -> Loop:
    """The same with fewer steps."""
    problem = loop.problem
    config = override(problem.config, [f"sampling.steps={steps}", *changes])
    kernel = problem.backbone.kernel(steps, eta=config.sampling.eta)
    return replace(loop, problem=replace(problem, kernel=kernel, config=config))
