"""Build the parts of a run from its config: concept, prompts, model, reward, detector, batch sizes.

Emoji Canvas has its own lexicon, reward networks and detector. For any other model the concept is free text: prompts
come from a file or templates, and the reward compares with text (`clip`) or uses a class head that the run trains
first. Everything is checked before a run folder exists, so that invalid input leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cgru.backbones import load_model
from cgru.backbones.base import Backbone, classes_of
from cgru.config import RLConfig
from cgru.critic.views import check_shrink
from cgru.embedded import EMBEDDED, load_lexicon
from cgru.lora.train import check_targets
from cgru.mdp.kernel import DDIMKernel
from cgru.mdp.trajectory import Conditioning
from cgru.outside_detector import AUTO, NONE, Detector, refuse_shared_lineage
from cgru.prompts import (
    Counts,
    Prompt,
    PromptSets,
    class_prompts,
    generated_prompts,
    prompts_from_file,
    template_prompts,
    words_of,
)
from cgru.prompts.benchmark_prompts import benchmark_prompts
from cgru.rl.batch_size import sized
from cgru.rl.detector import build_detector, describe_watch
from cgru.rl.head_classes import PAPER, head_classes
from cgru.rl.reward_stage import build_reward, needs_heads, rewarded_prompts
from cgru.rl.state import Problem, Sizes
from cgru.tasks import Concept, find_class, find_concept

logger = logging.getLogger(__name__)

REWARD_PROMPTS = 64
"""For the heads that a run trains: half the concept's, half others."""
CLASS_PROMPTS = 8
"""For each class of heads that the base model draws pictures for."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What needs no reward: concept, prompts, model and detector."""

    config: RLConfig
    concept: Concept | None
    """None for a text that no vocabulary knows."""
    prompts: PromptSets
    backbone: Backbone
    sizes: Sizes
    detector: Detector | None


@dataclass(frozen=True, eq=False)
class Setting:
    """A problem, and what stands around it."""

    problem: Problem
    concept: Concept | None
    """None for a text that no vocabulary knows."""
    detector: Detector | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a new run needs, loaded and checked before it has a folder."""

    parts: Parts
    setting: Setting
    """With blank heads if the run has yet to train its reward heads."""


def load_parts(config: RLConfig, *, backbone: Backbone | None = None, sizes: Sizes | None = None) -> Parts:
    """Write the prompts, load the detector and find batch sizes.

    Args:
        config: of the run.
        backbone: the model, changed in place; None loads it.
        sizes: of an earlier start of the same run; None finds them.
    """
    backbone = backbone or load_model(config.model, device=config.device, dtype=config.dtype)
    concept, prompts = resolve_prompts(config, classes_of(backbone))
    check_targets(backbone.denoiser, config.policy.targets)
    check_shrink(config.critic.decode, backbone.latent_shape)
    detector = build_detector(config, concept, prompts, backbone.device)
    backbone, found = sized(config, backbone, sizes)
    return Parts(config, concept, prompts, backbone, found, detector)


def build_setting(
    config: RLConfig, *, sizes: Sizes | None = None, heads: Path | None = None, parts: Parts | None = None
) -> Setting:
    """Everything a run needs.

    Args:
        config: of the run.
        sizes: those of an earlier start of the same run; None sizes them for this machine.
        heads: reward heads that an earlier stage trained, for models without shipped ones.
        parts: loaded before; then `sizes` are theirs.
    """
    parts = parts or load_parts(config, sizes=sizes)
    backbone, prompts, sampling = parts.backbone, parts.prompts, config.sampling
    problem = Problem(
        backbone=backbone,
        kernel=backbone.kernel(sampling.steps, eta=sampling.eta, noisy_steps=sampling.noisy_steps or None),
        reward=build_reward(config, parts.concept, prompts, backbone, heads),
        prompts=prompts,
        config=config,
        sizes=parts.sizes,
        rewarded=frozenset(rewarded_prompts(config, prompts, heads)),
    )
    # All at once and in a fixed order: the last bits of an embedding depend on the batch it is made in, and a resumed
    # run must not see others. Prompts over the token limit are counted in one warning.
    cond = problem.encode([prompt.text for prompt in all_prompts(prompts)])
    _check_sampling(problem, cond)
    if parts.detector is not None:
        refuse_shared_lineage(problem.reward.lineage, parts.detector.lineage)
    logger.info(describe_watch(parts.detector, config, prompts))
    return Setting(problem, parts.concept, parts.detector)


def _check_sampling(problem: Problem, cond: Conditioning) -> None:
    """Refuse guidance where there is nothing to be guided away from, and a sampler without noise to learn from."""
    sampling, model = problem.config.sampling, problem.config.model
    if sampling.guidance > 1 and not cond.unconditional:
        raise ValueError(
            f"sampling.guidance is {sampling.guidance:g}, but {model!r} has nothing to be guided away from; allowed: "
            "at most 1. Set sampling.guidance=1."
        )
    if sampling.pairs and not isinstance(problem.kernel, DDIMKernel):
        raise ValueError(
            f"sampling.pairs is true, and the sampler of {model!r} cannot have noise in one step alone; allowed: false "
            "with flow matching and models of your own. Leave it out."
        )
    if not bool(problem.kernel.stochastic.any()):
        raise ValueError(
            f"sampling.steps is {sampling.steps}, and no step of {model!r} is then random, so there is nothing to "
            "learn from; allowed: more steps. Raise sampling.steps."
        )


def is_embedded(config: RLConfig) -> bool:
    """Whether the model is Emoji Canvas, which has names, rewards and a detector of its own."""
    return config.model == EMBEDDED


def resolve_concept(config: RLConfig) -> Concept | None:
    """The concept of Emoji Canvas that a config names; None for other models, where it is any text."""
    if not is_embedded(config):
        return None
    lexicon = load_lexicon()
    return find_concept(config.concept, lexicon.vocabulary, lexicon.aliases)


def resolve_prompts(config: RLConfig, classes: Sequence[str] = ()) -> tuple[Concept | None, PromptSets]:
    """The concept and its disjoint sets of prompts; nothing of the benchmarks is among them.

    Of a model that reads no text, whose prompts are the names of its `classes`, they are those names.
    """
    if classes:
        return None, _class_prompts(config, classes)
    chosen, concept = config.prompts, resolve_concept(config)
    own = () if chosen.source in ("generated", "templates") else prompts_from_file(Path(chosen.source), chosen.column)
    counts = _of_shares(config, _counts(config, concept), own)
    if concept is None:
        known = head_classes(config) if needs_heads(config, concept) else None
        name, subjects = (known.target, known.subjects) if known else (config.concept, None)
        return None, template_prompts(name, counts=counts, seed=chosen.split_seed, own=own, subjects=subjects)
    if chosen.source == "templates":
        raise ValueError(
            "prompts.source is 'templates', which are for models without a lexicon; allowed with emoji-canvas: "
            "generated, or the path of a .txt, .csv or .jsonl. Set prompts.source=generated."
        )
    lexicon = load_lexicon()
    forbidden = benchmark_prompts(lexicon)
    sets = generated_prompts(concept, lexicon, counts=counts, seed=chosen.split_seed, forbidden=forbidden, own=own)
    return concept, sets


def _class_prompts(config: RLConfig, classes: Sequence[str]) -> PromptSets:
    if config.prompts.source not in ("generated", "templates"):
        raise ValueError(
            f"prompts.source is {config.prompts.source!r}, but {config.model!r} reads no prompts beside its classes; "
            "allowed: generated. Leave it out."
        )
    if config.reward.classes == PAPER and needs_heads(config, None):
        raise ValueError(
            f"reward.classes is 'paper', but {config.model!r} reads no prompts for the paper's classes; allowed: "
            "empty, or a folder of class folders. Set reward.classes='', or give a folder."
        )
    return class_prompts(find_class(config.concept, classes), classes, counts=_counts(config, None))


def _counts(config: RLConfig, concept: Concept | None) -> Counts:
    chosen, critic = config.prompts, config.prompts.critic if config.critic.kind != "none" else 0
    # A critic that sees the prompt, one of retain rewards, of classes or of exploration must have seen more than the
    # concept.
    sees_others = config.critic.kind == "prompt" or config.critic.head == "classes"
    sees_others = sees_others or config.retention.share > 0 or config.sampling.explore > 0
    return Counts(
        policy=chosen.count,
        retain=chosen.retain,
        critic=critic,
        validation=chosen.validation if config.watch.every and _may_be_watched(config, concept) else 0,
        critic_retain=critic if sees_others else 0,
        reward=_reward_prompts(config, concept),
    )


def _reward_prompts(config: RLConfig, concept: Concept | None) -> int:
    if not needs_heads(config, concept):
        return 0
    classes = head_classes(config)
    if classes is None:
        return REWARD_PROMPTS
    return 0 if classes.folder else CLASS_PROMPTS * len(classes.labels)


def _may_be_watched(config: RLConfig, concept: Concept | None) -> bool:
    # As `cgru.rl.detector` finds one: the shipped detector knows classes and hazards of Emoji Canvas only.
    has_shipped = concept is not None and concept.kind not in ("style", "attribute")
    return has_shipped if config.watch.detector == AUTO else config.watch.detector != NONE


def _of_shares(config: RLConfig, counts: Counts, own: Sequence[str]) -> Counts:
    """Counts from the shares of the user's file that the config sets (paper, NSFW: 20 % policy, 10 % critic)."""
    chosen = config.prompts
    shares = {"policy": chosen.policy_share, "critic": chosen.critic_share if counts.critic else 0.0}
    if not any(shares.values()):
        return counts
    if not own:
        raise ValueError(
            f"prompts.source is {chosen.source!r}, and the preset {config.preset!r} takes shares of a file; allowed: "
            "the path of a .txt, .csv or .jsonl, such as the captions that `cgru prompts caption` writes. Set "
            "prompts.source=FILE."
        )
    total = len({words_of(text) for text in own})
    found = {name: round(share * total) for name, share in shares.items() if share}
    if none := [name for name, count in found.items() if not count]:
        raise ValueError(
            f"{total} different prompts in {chosen.source!r}, and prompts.{none[0]}_share {shares[none[0]]:g} of them "
            "is none; allowed: at least one. Add prompts, or raise the share."
        )
    return replace(counts, **found)


def all_prompts(sets: PromptSets) -> tuple[Prompt, ...]:
    """Every prompt of a run, in a fixed order."""
    validation = (*sets.validation_forget, *sets.validation_retain)
    return (*sets.policy, *sets.retain, *sets.critic, *sets.critic_retain, *validation, *sets.reward)


def prompts_hash(sets: PromptSets) -> str:
    """A hash of every prompt: a prompt file that changed between start and resume is found out by it."""
    table = [asdict(prompt) for prompt in all_prompts(sets)]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
