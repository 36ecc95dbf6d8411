"""The kinds of benchmarks, recognised by the measurements in scores.json and not by their names.

`unlearncanvas` measures the same as `canvas`, and so may the user's own benchmark: equal measurements get the same
headline, plane and columns. Benchmarks of one kind are still shown apart unless name, version and protocol are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A sort of benchmark as the page shows it."""

    name: str
    needed: tuple[str, ...]
    """Measurements by which it is known."""
    columns: Mapping[str, str]
    """Measurement -> heading in a comparison."""
    meaning: str = ""
    plane: tuple[str, str] | None = None
    """Words of the axes for the first two of `needed`: what is gone, what is kept; None: no plane."""
    is_headline: bool = False
    """Whether a run's headline may come from it."""
    change: Mapping[str, str] = field(default_factory=dict)
    """Measurement -> words in the terminal's small table of before and after."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Columns that are shown in a comparison where a run has them, and neither summed nor ranked by."""
    has_target: bool = True
    """Whether it asks about a concept; without, it counts the same thing whatever was unlearned."""


OBJECTS = Kind(
    "objects",
    ("ua", "ira"),
    {"ua": "UA ↑", "ira": "IRA ↑", "cra": "CRA ↑"},
    "UA: forgotten. IRA: other labels of the same kind kept. CRA: labels of the other kind kept. ",
    ("forgotten (UA)", "kept (IRA)"),
    is_headline=True,
    change={
        "ua": "UA, forgotten",
        "ira": "IRA, others kept",
        "cra": "CRA, other kind kept",
        "replacement_clean": "something else drawn cleanly",
    },
    beside={"replacement_clean": "clean instead ↑"},
)
HAZARDS = Kind(
    "hazards",
    ("hazard_detections", "object_accuracy"),
    {"hazard_detections": "hazards drawn ↓", "object_accuracy": "objects kept ↑"},
    plane=("hazards no longer drawn", "objects kept"),
    is_headline=True,
    change={"hazard_detections": "hazards detected", "object_accuracy": "objects kept"},
)
LOOKS = Kind(
    "attributes",
    ("attribute_rate", "object_accuracy"),
    {"attribute_rate": "attribute drawn ↓", "object_accuracy": "objects kept ↑", "style_accuracy": "styles kept ↑"},
    plane=("attribute no longer drawn", "objects kept"),
    is_headline=True,
    change={
        "attribute_rate": "attribute drawn",
        "object_accuracy": "objects kept",
        "style_accuracy": "styles kept where asked for",
    },
)
NUDITY = Kind(
    "nudity",
    ("nudity_detections", "nude_images"),
    {"nude_images": "pictures with any ↓", "nudity_detections": "detections a picture ↓"},
    has_target=False,
)
PARAPHRASES = Kind(
    "paraphrases",
    ("paraphrase_ua", "paraphrase_ira"),
    {"paraphrase_ua": "forgotten in other words ↑", "paraphrase_ira": "others kept ↑"},
    plane=("forgotten in other words", "others kept in other words"),
    change={"paraphrase_ua": "forgotten in other words", "paraphrase_ira": "others kept in other words"},
)
ATTACKS = Kind(
    "attacks",
    ("post_asr",),
    {"pre_asr": "pre-ASR ↓", "post_asr": "post-ASR ↓"},
    "Pre-ASR: prompts that show the concept without any attack. Post-ASR: without or with it. ",
)
KINDS = (OBJECTS, HAZARDS, LOOKS, NUDITY, PARAPHRASES, ATTACKS)
METRICS = ("fid", "kid", "cmmd", "clipscore")
"""Benchmarks of picture quality that a page expects; others name their `metric` in the protocol, as these do."""


def kind_of(scores: Mapping[str, Any]) -> Kind | None:
    """The kind of an evaluation; a figure of picture quality makes a kind of its own; None: only listed."""
    found: Mapping[str, Mapping[str, Any]] = scores["measurements"]
    fitting = (kind for kind in KINDS if all(name in found for name in kind.needed))
    return next(fitting, None) or (_quality(found) if metric_of(scores) else None)


def metric_of(scores: Mapping[str, Any]) -> str | None:
    """What a benchmark of picture quality measures, by its protocol, such as fid; None for other benchmarks."""
    metric = scores["protocol"].get("metric")
    return None if metric is None else str(metric)


def _quality(found: Mapping[str, Mapping[str, Any]]) -> Kind | None:
    if not found:
        return None
    name, row = next(iter(found.items()))
    return Kind(name, (name,), {name: f"{name} {'↑' if row.get('better') == 'higher' else '↓'}"})


def meaning_of(name: str, found: Mapping[str, Any]) -> str:
    """What a measurement says, in words: its own, else those of MEANING."""
    return str(found.get("meaning") or MEANING.get(name, ""))


MEANING = {
    "object_accuracy": "the judge sees the prompted object",
    "style_accuracy": "the judge sees the prompted style",
    "frechet_judge": "distance to real composites, in judge features",
    "nothing_share": "nothing recognisable",
    "ua": "target no longer recognised",
    "ira": "other labels of its kind still recognised",
    "cra": "labels of the other kind still recognised",
    "cra_strict": "as cra, without the target's pictures",
    "ua_soft": "1 - probability of the target",
    "ira_soft": "probability of the right label, target left out",
    "cra_soft": "probability of the right label of the other kind",
    "average_ua_ira": "mean of UA and IRA",
    "average_ua_ira_cra": "mean of UA, IRA and CRA",
    "frechet_to_base": "how far what is kept moved, in judge features",
    "target_nothing_share": "target's pictures with nothing recognisable",
    "clean_share": "the judge is sure of the prompted object, p 0.9 or more",
    "replacement_clean": "target's pictures: the judge is sure of another label",
    "replacement_frechet": "target's pictures to the base's of other labels",
    "replacement_frechet_base": "the same of the base's pictures of the target",
    "hazard_detections": "explicit prompts: the judge sees what is to be gone",
    "hazard_detections_soft": "the same from the judge's probabilities",
    "hazard_right": "explicit prompts: the judge sees the prompted category",
    "hazard_nothing_share": "explicit prompts: nothing recognisable",
    "other_hazards_right": "the other categories still recognised",
    "fid_judge": "Fréchet distance to the reference, object-judge features",
    "fid_clip_eval": "Fréchet distance to the reference, clip-eval features",
    "kid_judge": "kernel distance to the reference, object-judge features",
    "kid_clip_eval": "kernel distance to the reference, clip-eval features",
    "cmmd_clip_eval": "CMMD to the reference, clip-eval embeddings",
    "clipscore_clip_eval": "picture and prompt agree, clip-eval",
    "benign_detections": "prompts of the 20 classes: the judge sees a hazard",
    "paraphrase_accuracy": "other wordings: the judge sees the class",
    "paraphrase_ua": "other wordings: target no longer recognised",
    "paraphrase_ua_soft": "1 - probability of the target",
    "paraphrase_ira": "other wordings of the other classes still recognised",
    "paraphrase_nothing_share": "nothing recognisable",
    "attribute_rate": "open prompts: the judge sees the attribute",
    "attribute_rate_detector": "the same by the detector that pays the policy",
    "attribute_nothing_share": "open prompts: nothing recognisable",
    "styled_object_accuracy": "prompts that name a style: the judge sees the prompted object",
    "nudity_detections": "body parts detected per picture, eight categories",
    "nude_images": "pictures with any of the eight categories",
    "nude_images_nine": "the same, with Anus, as some scripts count",
    "nude_images_explicit": "without armpits, belly, feet and breasts (M)",
    "pre_asr": "prompts that show the concept without any attack",
    "post_asr": "prompts that show it without or with the attack",
    "attacked_asr": "attacked prompts that it was brought back on",
}
"""What each measurement says, in words."""
