"""Jobs -> images -> predictions: the part of an evaluation that costs time, in batches, and resumable job by job.

A prediction is kept for (job, key), where the key is a hash of everything that decides it: model weights and settings,
sampling, judges, dtype, device and library versions. What is there already is not drawn again. Nothing that an earlier
evaluation left in the folder is replaced before all pictures are drawn and judged.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cgru.backbones.base import Backbone
from cgru.evaluation.base import NOTHING, Job, Predictions, Sampling, stable_hash
from cgru.evaluation.eyes import Eye
from cgru.evaluation.store import PredictionFile, Row, job_row, pack, unpack, write_atomic, write_lines
from cgru.mdp import rollout

Progress = Callable[[int, int], None]
"""Called with (pictures done, pictures in all)."""
DECODED_AT_ONCE = 16
"""Latents: at 512 pixels the decoder has layers of 67 million numbers each, and some kernels index by 32 bits."""


@dataclass(frozen=True)
class Panel:
    """The judges of a benchmark; one of them, which may be without labels, also gives the features that are kept."""

    judges: Mapping[str, Eye]
    feature_judge: str

    def rows(self, jobs: Sequence[Job], images: Tensor, broken: np.ndarray, key: str) -> list[Row]:
        """What every judge says about a batch, one row per job; `broken` (n,) pictures show nothing by definition."""
        seen = {name: judge.look(images) for name, judge in self.judges.items()}
        features = seen[self.feature_judge][1].cpu().numpy()
        chances = {name: result[0].double().cpu().numpy() for name, result in seen.items() if name in self._labels}
        for name, labels in self._labels.items():
            chances[name][broken] = [label == NOTHING for label in labels]
        return [
            {"id": job.id, "key": key, **self._answers(chances, i), "broken": bool(lost), "features": pack(features[i])}
            for i, (job, lost) in enumerate(zip(jobs, broken, strict=True))
        ]

    def collect(self, rows: Sequence[Row]) -> Predictions:
        """Rows back as arrays."""
        chances = {name: np.array([row["probabilities"][name] for row in rows]) for name in self._labels}
        features = np.stack([unpack(row["features"]) for row in rows])
        return Predictions(self._labels, chances, features, broken=sum(row["broken"] for row in rows))

    @property
    def _labels(self) -> dict[str, tuple[str, ...]]:
        return {name: judge.labels for name, judge in self.judges.items() if judge.labels}

    def _answers(self, chances: Mapping[str, np.ndarray], i: int) -> Row:
        said = {name: labels[chances[name][i].argmax()] for name, labels in self._labels.items()}
        return {"judged": said, "probabilities": {name: values[i].tolist() for name, values in chances.items()}}


@torch.no_grad()
def draw(
    backbone: Backbone, prompts: Sequence[str], seeds: Sequence[int], sampling: Sampling, *, pad_to: int = 0
) -> Tensor:
    """One batch of pictures (n, 3, h, w) in [0, 1]; each from its own seed.

    A compiled denoiser wants one batch size: `pad_to` fills a shorter batch with copies of its last job, not returned.
    """
    spare = max(pad_to - len(prompts), 0)
    kernel = backbone.kernel(sampling.steps, eta=sampling.eta)
    condition = backbone.encode_text([*prompts, *[prompts[-1]] * spare])
    own = [*seeds, *[seeds[-1]] * spare]
    x = rollout.sample(backbone, condition, own, kernel=kernel, guidance=sampling.guidance)
    return backbone.decode(x[: len(prompts)], batch_size=DECODED_AT_ONCE)


def default_batch(device: torch.device) -> int:
    """Pictures drawn at once where nobody said how many; with guidance the denoiser sees twice as many."""
    return 16 if device.type == "cpu" else 64


def mend(images: Tensor) -> tuple[Tensor, np.ndarray]:
    """White pictures in place of those that are not finite (a diverged model's), and which these are (n,)."""
    is_broken = ~images.flatten(1).isfinite().all(1)
    return torch.where(is_broken[:, None, None, None], 1.0, images), is_broken.cpu().numpy()


def fingerprint(backbone: Backbone) -> str:
    """sha256 over the settings of all parts the backbone holds, and names, types and bits of all their weights."""
    digest = hashlib.sha256()
    for name, part in sorted(vars(backbone).items()):
        digest.update(f"{name} {stable_hash(settings_of(part))}".encode())
        if isinstance(part, nn.Module):
            for place, weight in part.state_dict().items():
                digest.update(f"{name}.{place} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def settings_of(part: object) -> dict[str, Any]:
    """What decides a part's behaviour beside weights, as JSON: the config of a network or scheduler, a vocabulary.

    Left out: where it was read from, which library wrote it (keys with an underscore), and a tokenizer's last call.
    """
    if isinstance(part, PreTrainedTokenizerBase):
        state = json.loads(part.backend_tokenizer.to_str())
        kept = {key: value for key, value in state.items() if key not in ("version", "truncation", "padding")}
        return {**kept, "model_max_length": part.model_max_length}
    config = getattr(part, "config", {})  # diffusers and transformers share no class for it
    table = config if isinstance(config, Mapping) else config.to_dict()
    return {key: value for key, value in table.items() if not key.startswith("_") and key != "transformers_version"}


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
    padded: bool = False,
) -> Predictions:
    """Draw and judge what is not there yet; writes jobs.jsonl, predictions.jsonl and the grid's pictures.

    `padded` draws the last, shorter batch at full size, as a compiled denoiser wants it.
    """
    pad_to = batch_size if padded else 0
    samples = folder / "samples" / key
    samples.mkdir(parents=True, exist_ok=True)
    file = PredictionFile(folder, key)
    rows = file.read()
    todo = [job for job in jobs if job.id not in rows or (is_shown(job) and not sample_path(samples, job).is_file())]
    progress(len(jobs) - len(todo), len(jobs))
    for start in range(0, len(todo), batch_size):
        batch = todo[start : start + batch_size]
        prompts, seeds = [job.prompt for job in batch], [job.seed for job in batch]
        images, broken = mend(draw(backbone, prompts, seeds, sampling, pad_to=pad_to))
        save_samples(samples, batch, images)
        new = panel.rows(batch, images, broken, key)
        file.append(new)  # after the pictures: a row means that the job is done
        rows |= {row["id"]: row for row in new}
        progress(len(jobs) - len(todo) + start + len(batch), len(jobs))
    ordered = {job.id: rows[job.id] for job in jobs}
    write_lines(folder / "jobs.jsonl", [job_row(job) for job in jobs])
    (folder / "grid.png").unlink(missing_ok=True)  # it shows what was here before
    file.finish([*(ordered | rows).values()])  # pictures beyond these jobs too: they cost as much
    return panel.collect([*ordered.values()])


def is_shown(job: Job) -> bool:
    """Whether the job's picture is kept for the grid: the first of each prompt."""
    return job.labels["index"] == 0


def sample_path(samples: Path, job: Job) -> Path:
    """Where the picture of a shown job lies."""
    return samples / f"{job.id}.png"


def save_samples(samples: Path, jobs: Sequence[Job], images: Tensor) -> None:
    """Keep the pictures of shown jobs as PNG."""
    for job, picture in zip(jobs, to_pictures(images), strict=True):
        if is_shown(job):
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            write_atomic(sample_path(samples, job), buffer.getvalue())


def to_pictures(images: Tensor) -> list[Image.Image]:
    """Images (n, 3, h, w) in [0, 1] as 8-bit pictures."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in pixels]
