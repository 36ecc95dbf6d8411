"""Judges: image classifiers that recognise what a picture shows. Never used to train a policy.

A judge is a transformers image-classifier folder (config.json with id2label, model.safetensors,
preprocessor_config.json with image_size, mean and std) with a lineage.json that records its training data and starting
weights. "nothing" is one of its labels, so that a collapsed model is detected instead of counted as a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageClassification

from cgru.atomic_io import parse_json
from cgru.backbones.foreign_code import refuse_code
from cgru.backbones.loading import no_progress_bars
from cgru.catalog import unknown
from cgru.embedded import ROOT, judge_folder, sha256_of


@dataclass(frozen=True)
class Judge:
    """A classifier with its labels, preprocessing and lineage."""

    name: str
    labels: tuple[str, ...]
    network: Any
    image_size: int
    mean: float
    std: float
    weights_sha256: str
    lineage: Mapping[str, Any]

    @torch.inference_mode()
    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (n, labels) and pooled penultimate features (n, d) of images [0, 1], in float32."""
        pooled = self.network.base_model(self._prepared(images)).pooler_output
        logits = self.network.classifier(pooled)
        return logits.float().softmax(-1), pooled.flatten(1).float()

    def probabilities(self, images: Tensor, batch_size: int = 64) -> Tensor:
        """Return probabilities (n, labels) for any number of images."""
        return torch.cat([self.look(batch)[0] for batch in images.split(batch_size)])

    def _prepared(self, images: Tensor) -> Tensor:
        size = (self.image_size, self.image_size)
        # antialias matters only when shrinking (512-pixel models); enlarging is plain bilinear with or without it.
        resized = functional.interpolate(images.float(), size, mode="bilinear", align_corners=False, antialias=True)
        return (resized - self.mean) / self.std


def load_judge(name: str | Path, *, root: Path = ROOT, device: str | torch.device = "cpu") -> Judge:
    """Load a judge: a str is a name ("object", "style", "hazard"), a Path is a folder of the same layout."""
    folder = _folder(name, root)
    refuse_code(folder)
    with no_progress_bars():
        network = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    prepare = parse_json((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    lineage = parse_json((folder / "lineage.json").read_text(encoding="utf-8"))
    id2label = network.config.id2label
    return Judge(
        name=folder.name,
        labels=tuple(id2label[i] for i in range(len(id2label))),
        network=network.eval().to(device).requires_grad_(False),
        image_size=prepare["image_size"],
        mean=prepare["mean"],
        std=prepare["std"],
        weights_sha256=sha256_of(folder / "model.safetensors"),
        lineage=lineage,
    )


def _folder(name: str | Path, root: Path) -> Path:
    # A name never refers to the working directory: a folder there called "object" is not a judge.
    folder = name if isinstance(name, Path) else judge_folder(name, root)
    if not folder.is_dir():
        present = sorted(path.name for path in (root / "judges").glob("*") if path.is_dir())
        advice = "Give one of these, or a judge's folder as a Path."
        raise FileNotFoundError(unknown("judge", str(name), present, advice))
    return folder
