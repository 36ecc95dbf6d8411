"""Build a run's reward: the one the config names, plus a retain reward; train class heads where none are shipped.

Models other than Emoji Canvas have no class head. With the reward `concept`, the run first trains one (stage 1-reward)
on images that the base model generates, labelled [concept, "other"], or on those of more classes (`reward.classes`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cgru.backbones.base import Backbone
from cgru.config import RewardConfig, RLConfig
from cgru.prompts import Prompt, PromptSets, retain_label_table
from cgru.rewards.base import Reward, load_reward, parse_sum
from cgru.rewards.concept import ByPrompt, RetainReward
from cgru.rewards.heads import SHIPPED, ClassHeads, Tower, load_networks, load_tower, save_heads
from cgru.rewards.training import fit_heads, pictures_from_folder, pictures_from_model
from cgru.rewards.weights import origin_of
from cgru.rl.head_classes import head_classes
from cgru.rl.state import Sizes
from cgru.seeds import child_seed
from cgru.tasks import Concept

logger = logging.getLogger(__name__)

CLIP_B32 = "openai/clip-vit-base-patch32"
"""Backbone of the paper's reward and critic."""
HEADED = frozenset({"concept", "replaced"})
"""Rewards that read class heads."""
HEAD, OTHER = "object", "other"
PICTURES = 64
"""Images per label for training heads; a fifth is held out."""
POOR = 0.8
"""A trained head with a lower held-out accuracy causes a warning."""


@dataclass(frozen=True)
class TrainedHeads:
    """Record of stage 1-reward."""

    accuracy: float
    held_out: int
    pictures: int


def needs_heads(config: RLConfig, concept: Concept | None) -> bool:
    """Return whether the run must train class heads: its reward reads some, and no network of the config knows it."""
    is_headed = any(name in HEADED for _, name in parse_sum(config.reward.name))
    return concept is None and is_headed and all(name in SHIPPED for name in config.reward.networks)


def heads_source(config: RLConfig) -> Path | str:
    """Return the folder or hub id of the CLIP under the heads that the run trains."""
    return origin_of(config.reward.clip or CLIP_B32)


def train_heads(config: RLConfig, prompts: PromptSets, backbone: Backbone, sizes: Sizes, folder: Path) -> TrainedHeads:
    """Fit a head to images of the base model and write it as a heads folder."""
    concept, classes = text_of(config), head_classes(config)
    tower = load_tower(heads_source(config), device=backbone.device)
    if classes and classes.folder:
        pictures = pictures_from_folder(classes.folder, tower.resized)
    else:
        pictures = _drawn(config, prompts, backbone, sizes, tower)
    fitted = fit_heads(tower, pictures, head=HEAD, seed=child_seed(config.seed, "reward-head"))
    if fitted.accuracy < POOR:
        logger.warning(
            "the reward head classifies only %.0f %% of %d held-out pictures correctly: the pictures of %s are hard to "
            "tell apart, so the reward will be noisy",
            100 * fitted.accuracy,
            fitted.held_out,
            f"{len(pictures)} classes" if classes else f"{concept!r} and of the rest",
        )
    found = TrainedHeads(fitted.accuracy, fitted.held_out, sum(len(part) for part in pictures.values()))
    save_heads(fitted.heads, folder, name=f"heads for {concept}", record={"accuracy": found.accuracy})
    return found


def write_blank_heads(config: RLConfig, folder: Path) -> None:
    """Write heads of the right labels and zero weights, which cost what the trained ones will."""
    classes, tower = head_classes(config), load_tower(heads_source(config))
    labels = classes.labels if classes else (text_of(config), OTHER)
    head = nn.Linear(tower.width, len(labels))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    save_heads(ClassHeads(tower, {HEAD: head}, {HEAD: labels}), folder)


def drawn_labels(config: RLConfig) -> tuple[str, ...]:
    """Return the labels of the heads that the base model draws pictures for; none with a folder of pictures."""
    classes = head_classes(config)
    if classes is None:
        return (text_of(config), OTHER)
    return () if classes.folder else classes.labels


def _drawn(
    config: RLConfig, prompts: PromptSets, backbone: Backbone, sizes: Sizes, tower: Tower
) -> dict[str, torch.Tensor]:
    labels, sampling = drawn_labels(config), config.sampling
    return pictures_from_model(
        backbone,
        {label: [p.text for p in prompts.reward if label_among(p, labels) == label] for label in labels},
        per_label=PICTURES,
        seed=child_seed(config.seed, "reward"),
        steps=sampling.steps,
        guidance=sampling.guidance,
        eta=sampling.eta,
        resized=tower.resized,
        batch_size=sizes.rollout,
        decode_batch=sizes.decode,
    )


def label_among(prompt: Prompt, labels: Sequence[str]) -> str | None:
    """Return the label of a prompt's picture among those of the run's heads; None if they have none for it."""
    return prompt.label if prompt.label in labels else OTHER if OTHER in labels else None


def build_reward(
    config: RLConfig, concept: Concept | None, prompts: PromptSets, backbone: Backbone, heads: Path | None
) -> Reward:
    """Return the reward for forget prompts, combined with a retain reward if the batch holds retain prompts."""
    chosen, networks = config.reward, _networks(config, heads)
    forget = load_reward(chosen.name, backbone=backbone, **_settings(config, _name(config, concept, heads), networks))
    if not config.retention.share:
        return forget
    truth = rewarded_prompts(config, prompts, heads)
    if not truth:
        raise ValueError(
            f"retention.share is {config.retention.share}, but no reward network knows a label of the retain prompts "
            f"of {config.model!r}; set reward.name=concept or retention.share=0, or use retention.kl to retain."
        )
    # Retain reward: reward.retain · scale · p(label of the prompt)
    loaded = load_networks(networks, device=backbone.device)
    scale = chosen.retain * chosen.scale
    retain = RetainReward(loaded, truth, scale, chosen.temperature, chosen.views, config.seed)
    return ByPrompt(forget, retain, frozenset(truth))


def own_networks(chosen: RewardConfig) -> dict[str, Any]:
    """Return the networks and labels that the user names; each reward has its own defaults for the others."""
    given = {name: getattr(chosen, name) for name in ("model", "label", "weights", "negatives")}
    return {name: value for name, value in given.items() if value}


def _name(config: RLConfig, concept: Concept | None, heads: Path | None) -> str:
    if concept is not None:
        return concept.name
    classes = head_classes(config) if heads is not None else None
    return classes.target if classes else text_of(config)


def _settings(config: RLConfig, concept: str, networks: tuple[str | Path, ...]) -> dict[str, Any]:
    chosen = config.reward
    return {
        "concept": concept,
        "form": chosen.form,
        "scale": chosen.scale,
        "temperature": chosen.temperature,
        "limit": chosen.limit,
        "networks": networks,
        "views": chosen.views,
        "nothing": chosen.nothing,
        "seed": config.seed,
        **own_networks(chosen),
    }


def rewarded_prompts(config: RLConfig, prompts: PromptSets, heads: Path | None) -> Mapping[str, tuple[str, str]]:
    """Map each retain prompt that may be in a batch to the (head, label) of its reward; empty without such prompts.

    Prompts of everyday things have no label and are protected by the KL alone. Heads that the run trained know a
    retain prompt by its class, or as "other" where they have no other class.
    """
    if not config.retention.share:
        return {}
    kept = (*prompts.retain, *prompts.critic_retain)
    if heads is not None:
        classes = head_classes(config)
        labels = classes.labels if classes else (OTHER,)
        return {prompt.text: (HEAD, label) for prompt in kept if (label := label_among(prompt, labels))}
    return dict(retain_label_table(kept))


def forget_reward(reward: Reward) -> Reward:
    """Return the part of a reward that applies to forget prompts."""
    return reward.forget if isinstance(reward, ByPrompt) else reward


def text_of(config: RLConfig) -> str:
    """Return a free-text concept as it appears in prompts, with runs of white space collapsed."""
    return " ".join(config.concept.split())


def _networks(config: RLConfig, heads: Path | None) -> tuple[str | Path, ...]:
    return (heads,) if heads is not None else config.reward.networks
