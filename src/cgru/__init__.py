"""cgru: remove a concept from a text-to-image diffusion model by reinforcement learning, and measure what is left.

This module is the whole public API: `unlearn`, `load_model`, `load_edit`, `evaluate`. The functions import torch only
when they are called, so that `import cgru` and `cgru --help` stay fast.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from cgru.backbones.base import Backbone
    from cgru.edits import Edit
    from cgru.runs import Run

__all__ = ["__version__", "evaluate", "load_edit", "load_model", "unlearn"]

try:
    __version__ = version("cgru")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def unlearn(
    concept: str,
    *,
    model: str | None = None,
    method: str | None = None,
    preset: str | None = None,
    seed: int = 0,
    out: str | Path = "runs",
    overrides: Iterable[str] = (),
) -> Run:
    """Make a model forget a concept, and return the finished run; the edit is in `run.path / "edit"`.

    Args:
        concept: a class, a style or `hazard` of Emoji Canvas; any text for another model.
        model: a hub id, a diffusers folder or "emoji-canvas". None: the preset's model, or Emoji Canvas.
        method: a name from `cgru list methods`, or your own "module:attr". None: the preset's method.
        preset: the settings to start from. None: the method's own preset for the model; if no method is given, `demo`
            on Emoji Canvas and `paper-object` on other models.
        seed: seed of all random numbers of the run.
        out: parent of the run folder. Repeating the call continues an interrupted run.
        overrides: settings such as "policy.iterations=60".
    """
    from cgru.pipeline import unlearn
    from cgru.pipeline.trackers import tracking
    from cgru.presets import resolve_config

    settings = [f"seed={seed}", *overrides]
    config = resolve_config(concept, model=model, method=method, preset_name=preset, overrides=settings)
    with tracking(config, out) as listeners:
        return unlearn(config, out, listeners=listeners)


def load_model(name: str, **settings: Any) -> Backbone:  # noqa: ANN401 - device and dtype, as cgru.backbones.load_model
    """Load a text-to-image model: a hub id, a diffusers folder, or "emoji-canvas"."""
    from cgru.backbones import load_model

    return load_model(name, **settings)


def load_edit(path: str | Path) -> Edit:
    """Load the edit that a method produced; use it with `with edit.applied(backbone):`.

    Args:
        path: a run folder, an edit folder (edit.json and its tensors) or a LoRA file.
    """
    from cgru.edits import load_edit

    return load_edit(path)


def evaluate(model: str | Path, benchmark: str = "canvas", **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Score a model, a run folder or an edit, and return the contents of scores.json (see cgru.evaluation.session)."""
    from cgru.evaluation.session import evaluate

    return evaluate(model, benchmark, **settings)
