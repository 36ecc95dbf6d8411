"""What a config names, built: concept, prompts, model, reward, detector, sizes.

Emoji Canvas has a lexicon, reward networks and a detector of its own. Any other model takes any text as its concept:
prompts from a file or templates, a reward by text (`clip`) or a class head that the run trains first.
Everything here is checked before a run folder exists, so that a mistake leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from cgru.backbones import load_model
from cgru.backbones.adapter import check_targets
from cgru.backbones.base import Backbone
from cgru.config import RunConfig
from cgru.critic.views import check_shrink
from cgru.evaluation.canvas import TEMPLATE
from cgru.evaluation.hazard import explicit_prompts
from cgru.evaluation.wordings import paraphrases
from cgru.pipeline.detector import build_detector, describe_watch
from cgru.pipeline.reward import build_reward, rewarded_prompts
from cgru.pipeline.sizes import sized
from cgru.prompts import Counts, Prompt, PromptSets, generated_prompts, prompts_from_file, template_prompts
from cgru.rl.problem import Problem, Sizes
from cgru.tasks import Concept, find_concept, load_lexicon
from cgru.watch import Detector, refuse_shared_lineage

logger = logging.getLogger(__name__)

EMBEDDED = "emoji-canvas"
REWARD_PROMPTS = 64
"""For the heads that a run trains: half the concept's, half others."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What needs no reward: concept, prompts, model and detector."""

    config: RunConfig
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


def load_parts(config: RunConfig, *, sizes: Sizes | None = None) -> Parts:
    """Load model and detector, and write the prompts; `sizes` are those of an earlier start of the same run."""
    concept, prompts = resolve_prompts(config)
    backbone = load_model(config.model, device=config.device, dtype=config.dtype)
    check_targets(backbone.denoiser, config.policy.targets)
    check_shrink(config.critic.decode, backbone.latent_shape)
    detector = build_detector(config, concept, prompts, backbone.device)
    backbone, found = sized(config, backbone, sizes)
    return Parts(config, concept, prompts, backbone, found, detector)


def build_setting(
    config: RunConfig, *, sizes: Sizes | None = None, heads: Path | None = None, parts: Parts | None = None
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
    problem.encode([prompt.text for prompt in all_prompts(prompts)])
    if parts.detector is not None:
        refuse_shared_lineage(problem.reward.lineage, parts.detector.lineage)
    logger.info(describe_watch(parts.detector, config, prompts))
    return Setting(problem, parts.concept, parts.detector)


def is_embedded(config: RunConfig) -> bool:
    """Whether the model is Emoji Canvas, which has names, rewards and a detector of its own."""
    return config.model == EMBEDDED


def resolve_concept(config: RunConfig) -> Concept | None:
    """The concept of Emoji Canvas that a config names; None for other models, where it is any text."""
    if not is_embedded(config):
        return None
    lexicon = load_lexicon()
    return find_concept(config.concept, lexicon.vocabulary, lexicon.aliases)


def resolve_prompts(config: RunConfig) -> tuple[Concept | None, PromptSets]:
    """The concept and its disjoint sets of prompts; nothing of the benchmarks is among them."""
    chosen, concept = config.prompts, resolve_concept(config)
    own = () if chosen.source in ("generated", "templates") else prompts_from_file(Path(chosen.source), chosen.column)
    counts = _counts(config, concept)
    if concept is None:
        return None, template_prompts(config.concept, counts=counts, seed=chosen.split_seed, own=own)
    if chosen.source == "templates":
        raise ValueError(
            "prompts.source is 'templates', which are for models without a lexicon; allowed with emoji-canvas: "
            "generated, or the path of a .txt, .csv or .jsonl. Set prompts.source=generated."
        )
    lexicon = load_lexicon()
    grid = [TEMPLATE.format(**{"class": c, "style": s}) for c in lexicon.classes for s in lexicon.styles]
    grid += [*explicit_prompts(lexicon), *paraphrases(lexicon)]
    forbidden = [*grid, *(f"{prompt}." for prompt in grid)]
    sets = generated_prompts(concept, lexicon, counts=counts, seed=chosen.split_seed, forbidden=forbidden, own=own)
    return concept, sets


def _counts(config: RunConfig, concept: Concept | None) -> Counts:
    chosen, critic = config.prompts, config.prompts.critic if config.critic.kind != "none" else 0
    # A critic that sees the prompt, one of retain rewards, of classes or of exploration must have seen more than the
    # concept.
    sees_others = config.critic.kind == "prompt" or config.critic.head == "classes"
    sees_others = sees_others or config.retention.share > 0 or config.sampling.explore > 0
    return Counts(
        policy=chosen.count,
        retain=chosen.retain,
        critic=critic,
        validation=chosen.validation if config.watch.every else 0,
        critic_retain=critic if sees_others else 0,
        reward=0 if concept is not None else REWARD_PROMPTS,
    )


def all_prompts(sets: PromptSets) -> tuple[Prompt, ...]:
    """Every prompt of a run, in a fixed order."""
    validation = (*sets.validation_forget, *sets.validation_retain)
    return (*sets.policy, *sets.retain, *sets.critic, *sets.critic_retain, *validation, *sets.reward)


def prompts_hash(sets: PromptSets) -> str:
    """A hash of every prompt: a prompt file that changed between start and resume is found out by it."""
    table = [asdict(prompt) for prompt in all_prompts(sets)]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
