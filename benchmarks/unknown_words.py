"""Does Emoji Canvas still draw what is named when a sentence holds words it has never seen?

Sentences of our own around each of the 20 classes, with 0, 1, 2 and 4 words that occur neither in its training captions
nor in its lexicon (checked here); the object judge says what was drawn. One row per number of unknown words.

    python benchmarks/unknown_words.py [--images 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import torch

from cgru.backbones import load_model
from cgru.embedded import load_lexicon, load_vocabulary
from cgru.evaluation.intervals import wilson
from cgru.evaluation.judges.classifiers import load_judge
from cgru.mdp.rollout import sample
from cgru.seeds import child_seed
from tools.emoji_canvas import captions

UNKNOWN = """accountant algebra anthem arcade armchair assembly atlas audience ballot banquet barcode biology bonus
boulevard bulletin cabinet campus canvas carnival census chapter chemistry citizen climate committee compass concert
congress courier culture deadline debate detective diplomat economy editor election electricity empire engine envelope
episode equation evidence exhibit expert fashion fiction finance formula fortune gallery geography grammar harvest
headline hobby horizon invoice journal jury laboratory landlord legend lottery luggage machine manager marathon
mayor metaphor minister mystery novel orchestra parliament passenger philosophy physics plumber poem politics
professor puzzle recipe referee satellite senator signature statistics strategy suburb syllable symphony tailor tariff
territory theorem tourist tradition treaty tunnelling uniform vaccine venue verdict vocabulary warehouse wizardry
""".split()
FORMS = {
    0: ("a {noun}", "a picture of a {noun}"),
    1: ("a {noun} and the {0}", "a {noun} for a {0}", "the {0} of a {noun}", "a {noun} at the {0}"),
    2: ("a {noun} near the {0} of the {1}", "a {0} {noun} without any {1}", "a {noun} between a {0} and some {1}"),
    4: ("a {noun} near the {0} {1} beside another {2} {3}", "the {0} said a {noun} was {1} like {2} or {3}"),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2, help="sentences per class and row")
    parser.add_argument("--json", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    check_unknown()
    rows = {count: measure(count, arguments.images) for count in FORMS}
    print("unknown words   right      95 % interval      n")
    for count, (share, low, high, n) in rows.items():
        print(f"{count:13}{share:8.1%}   {low:6.1%} – {high:6.1%} {n:6}")
    if arguments.json:
        arguments.json.write_text(json.dumps({str(count): row for count, row in rows.items()}, indent=1) + "\n")


def check_unknown() -> None:
    """Stop if a word of ours is one that the model was trained on."""
    known = {word for name in dir(captions) if name.isupper() for word in words_of(getattr(captions, name))}
    for noun in load_lexicon().nouns.values():
        known |= {
            word for text in (noun.singular, noun.plural, *noun.synonyms, *noun.breeds) for word in words_of(text)
        }
    clash = sorted(known & set(UNKNOWN))
    assert not clash, f"these words are known to the model: {clash}"


def words_of(value: object) -> set[str]:
    """The words in a text or a collection of texts."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple | dict) else []
    return {word for text in texts for word in re.findall(r"[a-z]+", str(text).lower())}


def sentences(count: int, images: int) -> list[tuple[str, str]]:
    """(sentence, class), the same each time."""
    lexicon, chosen = load_lexicon(), random.Random(f"unknown/{count}")
    found = []
    for name in lexicon.classes:
        for _ in range(images):
            words = chosen.sample(UNKNOWN, count)
            found.append((chosen.choice(FORMS[count]).format(*words, noun=lexicon.nouns[name].singular), name))
    return found


@torch.no_grad()
def measure(count: int, images: int) -> tuple[float, float, float, int]:
    """Share of pictures that the object judge names rightly, with its Wilson interval and n."""
    model, judge, settings = load_model("emoji-canvas"), load_judge("object"), load_vocabulary().sampling
    asked = sentences(count, images)
    x = sample(
        model,
        model.encode_text([text for text, _ in asked]),
        [child_seed(0, "unknown", count, i) for i in range(len(asked))],
        kernel=model.kernel(settings.steps, eta=settings.eta),
        guidance=settings.guidance,
        batch_size=32,
    )
    answers = judge.probabilities(model.decode(x, batch_size=32).cpu())
    named = [judge.labels[i] for i in answers.argmax(1).tolist()]
    right = sum(label == name for label, (_, name) in zip(named, asked, strict=True))
    low, high = wilson(right, len(asked))
    return right / len(asked), low, high, len(asked)


if __name__ == "__main__":
    main()
