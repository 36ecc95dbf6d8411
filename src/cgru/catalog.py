"""Plain tables: name -> "module:attr", for everything a user may choose by name.

No plugin machinery: whoever has their own model, method, reward or benchmark passes "package.module:attr" instead of a
name. Nothing is imported before it is asked for, so listing names costs no torch import.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

# A model's loader is called with (name, *, device, dtype); hub ids and folders go through the same loader.
MODELS: Mapping[str, str] = {"emoji-canvas": "cgru.backbones:load_model"}
# A method's `apply` lays what it fixes over a config.
METHODS: Mapping[str, str] = {
    "cgru": "cgru.methods.cgru:apply",
    "ddpo": "cgru.methods.ddpo:apply",
    "dpok": "cgru.methods.dpok:apply",
}
# A preset is called with a concept, and with the model where its signature names it, and returns a config.
PRESETS: Mapping[str, str] = {
    "demo": "cgru.presets:demo",
    "best": "cgru.presets:best",
    "fast": "cgru.presets:fast",
    "paper-object": "cgru.presets:paper_object",
    "paper-nsfw": "cgru.presets:paper_nsfw",
    "paper-aesthetic": "cgru.presets:paper_aesthetic",
}
# A reward's factory is called with (backbone, **settings) and gets the settings that its signature names.
REWARDS: Mapping[str, str] = {
    "concept": "cgru.rewards.concept:concept_reward",
    "clip": "cgru.rewards.detectors:clip_reward",
    "nsfw": "cgru.rewards.detectors:nsfw_reward",
    "aesthetic": "cgru.rewards.detectors:aesthetic_reward",
    "jpeg": "cgru.rewards.detectors:jpeg_reward",
}
# A benchmark's factory is called with (images, root): pictures per prompt and the asset folder; and with variant,
# reference, judges, source, subset, threshold and judge, where its signature names them and the user gives them. A
# first parameter with default None: the benchmark has a number of pictures of its own.
BENCHMARKS: Mapping[str, str] = {
    "canvas": "cgru.evaluation.canvas:load_benchmark",
    "hazard": "cgru.evaluation.hazard:load_benchmark",
    "fid": "cgru.evaluation.quality:load_fid",
    "kid": "cgru.evaluation.quality:load_kid",
    "cmmd": "cgru.evaluation.quality:load_cmmd",
    "clipscore": "cgru.evaluation.quality:load_clipscore",
    "i2p": "cgru.evaluation.i2p:load_benchmark",
    "paraphrase": "cgru.evaluation.paraphrase:load_benchmark",
    "unlearncanvas": "cgru.evaluation.unlearncanvas:load_benchmark",
}

TABLES: Mapping[str, Mapping[str, str]] = {
    "model": MODELS,
    "method": METHODS,
    "preset": PRESETS,
    "reward": REWARDS,
    "benchmark": BENCHMARKS,
}


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like the given one, ignoring case; None when nothing is close."""
    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def unknown(what: str, given: str, allowed: Iterable[str], advice: str) -> str:
    """One line for a wrong name: what was given, what is allowed, the nearest match, what to do."""
    names = list(allowed)
    close = nearest(given, names)
    guess = f" Did you mean {close!r}?" if close else ""
    listed = ", ".join(names) if names else "none yet"
    return f"unknown {what} {given!r}; allowed: {listed}.{guess} {advice}"


def resolve(kind: str, name: str) -> Any:  # noqa: ANN401 - whatever the table row points at
    """Import what `name` stands for.

    Args:
        kind: a key of TABLES.
        name: a name of that table, or one's own "module:attr".
    """
    table = TABLES[kind]
    if ":" in name:
        return import_target(name)
    if name not in table:
        advice = f"Use one of these or your own 'module:attr'; see `cgru list {kind}s`."
        raise ValueError(unknown(kind, name, table, advice))
    return import_target(table[name])


def import_target(target: str) -> Any:  # noqa: ANN401
    """Import "module:attr"."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a module name that starts with a dot
        raise ValueError(f"cannot import {target!r} ({error}); give 'module:attr' of an importable module.") from error
