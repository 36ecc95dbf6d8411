"""CGRU: Critic-Guided Reinforcement Unlearning in Text-to-Image Diffusion (Vysotskyi, Kohut, Shpir, Rumezhak, Karpiv).

Paper: the one this package implements. Link: none yet. Official repository: none known.
Variant: on-policy, each trajectory drawn for the prompt that it is learned for; advantage r - V(x_t, c, t) with a
FiLM-conditioned CLIP critic, clipped ratios against theta_old (Alg. 1 to 3).
What differs: nothing here; the presets say which values are the paper's. GAE over the same V, other CLIP critics and a
KL to the base on retain prompts stay as a preset or the user sets them.
Defaults: critic `film` and advantage `critic` (paper §4), the pessimistic clip (DDPO's code; the paper says PPO-style).
"""

from __future__ import annotations

from dataclasses import replace

from cgru.config import RLConfig
from cgru.rl.method import on_policy, policy_gradient


def apply(config: RLConfig) -> RLConfig:
    """The config as CGRU: a critic of pictures, its advantage, no relabelling, replay or KL on forget states."""
    critic, policy = config.critic, config.policy
    return replace(
        config,
        method="cgru",
        sampling=on_policy(config.sampling),
        critic=replace(critic, kind="film") if critic.kind in ("none", "latent") else critic,
        policy=replace(
            policy,
            advantage=policy.advantage if policy.advantage in ("critic", "gae") else "critic",
            clip_mode="pessimistic",
            window=0,
            reward_weight=1.0,
        ),
        retention=replace(config.retention, kl_forget=0.0),
    )


METHOD = policy_gradient(apply, summary="policy gradient with a per-timestep critic")
