"""Stage 2-critic (Alg. 1): build the critic that the config names and fit it to trajectories of the base policy.

A `classes` head learns to predict what each prompt asks for, so its trajectories cover every label of the concept's
kind; prompts with an unknown label are left out.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from cgru import distributed
from cgru.backbones.base import one_line
from cgru.config import RLConfig
from cgru.critic import build_critic
from cgru.critic.film import TIME_RANGE, FilmCritic, text_width
from cgru.critic.fit import WarmStart, warm_start, warm_start_classes
from cgru.critic.frozen import FrozenCritic
from cgru.critic.tower import load_tower
from cgru.embedded import EMBEDDED, ROOT, load_lexicon
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Trajectory
from cgru.prompts import Prompt
from cgru.rewards.concept import ConceptReward
from cgru.rewards.weights import origin_of
from cgru.rl.build import Setting, is_embedded
from cgru.rl.collect import choose, counterparts, explored, relabelled, scored, viewed
from cgru.rl.reward_stage import CLIP_B32, forget_reward, label_among
from cgru.rl.state import Problem, trainable
from cgru.runs import Run
from cgru.tasks import Concept, targets

CRITIC_STAGE = "2-critic"
CRITIC_FILE = "critic.safetensors"
NONE = "none"
"""Label of images without a hazard, as in the reward's heads."""
HELD_OUT = 8
"""One trajectory in this many is held out from fitting."""


def critic_stage(run: Run, setting: Setting) -> nn.Module | None:
    """Return the warm-started critic, fitted on the first call and then read from the run; None for DDPO."""
    problem = setting.problem
    if problem.config.critic.kind == "none":
        return None
    if distributed.from_main(lambda: run.is_done(CRITIC_STAGE)):
        return distributed.alike(lambda: _read(run, setting))
    critic, record = _fitted(setting)
    distributed.from_main(lambda: _write(run, critic, record))
    return critic


def _read(run: Run, setting: Setting) -> nn.Module:
    folder = run.stage(CRITIC_STAGE)
    prior = run.outcome(CRITIC_STAGE).get("prior")
    if not isinstance(prior, float | int):
        raise ValueError(f"the record of {str(folder)!r} has no number 'prior'. Remove the folder: it is made again.")
    critic = build_untrained_critic(setting, prior)
    try:
        critic.load_state_dict(load_file(folder / CRITIC_FILE))
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: tensors of another critic
        why = one_line(error)
        raise ValueError(
            f"cannot read {str(folder / CRITIC_FILE)!r} ({why}). Remove {folder}: it is made again."
        ) from error
    return critic


def _write(run: Run, critic: nn.Module, record: dict[str, Any]) -> None:
    tensors = {name: value.cpu().contiguous() for name, value in critic.state_dict().items()}
    run.save(f"stages/{CRITIC_STAGE}/{CRITIC_FILE}", save(tensors))
    run.finish(CRITIC_STAGE, record)


def _fitted(setting: Setting) -> tuple[nn.Module, dict[str, Any]]:
    problem = setting.problem
    if not problem.config.critic.trajectories:
        # Without a warm start the critic begins at the middle of the reward's range.
        prior = (problem.reward.low + problem.reward.high) / 2
        return distributed.alike(lambda: build_untrained_critic(setting, prior)), {"prior": prior, "trajectories": 0}
    trajectory = warm_start_trajectories(setting)
    assert trajectory.reward is not None
    # V starts at the mean reward of the base policy.
    prior = float(trajectory.reward.mean())
    critic = distributed.alike(lambda: build_untrained_critic(setting, prior))
    result = fit_critic(setting, critic, trajectory)
    return critic, {"prior": prior, "trajectories": len(trajectory), **_described(result)}


def build_untrained_critic(setting: Setting, prior: float) -> nn.Module:
    """Build the critic that the config names on the model's device; `prior` is the mean reward."""
    problem = setting.problem
    config, reward = problem.config.critic, problem.reward
    source = tower_source(problem.config)
    tower = None if source is None else load_tower(source)
    has_classes = config.head == "classes"
    labels, wanted = class_labels(problem, setting.concept) if has_classes else ((), ())
    critic = build_critic(
        config.kind,
        config.head,
        config.view,
        tower=tower,
        labels=labels,
        target=wanted,
        scale=problem.config.reward.scale if has_classes else reward.high - reward.low,
        prior=prior,
        latent_shape=problem.backbone.latent_shape,
        text_width=text_width(problem.encode([problem.prompts.policy[0].text])),
        time_range=time_range(problem.kernel),
        seed=problem.seed("critic-init"),
        frozen=config.tower == "frozen",
        dtype=problem.backbone.dtype,
    )
    return critic.to(problem.backbone.device)


def time_range(kernel: ReverseKernel) -> float:
    """The times that a denoiser receives are 0 to this: the first, largest one where they are no whole numbers."""
    times = kernel.timesteps
    return float(times.max()) if times.is_floating_point() else TIME_RANGE


def tower_source(config: RLConfig) -> Path | str | None:
    """Return the vision tower the critic starts from; None if it has no tower or there is no critic."""
    if config.critic.kind in ("none", "latent"):
        return None
    if config.critic.clip:
        return origin_of(config.critic.clip)
    return ROOT / EMBEDDED / "clip" if is_embedded(config) else CLIP_B32


def class_labels(problem: Problem, concept: Concept | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels of the critic's classes head and those among them to forget.

    Without a vocabulary they are those of the reward's class head.
    """
    if concept is None:
        reward = forget_reward(problem.reward)
        if not isinstance(reward, ConceptReward):
            model = problem.config.model
            raise ValueError(
                f"critic.head 'classes' needs a vocabulary, but {model!r} has none; set critic.head=value."
            )
        return reward.networks[0].labels[reward.head], reward.targets
    if concept.kind == "attribute":
        raise ValueError(
            f"critic.head is 'classes' and the concept the attribute {concept.name}, which is no class of pictures; "
            "allowed: value. Set critic.head=value."
        )
    vocabulary = load_lexicon().vocabulary
    others = (NONE,) if concept.kind == "hazard" else ()
    return (*vocabulary[concept.kind], *others), targets(concept, vocabulary)


def class_of(prompt: Prompt, concept: Concept) -> str | None:
    """Return the label a classes head of the concept's kind should give to a prompt's image; None if it has none."""
    if prompt.head == concept.head:
        return prompt.label or None
    return NONE if concept.kind == "hazard" else None


def known_classes(problem: Problem, concept: Concept | None) -> dict[str, str]:
    """Map the critic's prompts to the labels of their images; prompts without one are left out."""
    sets = problem.prompts
    labels, wanted = class_labels(problem, concept)
    if concept is None:
        kept = {prompt.text: label_among(prompt, labels) for prompt in sets.critic_retain}
        found: dict[str, str | None] = {**kept, **{prompt.text: wanted[0] for prompt in sets.critic}}
    else:
        found = {prompt.text: class_of(prompt, concept) for prompt in (*sets.critic, *sets.critic_retain)}
    return {text: label for text, label in found.items() if label in labels}


def check_classes(problem: Problem, concept: Concept | None) -> None:
    """Refuse a classes head where there are no classes, or no prompts to tell them apart by."""
    labels, wanted = class_labels(problem, concept)
    shown = set(known_classes(problem, concept).values())
    if problem.config.critic.trajectories and not shown - set(wanted):
        raise ValueError(
            f"critic.head is 'classes' on the labels {', '.join(labels)}, but no prompt of the critic names another "
            f"than {', '.join(wanted)}; allowed: heads that the run trains. Set reward.classes, or critic.head=value."
        )


def warm_start_trajectories(setting: Setting) -> Trajectory:
    """Sample the base policy on the critic's own prompts and score it, with the same exploration as the policy.

    A classes head learns from prompts of every label, so it needs no exploration.
    """
    problem, count = setting.problem, setting.problem.config.critic.trajectories
    forget, retain, share = _pools(setting)
    kept = min(round(count * share), count - 1) if retain else 0
    prompts = choose(problem, "critic", forget, count - kept, "critic")
    prompts += choose(problem, "critic-retain", retain, kept, "critic")
    # Same exploration as in `collect.collect`: V must be accurate on the policy's batches.
    exploring = 0 if problem.config.critic.head == "classes" else explored(problem, count - kept)
    others = counterparts(problem, prompts[:exploring], problem.prompts.critic_retain, "critic")
    return scored(problem, relabelled(problem, prompts, others, "critic"))


def _pools(setting: Setting) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...], float]:
    # Forget prompts, other prompts and the share of the latter: that of the policy's batches, or uniform over labels.
    problem, concept = setting.problem, setting.concept
    sets, share = problem.prompts, problem.config.retention.share
    if problem.config.critic.head != "classes":
        return sets.critic, tuple(prompt for prompt in sets.critic_retain if prompt.text in problem.rewarded), share
    (labels, wanted), known = class_labels(problem, concept), known_classes(problem, concept)
    forget, retain = (
        tuple(prompt for prompt in prompts if prompt.text in known) for prompts in (sets.critic, sets.critic_retain)
    )
    if not forget:
        raise ValueError(
            "critic.head 'classes' needs prompts with one label each, but your prompts carry several labels; "
            "set critic.head=value, or name one label as the concept."
        )
    # Every label equally often: the retain share is the share of labels that are kept.
    return forget, retain, 1 - len(wanted) / len(labels)


def fit_critic(setting: Setting, critic: nn.Module, trajectory: Trajectory) -> WarmStart:
    """Fit by squared error to the reward, or, for a classes head, by cross-entropy to what each prompt asked for."""
    problem = setting.problem
    config = problem.config.critic
    optimiser = torch.optim.AdamW(trainable(critic), lr=config.learning_rate, weight_decay=config.weight_decay)
    views = viewed(problem, critic, trajectory)  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        "epochs": config.epochs,
        "batch": config.batch,
        "held_out": max(1, len(trajectory) // HELD_OUT),
        "generator": problem.generator("critic-warm-start"),
    }
    if isinstance(critic, FilmCritic | FrozenCritic) and config.head == "classes":
        return warm_start_classes(critic, optimiser, views, trajectory, _truth(setting, trajectory), **settings)
    return warm_start(critic, optimiser, views, trajectory, **settings)  # type: ignore[arg-type]


def _truth(setting: Setting, trajectory: Trajectory) -> torch.Tensor:
    labels, _ = class_labels(setting.problem, setting.concept)
    known = known_classes(setting.problem, setting.concept)
    return torch.tensor([labels.index(known[prompt]) for prompt in trajectory.cond.prompts])


def _described(result: WarmStart) -> dict[str, Any]:
    held = result.held_out
    return {
        "loss": result.loss.mean,
        "held_out": held.n,
        "value_error": held.value_error.tolist(),
        "explained_variance": held.explained_variance.tolist(),
        "calibration": [asdict(part) for part in held.calibration],
        "accuracy": held.accuracy,
        "macro_precision": held.macro_precision,
    }
