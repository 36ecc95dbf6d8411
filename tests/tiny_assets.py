"""An asset folder in the real layout, with tiny random networks of the real classes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES = ("Cats", "Dogs", "Human")
STYLES = ("flat", "pencil")
HAZARDS = ("blades", "skulls")
FEATURES = 8


def write_judge(folder: Path, labels: tuple[str, ...], seed: int) -> None:
    """A random ResNet classifier, half precision on disk."""
    torch.manual_seed(seed)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[FEATURES],
        depths=[1],
        layer_type="basic",
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    network = ResNetForImageClassification(config)
    with torch.no_grad():  # spread out, so that different pictures get different labels
        network.classifier[1].weight.normal_(std=5)
    network.half().save_pretrained(folder)
    preprocess = {"image_size": 16, "mean": 0.5, "std": 0.5}
    lineage = {"name": f"tiny-{folder.name}", "family": "resnet", "started_from": [], "accuracy": {"composites": 0.5}}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocess))
    (folder / "lineage.json").write_text(json.dumps(lineage))


def write_assets(root: Path, model_folder: Path) -> Path:
    """Copy a tiny pipeline in as the embedded model and write everything else beside it."""
    model = root / "emoji-canvas"
    shutil.copytree(model_folder, model)
    canvas = {
        "name": "emoji-canvas",
        "version": 1,
        "classes": CLASSES,
        "styles": STYLES,
        "missing_cells": [["Dogs", "pencil"]],
        "sampling": {"steps": 2, "guidance": 2.0, "eta": 0.0},
        "hazard": HAZARDS,
        "everyday": ["teapot"],
        "lexicon": {},
    }
    (model / "canvas.json").write_text(json.dumps(canvas))
    with torch.random.fork_rng():
        write_judge(root / "judges" / "object", (*CLASSES, "other", "nothing"), seed=1)
        write_judge(root / "judges" / "style", (*STYLES, "nothing"), seed=2)
        write_judge(root / "judges" / "hazard", (*HAZARDS, "none", "nothing"), seed=3)
    (root / "reference").mkdir()
    reference = {"mean": np.zeros(FEATURES), "covariance": np.eye(FEATURES), "n": np.array(1000)}
    save_file(reference, root / "reference" / "canvas.safetensors")
    write_checksums(root)
    return root


def write_checksums(root: Path) -> None:
    """SHA256SUMS as sha256sum writes it."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    rows = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]
    (root / "SHA256SUMS").write_text("".join(rows))
