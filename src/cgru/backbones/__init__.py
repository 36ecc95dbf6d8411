"""Text-to-image models behind one protocol (`base.Backbone`); diffusers is imported only in this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cgru.backbones.base import Backbone, one_line, parse_dtype, pick_device
from cgru.backbones.trial import failing, lacking
from cgru.catalog import MODELS, place_of, resolve
from cgru.config import is_code


def load_model(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "fp32",
    revision: str | None = None,
) -> Backbone:
    """Load a text-to-image model, frozen and ready to sample.

    Args:
        name: a name of `catalog.MODELS`, a folder in the diffusers layout, a hub id `owner/name`, or the user's own
            loader as "module:attr", which is imported and called with (name, device=, dtype=). An existing path is
            always read as a folder.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        dtype: `fp32`, `bf16` or `fp16`.
        revision: branch, tag or commit of a hub id.
    """
    place, precision = pick_device(device), parse_dtype(dtype)
    if is_own_loader(name):
        return _load_own(str(name), place, precision)
    if str(name) in MODELS:
        model: Backbone = resolve("model", str(name))(str(name), device=place, dtype=precision)
        return model
    return load_diffusers(name, device=place, dtype=precision, revision=revision)


def load_diffusers(
    source: str | Path, *, device: torch.device, dtype: torch.dtype, revision: str | None = None
) -> Backbone:
    """Load a diffusers folder or a hub id by its family: Stable Diffusion 1.x, 2.x, XL or 3."""
    # imported only when a model is loaded, because diffusers takes seconds to import
    from cgru.backbones.pipelines import load_pipeline

    return load_pipeline(source, device=device, dtype=dtype, revision=revision)


def check_model(name: str) -> None:
    """Refuse a name that no model has, before anything is loaded; imports the user's own loader."""
    if is_own_loader(name):
        _own_loader(name)
        return
    from cgru.backbones.loading import resolve_source

    resolve_source(name)


def is_own_loader(name: str | Path) -> bool:
    """Whether a model's name is code, "module:attr", and not an existing path."""
    return is_code(str(name)) and not Path(name).exists()


def _own_loader(name: str) -> Callable[..., Any]:
    found = resolve("model", name)
    if not callable(found):
        raise ValueError(
            f"model {name!r} is a {type(found).__name__}; allowed: a function (name, *, device, dtype) that returns a "
            "backbone. See docs/add-a-backbone.md."
        )
    load: Callable[..., Any] = found
    return load


def _load_own(name: str, device: torch.device, dtype: torch.dtype) -> Backbone:
    load = _own_loader(name)
    try:
        found = load(name, device=device, dtype=dtype)
        problem = lacking(found)
    except torch.OutOfMemoryError:
        raise  # smaller batches or another device may help
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything, or try to end the program
        why = f"{type(error).__name__}: {one_line(error)}{place_of(error)}"
        raise ValueError(f"the loader of model {name!r} failed ({why}); correct it.") from error
    problem = problem or failing(found)
    if problem is not None:
        raise ValueError(
            f"model {name!r} is a {type(found).__name__} {problem}; allowed: a cgru.backbones.base.Backbone. See "
            "docs/add-a-backbone.md."
        )
    model: Backbone = found
    return model
