"""Configs as tables, YAML and `key=value`; what differs between two; and the hash that names a run.

Unknown keys are errors that name the nearest one. A table may leave keys out: they take their defaults. Numbers such as
1e-4, which YAML 1.1 reads as text, are numbers here. Tuples are lists in tables and YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from cgru.catalog import nearest
from cgru.config.rules import bare, choices, hints
from cgru.config.schema import RunConfig

SECTIONS: dict[str, Any] = {name: hint for name, hint in hints(RunConfig).items() if is_dataclass(hint)}

# What a run may be continued with without being another run: none of these changes its result, but for the rounding
# that device and memory bring with them (batch sizes, kernels).
FREE = ("device", "memory", "tracker", "checkpoint_every", "samples_every")

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _keys() -> Iterator[tuple[str, Any]]:
    for name, hint in hints(RunConfig).items():
        if name in SECTIONS:
            yield from ((f"{name}.{key}", inner) for key, inner in hints(SECTIONS[name]).items())
        else:
            yield name, hint


_HINTS: dict[str, Any] = dict(_keys())
KEYS: tuple[str, ...] = tuple(_HINTS)
"""Every dotted key, in declaration order."""


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as plain nested tables, in declaration order; tuples become lists."""
    return _table(config)


def _table(config: Any) -> dict[str, Any]:  # noqa: ANN401 - any of our dataclasses
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:  # noqa: ANN401
    if is_dataclass(value):
        return _table(value)
    return list(value) if isinstance(value, tuple) else value


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """The inverse of `to_dict`; keys left out take their defaults, unknown ones are errors."""
    if not isinstance(table, Mapping):
        raise ValueError(f"the config is {table!r:.60}; allowed: a table of keys. Start from the config.yaml of a run.")
    values: dict[str, Any] = {}
    for key, value in table.items():
        values[key] = _section(key, value) if key in SECTIONS else _value(_known(str(key)), value)
    if "concept" not in values:
        raise ValueError("the config has no 'concept'; it is the one key without a default. Add e.g. concept: Dogs.")
    return RunConfig(**values)


def _section(name: str, table: object) -> object:
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} is {table!r:.60}; allowed: a table of keys. Give e.g. {_example(name)}.")
    values = {str(key): _value(_known(f"{name}.{key}"), value) for key, value in table.items()}
    return SECTIONS[name](**values)


def _example(section: str) -> str:
    return next(key for key in KEYS if key.startswith(section + ".")) + "=..."


def _known(key: str) -> str:
    if key in _HINTS:
        return key
    section = key.partition(".")[0]
    inside = [name for name in KEYS if name.startswith(section + ".")] if section in SECTIONS else []
    allowed = inside or [name if name not in SECTIONS else f"{name}.*" for name in hints(RunConfig)]
    close = nearest(key, KEYS)
    guess = f" Did you mean {close!r}?" if close else ""
    raise ValueError(f"unknown key {key!r}; allowed: {', '.join(allowed)}.{guess} Correct the key or leave it out.")


def _value(key: str, value: object) -> object:
    # YAML 1.1 wants a dot in a number with an exponent; people and json write 1e-4.
    if bare(_HINTS[key]) is float and isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return float(value)
    return value


def load(path: str | Path) -> RunConfig:
    """Read a config from a YAML file."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no config at {str(path)!r}; allowed: a YAML file. Give e.g. a run's config.yaml.")
    try:
        table = _read(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"cannot read {str(path)!r} as YAML ({why:.200}); correct the file.") from error
    try:
        return from_dict(table)
    except ValueError as error:
        raise ValueError(f"in {str(path)!r}: {error}") from error


def _read(text: str) -> Any:  # noqa: ANN401
    _refuse_twins(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.safe_load(text)


def _refuse_twins(node: yaml.Node | None) -> None:
    # PyYAML keeps the last of two equal keys without a word; half of a config would be lost.
    if not isinstance(node, yaml.MappingNode):
        return
    names = [key.value for key, _ in node.value]
    twins = [name for name in names if names.count(name) > 1]
    if twins:
        raise ValueError(f"the key {twins[0]!r} is there twice")
    for _, inner in node.value:
        _refuse_twins(inner)


def dump(config: RunConfig) -> str:
    """The config as YAML, every key written out, in declaration order; `load` reads it back."""
    return str(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=120))


def override(config: RunConfig, assignments: Iterable[str]) -> RunConfig:
    """The config with `key=value` settings applied, all at once; the last of two for one key counts.

    Values are YAML (`[clip, swin]`, `true`, `1e-4`). Of a text the characters count as they are, so that a regex needs
    no quotes; quotes around the whole are taken off.
    """
    table = to_dict(config)
    for text in assignments:
        key, is_given, value = text.partition("=")
        if not is_given:
            raise ValueError(f"{text!r} is not key=value; allowed: e.g. policy.iterations=60. Put an = between them.")
        section, _, name = _known(key.strip()).rpartition(".")
        (table[section] if section else table)[name] = _parsed(key.strip(), value.strip())
    return from_dict(table)


def _parsed(key: str, text: str) -> object:
    is_text = bare(_HINTS[key]) is str or choices(_HINTS[key]) is not None
    if is_text and not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"cannot read the value in {key}={text}; allowed: YAML. Quote what is special in it."
        ) from error


def fingerprint(config: RunConfig) -> str:
    """8 hex digits of everything that decides the result; FREE keys do not count."""
    table = {key: value for key, value in to_dict(config).items() if key not in FREE}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:8]


def diff(a: RunConfig, b: RunConfig) -> list[str]:
    """What differs, such as "policy.iterations: 60 -> 80", in declaration order; FREE keys are told as well."""
    before, after = _flat(a), _flat(b)
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in KEYS if before[key] != after[key]]


def _flat(config: RunConfig) -> dict[str, Any]:
    table = to_dict(config)
    outer = {key: value for key, value in table.items() if key not in SECTIONS}
    return outer | {f"{name}.{key}": value for name in SECTIONS for key, value in table[name].items()}
