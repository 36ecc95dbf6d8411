"""Concepts by name, and the words for them."""

from pathlib import Path

import pytest

from cgru.embedded import load_lexicon
from cgru.tasks import Concept, Lexicon, Noun, find_concept, targets

VOCABULARY = {"class": ("Dogs", "Human"), "style": ("pixel art",)}
HAZARDS = {**VOCABULARY, "hazard": ("blades", "skulls")}


@pytest.fixture(scope="module")
def lexicon() -> Lexicon:
    return load_lexicon()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("Dogs", Concept("Dogs", "class")),
        ("dogs", Concept("Dogs", "class")),
        ("Humans", Concept("Human", "class")),  # the paper's second spelling
        ("Pixel_Art", Concept("pixel art", "style")),
        (" pixel  art", Concept("pixel art", "style")),
    ],
)
def test_spelling_is_forgiven_only_in_case_and_underscores(given: str, found: Concept) -> None:
    assert find_concept(given, VOCABULARY) == found


def test_a_singular_is_refused_with_its_plural_named() -> None:
    with pytest.raises(
        ValueError, match=r"unknown concept 'dog'; allowed: Dogs, Human, pixel art. Did you mean 'Dogs'"
    ):
        find_concept("dog", VOCABULARY)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("dog", Concept("Dogs", "class")),
        ("Fish", Concept("Fishes", "class")),
        ("buildings", Concept("Architectures", "class")),
        ("BUTTERFLIES", Concept("Butterfly", "class")),
        ("cigarette", Concept("smoking", "hazard")),
        ("ink", Concept("Ink", "style")),
        ("hazard", Concept("hazard", "hazard")),
        ("Hazards", Concept("hazard", "hazard")),
    ],
)
def test_with_a_lexicon_singular_and_plural_are_names_too(lexicon: Lexicon, given: str, found: Concept) -> None:
    assert find_concept(given, lexicon.vocabulary, lexicon.aliases) == found


def test_every_name_means_itself(lexicon: Lexicon) -> None:
    for kind, names in lexicon.vocabulary.items():
        assert [find_concept(name, lexicon.vocabulary, lexicon.aliases) for name in names] == [
            Concept(name, kind) for name in names
        ]


@pytest.mark.parametrize(("given", "meant"), [("dgo", "Dogs"), ("buildng", "Architectures"), ("cigarete", "smoking")])
def test_a_misspelt_word_names_the_nearest_once(lexicon: Lexicon, given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown concept '{given}'.*Did you mean '{meant}'\?") as caught:
        find_concept(given, lexicon.vocabulary, lexicon.aliases)
    assert str(caught.value).count("Did you mean") == 1
    assert "\n" not in str(caught.value)


def test_what_is_kept_by_definition_is_no_concept(lexicon: Lexicon) -> None:
    with pytest.raises(ValueError, match="unknown concept 'umbrella'"):
        find_concept("umbrella", lexicon.vocabulary, lexicon.aliases)


def test_an_alias_of_a_name_that_cannot_be_chosen_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown concept 'blade'"):
        find_concept("blade", VOCABULARY, {"blade": "blades"})


def test_targets_are_labels_of_one_head() -> None:
    dogs, flat, blades, every = (find_concept(name, HAZARDS) for name in ("Dogs", "pixel art", "blades", "hazard"))
    assert [(concept.head, targets(concept, HAZARDS)) for concept in (dogs, flat, blades, every)] == [
        ("object", ("Dogs",)),
        ("style", ("pixel art",)),
        ("hazard", ("blades",)),
        ("hazard", ("blades", "skulls")),
    ]


def test_the_lexicon_has_a_row_for_every_label(lexicon: Lexicon) -> None:
    assert (len(lexicon.classes), len(lexicon.hazards)) == (20, 6)
    assert set(lexicon.nouns) == {*lexicon.classes, *lexicon.hazards, *lexicon.everyday}
    assert lexicon.nouns["Frogs"] == Noun("frog", "frogs", ("toad",), ("bullfrog", "tree frog"))


def test_a_missing_canvas_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"canvas.json': the embedded assets are incomplete"):
        load_lexicon(tmp_path)
