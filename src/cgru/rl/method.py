"""The policy-gradient method behind CGRU, DDPO and DPOK, which are settings of it.

Only its config is imported here: reading a run must not cost the seconds that torch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cgru.config import RLConfig, SamplingConfig
from cgru.embedded import EMBEDDED
from cgru.method import Method

if TYPE_CHECKING:
    from cgru.backbones.base import Backbone
    from cgru.edits import Edit
    from cgru.rl.build import Prepared
    from cgru.runs import Run
    from cgru.tasks import UnlearnTask


def on_policy(sampling: SamplingConfig) -> SamplingConfig:
    """The same sampling with trajectories of the policy's own prompts only."""
    return replace(sampling, explore=0.0, explore_credit="reward", explore_ratio="sampled")


def refuse_relabelling(config: RLConfig) -> None:
    """Relabelled trajectories belong to `anchored`."""
    own = on_policy(config.sampling)
    for name in ("explore", "explore_credit", "explore_ratio"):
        if (given := getattr(config.sampling, name)) != (allowed := getattr(own, name)):
            raise ValueError(
                f"sampling.{name} is {given} with --method {config.method}, whose trajectories are its own; allowed: "
                f"{allowed}. Leave it out, or take --method anchored."
            )


def policy_gradient(
    adjust: Callable[[RLConfig], RLConfig],
    summary: str,
    *,
    on_embedded: str = "on-policy",
    refuse: Callable[[RLConfig], None] = refuse_relabelling,
) -> Method[RLConfig]:
    """A method that is the policy gradient with some settings fixed by `adjust`.

    Args:
        adjust: lays them over the config.
        summary: for `cgru list methods`.
        on_embedded: its preset on Emoji Canvas.
        refuse: raises where the user's settings make it another method.
    """

    def checked(config: RLConfig) -> None:
        refuse(config)
        check(config)

    return Method(
        config=RLConfig,
        run=run,
        summary=summary,
        adjust=adjust,
        decisive=("policy.trajectories", "reward.scale"),  # DPOK's window and reward weight follow from them
        default_preset=lambda model: on_embedded if model == EMBEDDED else "paper-object",
        check=checked,
        prepare=prepare,
        plan=plan,
    )


def run(backbone: Backbone, task: UnlearnTask, config: RLConfig, run: Run, *, prepared: Prepared | None = None) -> Edit:
    """Do the stages that are left (`cgru.rl.stages`); returns the LoRA."""
    from cgru.rl.stages import finished, policy_stage
    from cgru.rl.train import train

    with policy_stage(backbone, config, run, prepared) as stage:
        observer = stage.observer
        if not observer.is_complete:  # it is when the run was killed after its last checkpoint
            train(stage.problem, stage.learner, stage.bank, after=observer.after, after_halving=observer.shrink)
    return finished(run, observer)


def check(config: RLConfig) -> None:
    """Refuse names and prompts before the model is loaded."""
    from cgru.rl.preflight import check_words

    check_words(config)


def prepare(backbone: Backbone, task: UnlearnTask, config: RLConfig) -> Prepared:
    """Load what a new run needs."""
    from cgru.rl.preflight import prepare

    return prepare(backbone, task, config)


def plan(prepared: Prepared) -> Mapping[str, Any]:
    """Counts and estimates for `--dry-run`."""
    from cgru.rl.estimate import describe_plan

    return describe_plan(prepared)
