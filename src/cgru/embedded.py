"""The assets inside the package: their paths, the vocabulary of Emoji Canvas, checksums.

Every function takes the asset folder as an argument; the default is the package's own. This file does not need torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from cgru.tasks import Lexicon, Noun, Sampling, find_concept

ROOT = Path(__file__).resolve().parent / "assets"
EMBEDDED = "emoji-canvas"
CHECKSUMS = "SHA256SUMS"

Health = Literal["ok", "changed", "missing"]


@dataclass(frozen=True)
class Vocabulary:
    """The names that Emoji Canvas knows, and its default sampling (canvas.json)."""

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


def load_lexicon(root: Path = ROOT) -> Lexicon:
    """Read emoji-canvas/canvas.json; a label that its lexicon leaves out has its own name as its only word."""
    table = _read_json(root / EMBEDDED / "canvas.json")
    classes, styles, hazards, everyday = (tuple(table[key]) for key in ("classes", "styles", "hazard", "everyday"))
    nouns = {label: _noun(label, table["lexicon"].get(label)) for label in (*classes, *hazards, *everyday)}
    return Lexicon(classes, styles, hazards, everyday, MappingProxyType(nouns))


def main_benchmark(concept: str) -> str:
    """The benchmark that shows whether a concept of Emoji Canvas is gone: hazard, attribute or canvas."""
    lexicon = load_lexicon()
    try:
        kind = find_concept(concept, lexicon.vocabulary, lexicon.aliases).kind
    except ValueError:  # a preset is made before the concept is checked
        return "canvas"
    return kind if kind in ("hazard", "attribute") else "canvas"


def proof_of(concept: str) -> list[str]:
    """The options of `cgru evaluate RUN` that show whether a concept of Emoji Canvas is gone."""
    benchmark = main_benchmark(concept)
    return [*([] if benchmark == "canvas" else ["--benchmark", benchmark]), "--target", concept]


def judge_folder(name: str, root: Path = ROOT) -> Path:
    """Where the judge called `name` ("object", "style", "hazard") lies."""
    return root / "judges" / name


def model_source(name: str, root: Path = ROOT) -> str:
    """The source for the model loader; for another asset root, the embedded model is a folder in it."""
    return str(root / EMBEDDED) if name == EMBEDDED and root != ROOT else name


def is_embedded(name: str, root: Path = ROOT) -> bool:
    """Whether a model's name or folder is the embedded model."""
    return name == EMBEDDED or Path(name).resolve() == (root / EMBEDDED).resolve()


def verify(root: Path = ROOT) -> Mapping[str, Health]:
    """Compare every file named in SHA256SUMS with its checksum; paths are relative to the asset folder."""
    lines = existing(root / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    rows = [line.split(maxsplit=1) for line in lines if line.strip()]
    return {name.lstrip("*"): _health(root / name.lstrip("*"), expected) for expected, name in rows}


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _noun(label: str, row: Mapping[str, Any] | None) -> Noun:
    if row is None:
        return Noun(label.lower(), label.lower())
    return Noun(row["singular"], row["plural"], tuple(row["synonyms"]), tuple(row["breeds"]))


def _health(path: Path, expected: str) -> Health:
    if not path.is_file():
        return "missing"
    return "ok" if sha256_of(path) == expected else "changed"


def _read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(existing(path).read_text(encoding="utf-8"))
    return result


def existing(path: Path) -> Path:
    """The path of an asset that must exist."""
    if not path.is_file():
        advice = "Run `cgru doctor`, then reinstall cgru."
        raise FileNotFoundError(f"no file {str(path)!r}: the embedded assets are incomplete. {advice}")
    return path
