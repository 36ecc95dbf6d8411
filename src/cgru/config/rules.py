"""Types that carry the allowed values of a setting: `Count` is a whole number of at least 1, `Share` a number in 0..1.

`check` compares every field of a config with its type when the object is made, so a wrong value is reported at once, in
one line with the key's name. A whole number given for a float becomes a float, and a list a tuple, so that equal
settings are equal objects with equal fingerprints.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cgru.catalog import unknown


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` and `below` exclude the ends."""

    low: float = 0
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the value lies inside; NaN and infinity never do."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below or self.high == math.inf else value <= self.high
        return over and under

    def __str__(self) -> str:
        """The range in words."""
        low = f"above {self.low:.12g}" if self.above else f"at least {self.low:.12g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'under' if self.below else 'at most'} {self.high:.12g}"


@dataclass(frozen=True)
class OneOf:
    """A closed set of texts, for fields that are plain `str` to their users."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NotBlank:
    """A text that is not empty."""


MOST = 10**6
"""Highest count that is accepted; a higher one is a typing error and would fill the memory."""
Count = Annotated[int, Range(1, MOST)]
Whole = Annotated[int, Range(0, MOST)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
Decay = Annotated[float, Range(0, 1, below=True)]
Seed = Annotated[int, Range(0, 2**32, below=True)]
Text = Annotated[str, NotBlank()]
Texts = tuple[str, ...]


def hints(kind: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a dataclass
    """Field name -> its type with its rule."""
    return _evaluated(kind)


@cache
def _evaluated(kind: Hashable) -> Mapping[str, Any]:
    # Kept, because evaluating a section's types takes 0.2 ms and reading one config asks for them a thousand times.
    return MappingProxyType(get_type_hints(kind, include_extras=True))


def bare(hint: Any) -> Any:  # noqa: ANN401 - a type, a Literal or a tuple
    """A type without its rule."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def check(config: Any, section: str) -> None:  # noqa: ANN401 - any of our frozen dataclasses
    """Raise a one-line ValueError for the first field whose value does not fit its type; called by __post_init__."""
    types = hints(type(config))
    for field in fields(config):
        key = f"{section}.{field.name}" if section else field.name
        value = _settled(getattr(config, field.name), types[field.name])
        problem = _problem(key, value, field, types[field.name])
        if problem:
            raise ValueError(problem)
        object.__setattr__(config, field.name, value)  # the object is still being built, so a frozen field may be set


def _settled(value: object, hint: object) -> object:
    if bare(hint) is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000:
        return float(value)
    return tuple(value) if hint == Texts and isinstance(value, list) else value


def _problem(key: str, value: object, field: Field[Any], hint: object) -> str | None:
    names = choices(hint)
    if names is not None:
        if value in names:
            return None
        return unknown(key, str(value), [name or "''" for name in names], f"Give one of these as {key}.")
    allowed = _wanted(value, hint)
    if allowed is None or value == () == field.default:  # an empty list is a choice only where it is the default
        return None
    example = "" if field.default is MISSING else f" such as {_shown(field.default)} (the default)"
    return f"{key} is {value!r:.80}; allowed: {allowed}. Give one{example}."


def choices(hint: object) -> tuple[str, ...] | None:
    """The texts of a closed choice, None for any other type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    rules = [rule for rule in get_args(hint)[1:] if isinstance(rule, OneOf)] if get_origin(hint) is Annotated else []
    return rules[0].names if rules else None


def _wanted(value: object, hint: object) -> str | None:
    # None if the value is allowed, else a text that says what is allowed.
    kind = bare(hint)
    rule = get_args(hint)[1] if get_origin(hint) is Annotated else None
    if hint == Texts:
        good = isinstance(value, tuple) and value and all(isinstance(part, str) and part.strip() for part in value)
        return None if good else "a list of texts, not empty"
    if isinstance(kind, type) and is_dataclass(kind):
        return None if type(value) is kind else f"a {kind.__name__}"
    if type(value) is not kind:
        return f"{_KINDS[kind]}, {rule}" if isinstance(rule, Range) else _KINDS[kind]
    if isinstance(rule, Range) and isinstance(value, (int, float)):
        return None if value in rule else f"{_KINDS[kind]}, {rule}"
    is_blank = isinstance(rule, NotBlank) and (not str(value).strip() or "\n" in str(value))
    return "a text of one line, not empty" if is_blank else None


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text (quoted in YAML)",
}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value) if isinstance(value, str) else str(value)
