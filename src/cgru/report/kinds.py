"""Which benchmarks say the same sort of thing, told by the measurements in scores.json and not by their names.

`unlearncanvas` measures what `canvas` does, and so may a benchmark of one's own: the same measurements get the same
headline, plane and columns. Benchmarks of one kind still stand apart unless name, version and protocol are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


OBJECTS = Kind(
    "objects",
    ("ua", "ira"),
    {"ua": "UA ↑", "ira": "IRA ↑", "cra": "CRA ↑"},
    "UA: forgotten. IRA: other labels of the same kind kept. CRA: labels of the other kind kept. ",
    ("forgotten (UA)", "kept (IRA)"),
    is_headline=True,
)
HAZARDS = Kind(
    "hazards",
    ("hazard_detections", "object_accuracy"),
    {"hazard_detections": "hazards drawn ↓", "object_accuracy": "objects kept ↑"},
    plane=("hazards no longer drawn", "objects kept"),
    is_headline=True,
)
NUDITY = Kind(
    "nudity",
    ("nudity_detections", "nude_images"),
    {"nude_images": "pictures with any ↓", "nudity_detections": "detections a picture ↓"},
)
PARAPHRASES = Kind(
    "paraphrases",
    ("paraphrase_ua", "paraphrase_ira"),
    {"paraphrase_ua": "forgotten in other words ↑", "paraphrase_ira": "others kept ↑"},
    plane=("forgotten in other words", "others kept in other words"),
)
ATTACKS = Kind(
    "attacks",
    ("post_asr",),
    {"pre_asr": "pre-ASR ↓", "post_asr": "post-ASR ↓"},
    "Pre-ASR: prompts that show the concept without any attack. Post-ASR: without or with it. ",
)
KINDS = (OBJECTS, HAZARDS, NUDITY, PARAPHRASES, ATTACKS)
METRICS = ("fid", "kid", "cmmd", "clipscore")
"""Benchmarks of picture quality; their measurements begin with the name and say whose features they compare."""


def kind_of(scores: Mapping[str, Any]) -> Kind | None:
    """The kind of an evaluation; a figure of picture quality makes a kind of its own; None: only listed."""
    found: Mapping[str, Mapping[str, Any]] = scores["measurements"]
    fitting = (kind for kind in KINDS if all(name in found for name in kind.needed))
    return next(fitting, None) or (_quality(found) if metric_of(scores) else None)


def metric_of(scores: Mapping[str, Any]) -> str | None:
    """fid, kid, cmmd or clipscore; None for other benchmarks."""
    metric = str(scores["benchmark"]).partition("-")[0]
    return metric if metric in METRICS else None


def _quality(found: Mapping[str, Mapping[str, Any]]) -> Kind | None:
    if not found:
        return None
    name, row = next(iter(found.items()))
    return Kind(name, (name,), {name: f"{name} {'↑' if row.get('better') == 'higher' else '↓'}"})
