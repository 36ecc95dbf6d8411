"""What to forget: a concept and the task around it.

A concept is one of the names a model's vocabulary knows, of one kind: an object class or a style (the paper's
UnlearnCanvas tasks), or a hazard category (our stand-in for its NSFW task). Prompt sets come with the first method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cgru.catalog import unknown

Kind = Literal["class", "style", "hazard"]

# The paper's class list says "Human", its per-class table "Humans": one class (evals/discrepancies.md, row 1).
ALIASES = {"humans": "human"}


@dataclass(frozen=True)
class Concept:
    """One thing that can be forgotten, spelled as in the vocabulary."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class UnlearnTask:
    """What is to be forgotten; everything else the vocabulary holds is to be kept."""

    concept: Concept


def find_concept(given: str, vocabulary: Mapping[Kind, Sequence[str]]) -> Concept:
    """The concept a user means: case and underscores do not matter, anything else must be exact."""
    wanted = _plain(given)
    for kind, names in vocabulary.items():
        for name in names:
            if _plain(name) == wanted:
                return Concept(name, kind)
    allowed = [name for names in vocabulary.values() for name in names]
    where = " or ".join(f"`cgru list {'classes' if kind == 'class' else kind + 's'}`" for kind in vocabulary)
    raise ValueError(unknown("concept", given, allowed, f"Choose one of them; see {where}."))


def _plain(name: str) -> str:
    plain = name.strip().lower().replace("_", " ")
    return ALIASES.get(plain, plain)
