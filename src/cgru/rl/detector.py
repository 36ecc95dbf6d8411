"""Load the outside detector that a config names (`watch.detector`), before the run folder is created.

`auto` uses the detector shipped with Emoji Canvas, for its classes and hazards. For other models there is no detector
unless the user names one, since every download is the user's choice. If the run will train its own reward heads, their
backbone is known in advance, so a detector related to it is refused in advance, too.
"""

from __future__ import annotations

import logging

import torch

from cgru.config import RLConfig
from cgru.embedded import load_lexicon
from cgru.outside_detector import (
    AUTO,
    NONE,
    Detector,
    detector_for,
    named_detector,
    refuse_judge,
    refuse_shared_lineage,
)
from cgru.prompts import PromptSets
from cgru.rewards.weights import lineage_of
from cgru.rl.reward_stage import heads_source, needs_heads, text_of
from cgru.tasks import Concept, targets

logger = logging.getLogger(__name__)


def build_detector(
    config: RLConfig, concept: Concept | None, prompts: PromptSets, device: torch.device
) -> Detector | None:
    """Return the outside detector; None if there is none or nothing for it to check."""
    watch = config.watch
    detector = _find(config, concept, prompts, device) if watch.every and prompts.validation_forget else None
    if detector is None and watch.stop:
        raise ValueError(
            f"watch.stop is true, but no outside detector knows {config.concept!r} on {config.model!r}; allowed: "
            "classes and hazards of Emoji Canvas, or a network in watch.detector. Name one, or set watch.stop=false."
        )
    # The detector must not be a relative of the CLIP under the heads that the run will train.
    if detector is not None and needs_heads(config, concept):
        refuse_shared_lineage(lineage_of(heads_source(config)), detector.lineage)
    return detector


def _find(config: RLConfig, concept: Concept | None, prompts: PromptSets, device: torch.device) -> Detector | None:
    name = config.watch.detector
    if name == NONE:
        return None
    if name == AUTO:
        return detector_for(concept, load_lexicon().vocabulary, device=device) if concept else None
    wanted = targets(concept, load_lexicon().vocabulary) if concept else (text_of(config),)
    others = [prompt.label for prompt in prompts.validation_retain if prompt.label]
    detector = named_detector(name, wanted, others, device=device)
    refuse_judge(detector.lineage)
    return detector


def describe_watch(detector: Detector | None, config: RLConfig, prompts: PromptSets) -> str:
    """Return one line for the log: which detector watches the run, or that none does."""
    if detector is None:
        return (
            f"no outside detector watches this run (watch.detector={config.watch.detector}, watch.every="
            f"{config.watch.every}): a fooled reward would go unnoticed"
        )
    line = f"outside detector {detector.lineage['name']!r} looks for {', '.join(detector.targets)}"
    if not detector.can_tell(prompts.validation_retain):
        line += "; it knows no label of the retain prompts, so it cannot check that their pictures stay right"
    return line
