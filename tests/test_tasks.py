"""Concepts by name."""

import pytest

from cgru.tasks import Concept, find_concept

VOCABULARY = {"class": ("Dogs", "Human"), "style": ("pixel art",)}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("Dogs", Concept("Dogs", "class")),
        ("dogs", Concept("Dogs", "class")),
        ("Humans", Concept("Human", "class")),  # the paper's second spelling
        ("Pixel_Art", Concept("pixel art", "style")),
    ],
)
def test_spelling_is_forgiven_only_in_case_and_underscores(given: str, found: Concept) -> None:
    assert find_concept(given, VOCABULARY) == found


def test_a_singular_is_refused_with_its_plural_named() -> None:
    with pytest.raises(
        ValueError, match=r"unknown concept 'dog'; allowed: Dogs, Human, pixel art. Did you mean 'Dogs'"
    ):
        find_concept("dog", VOCABULARY)
