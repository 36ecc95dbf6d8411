"""The reward of a run: what the config names, a retain reward beside it, and heads trained where none are shipped.

A model other than Emoji Canvas has no class head. With the reward `concept` its run trains one first (stage 1-reward),
on pictures that the base model makes itself, with the labels [concept, "other"]: no data set is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cgru.backbones.base import Backbone
from cgru.config import RunConfig
from cgru.prompts import PromptSets, retain_label_table
from cgru.rewards.base import Reward, load_reward, parse_sum
from cgru.rewards.concept import ByPrompt, RetainReward
from cgru.rewards.heads import SHIPPED, load_networks, load_tower, save_heads
from cgru.rewards.training import fit_heads, pictures_from_model
from cgru.rl.problem import Sizes
from cgru.seeds import child_seed
from cgru.tasks import Concept

logger = logging.getLogger(__name__)

CLIP_B32 = "openai/clip-vit-base-patch32"
"""The paper's reward and critic backbone."""
HEAD, OTHER = "object", "other"
PICTURES = 64
"""Per label, for heads that a run trains; a fifth is held out."""
POOR = 0.8
"""Held-out accuracy under which a trained head is warned about."""


@dataclass(frozen=True)
class TrainedHeads:
    """What the stage 1-reward says of its heads."""

    accuracy: float
    held_out: int
    pictures: int


def needs_heads(config: RunConfig, concept: Concept | None) -> bool:
    """Whether the run must train class heads: the reward is `concept`, and no network of the config knows the text."""
    names = [name for _, name in parse_sum(config.reward.name)]
    return concept is None and "concept" in names and all(name in SHIPPED for name in config.reward.networks)


def train_heads(config: RunConfig, prompts: PromptSets, backbone: Backbone, sizes: Sizes, folder: Path) -> TrainedHeads:
    """Fit a head to pictures of the base model and write it as a heads folder."""
    concept, sampling = text_of(config), config.sampling
    tower = load_tower(CLIP_B32, device=backbone.device)
    shown = {label: [p.text for p in prompts.reward if (p.label == concept) == is_it] for label, is_it in
             ((concept, True), (OTHER, False))}  # fmt: skip
    pictures = pictures_from_model(
        backbone,
        shown,
        per_label=PICTURES,
        seed=child_seed(config.seed, "reward"),
        steps=sampling.steps,
        guidance=sampling.guidance,
        eta=sampling.eta,
        size=tower.image_size,
        batch_size=sizes.rollout,
        decode_batch=sizes.decode,
    )
    fitted = fit_heads(tower, pictures, head=HEAD, seed=child_seed(config.seed, "reward-head"))
    if fitted.accuracy < POOR:
        logger.warning(
            "the reward head is right on %.0f %% of %d held-out pictures only: what the model draws for %r is hard to "
            "tell from the rest, and the reward will be noisy",
            100 * fitted.accuracy,
            fitted.held_out,
            concept,
        )
    found = TrainedHeads(fitted.accuracy, fitted.held_out, PICTURES * len(shown))
    save_heads(fitted.heads, folder, name=f"heads for {concept}", record={"accuracy": found.accuracy})
    return found


def build_reward(
    config: RunConfig, concept: Concept | None, prompts: PromptSets, backbone: Backbone, heads: Path | None
) -> Reward:
    """The reward of forget prompts; with retain prompts in the batch, theirs beside it."""
    chosen, networks = config.reward, _networks(config, heads)
    forget = load_reward(
        chosen.name,
        backbone=backbone,
        concept=concept.name if concept else text_of(config),
        form=chosen.form,
        scale=chosen.scale,
        temperature=chosen.temperature,
        limit=chosen.limit,
        networks=networks,
        views=chosen.views,
        nothing=chosen.nothing,
        seed=config.seed,
    )
    if not config.retention.share:
        return forget
    truth = rewarded_prompts(config, prompts, heads)
    if not truth:
        raise ValueError(
            f"retention.share is {config.retention.share}, but no reward network has labels for the retain prompts of "
            f"{config.model!r}; allowed there: reward.name=concept, or share 0. Use retention.kl to retain."
        )
    loaded = load_networks(networks, device=backbone.device)
    scale = chosen.retain * chosen.scale
    retain = RetainReward(loaded, truth, scale, chosen.temperature, chosen.views, config.seed)
    return ByPrompt(forget, retain, frozenset(truth))


def rewarded_prompts(config: RunConfig, prompts: PromptSets, heads: Path | None) -> Mapping[str, tuple[str, str]]:
    """Retain prompts that can be in a batch -> (head, label) of their reward; none where none are asked for.

    Everyday things have no label, so they are kept by the KL alone. With heads that a run trained, all are "other".
    """
    if not config.retention.share:
        return {}
    kept = (*prompts.retain, *prompts.critic_retain)
    if heads is not None:
        return {prompt.text: (HEAD, OTHER) for prompt in kept}
    return dict(retain_label_table(kept))


def forget_reward(reward: Reward) -> Reward:
    """The part of a reward that pictures of forget prompts get."""
    return reward.forget if isinstance(reward, ByPrompt) else reward


def text_of(config: RunConfig) -> str:
    """A concept that is any text, its blanks made plain, as it stands in the prompts."""
    return " ".join(config.concept.split())


def _networks(config: RunConfig, heads: Path | None) -> tuple[str | Path, ...]:
    return (heads,) if heads is not None else config.reward.networks
