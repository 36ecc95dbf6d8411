"""The outside detector that a config names (`watch.detector`), loaded before a run has a folder.

`auto` is the one Emoji Canvas ships, for its classes and hazards; elsewhere none, since every download is the user's
choice. What a run trains its own heads on is known beforehand, so a relative of it is refused beforehand, too.
"""

from __future__ import annotations

import logging

import torch

from cgru.config import RunConfig
from cgru.pipeline.reward import CLIP_B32, needs_heads, text_of
from cgru.prompts import PromptSets
from cgru.rewards.weights import lineage_of
from cgru.tasks import Concept, load_lexicon, targets
from cgru.watch import AUTO, NONE, Detector, detector_for, named_detector, refuse_judge, refuse_shared_lineage

logger = logging.getLogger(__name__)


def build_detector(
    config: RunConfig, concept: Concept | None, prompts: PromptSets, device: torch.device
) -> Detector | None:
    """The outside detector; None where there is none, or nothing for it to look at."""
    watch = config.watch
    detector = _find(config, concept, prompts, device) if watch.every and prompts.validation_forget else None
    if detector is None and watch.stop:
        raise ValueError(
            f"watch.stop is true, but no outside detector knows {config.concept!r} on {config.model!r}; allowed: "
            "classes and hazards of Emoji Canvas, or a network as watch.detector. Name one, or set watch.stop=false."
        )
    if detector is not None and needs_heads(config, concept):
        refuse_shared_lineage(lineage_of(CLIP_B32), detector.lineage)
    return detector


def _find(config: RunConfig, concept: Concept | None, prompts: PromptSets, device: torch.device) -> Detector | None:
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


def describe_watch(detector: Detector | None, config: RunConfig, prompts: PromptSets) -> str:
    """One line for the log: who watches, or that nobody does."""
    if detector is None:
        return (
            f"no outside detector watches this run (watch.detector={config.watch.detector}, watch.every="
            f"{config.watch.every}): a reward that is fooled would not be noticed"
        )
    line = f"outside detector {detector.lineage['name']!r} looks for {', '.join(detector.targets)}"
    if not detector.can_tell(prompts.validation_retain):
        line += "; it knows no label of the retain prompts, so it cannot tell whether their pictures are still right"
    return line
