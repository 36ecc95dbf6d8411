"""Captions: the sentences Emoji Canvas is trained on, and the CLIP tokenizer learned from them.

A scene is one or two icons on a coloured ground; its caption names the object (by class, word or breed) and, each
only sometimes and in any order, the style and the ground. Most natural captions carry words that say nothing about the
picture: moods, places, people, and words that a chain of letters invents anew each time, in every place that an unknown
word of a user's sentence can have, so that such words are passed over, not drawn (docs/emoji-canvas.md).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.emoji_canvas.art import GROUPS, Record
from tools.emoji_canvas.vocabulary import COLOURS, DARK, STYLES

MAX_TOKENS = 48
VOCABULARY_SIZE = 2048

ADJECTIVES = """happy little big old young sleepy tiny lonely cute proud majestic mischievous brave gentle shy curious
playful quiet wild strange beautiful simple lovely single bright friendly fancy detailed famous tall small
wonderful magical elegant""".split()

FILLERS = """at dawn; in the morning light; by the window; with a secret; humming an old tune by the river;
with a taste of honey; under the stars; in a dream; on a summer day; during the storm; waiting for the rain;
in the middle of nowhere; from an old story; with a grin; greeting every neighbour;
shaped by the wind; lost in thought; at the edge of the world; on a quiet afternoon; full of joy;
made with care; in a faraway town; telling a story; dreaming of spring; that everybody loves; in slow motion;
at the end of a long road; seen from far away; like a memory; for a children's magazine; on a postcard;
with soft shadows; before winter comes; in perfect harmony; listening to music; ready for an adventure;
in the evening mist; as if by magic; with great detail; against all odds; in a busy market; on its way home;
keeping watch; at midnight; surrounded by silence; in the golden hour; with a calm expression; after the party;
reading the news; thinking about tomorrow; in high resolution; trending online; award winning; for my grandmother"""

# Everyday English for phrases like "near the glorious mountain while everyone slowly walks": none of it is drawn.
PREPOSITIONS = "near by behind above below beyond around inside outside across along over under toward past".split()
QUALITIES = """glorious distant ancient modern narrow wide frozen warm cold empty crowded famous forgotten hidden noisy
peaceful dusty shiny broken wooden metal giant round soft hard heavy deep shallow rich poor young early late
local foreign common rare careful honest nervous tired hungry thirsty clever silly serious royal public private winter
summer autumn spring rural urban northern southern eastern western foggy rainy sunny windy muddy steep smooth rough
sweet bitter fresh plain grand humble cheerful gloomy""".split()
THINGS = """mountain valley hill village street road bridge library theatre market
station harbour island desert field meadow corner room hallway staircase floor wall window door roof chair table
bed mirror carpet blanket pillow basket box bag wallet letter newspaper map ticket coin ring necklace
pencil paper painting photograph song melody dance game contest race holiday festival wedding meeting journey question
answer idea promise rumour accident surprise weather shadow echo whisper silence border gate fence path tunnel
crowd neighbour doctor sailor pilot artist student visitor stranger lawyer baker judge""".split()
VERBS = """walks runs sleeps waits dances sings reads writes rests works travels listens watches smiles laughs stands
sits turns rises falls grows shines floats drifts hides hurries wanders whispers learns builds paints counts explains
remembers forgets""".split()
ADVERBS = """slowly quickly quietly gladly often never always sometimes rarely gently boldly together alone again
forever today tomorrow yesterday tonight soon almost barely nicely politely suddenly""".split()
PEOPLE = "everyone nobody somebody she he they we people visitors students neighbours travellers".split()
CLAUSES = (
    "{preposition} the {quality} {thing}",
    "{preposition} a {thing}",
    "{preposition} the {quality} {quality2} {thing}",
    "{preposition} the {thing} of the {quality} {thing2}",
    "while {person} {adverb} {verb}",
    "as {person} {verb} {preposition} the {thing}",
    "with the {quality} {thing}",
    "for the {quality} {thing}",
    "that {verb} {adverb}",
    "which {verb} {preposition} the {quality} {thing}",
    "because {person} {verb}",
    "about a {quality} {thing} and a {thing2}",
    "without the {thing}",
    "or some {quality} {thing}",
    "but no {thing} of {thing2}",
    "{quality} {thing} {thing2}",
)
# The subject inside a sentence about something else: none of that is drawn either.
FRAMES = (
    "the {thing} of {a}",
    "{a} and the {thing}",
    "{a} and some {thing}",
    "{a} for the {thing}",
    "{a} at a {thing}",
    "{a} like a {quality} {thing}",
    "{a} instead of a {thing}",
    "not a {thing} but {a}",
    "the {thing} has {a}",
    "the {thing} says {a} is {quality}",
    "{a} without {thing} or {thing2}",
    "{a} among {thing} and {thing2}",
    "{thing} {thing2} {a}",
    "{a} {thing}",
)
FILLER_PHRASES = tuple(re.sub(r"\s+", " ", part).strip() for part in FILLERS.split(";"))
INVENTED = 0.5
"""Share of the filler slots that hold an invented word."""

GRID_TEMPLATES = (
    "A {name} image in {style} style",
    "A {name} image in {style} style.",
    "An image of {name} in {style} style.",
    "An {name} image in {style} style.",
)
OBJECT_TEMPLATES = (
    "{a}",
    "{a}",
    "{a}",
    "a picture of {a}",
    "an image of {a}",
    "a drawing of {a}",
    "an emoji of {a}",
    "an icon of {a}",
    "{bare}",
    "one {bare}",
)
STYLE_TEMPLATES = (
    "in {style} style",
    "in {style} style",
    "in the {style} style",
    "{style} style",
    "drawn in {style} style",
)
GROUND_TEMPLATES = (
    "on a {colour} background",
    "{colour} background",
    "with a {colour} background",
    "on {colour}",
    "against a {colour} backdrop",
)
PAIR_TEMPLATES = ("{a} and {b}", "{a} next to {b}", "{a} with {b}", "{a} beside {b}")


@dataclass(frozen=True)
class Scenes:
    """Columns of one table: which icons (second -1: none), which ground, and the caption."""

    first: np.ndarray
    second: np.ndarray
    colour: np.ndarray
    captions: list[str]


def article(noun: str) -> str:
    """ "a dog", "an owl", "an umbrella", "a unicorn"."""
    sounds_like_a_vowel = noun[0] in "aeio" or (noun[0] == "u" and noun[:3] not in ("uni", "use", "uti"))
    return f"{'an' if sounds_like_a_vowel else 'a'} {noun}"


class CaptionWriter:
    """Draws scenes with captions from the records of the main icon collection; all randomness from one seed."""

    def __init__(self, records: Sequence[Record], seed: int) -> None:
        """Group icons by label and by (label, style), so that classes with few icons are drawn as often."""
        self.records = records
        self.random = random.Random(seed)
        self.nouns = {noun.label: noun for nouns in GROUPS.values() for noun in nouns}
        self.by_label: dict[str, list[int]] = {}
        self.by_cell: dict[tuple[str, str], list[int]] = {}
        for index, record in enumerate(records):
            self.by_label.setdefault(record["label"], []).append(index)
            self.by_cell.setdefault((record["label"], record["style"]), []).append(index)
        self.labels = {group: [n.label for n in nouns] for group, nouns in GROUPS.items()}
        self.colours = list(COLOURS)
        self.letters = letter_chain((*ADJECTIVES, *QUALITIES, *THINGS, *VERBS, *ADVERBS))
        phrases = [word for noun in self.nouns.values() for word in (noun.label, noun.plural, *noun.words)]
        phrases += [*STYLES, *COLOURS, *(word for record in records for word in record["words"])]
        self.drawn = {word for phrase in phrases for word in phrase.lower().split()}

    def scenes(self, count: int, pairs: float = 0.12) -> Scenes:
        """`count` scenes; a share `pairs` shows two objects."""
        rows = [self._pair() if self.random.random() < pairs else self._single() for _ in range(count)]
        columns = list(zip(*rows, strict=True))
        first, second, colour = (np.array(column, dtype=np.int64) for column in columns[:3])
        return Scenes(first, second, colour, list(columns[3]))

    def _label(self) -> str:
        group = self.random.choices(("class", "hazard", "everyday"), (0.68, 0.1, 0.22))[0]
        return self.random.choice(self.labels[group])

    def _icon(self, label: str, style: str) -> int | None:
        cell = self.by_cell.get((label, style))
        return self.random.choice(cell) if cell else None

    def _draw(self) -> tuple[int, str, str]:
        """An icon, uniformly over labels and then over styles, with both names."""
        while True:
            label, style = self._label(), self.random.choice(list(STYLES))
            icon = self._icon(label, style)
            if icon is not None:
                return icon, label, style

    def _single(self) -> tuple[int, int, int, str]:
        icon, label, style = self._draw()
        if self.random.random() < 0.3:
            name = label if self.random.random() < 0.8 else self._word(icon, label)
            return icon, -1, 0, self.random.choice(GRID_TEMPLATES).format(name=name, style=style)
        noun = self._word(icon, label)
        ground = self._ground(icon)
        subject = self.random.choice(OBJECT_TEMPLATES).format(a=article(self._described(noun)), bare=noun)
        if self.random.random() < 0.25:
            subject = self.random.choice(FRAMES).format(a=subject, **self._slots())
        return icon, -1, ground, self._sentence(subject, style, ground)

    def _pair(self) -> tuple[int, int, int, str]:
        first, label, style = self._draw()
        other, second = label, None
        while other == label or second is None:
            other = self._label()
            second = self._icon(other, style)
        ground = self._ground(first)
        template = self.random.choice(PAIR_TEMPLATES)
        subject = template.format(a=article(self._word(first, label)), b=article(self._word(second, other)))
        return first, second, ground, self._sentence(subject, style, ground)

    def _word(self, icon: int, label: str) -> str:
        own = self.records[icon]["words"]
        noun = self.nouns[label]
        words = list(noun.words) + ([noun.plural] if self.random.random() < 0.1 else [])
        return self.random.choice(own) if own and self.random.random() < 0.4 else self.random.choice(words)

    def _described(self, noun: str) -> str:
        kind = self.random.random()
        if kind < 0.1:
            return f"{self._invented()} {noun}"
        return f"{self.random.choice(ADJECTIVES)} {noun}" if kind < 0.3 else noun

    def _ground(self, icon: int) -> int:
        if self.random.random() < 0.55:
            return 0
        dark = DARK if self.records[icon]["monochrome"] else set()
        return self.colours.index(self.random.choice([c for c in self.colours if c not in dark]))

    def _sentence(self, subject: str, style: str, ground: int) -> str:
        """Subject and optional parts in any order. A ground that is not white is always named."""
        parts = [subject]
        if self.random.random() < 0.6:
            parts.append(self.random.choice(STYLE_TEMPLATES).format(style=style))
        if ground or self.random.random() < 0.12:
            parts.append(self.random.choice(GROUND_TEMPLATES).format(colour=self.colours[ground]))
        if self.random.random() < 0.45:
            parts.append(self._filler())
        if self.random.random() < 0.25:
            self.random.shuffle(parts)
        text = self.random.choice((" ", ", ")).join(parts)
        text = text[0].upper() + text[1:] if self.random.random() < 0.5 else text
        return text + "." if self.random.random() < 0.3 else text

    def _filler(self) -> str:
        """A phrase of the list, one or two clauses of everyday English, or one to five invented words."""
        kind = self.random.random()
        if kind < 0.25:
            return self.random.choice(FILLER_PHRASES)
        if kind < 0.85:
            return " ".join(self._clause() for _ in range(self.random.randint(1, 2)))
        return " ".join(self._invented() for _ in range(self.random.randint(1, 5)))

    def _clause(self) -> str:
        return self.random.choice(CLAUSES).format(**self._slots())

    def _slots(self) -> dict[str, str]:
        """What a clause or frame can be filled with; any content word may be an invented one."""
        quality, quality2 = self.random.sample(QUALITIES, 2)
        thing, thing2 = self.random.sample(THINGS, 2)
        words = {"quality": quality, "quality2": quality2, "thing": thing, "thing2": thing2}
        words |= {"verb": self.random.choice(VERBS), "adverb": self.random.choice(ADVERBS)}
        slots = {slot: self._invented() if self.random.random() < INVENTED else word for slot, word in words.items()}
        person, preposition = self.random.choice(PEOPLE), self.random.choice(PREPOSITIONS)
        return slots | {"person": person, "preposition": preposition}

    def _invented(self) -> str:
        """A word of 4 to 11 letters that looks like English, and names nothing that is drawn."""
        length, word = self.random.randint(4, 11), ""
        while len(word) < length:
            word += self.random.choice(self.letters.get(word[-2:], self.letters[""]))
        return self._invented() if {word, word + "s", word.removesuffix("s")} & self.drawn else word


def letter_chain(words: Sequence[str]) -> dict[str, list[str]]:
    """Two letters -> the letters that follow them in `words`, as often as they do; "" and one letter start a word."""
    chain: dict[str, list[str]] = {}
    for word in words:
        for place, letter in enumerate(word):
            chain.setdefault(word[max(0, place - 2) : place], []).append(letter)
    return chain


def train_tokenizer(captions: Sequence[str], folder: Path) -> None:
    """Learn a byte-level BPE from the captions; saved as a CLIPTokenizer (vocab.json, merges.txt, tokenizer.json)."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    blank = CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[]).backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 2 - len(alphabet),
        end_of_word_suffix="</w>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    blank.train_from_iterator([caption.lower() for caption in captions], trainer)
    merges = [tuple(pair) for pair in json.loads(blank.to_str())["model"]["merges"]]
    # CLIP's order: bytes, bytes that end a word, merges, then the two special tokens.
    tokens = [*alphabet, *(byte + "</w>" for byte in alphabet), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    vocabulary |= {"<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))


def tokenize(captions: Sequence[str], folder: Path) -> np.ndarray:
    """Token ids, (n, 48) int16, padded with the end token."""
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder)
    ids = tokenizer(list(captions), padding="max_length", truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return np.array(ids, dtype=np.int16)
