"""A tiny CLIP in the hub's cache under the name of the paper's backbone, as after a download."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from cgru.pipeline.reward import CLIP_B32


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
