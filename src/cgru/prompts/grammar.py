"""Grammars: how prompts for a label are worded, and how many wordings exist.

`CanvasGrammar` writes prompts like those of Emoji Canvas users ("an icon of a poodle, Flat style"); `TemplateGrammar`
places any text in a scene. Neither copies sentences from a data set. Added words name nothing that a model could draw
instead of the subject.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeVar

from cgru.tasks import Lexicon

T = TypeVar("T")
Weighted = Sequence[tuple[int, Sequence[T]]]
"""Weighted groups: a group is drawn by weight, then one of its items uniformly."""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


ARTICLES = {"a", "an", "the"}
COLOURS = "white red orange yellow green blue purple pink grey black brown beige turquoise".split()
# Black line art would be invisible on these backgrounds, however well the model remembers the concept.
DARK, LINE_ART = {"black", "brown"}, {"Ink"}
MASS = set("alcohol architecture beer bread champagne coffee dynamite sake smoking surf whisky wine".split())

FORMS = _listed(
    """{a}; {a}; {a}; a picture of {a}; an image of {a}; an icon of {a}; an emoji of {a}; a drawing of {a};
    {bare} image; {bare} icon"""
)
STYLED = (
    "{subject} in {style} style",
    "{subject}, {style} style",
    "{subject} drawn in {style} style",
    "{style} style, {subject}",
)
GROUNDS = (" on {a} background", ", {bare} background", " with {a} background", " against {a} backdrop")
ADJECTIVES = "lovely tiny huge pretty plain funny big small strange nice".split()
MOMENTS = tuple(
    f", {moment}" for moment in _listed("at dawn; made with care; full of joy; on a quiet day; very simple")
)

MEDIA = _listed(
    """{}; a photo of {}; a close-up of {}; a pencil drawing of {}; an oil painting of {}; a poster that shows {};
    a postcard with {}; a wide shot of {}; a watercolour of {}; a magazine picture of {}; a snapshot of {};
    a detailed rendering of {}"""
)
SETTINGS = _listed(
    """in an empty room; on a wide lawn; beside a stone wall; in front of a plain curtain; at the edge of a village;
    on a cobbled square; under a clear sky; in light rain; on a foggy morning; late in the evening; in deep snow;
    in a bright studio; on a dusty road; behind a window; in a narrow alley; on a rooftop; at a weekend market;
    in an overgrown yard; on a wooden floor; near a quiet harbour; in the middle of a meadow; at noon; after a storm"""
)
LOOKS = _listed(
    """soft light; strong contrast; muted colours; vivid colours; fine detail; seen from above; slightly blurred;
    seen from below; long shadows; plain composition; warm tones"""
)
THINGS = _listed(
    """a bicycle; a teapot; a wooden chair; a red umbrella; a lighthouse; a bowl of soup; a stack of books; a
    pair of boots; a sailing boat; a steam train; a garden gate; a loaf of bread; a basket of apples; a glass of
    water; a violin; a brass lamp; a kite; a tent; a windmill; a stone bridge; a mountain lake; a field of
    wheat; a sandy beach; a pine forest; a sunflower; a potted fern; an old clock; a paper lantern; a leather
    bag; a straw hat; a woollen scarf; a kitchen table; a delivery van; a fire engine; a row of shops; a church
    tower; a cup of tea; a slice of cake; a plate of noodles; a jar of honey; a goat; a swan; a hedgehog; a
    parrot; a cow; a snail"""
)
"""Subjects of retain prompts for models with an unknown vocabulary."""


class Grammar(Protocol):
    """Writes sentences for a label and a style ("" for none) and counts how many there are."""

    def write(self, rng: random.Random, label: str, style: str) -> str:
        """Return one random sentence."""

    def size(self, label: str, style: str) -> int:
        """Return the number of different sentences, apart from a few coincidences."""


@dataclass(frozen=True)
class CanvasGrammar:
    """Subject, style, and at most one of background, adjective and moment."""

    lexicon: Lexicon

    def write(self, rng: random.Random, label: str, style: str) -> str:
        """Write a sentence; name, singular and the list of synonyms and breeds have similar weights for any length."""
        adjective, tail = _pick(rng, _extras(style))
        bare = f"{adjective} {_pick(rng, self.words(label))}".strip()
        subject = rng.choice(FORMS).format(a=with_article(bare), bare=bare)
        styled = rng.choice(STYLED) if style else "{subject}"
        return _finished(rng, styled.format(subject=subject, style=style) + tail)

    def size(self, label: str, style: str) -> int:
        """Return the product of the numbers of choices."""
        return _count(self.words(label)) * len(set(FORMS)) * (len(STYLED) if style else 1) * _count(_extras(style))

    def words(self, label: str) -> Weighted[str]:
        """Return the words for a label, without everyday plurals, some of which are wrong ("cup of coffees")."""
        noun = self.lexicon.nouns[label]
        groups = [(3, (noun.singular,)), (3, (label,)), (4, (*noun.synonyms, *noun.breeds)), (1, (noun.plural,))]
        return _distinct(groups[:3] if label in self.lexicon.everyday else groups)


@dataclass(frozen=True)
class TemplateGrammar:
    """Medium, setting and look around a text about which nothing is known, not even whether it takes an article."""

    subjects: Mapping[str, str] = field(default_factory=dict)
    """Label -> what sentences call it, such as "a dog"; the label itself where it is not there."""

    def write(self, rng: random.Random, label: str, style: str) -> str:
        """Write a sentence; a third of them have no setting, half no look."""
        setting = rng.choice(("", f" {rng.choice(SETTINGS)}", f", {rng.choice(SETTINGS)}"))
        look = rng.choice(("", f", {rng.choice(LOOKS)}"))
        return _finished(rng, rng.choice(MEDIA).format(self.subjects.get(label, label)) + setting + look)

    def size(self, label: str, style: str) -> int:
        """Return the product of the numbers of choices."""
        return len(MEDIA) * (1 + len(SETTINGS)) * (1 + len(LOOKS))


def words_of(text: str) -> str:
    """Return a prompt's words for comparison: "A Dogs image in Flat style." equals "dogs image, in flat style"."""
    words = re.findall(r"\w+", text.casefold())
    return " ".join(word for word in words if word not in ARTICLES) or text.casefold().strip()


def with_article(noun: str) -> str:
    """Add "a" or "an", except to plurals ("crossed swords") and uncountable nouns ("bread")."""
    head = re.split(r" (?:of|with|in|and) ", noun)[0]
    is_plural = head.endswith("s") and not head.endswith(("ss", "us"))
    if is_plural or head.split()[-1] in MASS:
        return noun
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def are_related(thing: str, concept: str) -> bool:
    """Return whether two texts share a word or part of one: "a sunflower" is related to "flowers"."""
    one, other = ([w.removesuffix("s") for w in words_of(text).split() if len(w) > 2] for text in (thing, concept))
    return any(a in b or b in a for a in one for b in other)


@cache  # needed for every sentence
def _extras(style: str) -> Weighted[tuple[str, str]]:
    """Return weighted (adjective, tail) pairs; two prompts in five have neither."""
    colours = [c for c in COLOURS if style not in LINE_ART or c not in DARK]
    grounds = [("", ground.format(a=with_article(c), bare=c)) for ground in GROUNDS for c in colours]
    adjectives, moments = [(adjective, "") for adjective in ADJECTIVES], [("", moment) for moment in MOMENTS]
    return [(4, [("", "")]), (4, grounds), (1, adjectives), (1, moments)]


def _distinct(groups: Weighted[str]) -> Weighted[str]:
    """Keep each word only in the first group that contains it: "Sea" is both singular and name."""
    seen: set[str] = set()
    result = []
    for weight, group in groups:
        fresh = {word.lower(): word for word in group if word.lower() not in seen}
        seen |= set(fresh)
        result += [(weight, tuple(fresh.values()))] if fresh else []
    return result


def _count(groups: Weighted[T]) -> int:
    return sum(len(group) for _, group in groups)


def _pick(rng: random.Random, groups: Weighted[T]) -> T:
    weights = [weight for weight, _ in groups]
    return rng.choice(rng.choices([group for _, group in groups], weights)[0])


def _finished(rng: random.Random, text: str) -> str:
    text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    return text + "." if rng.random() < 0.25 else text
