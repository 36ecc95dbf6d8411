"""Writers of tiny folders: towers with heads, a whole CLIP, an image classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
)

from cgru.rewards.heads import ClassHeads, Tower

LABELS = {
    "object": ["Cats", "Dogs", "Human", "other", "nothing"],
    "hazard": ["blades", "skulls", "none", "nothing"],
    "style": ["Flat", "Ink", "nothing"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 8,
}
CLIP_PREPROCESS = {
    "do_center_crop": True,
    "crop_size": {"height": 16, "width": 16},
    "size": {"shortest_edge": 16},
    "resample": 3,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}


def clip_vision() -> CLIPVisionModelWithProjection:
    """Two layers of width 16 for 16-pixel pictures."""
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION)).eval()


def swin() -> SwinModel:
    """Two stages, last width 16."""
    config = SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2)
    return SwinModel(config).eval()


def save_tower_with_heads(tower: Any, folder: Path, *, mean: Any, std: Any) -> None:  # noqa: ANN401
    """The files that the tools write, by their own hand: keys `object.weight`, ..."""
    tower.save_pretrained(folder)
    heads = nn.ModuleDict({name: nn.Linear(16, len(labels)) for name, labels in LABELS.items()})
    save_file(heads.state_dict(), folder / "heads.safetensors", metadata={"format": "pt"})
    table = {"labels": LABELS, "image_size": 16, "mean": mean, "std": std}
    (folder / "heads.json").write_text(json.dumps(table))


def sure(head: str, probabilities: list[float]) -> ClassHeads:
    """A network that gives the same probabilities whatever it sees: weights 0, biases log p. Other heads: even."""
    tower = Tower(clip_vision(), image_size=16, mean=[0.5], std=[0.5], lineage={"weights": ["t"], "started_from": []})
    heads = {name: nn.Linear(16, len(labels)) for name, labels in LABELS.items()}
    for linear in heads.values():
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    heads[head].bias.data = torch.tensor(probabilities).log()
    return ClassHeads(tower, heads, LABELS)


def save_clip(folder: Path, tokenizer: CLIPTokenizer) -> CLIPModel:
    """A whole CLIP with tokenizer and preprocessing, as on the hub."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(CLIP_PREPROCESS))
    return model


def save_classifier(folder: Path) -> ViTForImageClassification:
    """A ViT with the labels and preprocessing of Falconsai/nsfw_image_detection."""
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        id2label={0: "normal", 1: "nsfw"},
        label2id={"normal": 0, "nsfw": 1},
    )
    model = ViTForImageClassification(config).eval()
    model.save_pretrained(folder)
    preprocess = {
        "do_normalize": True,
        "size": {"height": 16, "width": 16},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocess))
    return model
