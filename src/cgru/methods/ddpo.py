"""DDPO: Training Diffusion Models with Reinforcement Learning (Black, Janner, Du, Kostrikov, Levine; ICLR 2024).

Link: https://arxiv.org/abs/2305.13301. Official repository: https://github.com/kvablack/ddpo-pytorch (MIT).
Variant: the importance-sampled one (DDPO_IS), per-prompt statistics as in its aesthetic recipe: the last 32 rewards of
a prompt, the batch's as long as there are fewer than 16.
What differs: the reward is our absence of a concept; learning rate, batch, clip range, LoRA and any KL to the base on
retain prompts are the preset's, so that a comparison with CGRU differs in the advantage alone. DDPO itself has no KL:
retention.kl=0 is the method as published.
Defaults: no critic, (r - mean) / std clamped to ±5, the worse of clipped and unclipped (all: DDPO's code).
"""

from __future__ import annotations

from dataclasses import replace

from cgru.config import RLConfig
from cgru.rl.method import on_policy, policy_gradient


def apply(config: RLConfig) -> RLConfig:
    """The config as DDPO: no critic, normalised rewards, pessimistic clip, this iteration's trajectories only."""
    return replace(
        config,
        method="ddpo",
        sampling=on_policy(config.sampling),
        critic=replace(config.critic, kind="none", decode="full", tower="trained"),
        policy=replace(
            config.policy,
            advantage="per-prompt",  # code: stat_tracking.py; falls back to the batch's statistics
            advantage_clamp=5.0,  # code: adv_clip_max
            clip_mode="pessimistic",  # code: maximum of the two negated terms
            window=0,  # code: on-policy, each epoch its own samples
            reward_weight=1.0,  # code: none
        ),
        retention=replace(config.retention, kl_forget=0.0),
    )


METHOD = policy_gradient(apply, summary="policy gradient with normalised rewards")
