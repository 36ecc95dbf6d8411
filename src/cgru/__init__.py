"""cgru: remove a concept from a text-to-image diffusion model by reinforcement learning, and prove what was done.

The public API, and nothing else: `load_model`, `load_edit`, `evaluate`. They import torch only when called, so that
`import cgru` and `cgru --help` stay fast.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from cgru.backbones.base import Backbone
    from cgru.edits import Edit

__all__ = ["__version__", "evaluate", "load_edit", "load_model"]

try:
    __version__ = version("cgru")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


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
