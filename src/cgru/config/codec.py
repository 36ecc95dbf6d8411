"""Configs as tables, YAML and `key=value` settings; the difference of two configs; the hash that names a run.

An unknown key is an error that suggests the nearest key. Keys missing from a table take their defaults. Numbers such as
1e-4, which YAML 1.1 reads as text, are read as numbers. Tuples become lists in tables and YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cgru.catalog import CODE, nearest, resolve
from cgru.config.rules import bare, choices, hints
from cgru.config.schema import RunConfig, StoredConfig

C = TypeVar("C", bound=RunConfig)

# Keys that may change when a run is continued. None of them changes the result, apart from the rounding that depends on
# device and memory (batch sizes, kernels).
FREE = ("device", "memory", "tracker", "checkpoint_every", "samples_every")

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def keys(kind: type[RunConfig]) -> tuple[str, ...]:
    """Every dotted key of a config class, in declaration order."""
    return tuple(_types(kind))


def _types(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a config class
    """Dotted key -> its type with its rule."""
    found: dict[str, Any] = {}
    for name, hint in hints(kind).items():
        inner = {f"{name}.{key}": of for key, of in hints(hint).items()} if is_dataclass(hint) else {name: hint}
        found |= inner
    return found


def _sections(kind: Any) -> dict[str, Any]:  # noqa: ANN401
    return {name: hint for name, hint in hints(kind).items() if is_dataclass(hint)}


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as plain nested tables, in declaration order; tuples become lists."""
    return _table(config)


def _table(config: Any) -> dict[str, Any]:  # noqa: ANN401 - any of our dataclasses
    if isinstance(config, StoredConfig):
        header = {field.name: getattr(config, field.name) for field in fields(RunConfig)}
        return {**header, **config.settings}
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:  # noqa: ANN401
    if is_dataclass(value):
        return _table(value)
    return list(value) if isinstance(value, tuple) else value


def from_dict(table: Mapping[str, Any], *, code: Collection[str] = ()) -> RunConfig:
    """The inverse of `to_dict`, as the config class of the table's method.

    Keys left out take their defaults, unknown ones are errors.

    Args:
        table: what a config.yaml holds.
        code: user code ("module:attr" or "module") that may be imported. Reading a file must not run code that only
            the file names, so the config of any other such method is a `StoredConfig`.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"the config is {table!r:.60}; allowed: a table of keys. Start from the config.yaml of a run.")
    method = table.get("method", "cgru")
    if not isinstance(method, str):
        raise ValueError(f"method is {method!r:.60}; allowed: a name, see `cgru list methods`. Give one.")
    if is_code(method) and not _is_named(method, code):
        header = {field.name for field in fields(RunConfig)}
        own = {str(key): value for key, value in table.items() if key not in header}
        known = _built(RunConfig, {key: value for key, value in table.items() if key in header})
        return StoredConfig(**_table(known), settings=own)
    return _built(config_class(method), table)


def config_class(name: str) -> type[RunConfig]:
    """The config class of the method that a catalog name or "module:attr" stands for; anything else is refused."""
    found = resolve("method", name)
    try:
        kind = found.config
    except AttributeError as error:
        raise no_method(name, found) from error
    if not (isinstance(kind, type) and issubclass(kind, RunConfig)):
        raise ValueError(
            f"the method {name!r} has the config {_said(kind)}; allowed: a frozen dataclass that extends "
            "cgru.config.RunConfig. See docs/add-a-method.md."
        )
    known = {field.name: field for field in fields(kind)}
    for setting in vars(kind).get("__annotations__", ()):
        if setting not in known:
            raise ValueError(
                f"the method {name!r} has {setting!r} in {kind.__name__}, which is no dataclass; allowed: a frozen "
                "dataclass. Write @dataclass(frozen=True) above it."
            )
    for setting, field in known.items():
        if setting != "concept" and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"the method {name!r} has no default for the setting {setting!r}; give it one.")
    return kind


def no_method(name: str, found: object) -> ValueError:
    """A one-line error for a name that does not stand for a method."""
    return ValueError(
        f"{name!r} is a {type(found).__name__} and no method; allowed: a cgru.method.Method with a config and a "
        "run(backbone, task, config, run) -> Edit. See docs/add-a-method.md."
    )


def _said(kind: object) -> str:
    return repr(kind.__name__) if isinstance(kind, type) else repr(kind)[:60]


def _built(kind: type[C], table: Mapping[str, Any]) -> C:
    sections = _sections(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        values[key] = _section(kind, key, value) if key in sections else _value(kind, str(key), value)
    if "concept" not in values:
        raise ValueError("the config has no 'concept'; it is the one key without a default. Add e.g. concept: Dogs.")
    return kind(**values)


def _section(kind: type[RunConfig], name: str, table: object) -> object:
    if not isinstance(table, Mapping):
        example = next(key for key in keys(kind) if key.startswith(name + "."))
        raise ValueError(f"{name} is {table!r:.60}; allowed: a table of keys. Give e.g. {example}=....")
    values = {str(key): _value(kind, f"{name}.{key}", value) for key, value in table.items()}
    return _sections(kind)[name](**values)


def _known(kind: type[RunConfig], key: str) -> Any:  # noqa: ANN401 - a type
    """The type of a key; an unknown key is an error that names the nearest one."""
    types, sections = _types(kind), _sections(kind)
    if key in types:
        return types[key]
    section = key.partition(".")[0]
    inside = [name for name in types if name.startswith(section + ".")] if section in sections else []
    allowed = inside or [name if name not in sections else f"{name}.*" for name in hints(kind)]
    close = nearest(key, types)
    guess = f" Did you mean {close!r}?" if close else ""
    raise ValueError(f"unknown key {key!r}; allowed: {', '.join(allowed)}.{guess} Correct the key or leave it out.")


def _value(kind: type[RunConfig], key: str, value: object) -> object:
    # YAML 1.1 wants a dot in a number with an exponent; people and json write 1e-4.
    if bare(_known(kind, key)) is float and isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return float(value)
    return value


def load(path: str | Path, *, code: Collection[str] = ()) -> RunConfig:
    """Read a config from a YAML file; `code` as in `from_dict`."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no config at {str(path)!r}; allowed: a YAML file. Give e.g. a run's config.yaml.")
    try:
        table = _read(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # TypeError: a key that is a table
        why = " ".join(str(error).split())
        raise ValueError(f"cannot read {str(path)!r} as YAML ({why:.200}); correct the file.") from error
    try:
        return from_dict(table, code=code)
    except ValueError as error:
        raise ValueError(f"in {str(path)!r}: {error}") from error


def _read(text: str) -> Any:  # noqa: ANN401
    # A few lines of nested YAML aliases can expand to billions of values, so aliases are refused.
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise ValueError("it refers to another place of itself by *name; allowed: every value written out")
    _refuse_twins(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.safe_load(text)


def _refuse_twins(node: yaml.Node | None) -> None:
    # PyYAML silently keeps the last of two equal keys; half of a config could be lost.
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


def override(config: C, assignments: Iterable[str]) -> C:
    """The config with all `key=value` settings applied at once; if a key is given twice, the last value counts.

    Values are YAML (`[clip, swin]`, `true`, `1e-4`). For a text field the characters are taken literally, so that a
    regex needs no quotes; quotes around the whole value are removed.
    """
    table, kind = to_dict(config), type(config)
    for text in assignments:
        key, is_given, value = text.partition("=")
        if not is_given:
            raise ValueError(f"{text!r} is not key=value; allowed: e.g. policy.iterations=60. Put an = between them.")
        hint = _known(kind, key.strip())
        section, _, name = key.strip().rpartition(".")
        (table[section] if section else table)[name] = _parsed(key.strip(), hint, value.strip())
    return _built(kind, table)


def _parsed(key: str, hint: object, text: str) -> object:
    is_text = bare(hint) is str or choices(hint) is not None
    if is_text and not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(
            f"cannot read the value in {key}={text:.80}; allowed: YAML. Quote what is special in it."
        ) from error


def fingerprint(config: RunConfig) -> str:
    """8 hex digits that identify all settings except FREE keys, which do not change the result."""
    table = {key: value for key, value in to_dict(config).items() if key not in FREE}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:8]


def diff(a: RunConfig, b: RunConfig) -> list[str]:
    """The differences of two configs, such as "policy.iterations: 60 -> 80", in declaration order, FREE keys
    included."""
    before, after = _flat(a), _flat(b)
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]


def _flat(config: RunConfig) -> dict[str, Any]:
    table, sections = to_dict(config), _sections(type(config))
    outer = {key: value for key, value in table.items() if key not in sections}
    return outer | {f"{name}.{key}": value for name in sections for key, value in table[name].items()}


def named_code(config: RunConfig) -> tuple[str, ...]:
    """User code ("module:attr") that a config names: method, model, terms of the reward."""
    table = _flat(config)
    return code_in(config.method, config.model, str(table.get("reward.name", "")))


def code_in(*values: str) -> tuple[str, ...]:
    """Each "module:attr" in some settings, one of which may be a sum of rewards such as 0.7*mine:reward+clip."""
    words = [word.strip() for value in values for word in re.split(r"[*+]", value)]
    return tuple(dict.fromkeys(word for word in words if is_code(word)))


def _is_named(name: str, allowed: Collection[str]) -> bool:
    """Whether the user has named a "module:attr", or its module."""
    return name in allowed or name.partition(":")[0] in allowed


def is_code(name: str) -> bool:
    """Whether a name is user code, "module:attr"; a Windows path (`C:\\models`, `C:/models`) is not."""
    return CODE.fullmatch(name) is not None


def refuse_unnamed_code(config: RunConfig, allowed: Collection[str], where: str, option: str) -> None:
    """Refuse to run code that only a file names: somebody else's config.yaml could name anything."""
    for name in named_code(config):
        refuse_unnamed(name, allowed, where, option)


def refuse_unnamed(name: str, allowed: Collection[str], where: str, option: str) -> None:
    """Refuse a name that a file gives if it is code which the user has not named."""
    if is_code(name) and not _is_named(name, allowed):
        raise ValueError(
            f"{where} uses code of its own, {name!r}, which would be imported and run; allowed: code that you "
            f"name. If you trust it, add {option} {name}."
        )
