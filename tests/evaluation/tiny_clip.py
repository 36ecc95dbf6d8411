"""A tiny random CLIP of the real class, as `clip-eval` of an asset folder and as a hub id in the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

SIZE = 16


def write_clip(folder: Path, tokenizer: CLIPTokenizer, seed: int) -> CLIPModel:
    """Two layers a tower, 8 dimensions."""
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**layers, **marks, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    config = CLIPConfig(
        text_config={**text, "max_position_embeddings": tokenizer.model_max_length},
        vision_config={**layers, "image_size": SIZE, "patch_size": 8},
        projection_dim=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CLIPModel(config).eval()
    model.save_pretrained(folder)
    return model


def write_clip_eval(root: Path) -> CLIPModel:
    """Beside the embedded model of an asset folder, with lineage.json; the tokenizer is the model's."""
    tokenizer = CLIPTokenizer.from_pretrained(root / "emoji-canvas" / "tokenizer")
    model = write_clip(root / "clip-eval", tokenizer, seed=5)
    lineage = {"name": "tiny-clip-eval", "family": "clip", "started_from": []}
    (root / "clip-eval" / "lineage.json").write_text(json.dumps(lineage))
    return model


def write_hub_clip(cache: Path, hub_id: str, tokenizer: CLIPTokenizer) -> Path:
    """Into the hub's cache, as after a download; returns what to remove afterwards."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    folder = repository / "snapshots" / ("0" * 40)
    shutil.rmtree(repository, ignore_errors=True)
    write_clip(folder, tokenizer, seed=6)
    tokenizer.save_pretrained(folder)
    prepare = {"do_center_crop": True, "size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    prepare |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepare))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return repository
