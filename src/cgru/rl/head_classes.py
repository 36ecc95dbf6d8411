"""The classes of the head that a run trains (`reward.classes`), where no network knows its concept.

Without the setting there are two, the concept and "other". The paper's reward tells its 20 classes apart (§5.2):
`paper` lets the base model draw them, a folder of class folders brings pictures of them, or of any other classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgru.catalog import unknown
from cgru.config import RLConfig
from cgru.embedded import load_lexicon
from cgru.image_files import class_folders
from cgru.prompts.grammar import with_article
from cgru.tasks import ALIASES

PAPER = "paper"
"""The 20 object classes of UnlearnCanvas and of the paper, drawn by the base model."""


@dataclass(frozen=True)
class HeadClasses:
    """Labels of a head, what prompts call them, and which one is to be forgotten."""

    subjects: Mapping[str, str]
    """Label -> "a dog"."""
    target: str
    folder: Path | None
    """Its pictures; None: the base model draws them."""

    @property
    def labels(self) -> tuple[str, ...]:
        """In the order of the head's logits."""
        return tuple(self.subjects)


def head_classes(config: RLConfig) -> HeadClasses | None:
    """Return the classes that the config names; None for the concept and "other"."""
    given = config.reward.classes
    if not given:
        return None
    folder = None if given == PAPER else Path(given)
    labels = load_lexicon().classes if folder is None else tuple(class_folders(folder))
    return HeadClasses({label: _subject(label) for label in labels}, _find(config.concept, labels), folder)


def paper_classes(concept: str) -> str:
    """Return the setting `reward.classes` of the paper's presets: its classes if the concept is one of them."""
    return PAPER if _canonical(concept) in {name.lower() for name in load_lexicon().classes} else ""


def _find(concept: str, labels: Sequence[str]) -> str:
    by_name = {_canonical(label): label for label in labels} | {_plain(label): label for label in labels}
    for name in (_plain(concept), _canonical(concept)):
        if name in by_name:
            return by_name[name]
    advice = "Choose one of these classes, or leave out reward.classes: the head then tells the concept from the rest."
    raise ValueError(unknown("concept", concept, labels, advice))


def _subject(label: str) -> str:
    nouns = load_lexicon().nouns
    name = _lexical(label)
    return with_article(nouns[name].singular if name else _plain(label))


def _canonical(text: str) -> str:
    """Spell "a dog", "Dogs" and "dogs" alike."""
    return (_lexical(text) or _plain(text)).lower()


def _lexical(text: str) -> str | None:
    lexicon = load_lexicon()
    plain = _plain(text).removeprefix("a ").removeprefix("an ").removeprefix("the ")
    plain = ALIASES.get(plain, plain)
    by_word = {**lexicon.aliases} | {name.lower(): name for name in lexicon.classes}
    name = by_word.get(plain)
    return name if name in lexicon.classes else None


def _plain(text: str) -> str:
    return " ".join(text.lower().replace("_", " ").split())
