"""Anchored: a policy gradient on relabelled trajectories, which show what to draw instead; ours, without a paper.

A share of each batch is drawn for a retain prompt and used for learning under the forget prompt. This is hindsight
relabelling (arXiv 1707.01495) in the loop of CGRU, and close to concept ablation (arXiv 2303.13516), which regresses on
the pictures of an anchor prompt. A few hundred such trajectories show what a policy's own noise hardly ever finds.
Variant: everything else is as in CGRU or set by the preset. Controls for the effect of reward and critic:
sampling.explore_credit=constant or shuffled, and critic.kind=none policy.advantage=batch.
What differs from CGRU: trajectories that are not the policy's own, so the gradient is not that of the expected reward.
Defaults: half of the trajectories (ours: sweep c of docs/lab.md), the pessimistic clip.
"""

from __future__ import annotations

from dataclasses import replace

from cgru.config import RLConfig
from cgru.rl.method import policy_gradient

EXPLORE = 0.5


def apply(config: RLConfig) -> RLConfig:
    """The config with relabelled trajectories, no replay and no KL on the forget states."""
    return replace(
        config,
        method="anchored",
        sampling=replace(config.sampling, explore=config.sampling.explore or EXPLORE),
        policy=replace(config.policy, clip_mode="pessimistic", window=0, reward_weight=1.0),
        retention=replace(config.retention, kl_forget=0.0),
    )


def refuse_no_anchors(config: RLConfig) -> None:
    """Refuse a config without relabelled trajectories, which would be another method."""
    if config.sampling.explore == 0:
        raise ValueError(
            f"sampling.explore is 0 with --method {config.method}, which relabels trajectories; allowed: above 0 to "
            "under 1. Leave it out, or take --method cgru, whose trajectories are its own."
        )


METHOD = policy_gradient(
    apply, summary="policy gradient on relabelled trajectories", on_embedded="demo", refuse=refuse_no_anchors
)
