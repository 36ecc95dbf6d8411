"""Tiny random networks of the real transformers classes, saved as the folders that rewards are loaded from."""

import json
from pathlib import Path

import pytest
import torch
from reward_folders import clip_vision, save_tower_with_heads, swin

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion


@pytest.fixture(scope="session")
def heads_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A heads folder per family, as tools/emoji_canvas/rewards.py writes them; read only."""
    root = tmp_path_factory.mktemp("heads")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_tower_with_heads(clip_vision(), root / "clip", mean=0.5, std=0.5)
        save_tower_with_heads(swin(), root / "swin", mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4])
    lineage = {"name": "tiny", "started_from": ["abc"], "weights_sha256": "unused"}
    (root / "clip" / "lineage.json").write_text(json.dumps(lineage))
    return {name: root / name for name in ("clip", "swin")}


@pytest.fixture(scope="session")
def tiny(sd_folder: Path) -> StableDiffusion:
    """A tiny text-to-image model with pictures of 16×16."""
    return load_stable_diffusion(sd_folder, device="cpu")


@pytest.fixture
def images() -> torch.Tensor:
    """Five random pictures."""
    return torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
