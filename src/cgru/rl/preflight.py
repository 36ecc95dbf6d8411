"""What would stop a policy-gradient run later, refused before it has a folder: by the command and the library alike."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cgru import distributed
from cgru.backbones import is_own_loader
from cgru.backbones.base import Backbone, HasTextLimit, classes_of, unwrapped
from cgru.backbones.words import words_of_model
from cgru.config import RLConfig, RunConfig
from cgru.image_files import class_folders, read_rgb
from cgru.prompts import PromptSets, task_for
from cgru.rewards.base import check_reward
from cgru.rewards.concept import NOTHING
from cgru.rewards.weights import origin_of
from cgru.rl.build import Prepared, all_prompts, build_setting, load_parts, resolve_concept, resolve_prompts
from cgru.rl.critic_stage import build_untrained_critic, check_classes
from cgru.rl.head_classes import PAPER, head_classes
from cgru.rl.reward_stage import HEADED, needs_heads, own_networks, write_blank_heads
from cgru.tasks import UnlearnTask


def check_words(config: RLConfig) -> None:
    """Refuse rewards and prompts that would stop the run, before its model is loaded."""
    check_reward(config.reward.name, own_networks(config.reward))
    _check_heads(config)
    for source in filter(None, (config.reward.clip, config.critic.clip)):
        origin_of(source)
    if is_own_loader(config.model):  # the user's own model reports the prompts it accepts, once it is loaded
        return
    _, prompts = resolve_prompts(config)
    if words := words_of_model(config.model):
        check_length(prompts, words)


def _check_heads(config: RLConfig) -> None:
    """Refuse settings of heads that the run does not train, and what those that it trains would not know."""
    chosen = config.reward
    if needs_heads(config, resolve_concept(config)):
        classes = head_classes(config)
        if chosen.nothing and NOTHING not in (classes.labels if classes else ()):
            raise ValueError(
                f"reward.nothing is {chosen.nothing:g}, but the heads that the run trains have no label 'nothing'; "
                "allowed: 0. Set reward.nothing=0."
            )
        return
    folder = "" if chosen.classes == PAPER else chosen.classes  # shipped heads know the paper's classes
    for name, given in (("clip", chosen.clip), ("classes", folder)):
        if given:
            raise ValueError(
                f"reward.{name} is {given!r}, but the run trains no class heads; allowed: with reward.name="
                f"{' or '.join(sorted(HEADED))} on a model without shipped heads. Leave it out."
            )


def _check_pictures(config: RLConfig) -> None:
    classes = head_classes(config)
    if classes and classes.folder:
        for files in class_folders(classes.folder).values():
            for file in files:
                read_rgb(file)


def check_accepted(config: RunConfig, backbone: Backbone) -> None:
    """Refuse a concept or prompts that a loaded model does not read."""
    classes = classes_of(backbone)
    task_for(config.concept, config.model, classes)
    if isinstance(config, RLConfig):
        _check_limit(resolve_prompts(config, classes)[1], backbone)


def prepare(backbone: Backbone, task: UnlearnTask, config: RLConfig) -> Prepared:
    """Load detector, reward and prompts of a new run, and find batch sizes for this machine."""
    refuse_idle_processes(config)
    parts = load_parts(config, backbone=backbone)
    _check_limit(parts.prompts, parts.backbone)
    # Later stages need the same networks; a run that could not build them would stop after hours of sampling.
    if needs_heads(config, parts.concept):
        _check_pictures(config)
        with tempfile.TemporaryDirectory() as folder:
            write_blank_heads(config, Path(folder))
            setting = build_setting(config, heads=Path(folder), parts=parts)
    else:
        setting = build_setting(config, parts=parts)
    if config.critic.kind != "none":
        build_untrained_critic(setting, prior=0.0)
        if config.critic.head == "classes":
            check_classes(setting.problem, setting.concept)
    return Prepared(parts, setting)


def refuse_idle_processes(config: RLConfig) -> None:
    """Refuse more processes than an iteration has trajectories."""
    count, n = distributed.count(), config.policy.trajectories
    if count > n:
        raise ValueError(
            f"{count} processes for {n} trajectories an iteration; allowed: at most {n}, so that each has work. Launch "
            "fewer processes, or raise policy.trajectories."
        )


def _check_limit(prompts: PromptSets, backbone: Backbone) -> None:
    model = unwrapped(backbone)
    if isinstance(model, HasTextLimit):
        check_length(prompts, model)


def check_length(prompts: PromptSets, backbone: HasTextLimit) -> None:
    """Refuse prompts that the model would read only in part."""
    texts = [prompt.text for prompt in all_prompts(prompts)]
    counts = zip(texts, backbone.count_tokens(texts), strict=True)
    long = [(text, n) for text, n in counts if n > backbone.max_tokens]
    if long:
        text, n = long[0]
        raise ValueError(
            f"{len(long)} of {len(texts)} prompts are over the model's limit, first {text[:60]!r} with {n} tokens; "
            f"allowed: {backbone.max_tokens} tokens, start and end included. Shorten or remove them."
        )
