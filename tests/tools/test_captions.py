"""Captions say what the scene shows, and nothing that is not there."""

from pathlib import Path

import numpy as np
import pytest
from transformers import CLIPTokenizer

from cgru.embedded import load_lexicon
from tools.emoji_canvas import captions as writing
from tools.emoji_canvas.art import GROUPS, Record
from tools.emoji_canvas.captions import MAX_TOKENS, CaptionWriter, article, tokenize, train_tokenizer
from tools.emoji_canvas.vocabulary import COLOURS, DARK, STYLES

RECORDS: list[Record] = [
    {
        "label": noun.label,
        "style": style,
        "icon": icon,
        "words": list(words),
        "group": group,
        "monochrome": style == "Ink",
    }
    for style in STYLES
    for group, nouns in GROUPS.items()
    for noun in nouns
    for icon, words in noun.icons.items()
]


def test_scenes_repeat_with_the_seed() -> None:
    one, two, other = (CaptionWriter(RECORDS, seed).scenes(200) for seed in (1, 1, 2))
    assert one.captions == two.captions and (one.first == two.first).all()
    assert one.captions != other.captions


def test_a_coloured_ground_is_always_named_and_no_colour_is_named_in_vain() -> None:
    scenes = CaptionWriter(RECORDS, 0).scenes(3000)
    names = list(COLOURS)
    for colour, caption in zip(scenes.colour, scenes.captions, strict=True):
        said = [
            name for name in names if f"{name} background" in caption.lower() or f"{name} backdrop" in caption.lower()
        ]
        assert colour == 0 or names[colour] in caption.lower(), caption
        assert said in ([], [names[colour]]), caption


def test_black_line_art_never_stands_on_a_dark_ground() -> None:
    scenes = CaptionWriter(RECORDS, 0).scenes(5000)
    dark = [list(COLOURS).index(name) for name in DARK]
    ink = np.array([RECORDS[i]["monochrome"] for i in scenes.first])
    assert not np.isin(scenes.colour[ink], dark).any()
    assert np.isin(scenes.colour[~ink], dark).any()


def test_every_label_is_drawn_and_classes_evenly() -> None:
    scenes = CaptionWriter(RECORDS, 0).scenes(20_000)
    labels = [RECORDS[i]["label"] for i in scenes.first]
    counts = {noun.label: labels.count(noun.label) for nouns in GROUPS.values() for noun in nouns}
    classes = [counts[noun.label] for noun in GROUPS["class"]]
    assert min(counts.values()) > 0
    assert max(classes) < 1.3 * min(classes)  # about 680 each; one icon or twenty makes no difference


def test_pairs_share_a_style_and_differ_in_label() -> None:
    scenes = CaptionWriter(RECORDS, 0).scenes(500, pairs=1.0)
    for first, second in zip(scenes.first, scenes.second, strict=True):
        assert RECORDS[first]["style"] == RECORDS[second]["style"]
        assert RECORDS[first]["label"] != RECORDS[second]["label"]


def test_article() -> None:
    assert [article(noun) for noun in ("owl", "dog", "old man")] == ["an owl", "a dog", "an old man"]
    assert [article(noun) for noun in ("umbrella", "unicorn")] == ["an umbrella", "a unicorn"]  # by sound


@pytest.fixture(scope="module")
def drawn_words() -> set[str]:
    """Every word that means something in a picture: of the shipped lexicon's phrases, styles and grounds."""
    lexicon = load_lexicon()
    phrases = [*lexicon.nouns, *lexicon.styles, *COLOURS]
    for noun in lexicon.nouns.values():
        phrases += [noun.singular, noun.plural, *noun.synonyms, *noun.breeds]
    return {word for phrase in phrases for word in phrase.lower().split()}


@pytest.mark.parametrize("group", ["QUALITIES", "THINGS", "VERBS", "ADVERBS", "PEOPLE", "PREPOSITIONS"])
def test_no_filler_word_names_anything_that_is_drawn(group: str, drawn_words: set[str]) -> None:
    # A caption "a dog near the tree" without a tree in its picture would teach the model to leave trees out.
    words: list[str] = getattr(writing, group)
    assert {"dog", "poodle", "flat", "blue"} <= drawn_words and len(words) > 10
    endings = {word: {word, word + "s", word.removesuffix("s")} for word in words}
    assert [word for word, forms in endings.items() if forms & drawn_words] == []


def test_clauses_reach_the_captions_whole() -> None:
    captions = [caption.lower() for caption in CaptionWriter(RECORDS, 0).scenes(3000, pairs=0.0).captions]
    assert not [caption for caption in captions if "{" in caption or "}" in caption]
    things = [c for c in captions if any(f" the {q} " in c for q in writing.QUALITIES)]
    # 0.7 natural captions x 0.45 with filler x 0.6 clauses x a third of the templates x half not invented: 3 %.
    assert len(things) > 90


def test_invented_words_are_new_each_time_and_name_nothing_that_is_drawn(drawn_words: set[str]) -> None:
    writer = CaptionWriter(RECORDS, 0)
    words = [writer._invented() for _ in range(5000)]
    assert len(set(words)) > 4500 and all(4 <= len(word) <= 11 for word in words)
    assert not set(words) & drawn_words


def test_half_of_the_natural_captions_or_more_hold_words_that_are_not_drawn() -> None:
    captions = CaptionWriter(RECORDS, 0).scenes(3000, pairs=0.0).captions
    templates = (
        *writing.GRID_TEMPLATES,
        *writing.OBJECT_TEMPLATES,
        *writing.STYLE_TEMPLATES,
        *writing.GROUND_TEMPLATES,
    )
    plain = {word for text in templates for word in text.lower().replace(".", "").split()}
    known = plain | CaptionWriter(RECORDS, 0).drawn
    filled = [c for c in captions if set(c.lower().replace(",", "").replace(".", "").split()) - known]
    assert 0.35 < len(filled) / len(captions) < 0.6  # three in ten are grid captions, which hold none


def test_the_tokenizer_is_a_clip_tokenizer_that_pads_with_its_end_token(tmp_path: Path) -> None:
    captions = CaptionWriter(RECORDS, 0).scenes(2000).captions
    train_tokenizer(captions, tmp_path)
    ids = tokenize(["a dog", "a dog on a zorgle"], tmp_path)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    assert ids.shape == (2, MAX_TOKENS)
    assert ids[0, 0] == tokenizer.bos_token_id and set(ids[0, 3:]) == {tokenizer.eos_token_id}
    assert tokenizer.decode(ids[1], skip_special_tokens=True) == "a dog on a zorgle"
    assert len(tokenizer) == ids.max() + 1 == len(tokenizer.get_vocab())
