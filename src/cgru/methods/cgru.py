"""CGRU: Critic-Guided Reinforcement Unlearning in Text-to-Image Diffusion (Vysotskyi, Kohut, Shpir, Rumezhak, Karpiv).

Paper: the one this package implements. Link: none yet. Official repository: none known.
Variant: advantage r - V(x_t, c, t) with a FiLM-conditioned CLIP critic, clipped ratios against theta_old (Alg. 1 to 3).
What differs: nothing here; the presets say which values are the paper's. GAE over the same V, other CLIP critics and a
KL to the base on retain prompts stay as a preset or the user sets them.
Defaults: critic `film` and advantage `critic` (paper §4), the pessimistic clip (DDPO's code; the paper says PPO-style).
"""

from __future__ import annotations

from dataclasses import replace

from cgru.config import RunConfig


def apply(config: RunConfig) -> RunConfig:
    """The config as CGRU: a critic that looks at pictures, its advantage, no replay and no KL on the forget states."""
    critic, policy = config.critic, config.policy
    return replace(
        config,
        method="cgru",
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
