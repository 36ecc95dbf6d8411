"""Jobs -> images -> predictions: the part of an evaluation that costs time, in batches, and resumable job by job.

A prediction is kept for (job, key), where the key is a hash of everything that decides it: model weights, sampling,
judges, dtype, device and library versions. What is there already is not drawn again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from cgru.backbones.base import Backbone
from cgru.evaluation.base import Job, Predictions, Sampling
from cgru.evaluation.judges import Judge
from cgru.evaluation.store import PredictionFile, Row, job_row, pack, unpack, write_atomic, write_lines
from cgru.mdp import rollout

Progress = Callable[[int, int], None]
"""Called with (pictures done, pictures in all)."""


@dataclass(frozen=True)
class Panel:
    """The judges of a benchmark; one of them also gives the features of the Fréchet distance."""

    judges: Mapping[str, Judge]
    feature_judge: str

    def rows(self, jobs: Sequence[Job], images: Tensor, key: str) -> list[Row]:
        """What every judge says about a batch, one row per job."""
        seen = {name: judge.look(images) for name, judge in self.judges.items()}
        features = seen[self.feature_judge][1].cpu().numpy()
        chances = {name: result[0].double().cpu().numpy() for name, result in seen.items()}
        return [
            {"id": job.id, "key": key, **self._answers(chances, i), "features": pack(features[i])}
            for i, job in enumerate(jobs)
        ]

    def collect(self, rows: Sequence[Row]) -> Predictions:
        """Rows back as arrays."""
        chances = {name: np.array([row["probabilities"][name] for row in rows]) for name in self.judges}
        labels = {name: judge.labels for name, judge in self.judges.items()}
        return Predictions(labels, chances, np.stack([unpack(row["features"]) for row in rows]))

    def _answers(self, chances: Mapping[str, np.ndarray], i: int) -> Row:
        said = {name: judge.labels[chances[name][i].argmax()] for name, judge in self.judges.items()}
        return {"judged": said, "probabilities": {name: values[i].tolist() for name, values in chances.items()}}


@torch.no_grad()
def draw(backbone: Backbone, prompts: Sequence[str], seeds: Sequence[int], sampling: Sampling) -> Tensor:
    """One batch of pictures (n, 3, h, w) in [0, 1]; each from its own seed."""
    kernel = backbone.kernel(sampling.steps, eta=sampling.eta)
    condition = backbone.encode_text(list(prompts))
    x = rollout.sample(
        backbone, condition, list(seeds), kernel=kernel, guidance=sampling.guidance, batch_size=len(prompts)
    )
    return backbone.decode(x)


def fingerprint(backbone: Backbone) -> str:
    """sha256 over names, types and bits of all weights of all networks the backbone holds."""
    digest = hashlib.sha256()
    for part, network in sorted(vars(backbone).items()):
        if isinstance(network, nn.Module):
            for name, weight in network.state_dict().items():
                digest.update(f"{part}.{name} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def predict(
    backbone: Backbone,
    jobs: Sequence[Job],
    panel: Panel,
    sampling: Sampling,
    *,
    folder: Path,
    key: str,
    batch_size: int,
    progress: Progress,
) -> Predictions:
    """Draw and judge what is not there yet; writes jobs.jsonl, predictions.jsonl and the grid's pictures."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "jobs.jsonl", [job_row(job) for job in jobs])
    file = PredictionFile(folder, key)
    rows = file.read()
    todo = [job for job in jobs if job.id not in rows or (is_shown(job) and not sample_path(folder, job).is_file())]
    progress(len(jobs) - len(todo), len(jobs))
    for start in range(0, len(todo), batch_size):
        batch = todo[start : start + batch_size]
        images = draw(backbone, [job.prompt for job in batch], [job.seed for job in batch], sampling)
        save_samples(folder, batch, images)
        new = panel.rows(batch, images, key)
        file.append(new)  # after the pictures: a row means that the job is done
        rows |= {row["id"]: row for row in new}
        progress(len(jobs) - len(todo) + start + len(batch), len(jobs))
    ordered = [rows[job.id] for job in jobs]
    file.finish(ordered)
    return panel.collect(ordered)


def is_shown(job: Job) -> bool:
    """Whether the job's picture is kept for the grid: the first of each prompt."""
    return job.labels["index"] == 0


def sample_path(folder: Path, job: Job) -> Path:
    """Where the picture of a shown job lies."""
    return folder / "samples" / f"{job.id}.png"


def save_samples(folder: Path, jobs: Sequence[Job], images: Tensor) -> None:
    """Keep the pictures of shown jobs as PNG."""
    for job, picture in zip(jobs, to_pictures(images), strict=True):
        if is_shown(job):
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            write_atomic(sample_path(folder, job), buffer.getvalue())


def to_pictures(images: Tensor) -> list[Image.Image]:
    """Images (n, 3, h, w) in [0, 1] as 8-bit pictures."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in pixels]
