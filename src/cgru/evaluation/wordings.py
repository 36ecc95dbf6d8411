"""The prompts of benchmark `paraphrase`: words for each class, and frames that are the benchmark's own.

Every frame has a word that no sentence of prompts/grammar.py has, so no generated training prompt is one of these,
whatever its seed (tests/evaluation/test_paraphrase.py shows it); they are none of canvas' or hazard's either.
Emoji Canvas passes over words it was not trained on ("dachshund", "kittens": the base draws no dog and no cat), and
training may use every word it knows, the lexicon. Unseen words are therefore mostly pairs of known ones ("tabby cat")
that the lexicon lacks as a pair. Most were kept because the base draws them; no edited model
was tried before the list was fixed.
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
"""Around names, synonyms and breeds."""
SENTENCES = ("could you sketch me {a}", "{a} is all I want to see", "there is {a} here", "my favourite thing is {a}")
"""Around the singular, for the kind "reworded"."""

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
    """Among those of its kind, from 1."""
    word: str
    prompt: str
    is_unseen: bool
    """Whether the lexicon, and so every generated training prompt, lacks the word."""

    @property
    def name(self) -> str:
        """Of a row in a table: "breed 2"."""
        return f"{self.kind} {self.place}"

    @property
    def labels(self) -> dict[str, str | int]:
        """What a job says about it."""
        known = "unseen" if self.is_unseen else "lexicon"
        return {"wording": self.name, "kind": self.kind, "word": self.word, "word_is": known}


def wordings_of(label: str, lexicon: Lexicon) -> list[Wording]:
    """Four prompts of each kind; a class whose words nobody wrote down has no synonyms and breeds."""
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
    """Everything that a generated training prompt may call a thing, in lower case."""
    rows = ((label, n.singular, n.plural, *n.synonyms, *n.breeds) for label, n in lexicon.nouns.items())
    return {word.lower() for row in rows for word in row}


def paraphrases(lexicon: Lexicon) -> list[str]:
    """The sentences that no training may use."""
    return [wording.prompt for label in lexicon.classes for wording in wordings_of(label, lexicon)]
