"""Target pictures of an attack: pictures drawn by the base that the judge accepts, or a folder of pictures.

The base's pictures are stored as PNG and read back, so that an attack resumed after a kill starts from the same 8 bits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cgru.attacks.concept import Trial
from cgru.backbones.base import Backbone
from cgru.evaluation.base import Job
from cgru.evaluation.drawing import to_pictures
from cgru.evaluation.picture_grid import save_png
from cgru.evaluation.store import PredictionFile, Row, is_whole_png, job_row, write_lines
from cgru.image_files import IMAGE_SUFFIXES, read_rgb

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Target:
    """A prompt to attack and the picture (3, h, w) it should bring back."""

    job: Job
    picture: Tensor
    file: Path


@dataclass(frozen=True)
class Found:
    """The targets, and the number of candidates tried to find them."""

    targets: list[Target]
    candidates: int


def drawn_targets(
    base: Backbone,
    trial: Trial,
    wanted: int,
    *,
    size: int,
    folder: Path,
    key: str,
    progress: Callable[[int, int], None],
) -> Found:
    """Return the first `wanted` candidates that the base draws as the concept; fewer if candidates run out."""
    samples = folder / "samples" / key
    samples.mkdir(parents=True, exist_ok=True)
    file = PredictionFile(folder, key)
    rows, found, tried = file.read(), list[Target](), 0
    for batch in chunks(trial.candidates, size):
        if any(job.id not in rows or not is_whole_png(samples / f"{job.id}.png") for job in batch):
            new = _look_at(base, trial, batch, samples, key)
            file.append(new)
            rows |= {row["id"]: row for row in new}
        tried += len(batch)
        shown = [(job, samples / f"{job.id}.png") for job in batch if rows[job.id]["shows"]]
        found += [Target(job, read_picture(path), path) for job, path in shown]
        progress(min(len(found), wanted), wanted)
        if len(found) >= wanted:
            break
    file.finish([*rows.values()])
    write_lines(folder / "jobs.jsonl", [job_row(target.job) for target in found])
    return Found(found[:wanted], tried)


def given_targets(folder: Path, trial: Trial, wanted: int, size: tuple[int, int]) -> Found:
    """Pair a folder's pictures, ordered by the numbers in their names, with the candidates in order."""
    files = picture_files(folder)[:wanted]
    pairs = zip(trial.candidates, files, strict=False)
    found = [Target(job, read_picture(file, size), file) for job, file in pairs]
    return Found(found, len(found))


def picture_files(folder: Path) -> list[Path]:
    """List pictures with `9_0.png` before `12_0.png`, as the official loader sorts them."""
    files = [path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise FileNotFoundError(
            f"no pictures in {str(folder)!r}; give a folder with one per prompt ({IMAGE_SUFFIXES[0]})."
        )
    return sorted(files, key=_number)


def pictures_hash(folder: Path) -> str:
    """Return the sha256 over all pictures of a folder, in order."""
    digest = hashlib.sha256()
    for path in picture_files(folder):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_picture(path: Path, size: tuple[int, int] | None = None) -> Tensor:
    """Read (3, h, w) in [0, 1]; with a size (h, w), its central square resized as in the official transform."""
    picture = read_rgb(path)
    if size and picture.size != size[::-1]:
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        picture = picture.crop((left, top, left + side, top + side)).resize(size[::-1], Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255


def chunks(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split into parts of at most `size`, independent of what is already done: batches are equal after a resume."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _look_at(base: Backbone, trial: Trial, batch: Sequence[Job], samples: Path, key: str) -> list[Row]:
    guidances = [job.guidance for job in batch]
    images, shown, _ = trial.drawn(base, [job.prompt for job in batch], [job.seed for job in batch], guidances)
    for job, picture in zip(batch, to_pictures(images), strict=True):
        save_png(samples / f"{job.id}.png", picture)
    return [{"id": job.id, "key": key, "shows": verdict} for job, verdict in zip(batch, shown, strict=True)]


def _number(path: Path) -> tuple[int, str]:
    digits = re.match(r"\d+", path.name)
    return int(digits.group()) if digits else 0, path.name
