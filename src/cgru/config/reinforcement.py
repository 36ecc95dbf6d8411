"""Settings of the policy-gradient methods (CGRU, DDPO, DPOK), and checks for combinations that cannot work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cgru.config.rules import Count, Whole, check
from cgru.config.schema import RunConfig
from cgru.config.sections import (
    CriticConfig,
    DiagnosticsConfig,
    PolicyConfig,
    PromptConfig,
    RetentionConfig,
    RewardConfig,
    SamplingConfig,
    WatchConfig,
)


@dataclass(frozen=True)
class RLConfig(RunConfig):
    """Settings of a policy-gradient run. `memory` and the two `_every` fields do not change the result."""

    preset: str = "demo"
    """The preset that these settings started from; recorded only, without any effect."""
    compile: bool = False
    """Compile the networks of the policy stage: this takes a minute or two and speeds up long runs on a GPU."""
    memory: Literal["auto", "fast", "low"] = "auto"
    """fast: batches that fill the device. low: smaller batches, activations recomputed in the backward pass, idle
    networks kept on the CPU. auto: fast if it fits the device, else low. Can be changed on resume."""
    checkpoint_every: Count = 5
    """Iterations between checkpoints; the last one is always saved."""
    samples_every: Whole = 10
    """Iterations between sample pictures of fixed prompts and seeds; 0: never."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are drawn."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """The prompts."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The reward."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The baseline."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Policy optimisation."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    """Losses that keep the rest of the model unchanged."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """The outside detector."""
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    """Gradient variance."""

    @property
    def length(self) -> int:
        """Number of policy iterations."""
        return self.policy.iterations

    def __post_init__(self) -> None:
        """Check every field, then the combinations."""
        check(self, "")
        for is_wrong, message in _combinations(self):
            if is_wrong:
                raise ValueError(message)


def as_rl(config: RunConfig) -> RLConfig:
    """The same config, if it is one of the policy-gradient method."""
    if not isinstance(config, RLConfig):
        raise ValueError(
            f"method {config.method!r} has no policy; allowed: a policy gradient (cgru, ddpo, dpok). Choose one."
        )
    return config


def _combinations(config: RLConfig) -> list[tuple[bool, str]]:
    # Without these checks, the run would fail late or silently ignore a setting.
    return [*_of_the_critic(config), *_of_the_batch(config)]


def _of_the_critic(config: RLConfig) -> list[tuple[bool, str]]:
    # Also combinations with compile=true that do not work.
    has_critic = config.critic.kind != "none"
    return [
        (
            config.policy.advantage in ("critic", "gae") and not has_critic,
            f"policy.advantage is {config.policy.advantage!r} and critic.kind 'none'; allowed without a critic: batch, "
            "per-prompt, pair. Choose one of these, or a critic.",
        ),
        (
            config.critic.kind in ("latent", "none")
            and (config.critic.decode, config.critic.tower) != ("full", "trained"),
            f"critic.kind is {config.critic.kind!r}, critic.decode {config.critic.decode!r} and critic.tower "
            f"{config.critic.tower!r}; allowed without pictures: full and trained. Set both, or another kind.",
        ),
        (
            config.critic.kind in ("latent", "none") and bool(config.critic.clip),
            f"critic.kind is {config.critic.kind!r} and critic.clip {config.critic.clip!r}; allowed without pictures: "
            "no CLIP. Leave out critic.clip, or set another kind.",
        ),
        (
            has_critic and config.critic.trajectories > 0 and config.prompts.critic == 0,
            f"critic.trajectories is {config.critic.trajectories} and prompts.critic 0; allowed: prompts for the warm "
            "start, or none of it. Raise prompts.critic, or set critic.trajectories=0.",
        ),
        (
            has_critic and config.critic.trajectories == 1,
            "critic.trajectories is 1; allowed: 0, or 2 and more, since one is held out. Raise critic.trajectories.",
        ),
        (
            config.critic.trust == "measured" and not has_critic,
            "critic.trust is 'measured' and critic.kind 'none'; allowed without a critic: full. Leave it out, or "
            "choose a critic.",
        ),
        (
            config.critic.trust == "measured" and config.policy.trajectories < 3,
            f"critic.trust is 'measured' and policy.trajectories {config.policy.trajectories}; allowed: 3 or more, "
            "since each is compared with the rest. Raise policy.trajectories.",
        ),
        (
            config.policy.step_choice == "variance" and not has_critic,
            "policy.step_choice is 'variance' and critic.kind 'none'; allowed without a critic: each, shared. Choose "
            "one of these, or a critic.",
        ),
        (
            config.compile and config.retention.kl_forget > 0,
            f"compile is true and retention.kl_forget {config.retention.kl_forget}; allowed: one of them: the base's "
            "predictions would not be compiled and would round differently. Set compile=false.",
        ),
        (
            config.sampling.merged and config.compile,
            "sampling.merged is true and compile true; allowed: one of them, since compiled rollouts go through the "
            "graph of the updates, LoRA and all. Set sampling.merged=false.",
        ),
    ]


def _of_the_batch(config: RLConfig) -> list[tuple[bool, str]]:
    policy, share = config.policy, config.retention.share
    retains = share > 0 or config.retention.kl > 0 or config.sampling.explore > 0
    forget = policy.trajectories - round(share * policy.trajectories)
    explored = round(config.sampling.explore * forget)
    measured = min(config.diagnostics.trajectories, policy.trajectories - explored)
    return [
        (
            policy.step_choice != "each" and policy.window > 0,
            f"policy.step_choice is {policy.step_choice!r} and policy.window {policy.window}; allowed with a window: "
            "each, since batches of other iterations have other steps. Set policy.step_choice=each.",
        ),
        (
            config.retention.kl_target > 0 and config.retention.kl == 0,
            f"retention.kl_target is {config.retention.kl_target} and retention.kl 0; allowed: a weight to start "
            "from, or no target. Raise retention.kl, or set retention.kl_target=0.",
        ),
        (
            policy.normalise_floor > 0 and not policy.normalise,
            f"policy.normalise_floor is {policy.normalise_floor} and policy.normalise false; allowed: 0 where "
            "nothing is divided. Set policy.normalise=true.",
        ),
        (
            policy.advantage == "pair" and not config.sampling.pairs,
            "policy.advantage is 'pair' and sampling.pairs false; allowed: pairs, or another advantage. Set "
            "sampling.pairs=true.",
        ),
        (
            config.sampling.pairs and (policy.trajectories % 2 == 1 or share > 0 or config.sampling.explore > 0),
            f"sampling.pairs is true, policy.trajectories {policy.trajectories}, retention.share {share} and "
            f"sampling.explore {config.sampling.explore}; allowed: an even number of trajectories of the concept's own "
            "prompts. Set the other two to 0.",
        ),
        (
            config.sampling.pairs and policy.step_choice != "each",
            f"sampling.pairs is true and policy.step_choice {policy.step_choice!r}; allowed: each, since an iteration "
            "has one noisy step. Set policy.step_choice=each.",
        ),
        (
            policy.updates > policy.trajectories,
            f"policy.updates is {policy.updates} and policy.trajectories {policy.trajectories}; allowed: at most one "
            "update a trajectory, since updates divide the batch. Lower policy.updates.",
        ),
        (
            share > 0 and not 0 < round(share * policy.trajectories) < policy.trajectories,
            f"retention.share is {share} of {policy.trajectories} policy.trajectories, which rounds to none or all; "
            "allowed: at least one of each kind. Change retention.share or policy.trajectories.",
        ),
        (
            config.sampling.explore > 0 and not 0 < explored < forget,
            f"sampling.explore is {config.sampling.explore} of {forget} forget trajectories, which rounds to none or "
            "all; allowed: at least one of each kind. Change sampling.explore or policy.trajectories.",
        ),
        (
            share > 0 and config.reward.retain == 0,
            f"retention.share is {share} and reward.retain 0; allowed: a retain reward above 0. Raise reward.retain.",
        ),
        (
            config.diagnostics.every > 0 and measured < 2,
            f"diagnostics.every is {config.diagnostics.every} on {measured} trajectory; allowed: at least 2 for a "
            "variance. Raise diagnostics.trajectories and policy.trajectories, or set diagnostics.every=0.",
        ),
        (
            retains and config.prompts.retain == 0,
            f"retention.share is {config.retention.share}, retention.kl {config.retention.kl}, sampling.explore "
            f"{config.sampling.explore} and prompts.retain 0; allowed: retain prompts, or all three at 0. "
            "Raise prompts.retain.",
        ),
        (
            config.watch.stop and (config.watch.every == 0 or config.prompts.validation == 0),
            f"watch.stop is true, watch.every {config.watch.every} and prompts.validation {config.prompts.validation}; "
            "allowed: stopping with both above 0. Raise them, or set watch.stop=false.",
        ),
    ]
