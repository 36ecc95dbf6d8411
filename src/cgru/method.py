"""The definition of a method: a config and a function that returns an edit. Each method is one file in `cgru.methods`.

    METHOD = Method(config=Config, run=run, summary="closed-form edit of cross-attention")

The catalog lists the methods; `--method pkg:attr` selects your own. Everything else is shared by all methods: run
folder, lock, resume, plan, live display, evaluation, attack, report, export and sweep. Signatures that involve torch
are given in docstrings, because reading a run needs its method's config but must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from cgru.catalog import call_own, resolve
from cgru.config import RunConfig, config_class, is_code
from cgru.config.codec import no_method

C = TypeVar("C", bound=RunConfig)


def _unchanged(config: C) -> C:
    return config


def _no_preset(model: str) -> str | None:
    return None


@dataclass(frozen=True)
class Method(Generic[C]):
    """A way to remove a concept."""

    config: type[C]
    """A frozen dataclass that extends `RunConfig`; its fields are the settings a user may give as key=value."""
    run: Callable[..., Any]
    """run(backbone: Backbone, task: UnlearnTask, config: C, run: Run) -> Edit. It may store stages and checkpoints in
    the run, and it logs with `run.log`. Called again after a kill, it continues or starts over, with the same result.
    If there is a `prepare`, it also receives `prepared=` (None when an existing run is continued)."""
    summary: str = ""
    """A few words for `cgru list methods`."""
    adjust: Callable[[C], C] = _unchanged
    """Sets the values that the method fixes; the user's key=value settings are applied afterwards."""
    decisive: tuple[str, ...] = ()
    """Keys from which `adjust` computes other values; the user's values for them are applied before `adjust`."""
    default_preset: Callable[[str], str | None] = _no_preset
    """model -> the preset that is used if the user names none; None: the defaults of `config`."""
    check: Callable[[C], None] | None = None
    """Refuses invalid settings before a model is loaded."""
    prepare: Callable[[Any, Any, C], Any] | None = None
    """prepare(backbone, task, config): loads and checks everything that may fail, before the folder of a new run is
    made. Its result is passed to `run`."""
    plan: Callable[[Any], Mapping[str, Any]] | None = None
    """For `--dry-run`: a JSON record of what a prepared run will do; its `lines`, name -> text, are also printed.
    Policy gradients report measured estimates instead (see `cgru.rl.estimate`)."""


def find_method(name: str) -> Method[Any]:
    """The method that a catalog name or "module:attr" stands for; anything else raises a one-line ValueError.

    Errors in a user's own functions become a ValueError that names the method.
    """
    config_class(name)
    found = resolve("method", name)
    if not isinstance(found, Method):
        raise no_method(name, found)
    if not is_code(name):
        return found
    return replace(
        found,
        run=_guarded(name, "run", found.run),
        adjust=_guarded(name, "adjust", found.adjust, RunConfig),
        check=found.check and _guarded(name, "check", found.check),
        prepare=found.prepare and _guarded(name, "prepare", found.prepare),
        plan=found.plan and _guarded(name, "plan", found.plan, Mapping),
    )


def _guarded(name: str, part: str, function: object, returns: type = object) -> Callable[..., Any]:
    """The user's own function, whose errors and wrong results are reported in one line."""
    if not callable(function):
        raise ValueError(f"the method {name!r} has {part} = {function!r:.60}; allowed: a function. Give one.")

    def call(*words: Any, **options: Any) -> Any:  # noqa: ANN401
        made = call_own("method", name, function, *words, **options)
        if not isinstance(made, returns):
            raise ValueError(
                f"the method {name!r} is wrong: its {part} returned a {type(made).__name__}; allowed: a "
                f"{returns.__name__}. Correct its code."
            )
        return made

    return call
