"""What to forget: a concept, the words for it, and the unlearning task.

A concept is a name from a model's vocabulary and has one kind: an object class or a style (the paper's UnlearnCanvas
tasks), a hazard category (our substitute for the paper's NSFW task), or an attribute (a look that no prompt asks for).
The concept `hazard` is all categories together. The lexicon lists the words for each label; prompts are written from it
(prompts/grammar.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from cgru.attributes import ATTRIBUTES
from cgru.catalog import nearest, unknown

Kind = Literal["class", "style", "hazard", "attribute", "text"]
"""`text`: a concept that no vocabulary knows, as on models other than Emoji Canvas."""
Head = Literal["object", "style", "hazard", ""]
"""The classifier head that knows a label; empty: none."""

# The paper's class list says "Human", its per-class table "Humans": one class.
ALIASES = {"humans": "human", "hazards": "hazard"}
HAZARD = "hazard"
"""The concept that stands for all hazard categories."""
HEADS: Mapping[Kind, Head] = {"class": "object", "style": "style", "hazard": "hazard", "attribute": "", "text": ""}


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
    """What is to be forgotten and kept, with the words that a method may use; built by `cgru.prompts.task_for`."""

    concept: Concept
    words: tuple[str, ...] = ()
    """Every word for the concept, the plainest first: "dog", "Dogs", "puppy", "poodle", ..."""
    kept: tuple[str, ...] = ()
    """A plain word for each thing that is to be kept, of the concept's own kind where the model has a vocabulary."""
    templates: tuple[str, ...] = ("{bare}",)
    """Sentences around a word, "{a}" with its article or "{bare}" without; filled by `cgru.prompts.sentence`."""


@dataclass(frozen=True)
class Sampling:
    """How pictures are drawn."""

    steps: int
    guidance: float
    eta: float


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
        return {"class": self.classes, "style": self.styles, "hazard": self.hazards, "attribute": tuple(ATTRIBUTES)}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Lower-case singulars and plurals -> name, for classes and hazards: "dog" is Dogs."""
        rows = [(name, self.nouns[name]) for name in (*self.classes, *self.hazards)]
        return {word.lower(): name for name, noun in rows for word in (noun.plural, noun.singular)}


def find_concept(
    given: str, vocabulary: Mapping[Kind, Sequence[str]], aliases: Mapping[str, str] = MappingProxyType({})
) -> Concept:
    """The concept that a user means. Case and underscores are ignored, and `aliases` are accepted as names.

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


def find_class(given: str, classes: Sequence[str]) -> str:
    """A class of a model that reads no text; it must be spelled exactly as the model spells it."""
    name = " ".join(given.split())
    if name not in classes:
        raise ValueError(unknown("class", given, classes, "The model reads no other prompts: choose one of these."))
    return name


def targets(concept: Concept, vocabulary: Mapping[Kind, Sequence[str]]) -> tuple[str, ...]:
    """The labels of `concept.head` that are to be forgotten: one, or every hazard category for `hazard`."""
    if concept == Concept(HAZARD, "hazard"):
        return tuple(vocabulary["hazard"])
    return (concept.name,)


def _unknown_concept(given: str, listed: Iterable[str], names: Iterable[str], by_word: Mapping[str, str]) -> str:
    # Suggests the name of the nearest word: "cigarete" is nearer to "cigarette" (smoking) than to any name.
    close = nearest(given, by_word)
    guess = f" Did you mean {by_word[close]!r}?" if close else ""
    where = " or ".join(f"`cgru list {'classes' if kind == 'class' else kind + 's'}`" for kind in listed)
    return f"unknown concept {given!r}; allowed: {', '.join(names)}.{guess} Choose one of them; see {where}."


def _plain(name: str) -> str:
    plain = " ".join(name.lower().replace("_", " ").split())
    return ALIASES.get(plain, plain)
