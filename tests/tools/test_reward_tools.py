"""The reward networks' tools: labels for three heads, pictures through the VAE, and what is saved."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import SwinModel

from tools.emoji_canvas import rewards, vae
from tools.emoji_canvas.art import Record
from tools.emoji_canvas.judges import LABELS

CPU = torch.device("cpu")


def record(label: str, group: str, style: str) -> Record:
    return {"label": label, "style": style, "icon": label, "words": [], "group": group, "monochrome": False}


RECORDS = [record("Dogs", "class", "Flat"), record("skulls", "hazard", "Ink"), record("guitar", "everyday", "Blob")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three one-colour icons and an untrained VAE."""
    folder = tmp_path_factory.mktemp("work")
    icons = np.zeros((3, 128, 128, 4), dtype=np.uint8)
    icons[..., 3] = 255
    for index in range(3):
        icons[index, ..., index] = 255
    np.savez_compressed(folder / "icons-main.npz", icons=icons)
    (folder / "icons-main.json").write_text(json.dumps(RECORDS))
    torch.manual_seed(0)
    vae.build().save_pretrained(folder / "vae")
    return folder


def test_every_head_has_its_own_word_for_an_icon(work: Path) -> None:
    labels = rewards.source(work, CPU).labels.tolist()
    words = [[LABELS[head][k] for head, k in zip(rewards.HEADS, row, strict=True)] for row in labels]
    assert rewards.HEADS == ("object", "hazard", "style")
    assert words == [["Dogs", "none", "Flat"], ["other", "skulls", "Ink"], ["other", "none", "Blob"]]


def test_every_second_picture_goes_through_the_vae(work: Path) -> None:
    given, coder = rewards.source(work, CPU), vae.build().eval()
    images, truth = rewards.draw(given, coder, 12, torch.Generator().manual_seed(0))
    assert images.shape == (12, 3, 64, 64) and images.min() >= 0 and images.max() <= 1
    # An icon of one colour is pure at its centre (1 in one channel, 0 in the others); no untrained VAE paints that.
    pure = torch.tensor([sorted(pixel.tolist()) == [0, 0, 1] for pixel in images[:, :, 32, 32]])
    assert pure.tolist() == [False, True] * 6
    shown = images[1::2, :, 32, 32].argmax(1)
    assert torch.equal(truth[1::2], given.labels[shown])


def test_what_is_saved_is_what_was_measured(work: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = rewards.Heads("reward-swin", work).eval()
    rewards.save(model, tmp_path / "reward-swin", {"object": 0.5, "hazard": 0.25, "style": 1.0})
    folder = tmp_path / "reward-swin"
    table = json.loads((folder / "heads.json").read_text())
    heads, tower = load_file(folder / "heads.safetensors"), SwinModel.from_pretrained(folder).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = tower(images * 2 - 1).pooler_output
        logits = model(images)
    assert table["labels"] == {head: LABELS[head] for head in rewards.HEADS}
    for head in rewards.HEADS:
        again = features @ heads[f"{head}.weight"].T + heads[f"{head}.bias"]
        assert again.shape == (2, len(LABELS[head]))
        assert torch.allclose(again, logits[head], atol=1e-5)
    assert json.loads((folder / "accuracy.json").read_text()) == {"object": 0.5, "hazard": 0.25, "style": 1.0}
