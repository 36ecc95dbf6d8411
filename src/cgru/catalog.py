"""Plain tables from name to "module:attr", for everything that a user can choose by name.

There is no plugin machinery: to use your own model, method, reward or benchmark, pass "package.module:attr" instead of
a name. A target is imported only when it is used, so listing names does not import torch.
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from cgru.interrupt import Interrupted

T = TypeVar("T")

# A model's loader is called with (name, *, device, dtype): a torch.device and a torch.dtype. Hub ids and folders need
# no row: `cgru.backbones.load_diffusers` loads them.
MODELS: Mapping[str, str] = {"emoji-canvas": "cgru.backbones:load_diffusers"}
# A method is a `cgru.method.Method`: a config and a function that returns an edit.
METHODS: Mapping[str, str] = {
    "anchored": "cgru.methods.anchored:METHOD",
    "cgru": "cgru.methods.cgru:METHOD",
    "ddpo": "cgru.methods.ddpo:METHOD",
    "dpok": "cgru.methods.dpok:METHOD",
    "esd": "cgru.methods.esd:METHOD",
    "sld": "cgru.methods.sld:METHOD",
    "uce": "cgru.methods.uce:METHOD",
}
# A preset is called with a concept, and with the model where its signature names it, and returns a config.
PRESETS: Mapping[str, str] = {
    "demo": "cgru.presets:demo",
    "best": "cgru.presets:best",
    "on-policy": "cgru.presets:on_policy",
    "fast": "cgru.presets:fast",
    "paper-object": "cgru.presets:paper_object",
    "paper-nsfw": "cgru.presets:paper_nsfw",
    "paper-aesthetic": "cgru.presets:paper_aesthetic",
}
# A reward's factory is called with (backbone, **settings) and gets the settings that its signature names.
REWARDS: Mapping[str, str] = {
    "concept": "cgru.rewards.concept:concept_reward",
    "replaced": "cgru.rewards.replaced:replaced_reward",
    "attribute": "cgru.rewards.attribute:attribute_reward",
    "clip": "cgru.rewards.detectors:clip_reward",
    "nsfw": "cgru.rewards.detectors:nsfw_reward",
    "aesthetic": "cgru.rewards.detectors:aesthetic_reward",
    "jpeg": "cgru.rewards.detectors:jpeg_reward",
}
# A hook is called with (backbone, settings, tensors) and returns the backbone that an edit of kind `hook` draws with.
HOOKS: Mapping[str, str] = {"sld": "cgru.methods.sld:make_hook"}
# A benchmark's factory is called with (images, root): pictures per prompt and the asset folder. Its other parameters
# are keyword-only and passed if the user gives them: the options variant, reference, judges, source, subset, threshold
# and judge, and KEY=VALUE for any other name. If the first parameter defaults to None, the benchmark sets its own
# number of pictures.
BENCHMARKS: Mapping[str, str] = {
    "canvas": "cgru.evaluation.benchmarks.canvas:load_benchmark",
    "hazard": "cgru.evaluation.benchmarks.hazard:load_benchmark",
    "attribute": "cgru.evaluation.benchmarks.attribute:load_benchmark",
    "fid": "cgru.evaluation.benchmarks.quality:load_fid",
    "kid": "cgru.evaluation.benchmarks.quality:load_kid",
    "cmmd": "cgru.evaluation.benchmarks.quality:load_cmmd",
    "clipscore": "cgru.evaluation.benchmarks.quality:load_clipscore",
    "i2p": "cgru.evaluation.benchmarks.i2p:load_benchmark",
    "paraphrase": "cgru.evaluation.benchmarks.paraphrase:load_benchmark",
    "unlearncanvas": "cgru.evaluation.benchmarks.unlearncanvas:load_benchmark",
}

CODE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
"""The form of "module:attr". Nothing else is ever imported, so a check of names against this pattern
(`cgru.config.codec.named_code`) finds all foreign code."""

PACKAGE = str(Path(__file__).parent) + os.sep

TABLES: Mapping[str, Mapping[str, str]] = {
    "model": MODELS,
    "method": METHODS,
    "preset": PRESETS,
    "reward": REWARDS,
    "benchmark": BENCHMARKS,
    "hook": HOOKS,
}


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name most similar to the given one, ignoring case; None if none is similar."""
    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def unknown(what: str, given: str, allowed: Iterable[str], advice: str) -> str:
    """A one-line message for an unknown name: what was given, what is allowed, the nearest match, what to do."""
    names = list(allowed)
    close = nearest(given, names)
    guess = f" Did you mean {close!r}?" if close else ""
    listed = ", ".join(names) if names else "none yet"
    return f"unknown {what} {given!r}; allowed: {listed}.{guess} {advice}"


def resolve(kind: str, name: str) -> Any:  # noqa: ANN401 - whatever the table row points at
    """Import the object that `name` stands for.

    Args:
        kind: a key of TABLES.
        name: a name in that table, or the user's own "module:attr".
    """
    table = TABLES[kind]
    if ":" in name:
        return import_target(name)
    if name not in table:
        advice = f"Use one of these or your own 'module:attr'; see `cgru list {kind}s`."
        raise ValueError(unknown(kind, name, table, advice))
    return import_target(table[name])


def call_own(what: str, name: str, function: Callable[..., T], *words: Any, **options: Any) -> T:  # noqa: ANN401
    """Call the user's own function; any error in it becomes a one-line ValueError that names the function.

    >>> call_own("reward", "mine:reward", int, "x")
    Traceback (most recent call last):
    ValueError: invalid literal for int() with base 10: 'x'
    """
    try:
        return function(*words, **options)
    except (ValueError, OSError, Interrupted):
        raise
    except (Exception, SystemExit) as error:  # as in import_target
        if type(error).__name__ == "OutOfMemoryError":  # torch's: not a mistake in the code
            raise
        why = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ValueError(f"the {what} {name!r} fails ({why}); correct its code.") from error


def place_of(error: BaseException) -> str:
    """Where in the user's own code an error was raised, as ", FILE line N"; empty if it was raised elsewhere.

    This is the last line outside cgru and installed packages that was called, directly or not, by cgru.
    """
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
    place, is_inside = "", False
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(PACKAGE):
            is_inside = True
        elif is_inside and not frame.filename.startswith(("<", *libraries)):
            place = f", {Path(frame.filename).name} line {frame.lineno}"
    return place


def own_mistake(error: Exception) -> str | None:
    """A one-line message if the user's own code raised this error when called by cgru; None for an error of cgru."""
    place = place_of(error)
    if not place or type(error).__name__ == "OutOfMemoryError":
        return None
    return f"your code fails ({type(error).__name__}: {error}{place}); correct it."


def import_target(target: str) -> Any:  # noqa: ANN401
    """Import "module:attr"."""
    if not CODE.fullmatch(target):
        raise ValueError(f"{target!r} is not a 'module:attr'; allowed: a module and a name in it, such as mine:reward.")
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, or try to end the program
        raise ValueError(f"cannot import {target!r} ({error}); give 'module:attr' of an importable module.") from error
