"""What to forget: a concept, the words for it, and the task around it.

A concept is one of the names a model's vocabulary knows, of one kind: an object class or a style (the paper's
UnlearnCanvas tasks), or a hazard category (our stand-in for its NSFW task); the concept `hazard` is all categories at
once. The lexicon says which words name a label; prompts are written from it (prompts.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from cgru.catalog import nearest

Kind = Literal["class", "style", "hazard"]
Head = Literal["object", "style", "hazard", ""]
"""Which classifier head knows a label; empty: none."""

# The paper's class list says "Human", its per-class table "Humans": one class (evals/discrepancies.md, row 1).
ALIASES = {"humans": "human", "hazards": "hazard"}
HAZARD = "hazard"
"""The concept that is every hazard category."""
HEADS: Mapping[Kind, Head] = {"class": "object", "style": "style", "hazard": "hazard"}
ASSETS = Path(__file__).resolve().parent / "assets"


@dataclass(frozen=True)
class Concept:
    """One thing that can be forgotten, spelled as in the vocabulary."""

    name: str
    kind: Kind

    @property
    def head(self) -> Head:
        """The head that knows this concept's labels."""
        return HEADS[self.kind]


@dataclass(frozen=True)
class UnlearnTask:
    """What is to be forgotten; everything else the vocabulary holds is to be kept."""

    concept: Concept


@dataclass(frozen=True)
class Noun:
    """The words for one label: synonyms name any picture of it, breeds name particular ones ("poodle")."""

    singular: str
    plural: str
    synonyms: tuple[str, ...] = ()
    breeds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lexicon:
    """Every name a model knows, by kind, with the words for it."""

    classes: tuple[str, ...]
    styles: tuple[str, ...]
    hazards: tuple[str, ...]
    everyday: tuple[str, ...]
    """Benign nouns outside classes and hazards; they are kept, and cannot be a concept."""
    nouns: Mapping[str, Noun]

    @property
    def vocabulary(self) -> Mapping[Kind, tuple[str, ...]]:
        """The names that can be a concept."""
        return {"class": self.classes, "style": self.styles, "hazard": self.hazards}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Lower-case singulars and plurals -> name, for classes and hazards: "dog" is Dogs."""
        rows = [(name, self.nouns[name]) for name in (*self.classes, *self.hazards)]
        return {word.lower(): name for name, noun in rows for word in (noun.plural, noun.singular)}


def load_lexicon(root: Path = ASSETS) -> Lexicon:
    """Read emoji-canvas/canvas.json; a label that its lexicon leaves out has its own name as its only word."""
    path = root / "emoji-canvas" / "canvas.json"
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}: the embedded assets are incomplete. Run `cgru doctor`.")
    table = json.loads(path.read_text(encoding="utf-8"))
    classes, styles, hazards, everyday = (tuple(table[key]) for key in ("classes", "styles", "hazard", "everyday"))
    nouns = {label: _noun(label, table["lexicon"].get(label)) for label in (*classes, *hazards, *everyday)}
    return Lexicon(classes, styles, hazards, everyday, MappingProxyType(nouns))


def find_concept(
    given: str, vocabulary: Mapping[Kind, Sequence[str]], aliases: Mapping[str, str] = MappingProxyType({})
) -> Concept:
    """The concept a user means: case and underscores do not matter, and `aliases` are as good as names.

    Args:
        given: what the user typed.
        vocabulary: the names that can be a concept; with the kind "hazard", also `hazard` for all of its names.
        aliases: other lower-case words -> name (`Lexicon.aliases`).
    """
    kinds = {name: kind for kind, names in vocabulary.items() for name in names}
    if "hazard" in vocabulary:
        kinds[HAZARD] = "hazard"
    wanted = _plain(given)
    by_word = {**{word: name for word, name in aliases.items() if name in kinds}, **{_plain(n): n for n in kinds}}
    if wanted in by_word:
        return Concept(by_word[wanted], kinds[by_word[wanted]])
    raise ValueError(_unknown_concept(given, vocabulary, kinds, by_word))


def targets(concept: Concept, vocabulary: Mapping[Kind, Sequence[str]]) -> tuple[str, ...]:
    """The labels of `concept.head` that are to be forgotten: one, or every hazard category for `hazard`."""
    if concept == Concept(HAZARD, "hazard"):
        return tuple(vocabulary["hazard"])
    return (concept.name,)


def _unknown_concept(given: str, listed: Iterable[str], names: Iterable[str], by_word: Mapping[str, str]) -> str:
    # The nearest word, told as its name: "cigarete" is nearer to "cigarette" (smoking) than to any name.
    close = nearest(given, by_word)
    guess = f" Did you mean {by_word[close]!r}?" if close else ""
    where = " or ".join(f"`cgru list {'classes' if kind == 'class' else kind + 's'}`" for kind in listed)
    return f"unknown concept {given!r}; allowed: {', '.join(names)}.{guess} Choose one of them; see {where}."


def _noun(label: str, row: Mapping[str, Any] | None) -> Noun:
    if row is None:
        return Noun(label.lower(), label.lower())
    return Noun(row["singular"], row["plural"], tuple(row["synonyms"]), tuple(row["breeds"]))


def _plain(name: str) -> str:
    plain = " ".join(name.lower().replace("_", " ").split())
    return ALIASES.get(plain, plain)
