"""The stage 2-critic (Alg. 1): build the critic that a config names and fit it to trajectories of the base policy.

A `classes` head learns what each prompt asked for, so its trajectories come from every label of the concept's kind;
prompts whose label it does not know are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from cgru import processes
from cgru.config import RunConfig
from cgru.critic import build_critic
from cgru.critic.film import FilmCritic
from cgru.critic.fit import WarmStart, warm_start, warm_start_classes
from cgru.critic.frozen import FrozenCritic
from cgru.critic.tower import load_tower
from cgru.mdp.trajectory import Trajectory
from cgru.pipeline.reward import CLIP_B32
from cgru.pipeline.setting import EMBEDDED, Setting, is_embedded
from cgru.prompts import Prompt
from cgru.rl.collect import choose, counterparts, explored, relabelled, scored, viewed
from cgru.rl.problem import Problem, trainable
from cgru.runs import Run
from cgru.tasks import ASSETS, Concept, load_lexicon, targets

CRITIC_STAGE = "2-critic"
CRITIC_FILE = "critic.safetensors"
NONE = "none"
"""The label of pictures without a hazard, as in the reward's heads."""
HELD_OUT = 8
"""One trajectory in this many is not fitted to."""


def critic_stage(run: Run, setting: Setting) -> nn.Module | None:
    """The warm-started critic; fitted once, then read from the run. None for DDPO."""
    problem = setting.problem
    if problem.config.critic.kind == "none":
        return None
    if processes.from_main(lambda: run.is_done(CRITIC_STAGE)):
        return processes.alike(lambda: _read(run, setting))
    critic, record = _fitted(setting)
    processes.from_main(lambda: _write(run, critic, record))
    return critic


def _read(run: Run, setting: Setting) -> nn.Module:
    critic = build_untrained_critic(setting, run.outcome(CRITIC_STAGE)["prior"])
    critic.load_state_dict(load_file(run.stage(CRITIC_STAGE) / CRITIC_FILE))
    return critic


def _write(run: Run, critic: nn.Module, record: dict[str, Any]) -> None:
    tensors = {name: value.cpu().contiguous() for name, value in critic.state_dict().items()}
    run.save(f"stages/{CRITIC_STAGE}/{CRITIC_FILE}", save(tensors))
    run.finish(CRITIC_STAGE, record)


def _fitted(setting: Setting) -> tuple[nn.Module, dict[str, Any]]:
    problem = setting.problem
    if not problem.config.critic.trajectories:
        prior = (problem.reward.low + problem.reward.high) / 2
        return processes.alike(lambda: build_untrained_critic(setting, prior)), {"prior": prior, "trajectories": 0}
    trajectory = warm_start_trajectories(setting)
    assert trajectory.reward is not None
    prior = float(trajectory.reward.mean())
    critic = processes.alike(lambda: build_untrained_critic(setting, prior))
    result = fit_critic(setting, critic, trajectory)
    return critic, {"prior": prior, "trajectories": len(trajectory), **_described(result)}


def build_untrained_critic(setting: Setting, prior: float) -> nn.Module:
    """The critic that the config names, on the model's device; `prior` is the mean reward."""
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
        text_width=int(problem.encode([""]).embeddings.shape[-1]),
        seed=problem.seed("critic-init"),
        frozen=config.tower == "frozen",
        dtype=problem.backbone.dtype,
    )
    return critic.to(problem.backbone.device)


def tower_source(config: RunConfig) -> Path | str | None:
    """The vision tower that the critic starts from; None for one without, and for none."""
    if config.critic.kind in ("none", "latent"):
        return None
    return ASSETS / EMBEDDED / "clip" if is_embedded(config) else CLIP_B32


def class_labels(problem: Problem, concept: Concept | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of the critic's classes head, and which of them are to be forgotten."""
    if concept is None:
        model = problem.config.model
        raise ValueError(f"critic.head 'classes' needs a vocabulary, which {model!r} has not; set critic.head=value.")
    vocabulary = load_lexicon().vocabulary
    others = (NONE,) if concept.kind == "hazard" else ()
    return (*vocabulary[concept.kind], *others), targets(concept, vocabulary)


def class_of(prompt: Prompt, concept: Concept) -> str | None:
    """What a classes head of the concept's kind should say of a prompt's picture; None where it has no word for it."""
    if prompt.head == concept.head:
        return prompt.label or None
    return NONE if concept.kind == "hazard" else None


def warm_start_trajectories(setting: Setting) -> Trajectory:
    """Trajectories of the base policy on the critic's own prompts, with rewards, exploring as the policy's do.

    A classes head learns from every label's own prompts, so there is nothing to explore.
    """
    problem, count = setting.problem, setting.problem.config.critic.trajectories
    forget, retain, share = _pools(setting)
    kept = min(round(count * share), count - 1) if retain else 0
    prompts = choose(problem, "critic", forget, count - kept, "critic")
    prompts += choose(problem, "critic-retain", retain, kept, "critic")
    exploring = 0 if problem.config.critic.head == "classes" else explored(problem, count - kept)
    others = counterparts(problem, prompts[:exploring], problem.prompts.critic_retain, "critic")
    return scored(problem, relabelled(problem, prompts, others, "critic"))


def _pools(setting: Setting) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...], float]:
    # Forget prompts, other prompts, and the share of the latter: as in the policy's batches, or every label alike.
    problem, concept = setting.problem, setting.concept
    sets, share = problem.prompts, problem.config.retention.share
    if problem.config.critic.head != "classes":
        return sets.critic, tuple(prompt for prompt in sets.critic_retain if prompt.text in problem.rewarded), share
    labels, wanted = class_labels(problem, concept)
    assert concept is not None
    forget, retain = (_known(prompts, concept, labels) for prompts in (sets.critic, sets.critic_retain))
    if not forget:
        raise ValueError(
            "critic.head 'classes' needs prompts with one label each, which your own of several labels have not; "
            "set critic.head=value, or name one label as the concept."
        )
    return forget, retain, 1 - len(wanted) / len(labels)


def _known(prompts: Sequence[Prompt], concept: Concept, labels: Sequence[str]) -> tuple[Prompt, ...]:
    return tuple(prompt for prompt in prompts if class_of(prompt, concept) in labels)


def fit_critic(setting: Setting, critic: nn.Module, trajectory: Trajectory) -> WarmStart:
    """Fit by squared error to the reward; a classes head by cross-entropy to what each prompt asked for."""
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
    sets, concept = setting.problem.prompts, setting.concept
    assert concept is not None
    labels, _ = class_labels(setting.problem, concept)
    known = {prompt.text: class_of(prompt, concept) for prompt in (*sets.critic, *sets.critic_retain)}
    return torch.tensor([labels.index(known[prompt] or "") for prompt in trajectory.cond.prompts])


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
