"""Jobs -> images -> predictions: the expensive part of an evaluation, in batches, resumable job by job.

A prediction is stored for (job, key); the key is a hash of everything that determines it: model weights and settings,
sampling, judges, dtype, device and library versions. Stored predictions are not drawn again. Nothing that an earlier
evaluation left in the folder is replaced before all pictures are drawn and judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cgru import distributed
from cgru.backbones.base import Backbone
from cgru.evaluation.base import NOTHING, Detection, Job, Predictions, stable_hash
from cgru.evaluation.drawing import Gallery, draw_jobs, mend, to_pictures
from cgru.evaluation.judges.features import Eye, ObjectDetector
from cgru.evaluation.picture_grid import save_png
from cgru.evaluation.store import PredictionFile, Row, is_whole_png, job_row, pack, unpack, write_lines
from cgru.tasks import Sampling

Progress = Callable[[int, int], None]
"""Called with (pictures done, total pictures)."""


@dataclass(frozen=True)
class JudgePanel:
    """The judges of a benchmark. One of them, which may have no labels, also provides the stored features."""

    judges: Mapping[str, Eye]
    feature_judge: str

    def rows(self, jobs: Sequence[Job], images: Tensor, broken: np.ndarray, key: str) -> list[Row]:
        """Return the judges' answers for a batch, one row per job; `broken` (n,) pictures are judged NOTHING."""
        seen = {name: judge.look(images) for name, judge in self.judges.items()}
        features = seen[self.feature_judge][1].cpu().numpy()
        chances = {name: result[0].double().cpu().numpy() for name, result in seen.items() if name in self._labels}
        for name, labels in self._labels.items():
            chances[name][broken] = [label == NOTHING for label in labels]
        boxes = self._found(images, broken)
        return [
            {"id": job.id, "key": key, **self._answers(chances, i), "broken": bool(lost), "features": pack(features[i])}
            | boxes[i]
            for i, (job, lost) in enumerate(zip(jobs, broken, strict=True))
        ]

    def collect(self, rows: Sequence[Row]) -> Predictions:
        """Convert rows back to arrays."""
        chances = {name: np.array([row["probabilities"][name] for row in rows]) for name in self._labels}
        features = np.stack([unpack(row["features"]) for row in rows])
        detections = {name: [_detections(row["detections"][name]) for row in rows] for name in self._detectors}
        return Predictions(self._labels, chances, features, sum(row["broken"] for row in rows), detections)

    @property
    def _labels(self) -> dict[str, tuple[str, ...]]:
        return {name: judge.labels for name, judge in self.judges.items() if judge.labels}

    @property
    def _detectors(self) -> dict[str, ObjectDetector]:
        return {name: judge for name, judge in self.judges.items() if isinstance(judge, ObjectDetector)}

    def _found(self, images: Tensor, broken: np.ndarray) -> list[Row]:
        """Return what detectors add to each row; empty rows without detectors."""
        seen = {name: detector.detect(images) for name, detector in self._detectors.items()}
        if not seen:
            return [{} for _ in broken]
        return [
            {"detections": {name: [] if lost else [asdict(box) for box in found[i]] for name, found in seen.items()}}
            for i, lost in enumerate(broken)
        ]

    def _answers(self, chances: Mapping[str, np.ndarray], i: int) -> Row:
        said = {name: labels[chances[name][i].argmax()] for name, labels in self._labels.items()}
        return {"judged": said, "probabilities": {name: values[i].tolist() for name, values in chances.items()}}


def fingerprint(backbone: Backbone) -> str:
    """Return the sha256 of the settings of all parts of the backbone and the names, types and bits of its weights."""
    digest = hashlib.sha256()
    parts = {"backbone": backbone} if isinstance(backbone, nn.Module) else vars(backbone)
    for name, part in sorted(parts.items()):
        digest.update(f"{name} {stable_hash(settings_of(part))}".encode())
        if isinstance(part, nn.Module):
            for place, weight in part.state_dict().items():
                digest.update(f"{name}.{place} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def settings_of(part: object) -> dict[str, Any]:
    """Return, as JSON, what determines a part's behaviour besides weights: a network's config, a vocabulary.

    Excludes where it was read from, the library that wrote it (keys with an underscore), and a tokenizer's last call.
    """
    if isinstance(part, PreTrainedTokenizerBase):
        state = json.loads(part.backend_tokenizer.to_str())
        kept = {key: value for key, value in state.items() if key not in ("version", "truncation", "padding")}
        return {**kept, "model_max_length": part.model_max_length}
    config = getattr(part, "config", {})  # diffusers and transformers have no common class with a config
    table = config.to_dict() if isinstance(config, PretrainedConfig) else config
    if not isinstance(table, Mapping):  # a user's own network
        return {"config": repr(table)}
    return {key: value for key, value in table.items() if not key.startswith("_") and key != "transformers_version"}


def _detections(rows: Sequence[Row]) -> list[Detection]:
    return [Detection(row["label"], row["score"], tuple(row["box"])) for row in rows]


def predict(
    backbone: Backbone,
    jobs: Sequence[Job],
    panel: JudgePanel,
    sampling: Sampling,
    *,
    folder: Path,
    key: str,
    batch_size: int,
    progress: Progress,
    padded: bool = False,
    gallery: Gallery | None = None,
    mark: str = "",
) -> Predictions:
    """Draw and judge pictures without a stored prediction; write jobs.jsonl, predictions.jsonl and the grid's pictures.

    With several processes each draws its share into a file of its own; the main one merges them and reports to all.
    `padded` draws the last, shorter batch at full size, as a compiled denoiser requires. Pictures in `gallery` by the
    model with the fingerprint `mark` are not drawn again.
    """
    pad_to = batch_size if padded else 0
    samples = folder / "samples" / key
    samples.mkdir(parents=True, exist_ok=True)
    file = PredictionFile(folder, key)
    todo = distributed.from_main(lambda: missing_jobs(jobs, file.read(), samples))
    todo = sorted(todo, key=lambda job: job.guidance or 0.0)  # stable; jobs with equal guidance share a batch
    mine = todo[distributed.share(len(todo))]

    def pictures(model: Backbone, batch: Sequence[Job]) -> Tensor:
        if gallery:
            return gallery.draw(model, mark, batch, sampling, pad_to=pad_to)
        return draw_jobs(model, batch, sampling, pad_to=pad_to)

    def draw_mine() -> None:
        progress(len(jobs) - len(todo), len(jobs))
        for start in range(0, len(mine), batch_size):
            batch = mine[start : start + batch_size]
            images, broken = mend(pictures(backbone, batch))
            save_samples(samples, batch, images)
            file.append(panel.rows(batch, images, broken, key))  # after the pictures: a row marks the job as done
            left = len(todo) * (len(mine) - start - len(batch)) // len(mine)  # assumes equal progress in all processes
            progress(len(jobs) - left, len(jobs))

    distributed.alike(draw_mine)
    return panel.collect(distributed.from_main(lambda: finish(file, jobs)))


def missing_jobs(jobs: Sequence[Job], rows: Mapping[str, Row], samples: Path) -> list[Job]:
    """Return the jobs without a row, or without their stored picture."""
    lost = {job.id for job in jobs if is_shown(job) and not is_whole_png(sample_path(samples, job))}
    return [job for job in jobs if job.id not in rows or job.id in lost]


def finish(file: PredictionFile, jobs: Sequence[Job]) -> list[Row]:
    """Merge what was found, in job order; replaces what was in the folder before."""
    rows = file.read()
    if lost := sum(job.id not in rows for job in jobs):
        allowed = "allowed: one folder that all processes write to. Choose another --out."
        raise ValueError(f"{lost} of {len(jobs)} predictions are missing in {str(file.folder)!r}; {allowed}")
    ordered = {job.id: rows[job.id] for job in jobs}
    write_lines(file.folder / "jobs.jsonl", [job_row(job) for job in jobs])
    (file.folder / "grid.png").unlink(missing_ok=True)  # it shows the earlier evaluation
    file.finish([*(ordered | rows).values()])  # including pictures of other jobs, which were expensive too
    return [*ordered.values()]


def is_shown(job: Job) -> bool:
    """Return whether the job's picture is stored for the grid: the first of each prompt; False without an index."""
    return job.labels.get("index") == 0


def sample_path(samples: Path, job: Job) -> Path:
    """Return the path of a stored picture."""
    return samples / f"{job.id}.png"


def save_samples(samples: Path, jobs: Sequence[Job], images: Tensor) -> None:
    """Store the pictures of shown jobs as PNG."""
    for job, picture in zip(jobs, to_pictures(images), strict=True):
        if is_shown(job):
            save_png(sample_path(samples, job), picture)
