"""Loading the CLIP vision tower: whole CLIP or vision part, normalisation, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_critic import tiny_clip
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from cgru.critic.film import FilmCritic
from cgru.critic.tower import load_tower

CLIP = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


def saved(folder: Path, settings: object = CLIP) -> Path:
    tiny_clip().half().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_reads_float32_with_its_normalisation(tmp_path: Path) -> None:
    network, mean, std, *_ = load_tower(saved(tmp_path))
    assert (mean, std) == ((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    expected = tiny_clip().half().float().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in network.state_dict().items())
    assert network.dtype == torch.float32


def test_reads_the_vision_part_of_a_whole_clip_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vision = tiny_clip().config
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    # its projection is 512 wide, which vision.projection_dim = 8 contradicts: not used, so no matter
    whole = CLIPModel(CLIPConfig(text_config=text, vision_config=vision.to_dict()))
    whole.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CLIP))
    loaded = load_tower(str(tmp_path)).network.vision_model.state_dict()
    expected = whole.vision_model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert caplog.text == ""


def test_the_embedded_tower() -> None:
    import cgru

    network, mean, std, *_ = load_tower(Path(cgru.__file__).parent / "assets" / "emoji-canvas" / "clip")
    assert (mean, std) == ((0.5,) * 3, (0.5,) * 3)
    assert (network.config.image_size, network.config.num_hidden_layers, network.dtype) == (64, 6, torch.float32)


def test_pictures_go_through_clips_own_processor(tmp_path: Path) -> None:
    """Bicubic to the shortest side, then the centre, as transformers does it with Pillow on bytes."""
    settings = {**CLIP, "do_center_crop": True, "crop_size": {"height": 8, "width": 8}}
    tower = load_tower(saved(tmp_path, {**settings, "size": {"shortest_edge": 8}, "resample": 3}))
    critic = FilmCritic(tower, head="value", scale=1.0)
    wide = (torch.rand(1, 3, 20, 32, generator=torch.Generator().manual_seed(0)) * 255).round().to(torch.uint8)
    expected = CLIPImageProcessorPil.from_pretrained(tmp_path)(wide[0].permute(1, 2, 0).numpy(), return_tensors="pt")
    # Pillow rounds to bytes between its two passes: 1.5 of 255 levels, over the smallest std
    torch.testing.assert_close(critic._pixels(wide), expected.pixel_values, atol=1.5 / 255 / 0.26, rtol=0)
    stored = (critic.resized(wide.float() / 255) * 255).round().to(torch.uint8)
    assert stored.shape == (1, 3, 8, 8)
    torch.testing.assert_close(critic._pixels(stored), expected.pixel_values, atol=2 / 255 / 0.26, rtol=0)


def test_a_missing_tensor_is_an_error_and_an_unused_one_is_not(tmp_path: Path) -> None:
    tensors = load_file(saved(tmp_path) / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    load_tower(tmp_path)
    del tensors["vision_model.post_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of its"):
        load_tower(tmp_path)


def test_no_folder_no_normalisation_no_network(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_tower(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="cannot read a CLIP vision tower from 'nobody/nothing'"):
        load_tower("nobody/nothing")
    (saved(tmp_path) / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="preprocessor_config.json"):
        load_tower(tmp_path)
    with pytest.raises(ValueError, match="image_std = 0.5; it must be three numbers"):
        load_tower(saved(tmp_path, {**CLIP, "image_std": 0.5}))
