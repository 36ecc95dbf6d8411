"""A tiny policy problem: the tiny Stable Diffusion (4×8×8 latents), a reward of brightness, a handful of prompts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.config import RLConfig, override
from cgru.critic import build_critic
from cgru.critic.film import FilmCritic
from cgru.critic.frozen import FrozenCritic
from cgru.critic.tower import Tower
from cgru.lora.train import attach
from cgru.prompts import Prompt, PromptSets
from cgru.rl.state import Learner, Problem, Sizes, make_learner

TINY = ["sampling.steps=3", "policy.trajectories=4", "policy.updates=2", "critic.kind=none", "policy.advantage=batch"]


@dataclass
class Brightness:
    """Mean brightness, 0 to 1."""

    low: float = 0.0
    high: float = 1.0
    lineage: dict[str, Any] = field(default_factory=lambda: {"name": "brightness", "weights": [], "started_from": []})

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return images.mean((1, 2, 3))


def prompts(*texts: str) -> tuple[Prompt, ...]:
    return tuple(Prompt(text, "", "") for text in texts)


@cache
def loaded(folder: Path, dtype: str) -> StableDiffusion:
    return load_stable_diffusion(folder, device="cpu", dtype=dtype)


def fresh_model(folder: Path, dtype: str = "fp32") -> StableDiffusion:
    """A denoiser of its own around shared parts, which nobody changes: much faster than loading."""
    return replace(loaded(folder, dtype), denoiser=copy.deepcopy(loaded(folder, dtype).denoiser))


def tiny_problem(folder: Path, *settings: str, sizes: Sizes | None = None) -> Problem:
    """A problem without a LoRA yet."""
    config = override(RLConfig(concept="dogs", model=str(folder)), [*TINY, *settings])
    backbone = fresh_model(folder, config.dtype)
    sets = PromptSets(
        reward=(),
        critic=prompts("a critic"),
        critic_retain=(),
        policy=prompts("a dog", "dogs", "two dogs"),
        retain=prompts("a cat", "trees"),
        validation_forget=(),
        validation_retain=(),
    )
    return Problem(
        backbone=backbone,
        kernel=backbone.kernel(config.sampling.steps, eta=1.0, noisy_steps=config.sampling.noisy_steps or None),
        reward=Brightness(),
        prompts=sets,
        config=config,
        sizes=sizes or Sizes(rollout=4, update=64, decode=8, score=64),
    )


def tiny_learner(problem: Problem, *, seed: int = 0) -> Learner:
    """A learner with a fresh LoRA on the problem's model."""
    policy = problem.config.policy
    parameters = attach(problem.backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets="attention", seed=seed)
    return make_learner(problem, parameters, None)


def tiny_film(problem: Problem) -> FilmCritic | FrozenCritic:
    """The critic that the problem's config names, on a random tower of 8 px and one layer; the same each time."""
    config = problem.config.critic
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, image_size=8, patch_size=4))
    critic = build_critic(
        config.kind,
        config.head,
        config.view,
        tower=Tower(network.eval(), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        scale=1.0,
        prior=0.4,
        latent_shape=problem.backbone.latent_shape,
        text_width=16,
        frozen=config.tower == "frozen",
    )
    assert isinstance(critic, FilmCritic | FrozenCritic)
    return critic


def nudge(learner: Learner, size: float = 0.05) -> None:
    """Move every LoRA weight, the same way each time, so that the policy is not the base any more."""
    for number, parameter in enumerate(learner.parameters.values()):
        parameter.data += size * ((number % 3) - 1.2)
