"""A folder of reference pictures in MJHQ-30K's layout: `<category>/<id>.png` (or .jpg, .webp) and meta_data.json.

The pictures alone are a reference for FID, KID and CMMD; meta_data.json ({id: {"category", "prompt"}}) provides prompts
to draw. Unreadable pictures are counted and skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cgru.atomic_io import parse_json
from cgru.evaluation.judges.features import Eye, load_eye
from cgru.image_files import IMAGE_SUFFIXES, read_rgb

META = "meta_data.json"
BATCH = 32


@dataclass(frozen=True)
class Folder:
    """Reference pictures and a hash of their names and bytes."""

    path: Path
    files: tuple[Path, ...]
    sha256: str

    def record(self) -> dict[str, Any]:
        """Return the entry in a benchmark's protocol; without the path, which does not identify the pictures."""
        return {"what": "folder of pictures", "name": self.path.name, "files": len(self.files), "sha256": self.sha256}


@dataclass(frozen=True)
class CaptionedPicture:
    """What one picture of the folder shows."""

    id: str
    category: str
    prompt: str


@dataclass(frozen=True, eq=False)
class Features:
    """Features (n, d) of the readable pictures, and the number of unreadable ones."""

    rows: np.ndarray
    skipped: int


def read_folder(path: Path) -> Folder:
    """List and hash the pictures of a folder, at any depth; one with fewer than two that can be read is refused."""
    _check_folder(path)
    files = tuple(sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()))
    if len(files) < 2:
        allowed = f"allowed: 2 or more files {', '.join(IMAGE_SUFFIXES)}, at any depth. Give another --reference."
        raise ValueError(f"{len(files)} picture(s) in {str(path)!r}; {allowed}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    found = sum(1 for _ in islice(filter(_is_readable, files), 2))
    if found < 2:
        allowed = "allowed: at least 2 whole pictures. Give another --reference."
        raise ValueError(f"{found} of {len(files)} pictures in {str(path)!r} can be read; {allowed}")
    return Folder(path, files, digest.hexdigest())


def has_captions(path: Path | None) -> bool:
    """Return whether the folder has captions of its pictures."""
    return path is not None and (path / META).is_file()


def read_captions(path: Path) -> list[CaptionedPicture]:
    """Return the rows of meta_data.json, sorted by id."""
    _check_folder(path)
    file = path / META
    if not file.is_file():
        raise FileNotFoundError(f"no {META} in {str(path)!r}; prompts are read from it, as in MJHQ-30K. Add it.")
    try:
        table = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error}); allowed: {_LAYOUT}. Download it again.") from error
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{str(file)!r} lists no pictures; allowed: {_LAYOUT}. Download it again.")
    return [_caption(file, name, row) for name, row in sorted(table.items())]


_LAYOUT = '{"ID": {"category": TEXT, "prompt": TEXT}, ...}'


def _caption(file: Path, name: str, row: object) -> CaptionedPicture:
    if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in ("category", "prompt")):
        raise ValueError(f"{str(file)!r}: {name!r} has no category or prompt; allowed: {_LAYOUT}. Fix or remove it.")
    if not row["prompt"].strip():
        raise ValueError(f"{str(file)!r}: the prompt of {name!r} is empty; allowed: any text. Fix or remove it.")
    return CaptionedPicture(name, row["category"], row["prompt"])


@lru_cache(maxsize=4)
def features_of(folder: Folder, eye: str, root: Path) -> Features:
    """Return a network's features of the folder; cached, since base and model share the reference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_eye(eye, root=root, device=device)
    rows = list(_looks(network, _readable(folder), device))
    found = np.concatenate(rows) if rows else np.zeros((0, 0))
    if len(found) < 2:
        raise ValueError(f"{len(found)} of {len(folder.files)} pictures in {str(folder.path)!r} can be read; need 2.")
    return Features(found, len(folder.files) - len(found))


def _is_readable(file: Path) -> bool:
    return _read(file) is not None


def _readable(folder: Folder) -> Iterator[Tensor]:
    return (picture for picture in map(_read, folder.files) if picture is not None)


def _read(file: Path) -> Tensor | None:
    """Return (3, h, w) in [0, 1]; None if the file is broken."""
    try:
        pixels = np.array(read_rgb(file))
    except ValueError:
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def _looks(eye: Eye, pictures: Iterator[Tensor], device: str) -> Iterator[np.ndarray]:
    """Yield features, in batches of consecutive pictures of equal size."""
    for _, same in groupby(pictures, key=lambda picture: tuple(picture.shape)):
        batch: list[Tensor] = []
        for picture in same:
            batch.append(picture)
            if len(batch) == BATCH:
                yield _seen(eye, batch, device)
                batch = []
        if batch:
            yield _seen(eye, batch, device)


def _seen(eye: Eye, batch: list[Tensor], device: str) -> np.ndarray:
    return eye.look(torch.stack(batch).to(device))[1].cpu().numpy()


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {str(path)!r}; --reference is a folder of pictures. Check the spelling.")
