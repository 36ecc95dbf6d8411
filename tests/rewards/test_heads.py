"""Heads folders: read as the tools write them, saved and read again, differentiable, refused when incomplete."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from reward_folders import CLIP_PREPROCESS, LABELS, clip_vision, save_clip
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessorPil, CLIPTokenizer, CLIPVisionModelWithProjection, SwinModel

from cgru.embedded import sha256_of
from cgru.rewards.heads import ClassHeads, load_heads, load_networks, load_tower, save_heads


def test_logits_are_the_towers_pooled_features_through_the_heads(
    heads_folders: dict[str, Path], images: torch.Tensor
) -> None:
    folder = heads_folders["clip"]
    tower = CLIPVisionModelWithProjection.from_pretrained(folder).eval()
    features = tower.vision_model(pixel_values=images * 2 - 1).pooler_output  # mean and std 0.5
    stored = load_file(folder / "heads.safetensors")
    logits = load_heads(folder)(images)
    assert {head: list(names) for head, names in load_heads(folder).labels.items()} == LABELS
    for head in LABELS:
        expected = features @ stored[f"{head}.weight"].T + stored[f"{head}.bias"]
        assert torch.allclose(logits[head], expected, atol=1e-5)


def test_swin_and_a_mean_per_channel(heads_folders: dict[str, Path], images: torch.Tensor) -> None:
    folder = heads_folders["swin"]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    features = SwinModel.from_pretrained(folder).eval()(pixel_values=(images - mean) / std).pooler_output
    stored = load_file(folder / "heads.safetensors")
    expected = features @ stored["style.weight"].T + stored["style.bias"]
    assert torch.allclose(load_heads(folder)(images)["style"], expected, atol=1e-5)


@pytest.mark.parametrize("family", ["clip", "swin"])
def test_frozen_but_differentiable_in_the_pictures(heads_folders: dict[str, Path], family: str) -> None:
    model = load_heads(heads_folders[family])
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training
    pictures = torch.rand(2, 3, 24, 40).requires_grad_(True)  # of another size than the tower's
    logits = model(pictures)
    assert logits["object"].shape == (2, 5) and logits["object"].dtype == torch.float32
    logits["object"][0, 1].backward()
    assert pictures.grad is not None
    assert pictures.grad[0].abs().max() > 0 and pictures.grad[1].abs().max() == 0


def test_saved_and_loaded_gives_the_same_logits(
    heads_folders: dict[str, Path], images: torch.Tensor, tmp_path: Path
) -> None:
    model = load_heads(heads_folders["swin"])
    save_heads(model, tmp_path / "again", record={"accuracy": 0.5})
    again = load_heads(tmp_path / "again")
    assert again.labels == model.labels
    for head, logits in model(images).items():
        assert torch.equal(again(images)[head], logits)
    table = json.loads((tmp_path / "again" / "lineage.json").read_text())
    assert table["accuracy"] == 0.5 and table["name"] == "again"
    assert again.lineage["started_from"] == model.lineage["weights"]


def test_lineage_has_every_weight_file_and_what_they_started_from(heads_folders: dict[str, Path]) -> None:
    folder = heads_folders["clip"]
    hashes = [sha256_of(folder / name) for name in ("heads.safetensors", "model.safetensors")]
    assert load_heads(folder).lineage == {"name": "tiny", "weights": hashes, "started_from": ["abc"]}


def test_a_tower_from_a_hub_like_folder_takes_its_preprocessing(tmp_path: Path) -> None:
    clip_vision().save_pretrained(tmp_path)
    table = {"size": 16, "crop_size": 16, "do_center_crop": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(table))
    tower = load_tower(tmp_path)
    assert (tower.image_size, tower.mean, tower.std, tower.width) == (16, (0.1, 0.2, 0.3), (1, 2, 3), 16)


def test_a_whole_clip_gives_its_vision_tower(tmp_path: Path, sd_folder: Path, images: torch.Tensor) -> None:
    clip = save_clip(tmp_path, CLIPTokenizer.from_pretrained(sd_folder / "tokenizer"))
    tower = load_tower(tmp_path)
    mean, std = (torch.tensor(CLIP_PREPROCESS[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
    expected = clip.vision_model(pixel_values=(images - mean) / std).pooler_output
    assert torch.allclose(tower(images), expected, atol=1e-5)


def test_a_clips_pictures_go_through_its_own_processor_also_when_saved(tmp_path: Path) -> None:
    """Bicubic to the shortest side, then the centre, as transformers does it with Pillow on bytes."""
    clip_vision().save_pretrained(tmp_path / "clip")
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(CLIP_PREPROCESS))
    tower = load_tower(tmp_path / "clip")
    heads = ClassHeads(tower, {"object": torch.nn.Linear(16, 2)}, {"object": ("dog", "other")})
    save_heads(heads, tmp_path / "heads")
    wide = (torch.rand(1, 3, 40, 64, generator=torch.Generator().manual_seed(0)) * 255).round()
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "clip")
    expected = processor(wide[0].permute(1, 2, 0).to(torch.uint8).numpy(), do_normalize=False, return_tensors="pt")
    for read in (tower, load_heads(tmp_path / "heads").tower):
        torch.testing.assert_close(read.resized(wide / 255), expected.pixel_values, atol=1.5 / 255, rtol=0)
        assert torch.equal(read.resized(read.resized(wide / 255)), read.resized(wide / 255))


def test_the_embedded_tower_is_found_by_name() -> None:
    tower = load_tower("emoji-canvas")
    assert (tower.image_size, tower.mean, tower.std, tower.width) == (64, (0.5,), (0.5,), 192)


def test_ensembles_and_their_mistakes(heads_folders: dict[str, Path]) -> None:
    assert len(load_networks([str(heads_folders["clip"]), heads_folders["swin"]])) == 2
    with pytest.raises(ValueError, match="at least one"):
        load_networks([])
    with pytest.raises(FileNotFoundError, match="Did you mean 'swin'"):
        load_networks(["swim"])


@pytest.mark.parametrize("damage", ["tensor", "rows", "truncated", "family"])
def test_an_incomplete_folder_is_one_line(heads_folders: dict[str, Path], tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(heads_folders["clip"], folder)
    if damage == "tensor":
        weights = load_file(folder / "model.safetensors")
        save_file(dict(list(weights.items())[1:]), folder / "model.safetensors", metadata={"format": "pt"})
    elif damage == "rows":
        table = json.loads((folder / "heads.json").read_text())
        table["labels"]["object"].append("more")
        (folder / "heads.json").write_text(json.dumps(table))
    elif damage == "truncated":
        (folder / "heads.safetensors").write_bytes((folder / "heads.safetensors").read_bytes()[:100])
    else:
        (folder / "config.json").write_text(json.dumps({"model_type": "swinv2"}))
    says = {
        "tensor": "lacks 1 of the",
        "rows": "5 rows for 6 labels",
        "truncated": "Save or download",
        "family": "swin",
    }
    with pytest.raises((ValueError, FileNotFoundError), match=says[damage]) as caught:
        load_heads(folder)
    assert "\n" not in str(caught.value)
