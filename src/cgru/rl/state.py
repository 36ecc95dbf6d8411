"""What stays the same over a run (`Problem`) and what a run learns (`Learner`).

Everything random is drawn from a seed named by purpose and iteration (`cgru.seeds`), so a Learner and its iteration
number are all that the next iteration reads: there is no random state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cgru.backbones.base import Backbone
from cgru.config import RLConfig
from cgru.critic.views import Critic
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Conditioning, Trajectory
from cgru.prompts import PromptSets
from cgru.rewards.base import Reward
from cgru.rl.advantage import PromptStatistics
from cgru.rl.objective import balanced_weights
from cgru.seeds import child_seed

# Rewards kept per prompt, and how many a prompt needs: DDPO's aesthetic recipe.
PROMPT_BUFFER, PROMPT_MINIMUM = 32, 16

Batches = Literal["pairs", "pictures"]
"""What goes through the denoiser in batches, and what through decoder, reward and critic."""


@dataclass(frozen=True)
class Sizes:
    """How many go through a network at once: a matter of memory and speed; stored in the run and reused on resume."""

    rollout: int
    """Trajectories sampled together."""
    update: int
    """(state, step) pairs per forward and backward pass of the policy."""
    decode: int
    """Latents decoded together."""
    score: int
    """Pictures per forward pass of reward or critic."""
    low_memory: bool = False
    """Whether memory is saved at the cost of time (`cgru.fast.low_memory`)."""

    def halved(self, of: Batches) -> Sizes:
        """Half as many pairs, rollouts with them, or half as many pictures; one at least."""
        if of == "pairs":
            return replace(self, rollout=max(1, self.rollout // 2), update=max(1, self.update // 2))
        return replace(self, decode=max(1, self.decode // 2), score=max(1, self.score // 2))


@dataclass(frozen=True, eq=False)
class Problem:
    """The model, what is wanted of it, and how it is to be learned."""

    backbone: Backbone
    kernel: ReverseKernel
    reward: Reward
    prompts: PromptSets
    config: RLConfig
    sizes: Sizes
    rewarded: frozenset[str] = frozenset()
    """Retain prompts with a reward of their own; only these can be in a batch."""
    text: dict[str, Conditioning] = field(default_factory=dict)
    """Every prompt's embedding, made once."""

    @property
    def dimensions(self) -> int:
        """Latent dimensions d, which the clip range depends on."""
        return int(torch.Size(self.backbone.latent_shape).numel())

    @cached_property
    def step_weights(self) -> Tensor:
        """How much each step counts in the policy's loss, (t,)."""
        if self.config.policy.step_weights == "balanced":
            return balanced_weights(self.kernel, self.backbone.latent_shape)
        return torch.ones(len(self.kernel), device=self.backbone.device)

    def generator(self, *names: str | int) -> torch.Generator:
        """A generator of its own for a named purpose, on the CPU."""
        return torch.Generator().manual_seed(self.seed(*names))

    def seed(self, *names: str | int) -> int:
        """The seed of a named purpose."""
        return child_seed(self.config.seed, *names)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Embeddings of prompts; each distinct one goes through the text encoder once in a run."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.text]
        if new:
            cond = self.backbone.encode_text(new)
            self.text.update({prompt: cond[i : i + 1] for i, prompt in enumerate(new)})
        return Conditioning.cat([self.text[prompt] for prompt in prompts])


@dataclass(eq=False)
class Learner:
    """The policy's LoRA, the critic, and everything else that an iteration changes."""

    parameters: dict[str, nn.Parameter]
    optimiser: Optimizer
    critic: Critic | None = None
    critic_optimiser: Optimizer | None = None
    average: dict[str, Tensor] = field(default_factory=dict)
    """Averaged LoRA weights, empty when none are kept."""
    best: dict[str, Tensor] = field(default_factory=dict)
    """LoRA weights of the best look of the outside detector, empty before the first."""
    statistics: PromptStatistics = field(default_factory=lambda: PromptStatistics(PROMPT_BUFFER, PROMPT_MINIMUM))
    step_errors: dict[int, float] = field(default_factory=dict)
    """Step -> mean squared r - V the last time it was looked at; kept for step_choice `variance` alone."""
    window: list[Trajectory] = field(default_factory=list)
    """Newest trajectories of earlier iterations (DPOK); empty without a window."""
    kl_weight: float | None = None
    """What `retention.kl_target` has made of the weight `retention.kl`; None before the first update."""
    is_parity_checked: bool = False
    """Whether this start has checked that ratios are 1 right after collection; not part of a checkpoint."""
    iteration: int = 0
    updates: int = 0
    """Optimiser steps of the policy so far, for the warm-up of its learning rate."""

    @property
    def exported(self) -> dict[str, Tensor]:
        """The weights that count now: averaged where an average is kept, else the last."""
        return self.average or {name: parameter.data for name, parameter in self.parameters.items()}

    def averaged(self, decay: float) -> None:
        """Move the average by one update; it starts at the weights of the first."""
        if not decay:
            return
        for name, parameter in self.parameters.items():
            old = self.average.get(name)
            new = parameter.detach().clone()
            self.average[name] = new if old is None else old.lerp(new, 1 - decay)


def trainable(network: nn.Module) -> list[nn.Parameter]:
    """What an optimiser is to move: all but what is frozen."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def make_learner(problem: Problem, parameters: dict[str, nn.Parameter], critic: nn.Module | None) -> Learner:
    """A learner at its start: AdamW for the policy (DDPO's choice) and for the critic."""
    policy, critic_config = problem.config.policy, problem.config.critic
    optimiser = torch.optim.AdamW(
        parameters.values(),
        lr=policy.learning_rate,
        betas=(policy.beta1, policy.beta2),
        weight_decay=policy.weight_decay,
    )
    learner = Learner(parameters, optimiser)
    if critic is not None:
        learner.critic = critic  # type: ignore[assignment]
        learner.critic_optimiser = torch.optim.AdamW(
            trainable(critic), lr=critic_config.online_learning_rate, weight_decay=critic_config.weight_decay
        )
    return learner
