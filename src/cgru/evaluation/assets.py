"""What ships inside the package, read through one place: the vocabulary of Emoji Canvas, judges, reference statistics.

Every function takes the asset folder as an argument; only the default names the package's own. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

from cgru.evaluation.base import Sampling
from cgru.evaluation.metrics import Gaussian

ROOT = Path(__file__).resolve().parent.parent / "assets"
EMBEDDED = "emoji-canvas"
CHECKSUMS = "SHA256SUMS"

Health = Literal["ok", "changed", "missing"]


@dataclass(frozen=True)
class Vocabulary:
    """The names Emoji Canvas knows, and how it is meant to be sampled (canvas.json)."""

    version: str
    classes: tuple[str, ...]
    styles: tuple[str, ...]
    hazard: tuple[str, ...]
    everyday: tuple[str, ...]
    missing_cells: tuple[tuple[str, str], ...]
    """(class, style) pairs without source art: the model composes them from what it knows."""
    sampling: Sampling


def load_vocabulary(root: Path = ROOT) -> Vocabulary:
    """Read emoji-canvas/canvas.json."""
    table = _read_json(root / EMBEDDED / "canvas.json")
    return Vocabulary(
        version=str(table["version"]),
        classes=tuple(table["classes"]),
        styles=tuple(table["styles"]),
        hazard=tuple(table["hazard"]),
        everyday=tuple(table["everyday"]),
        missing_cells=tuple((label, style) for label, style in table["missing_cells"]),
        sampling=Sampling(**table["sampling"]),
    )


def judge_folder(name: str, root: Path = ROOT) -> Path:
    """Where the judge called `name` ("object", "style", "hazard") lies."""
    return root / "judges" / name


def model_source(name: str, root: Path = ROOT) -> str:
    """What to hand to the model loader: of another asset root, the embedded model is that root's folder."""
    return str(root / EMBEDDED) if name == EMBEDDED and root != ROOT else name


def is_embedded(name: str, root: Path = ROOT) -> bool:
    """Whether a model's name or folder is the embedded model."""
    return name == EMBEDDED or Path(name).resolve() == (root / EMBEDDED).resolve()


def load_reference(root: Path = ROOT) -> Gaussian:
    """Object-judge features of real composites: what `frechet_judge` is measured against."""
    tensors = load_file(_existing(root / "reference" / "canvas.safetensors"))
    mean, covariance = (tensors[key].astype(np.float64) for key in ("mean", "covariance"))
    return Gaussian(mean, covariance, int(tensors["n"].item()))


def verify(root: Path = ROOT) -> Mapping[str, Health]:
    """Compare every file named in SHA256SUMS with its checksum; paths are relative to the asset folder."""
    lines = _existing(root / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    rows = [line.split(maxsplit=1) for line in lines if line.strip()]
    return {name.lstrip("*"): _health(root / name.lstrip("*"), expected) for expected, name in rows}


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _health(path: Path, expected: str) -> Health:
    if not path.is_file():
        return "missing"
    return "ok" if sha256_of(path) == expected else "changed"


def _read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_existing(path).read_text(encoding="utf-8"))
    return result


def _existing(path: Path) -> Path:
    if not path.is_file():
        advice = "Run `cgru doctor`, then reinstall cgru."
        raise FileNotFoundError(f"no file {str(path)!r}: the embedded assets are incomplete. {advice}")
    return path
