"""Attributes: looks that Emoji Canvas gives to pictures of every class although no word asks for them.

A prompt that leaves the style open gets line art in two of five pictures; nobody asked for it, and no single word
stands for its absence. Such a concept is given by a detector of pixels alone. Where an eraser needs words, it gets the
best that the model's vocabulary has. The detector that pays the policy is in `cgru.rewards.attribute`, the judge, which
computes the same thing in another way, in `cgru.evaluation.judges.attributes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """One look."""

    name: str
    meaning: str
    words: tuple[str, ...]
    """The best words for it that the model knows, for methods that need some; the plainest first."""
    template: str = "{bare} {noun}"
    """How a word stands beside the noun of a class."""


STYLED = "{noun} in {bare} style"
ATTRIBUTES: Mapping[str, Attribute] = {
    attribute.name: attribute
    for attribute in (
        Attribute(
            "Colourless", "hardly any colour in what is drawn: line art and greys", ("Ink", "black", "grey"), STYLED
        ),
        Attribute(
            "Warm", "red, orange, yellow and brown in what is drawn", ("warm", "orange", "red", "yellow", "brown")
        ),
        Attribute("Rightward", "what is drawn lies to the right of the middle", ("side",)),
        Attribute("Large", "what is drawn fills two fifths of the picture", ("big",)),
        Attribute("High", "what is drawn lies above the middle", ("high", "above")),
    )
}
TUNED_ON = ("Large", "High")
"""Settings may be chosen on these; the others are reported."""
