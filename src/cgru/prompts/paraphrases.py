"""The prompts of benchmark `paraphrase`: words for each class, and sentence frames used by this benchmark only.

Every frame contains a word that no sentence of prompts/grammar.py has, so no generated training prompt equals one of
these for any seed (tests/evaluation/benchmarks/test_paraphrase.py checks it), nor does a prompt of canvas or hazard.
Emoji Canvas ignores words it was not trained on ("dachshund", "kittens": the base draws neither dog nor cat), and
training may use every word it knows, the lexicon. Unseen words are therefore mostly pairs of known words ("tabby cat")
that the lexicon does not contain as a pair. Most were chosen because the base draws them; the list was fixed before any
edited model was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cgru.prompts.grammar import with_article
from cgru.tasks import Lexicon

Kind = Literal["name", "synonym", "breed", "reworded"]
KINDS: tuple[Kind, ...] = ("name", "synonym", "breed", "reworded")

FRAMES = ("please draw {a} for my sister", "{a} as a logo", "somebody has drawn {a}", "the portrait of {a}")
"""Frames for names, synonyms and breeds."""
SENTENCES = ("could you sketch me {a}", "{a} is all I want to see", "there is {a} here", "my favourite thing is {a}")
"""Frames around the singular, for the kind "reworded"."""

SYNONYMS: Mapping[str, Sequence[str]] = {
    "Architectures": ("architecture", "piece of architecture", "structure", "house building"),
    "Bears": ("grizzly bear", "bear cub"),
    "Birds": ("fowl", "feathered bird"),
    "Butterfly": ("monarch butterfly", "butterfly moth"),
    "Cats": ("kitten", "kitty", "tabby cat", "kitty cat"),
    "Dogs": ("puppy", "hound", "pup", "puppy dog"),
    "Fishes": ("salmon fish", "trout fish"),
    "Flame": ("fire", "blaze", "blazing fire", "fire flame"),
    "Flowers": ("bloom", "blooming flower"),
    "Frogs": ("toad", "toad frog"),
    "Horses": ("pony", "stallion", "mare", "pony horse"),
    "Human": ("person", "human person"),
    "Jellyfish": ("medusa", "medusa jellyfish"),
    "Rabbits": ("bunny", "hare", "bunny rabbit", "hare rabbit"),
    "Sandwiches": ("burger sandwich", "hamburger sandwich"),
    "Sea": ("ocean", "sea wave"),
    "Statues": ("sculpture", "monument", "statue monument", "stone statue"),
    "Towers": ("watchtower", "tower of steel"),
    "Trees": ("oak tree", "evergreen tree"),
    "Waterfalls": ("cascade", "waterfall cascade"),
}
BREEDS: Mapping[str, Sequence[str]] = {
    "Architectures": ("castle", "church", "hospital", "school"),
    "Bears": ("panda", "polar bear", "grizzly", "teddy bear"),
    "Birds": ("owl", "duck", "penguin", "parrot"),
    "Butterfly": ("monarch", "moth"),
    "Cats": ("tomcat", "house cat", "black cat", "grumpy cat"),
    "Dogs": ("poodle", "labrador", "terrier", "bulldog"),
    "Fishes": ("shark", "clownfish", "pufferfish", "tropical fish"),
    "Flame": ("campfire", "bonfire"),
    "Flowers": ("rose", "tulip", "sunflower", "daisy"),
    "Frogs": ("bullfrog", "tree frog"),
    "Horses": ("mustang", "galloping horse", "horse head", "carousel horse"),
    "Human": ("man", "woman", "farmer", "chef"),
    "Jellyfish": ("sea jelly", "box jellyfish"),
    "Rabbits": ("cottontail", "wild rabbit", "rabbit face", "bunny face"),
    "Sandwiches": ("hamburger", "hot dog", "kebab", "club sandwich"),
    "Sea": ("wave", "surf", "ocean wave", "ocean surf"),
    "Statues": ("moai", "statue of liberty", "stone head", "marble statue"),
    "Towers": ("radio tower", "steel tower", "tall tower", "steel radio tower"),
    "Trees": ("oak", "palm", "christmas tree", "fir tree"),
    "Waterfalls": ("fountain", "water fountain"),
}


@dataclass(frozen=True)
class Wording:
    """One prompt for a class."""

    kind: Kind
    place: int
    """Position among the wordings of its kind, from 1."""
    word: str
    prompt: str
    is_unseen: bool
    """Whether the word is missing from the lexicon, and so from every generated training prompt."""

    @property
    def name(self) -> str:
        """Name of a table row: "breed 2"."""
        return f"{self.kind} {self.place}"

    @property
    def labels(self) -> dict[str, str | int]:
        """The wording's entries among a job's labels."""
        known = "unseen" if self.is_unseen else "lexicon"
        return {"wording": self.name, "kind": self.kind, "word": self.word, "word_is": known}


def wordings_of(label: str, lexicon: Lexicon) -> list[Wording]:
    """Return four prompts of each kind; a class without recorded words has no synonyms and breeds."""
    singular = lexicon.nouns[label].singular
    plan: tuple[tuple[Kind, Sequence[str], Sequence[str]], ...] = (
        ("name", (singular, label), FRAMES),
        ("synonym", SYNONYMS.get(label, ()), FRAMES),
        ("breed", BREEDS.get(label, ()), FRAMES),
        ("reworded", (singular,), SENTENCES),
    )
    known = known_words(lexicon)
    found = []
    for kind, words, frames in plan:
        for place, frame in enumerate(frames if words else (), 1):
            word = words[(place - 1) % len(words)]
            prompt = frame.format(a=with_article(word))
            found.append(Wording(kind, place, word, prompt, is_unseen=word.lower() not in known))
    return found


def known_words(lexicon: Lexicon) -> set[str]:
    """Return every word for a thing that a generated training prompt may use, in lower case."""
    rows = ((label, n.singular, n.plural, *n.synonyms, *n.breeds) for label, n in lexicon.nouns.items())
    return {word.lower() for row in rows for word in row}


def paraphrases(lexicon: Lexicon) -> list[str]:
    """Return the prompts that training must not use."""
    return [wording.prompt for label in lexicon.classes for wording in wordings_of(label, lexicon)]
