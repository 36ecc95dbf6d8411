"""cgru: remove a concept from a text-to-image diffusion model by reinforcement learning, and prove what was done.

The public API, and nothing else: `unlearn`, `load_model`, `load_edit`, `evaluate`. They import torch only when called,
so that `import cgru` and `cgru --help` stay fast.
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
    method: str = "cgru",
    preset: str | None = None,
    seed: int = 0,
    out: str | Path = "runs",
    overrides: Iterable[str] = (),
) -> Run:
    """Make a model forget a concept; returns the finished run, whose `path / "edit"` is the LoRA.

    Args:
        concept: a class, a style or `hazard` of Emoji Canvas; any text for another model.
        model: a hub id, a diffusers folder or "emoji-canvas"; None: the preset's, without one Emoji Canvas.
        method: cgru, ddpo, dpok or one's own "module:attr".
        preset: where the settings start; None: demo on Emoji Canvas, else paper-object.
        seed: root of everything random.
        out: folder in which the run's own is made; the same call again continues it.
        overrides: settings such as "policy.iterations=60".
    """
    from cgru.cli.trackers import tracking
    from cgru.pipeline import unlearn
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
    """Read what a method produced (a LoRA file or a run folder), ready for `edit.applied(backbone)`."""
    from cgru.edits import load_edit

    return load_edit(path)


def evaluate(model: str | Path, benchmark: str = "canvas", **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Score a model, a run folder or a LoRA file; returns the contents of scores.json (see cgru.evaluation.session)."""
    from cgru.evaluation.session import evaluate

    return evaluate(model, benchmark, **settings)
