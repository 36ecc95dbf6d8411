"""UnlearnCanvas' judges: timm's layout renamed, held against timm's computation written out; pictures; bad files."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_vit import DEPTH, SIDE, WIDTH, timm_logits, timm_state
from torch import Tensor

from cgru.embedded import sha256_of
from cgru.evaluation.judges.features import Eye
from cgru.evaluation.judges.vit import VitJudge, load_vit, prepared

LABELS = ("Cats", "Dogs", "Human")


def write(path: Path, state: object) -> Path:
    torch.save({"model_state_dict": state}, path)
    return path


def load(path: Path) -> VitJudge:
    return load_vit(path, LABELS, {"name": "tiny", "started_from": ["a/b"]})


def logits(judge: VitJudge, x: Tensor) -> Tensor:
    found: Tensor = judge.network(x).logits
    return found.double()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_renamed_weights_compute_what_timm_does(x: Tensor, tmp_path: Path) -> None:
    state = timm_state(3, seed=0)
    expected = timm_logits(state, x)
    assert expected.std(0).min() > 0.05  # pictures differ, so equal numbers mean something
    torch.testing.assert_close(logits(load(write(tmp_path / "a.pth", state)), x), expected, atol=2e-4, rtol=1e-4)


def swapped(state: dict[str, Tensor], first: int, second: int) -> dict[str, Tensor]:
    """q, k, v of the first block in another order."""
    order = [0, 1, 2]
    order[first], order[second] = order[second], order[first]
    changed = {}
    for part in ("weight", "bias"):
        thirds = state[f"blocks.0.attn.qkv.{part}"].chunk(3)
        changed[f"blocks.0.attn.qkv.{part}"] = torch.cat([thirds[i] for i in order])
    return {**state, **changed}


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_the_order_of_q_k_v_would_be_seen(pair: tuple[int, int], x: Tensor, tmp_path: Path) -> None:
    state = timm_state(3, seed=0)
    judge = load(write(tmp_path / "a.pth", swapped(state, *pair)))
    assert (logits(judge, x) - timm_logits(state, x)).abs().max() > 0.01


def test_another_epsilon_would_be_seen(x: Tensor, tmp_path: Path) -> None:
    state = timm_state(3, seed=0)
    judge = load(write(tmp_path / "a.pth", state))
    for layer in judge.network.vit.layers:
        layer.layernorm_before.eps = 1e-12  # transformers' default
    assert (logits(judge, x) - timm_logits(state, x)).abs().max() > 0.01


def test_a_judge_says_labels_probabilities_features_and_where_it_comes_from(tmp_path: Path) -> None:
    state = timm_state(3, seed=0)
    judge: Eye = load(path := write(tmp_path / "a.pth", state))
    images = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    chances, features = judge.look(images)
    assert judge.labels == (*LABELS, "nothing")
    assert chances[:, 3].tolist() == [0, 0, 0]  # no official judge says "nothing"
    expected = timm_logits(state, prepared(images, SIDE)).softmax(-1)
    torch.testing.assert_close(chances[:, :3].double(), expected, atol=1e-4, rtol=1e-4)
    assert features.shape == (3, WIDTH)
    assert judge.weights_sha256 == sha256_of(path)
    assert judge.lineage == {"name": "tiny", "started_from": ["a/b"], "weights": [sha256_of(path)]}


def test_pictures_go_through_pillows_default_jpeg_and_resize(tmp_path: Path) -> None:
    images = torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    expected = []
    for i, image in enumerate(images):  # as the official scripts: saved by its name alone, opened, resized, to -1..1
        pixels = (255 * image.permute(1, 2, 0).numpy()).round().astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.jpg")
        small = Image.open(tmp_path / f"{i}.jpg").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        expected.append((np.asarray(small).transpose(2, 0, 1) / 255 - 0.5) / 0.5)
    found = prepared(images, SIDE).numpy()
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-6)
    plain = torch.nn.functional.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True)
    assert np.abs(found - (plain.numpy() - 0.5) / 0.5).max() > 0.02  # JPEG is seen


def test_safetensors_and_bare_state_dicts_are_as_good(x: Tensor, tmp_path: Path) -> None:
    state = timm_state(3, seed=0)
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pth")
    assert torch.equal(logits(load(tmp_path / "a.safetensors"), x), logits(load(tmp_path / "b.pth"), x))


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in timm_state(3, seed=0).items() if key != name}


BAD: dict[str, tuple[object, list[str]]] = {
    "other outputs": (timm_state(51, seed=0), ["51 outputs", "allowed: 3, from 'Cats' to 'Human'"]),
    "a missing tensor": (without("blocks.1.norm2.bias"), ["1 tensors are missing", "'blocks.1.norm2.bias'"]),
    "a missing bias of q, k, v": (without("blocks.0.attn.qkv.bias"), ["'blocks.0.attn.qkv.bias'"]),
    "one left over": ({**timm_state(3, seed=0), "fc_norm.weight": torch.ones(3)}, ["superfluous", "'fc_norm.weight'"]),
    "another shape": ({**timm_state(3, seed=0), "norm.weight": torch.ones(3)}, ["shape", "'norm.weight'"]),
    "a deeper one cut": (
        {**timm_state(3, seed=0), f"blocks.{DEPTH}.norm1.weight": torch.ones(WIDTH)},
        ["missing", f"'blocks.{DEPTH}."],
    ),
    "another network": ({"conv1.weight": torch.ones(3)}, ["not a ViT in timm's layout", "'conv1.weight'"]),
    "no tensors": ({"epoch": 3}, ["has no state dict", "'model_state_dict'"]),
    "nothing": ({}, ["not a ViT in timm's layout", "it has nothing"]),
    "a list": ([1, 2], ["has no state dict"]),
}


@pytest.mark.parametrize(("state", "told"), BAD.values(), ids=BAD.keys())
def test_another_checkpoint_is_refused_in_one_line(state: object, told: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "a.pth", state)
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [repr(str(path)), *told]), message


class Trap:
    """What a pickle could run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("trapped"),))  # type: ignore[return-value]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("damage", ["cut", "text", "empty", "code"])
def test_a_damaged_file_is_refused_in_one_line(suffix: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    save_file(timm_state(3, seed=0), path) if suffix == ".safetensors" else write(path, timm_state(3, seed=0))
    whole = path.read_bytes()
    if damage == "code":
        torch.save({"model_state_dict": {"head": Trap()}}, path)
    else:
        path.write_bytes(
            {"cut": whole[: len(whole) // 2], "text": b"<html>too many requests</html>", "empty": b""}[damage]
        )
    with contextlib.chdir(tmp_path), pytest.raises(ValueError) as caught:
        load(path)
    assert str(caught.value).startswith(f"cannot read the checkpoint {str(path)!r} (")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "trapped").exists()
