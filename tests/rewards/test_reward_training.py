"""Heads are learned from folders and from the model's own pictures; held-out pictures are never trained on."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reward_folders import clip_vision, swin

from cgru.backbones.sd import StableDiffusion
from cgru.mdp.rollout import sample
from cgru.rewards.base import load_reward
from cgru.rewards.heads import Tower, load_heads, save_heads
from cgru.rewards.pictures import fitted
from cgru.rewards.training import fit_heads, pictures_from_folder, pictures_from_model

LINEAGE = {"name": "tiny", "weights": ["tower"], "started_from": ["hub"]}


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(0)
    return Tower(clip_vision(), image_size=16, mean=[0.5], std=[0.5], lineage=LINEAGE)


def coloured(channel: int, count: int, seed: int) -> torch.Tensor:
    """Noisy pictures in which one channel is bright."""
    pictures = 0.4 * torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    pictures[:, channel] += 0.5
    return pictures


RED_AND_BLUE = {"red": coloured(0, 30, 1), "other": coloured(2, 60, 2)}


@pytest.mark.parametrize("family", ["clip", "swin"])
def test_a_head_on_a_frozen_tower_learns_two_colours(tower: Tower, family: str) -> None:
    if family == "swin":
        tower = Tower(swin(), image_size=16, mean=[0.5], std=[0.5], lineage=LINEAGE)
    before = {key: value.clone() for key, value in tower.state_dict().items()}
    fitted = fit_heads(tower, RED_AND_BLUE)
    assert fitted.accuracy == 1.0
    assert fitted.held_out == 6 + 12  # a fifth of 30 and of 60
    assert fitted.heads.labels == {"object": ("red", "other")}
    assert all(torch.equal(value, before[key]) for key, value in tower.state_dict().items())
    assert not any(parameter.requires_grad for parameter in fitted.heads.parameters())


def test_the_same_seed_gives_the_same_head(tower: Tower) -> None:
    weights = [fit_heads(tower, RED_AND_BLUE, epochs=2, seed=s).heads.heads["object"].weight for s in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_accuracy_is_measured_on_what_was_held_out(tower: Tower) -> None:
    """Labels without meaning: all noise. What is learned by heart is of no use on pictures never seen."""
    noise = torch.rand(400, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    fitted = fit_heads(tower, {"a": noise[:200], "b": noise[200:]}, held_out=0.5, epochs=5)
    assert 0.35 < fitted.accuracy < 0.65  # 200 fair coins: 0.5 ± 0.11 at three standard deviations


def test_full_training_moves_a_copy_of_the_tower(tower: Tower) -> None:
    before = {key: value.clone() for key, value in tower.state_dict().items()}
    fitted = fit_heads(tower, RED_AND_BLUE, epochs=3, learning_rate=1e-3, is_full=True)
    assert all(torch.equal(value, before[key]) for key, value in tower.state_dict().items())
    after = fitted.heads.tower.state_dict()
    assert any(not torch.equal(value, before[key]) for key, value in after.items())
    assert fitted.accuracy == 1.0
    assert not any(parameter.requires_grad for parameter in fitted.heads.parameters())


def test_a_fitted_head_is_saved_loaded_and_used_as_a_reward(
    tower: Tower, tiny: StableDiffusion, tmp_path: Path
) -> None:
    fitted = fit_heads(tower, RED_AND_BLUE)
    save_heads(fitted.heads, tmp_path / "red", record={"accuracy": fitted.accuracy})
    test = torch.cat([coloured(0, 3, 5), coloured(2, 3, 6)])
    assert torch.equal(load_heads(tmp_path / "red")(test)["object"], fitted.heads(test)["object"])
    assert json.loads((tmp_path / "red" / "lineage.json").read_text())["started_from"] == ["tower", "hub"]
    reward = load_reward("concept", backbone=tiny, concept="red", networks=[str(tmp_path / "red")])
    scores = reward(test, [""] * 6)
    assert scores[:3].max() + 3 < scores[3:].min()


def to_side(side: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda images: fitted(images, (side, side), side, "bicubic")


def test_pictures_from_a_folder(tmp_path: Path) -> None:
    for label, shade in (("dog", 255), ("other", 0)):
        (tmp_path / label).mkdir()
        for k in range(3):
            pixels = np.full((20, 40, 3), shade, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{k}{'.png' if k else '.JPG'}")
    (tmp_path / "dog" / "notes.txt").write_text("no picture")
    pictures = pictures_from_folder(tmp_path, to_side(16))
    assert {label: tuple(table.shape) for label, table in pictures.items()} == {
        "dog": (3, 3, 16, 16),
        "other": (3, 3, 16, 16),
    }
    assert pictures["dog"].min() > 0.99 and pictures["other"].max() < 0.01


def test_pictures_are_cropped_not_squeezed(tmp_path: Path) -> None:
    pixels = np.zeros((16, 48, 3), dtype=np.uint8)
    pixels[:, 16:32] = 255  # the middle third of a wide picture is all that remains
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for name in ("x.png", "y.png"):
            Image.fromarray(pixels).save(tmp_path / label / name)
    assert pictures_from_folder(tmp_path, to_side(16))["a"].min() == 1.0


@pytest.mark.parametrize("what", ["missing", "one label", "empty label", "broken"])
def test_folder_mistakes_are_one_line(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "pictures"
    if what != "missing":
        (folder / "dog").mkdir(parents=True)
        for name in ("x.png", "y.png"):
            Image.new("RGB", (4, 4)).save(folder / "dog" / name)
    if what in ("empty label", "broken"):
        (folder / "other").mkdir()
    if what == "broken":
        for name in ("x.png", "y.png"):
            (folder / "other" / name).write_bytes(b"not a picture")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        pictures_from_folder(folder, to_side(16))
    says = {"missing": "class folders []", "one label": "['dog']", "empty label": "0 pictures", "broken": "x.png"}
    assert says[what] in str(caught.value) and "\n" not in str(caught.value)


def test_the_model_draws_its_own_pictures(tiny: StableDiffusion) -> None:
    prompts = {"dog": ["a dog", "the dog"], "other": ["a cat"]}
    drawn = pictures_from_model(tiny, prompts, 3, seed=5, steps=2, guidance=2.0, batch_size=2)
    assert {label: tuple(table.shape) for label, table in drawn.items()} == {
        "dog": (3, 3, 16, 16),
        "other": (3, 3, 16, 16),
    }
    again = pictures_from_model(
        tiny, {"dog": ["a dog", "the dog"]}, 4, seed=5, steps=2, guidance=2.0, resized=to_side(8)
    )
    assert again["dog"].shape == (4, 3, 8, 8)
    # the same seeds whatever else is asked for, one per picture
    small = pictures_from_model(tiny, {"dog": ["a dog", "the dog"]}, 3, seed=5, steps=2, guidance=2.0)["dog"]
    assert torch.allclose(small, drawn["dog"], atol=1e-5)
    assert not torch.allclose(drawn["dog"][0], drawn["dog"][2], atol=1e-2)  # the same prompt, another seed
    assert not torch.allclose(
        small, pictures_from_model(tiny, {"dog": ["a dog", "the dog"]}, 3, seed=6, steps=2, guidance=2.0)["dog"]
    )


def test_pictures_are_decoded_in_batches_of_their_own(tiny: StableDiffusion) -> None:
    decoded = []
    hook = tiny.decoder.register_forward_pre_hook(lambda _, args: decoded.append(len(args[0])))
    drawn = pictures_from_model(tiny, {"x": ["a dog"]}, 5, seed=0, steps=2, guidance=2.0, batch_size=4, decode_batch=2)
    hook.remove()
    assert decoded == [2, 2, 1] and len(drawn["x"]) == 5


def test_a_drawn_picture_is_what_the_sampler_gives(tiny: StableDiffusion) -> None:
    from cgru.rewards.training import _child

    drawn = pictures_from_model(tiny, {"x": ["a dog"]}, 1, seed=0, steps=3, guidance=2.0)["x"]
    latents = sample(
        tiny, tiny.encode_text(["a dog"]), [_child(0, "x", 0)], kernel=tiny.kernel(3, eta=0.0), guidance=2.0
    )
    assert torch.allclose(drawn, tiny.decode(latents), atol=1e-6)


def test_training_mistakes(tower: Tower, tiny: StableDiffusion) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fit_heads(tower, {"red": coloured(0, 4, 0)})
    with pytest.raises(ValueError, match="'blue' has fewer than 2"):
        fit_heads(tower, {"red": coloured(0, 4, 0), "blue": coloured(2, 1, 0)})
    with pytest.raises(ValueError, match="held_out is 1.0"):
        fit_heads(tower, RED_AND_BLUE, held_out=1.0)
    with pytest.raises(ValueError, match="no prompts for the label 'other'"):
        pictures_from_model(tiny, {"dog": ["a dog"], "other": []}, 1, seed=0, steps=2, guidance=1.0)
