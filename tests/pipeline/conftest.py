"""A tiny CLIP in the hub's cache under the name of the paper's backbone, as after a download."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rewards.reward_folders import save_classifier, save_clip
from safetensors.torch import save_file
from transformers import CLIPTokenizer, CLIPVisionConfig, CLIPVisionModelWithProjection

from cgru.rl.reward_stage import CLIP_B32


@pytest.fixture(scope="session")
def sd_folder(long_sd_folder: Path) -> Path:
    """Runs need a model that reads whole prompts."""
    return long_sd_folder


@pytest.fixture
def tiny_clip_on_the_hub() -> Iterator[str]:
    """Two layers of width 16 for 16-pixel pictures; the cache is the test session's own (tests/conftest.py)."""
    commit = "0" * 40
    repository = Path(os.environ["HF_HUB_CACHE"]) / f"models--{CLIP_B32.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPVisionModelWithProjection(config).save_pretrained(folder)
    side = {"height": 16, "width": 16}
    prepare = {"do_center_crop": True, "crop_size": side, "size": {"shortest_edge": 16}, "resample": 3}
    prepare |= {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepare))
    yield CLIP_B32
    shutil.rmtree(repository)  # other tests need a cache without it


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory, long_sd_folder: Path) -> Path:
    """clip (both towers, with its processor), nsfw (a ViT) and a linear aesthetic predictor."""
    root = tmp_path_factory.mktemp("networks")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_clip(root / "clip", CLIPTokenizer.from_pretrained(long_sd_folder / "tokenizer"))
        save_classifier(root / "nsfw")
        save_file({"weight": torch.randn(1, 8), "bias": torch.full((1,), 5.0)}, root / "aesthetic.safetensors")
    return root
