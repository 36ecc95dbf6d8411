"""DPOK: Reinforcement Learning for Fine-tuning Text-to-Image Diffusion Models (Fan et al.; NeurIPS 2023).

Link: https://arxiv.org/abs/2305.16381. Official repository: https://github.com/google-research/google-research, dpok/
(Apache-2.0). Variant: its released online policy gradient with a value function (v_flag=1), which already has the
advantage r - V(x_t, c, t), V a small network on the raw latent and the text.
What differs: the reward; trajectories, learning rate, clip range and LoRA are the preset's; V sees the denoiser's own
text embedding. Its updates draw transitions from the window with replacement, ours without. No KL on retain prompts:
DPOK's pull to the base is the one on its own states.
Defaults: below, from its argparse and README (single prompt).
"""

from __future__ import annotations

from dataclasses import replace

from cgru.config import RLConfig
from cgru.rl.method import on_policy, policy_gradient

ROUNDS = 2
"""Rounds in the replay window. Code: the newest 1000 transitions, so 20 pictures of 50 steps, or 2 rounds of 10."""
UPDATES = 5
"""Code: p_step."""
STEP_FRACTION = 0.24
"""Code: 5 updates × 12 minibatches × 4 transitions = 240 of the 1000 in the window."""


def apply(config: RLConfig) -> RLConfig:
    """The config as DPOK: latent critic, clamped ratio, replay window, squared difference of noises as KL."""
    policy = replace(
        config.policy,
        advantage="critic",  # code: r - V, not normalised
        normalise=False,
        clip_mode="hard",  # code: the ratio is clamped, no maximum with the unclipped term
        window=ROUNDS * config.policy.trajectories,
        updates=min(UPDATES, config.policy.trajectories),
        passes=1,
        step_fraction=STEP_FRACTION,
        step_choice="each",  # code: transitions are drawn one by one
        reward_weight=100 / config.reward.scale,  # code: 100 for rewards of about 1, so 10 for ours of 0..10
    )
    retention = replace(
        config.retention,
        share=0.0,
        kl=0.0,
        kl_forget=0.01,  # code: kl_weight
        kl_form="noise",  # code: plain MSE of guided noise predictions
        balance=0.0,
    )
    # code: V is on latents, which have no decode and no tower, and learns online only
    critic = replace(config.critic, kind="latent", head="value", trajectories=0, decode="full", tower="trained")
    # Its KL needs the base's predictions, for which nothing is compiled.
    return replace(
        config,
        method="dpok",
        compile=False,
        sampling=on_policy(config.sampling),
        critic=critic,
        policy=policy,
        retention=retention,
    )


METHOD = policy_gradient(apply, summary="policy gradient with a latent critic and a KL to the base")
