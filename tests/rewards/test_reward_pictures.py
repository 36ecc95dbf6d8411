"""Preprocessing agrees with Pillow and reads every spelling of its file; views depend on nothing but the seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cgru.rewards.pictures import Preprocess, centre_crop, normalise, read_preprocess, resize, views


@pytest.mark.parametrize("size", [(12, 20), (80, 64), (31, 31)])
@pytest.mark.parametrize(("mode", "pillow"), [("bilinear", Image.BILINEAR), ("bicubic", Image.BICUBIC)])
def test_resize_is_pillows(size: tuple[int, int], mode: Any, pillow: Image.Resampling) -> None:  # noqa: ANN401
    # grey enough that the overshoot of bicubic is not clipped between the axes, as only Pillow does
    pixels = np.random.default_rng(0).integers(80, 176, (40, 48, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(pixels).resize(size[::-1], pillow)).astype(np.float32) / 255
    got = resize(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255, size, mode)[0].permute(1, 2, 0)
    # Pillow rounds to whole numbers twice, once per axis
    assert np.abs(got.numpy() - expected).max() <= 1.6 / 255


def test_crop_takes_the_centre() -> None:
    # columns 0..5, of which 2 and 3 are the middle two
    images = torch.arange(6.0).expand(1, 3, 4, 6)
    assert centre_crop(images, (2, 2))[0, 0].tolist() == [[2.0, 3.0], [2.0, 3.0]]


def test_normalise_with_one_number_or_three() -> None:
    images = torch.full((1, 3, 1, 1), 0.75)
    assert normalise(images, (0.5,), (0.5,)).flatten().tolist() == [0.5, 0.5, 0.5]
    assert normalise(images, (0.5, 0.25, 0.75), (0.25, 0.5, 1.0)).flatten().tolist() == [1.0, 1.0, 0.0]


def test_a_tall_picture_is_shrunk_by_its_shortest_side_then_cropped() -> None:
    prepare = Preprocess((8, 8), 8, (0.0,), (1.0,), "bicubic")
    images = torch.rand(2, 3, 48, 16)
    # 48×16 becomes 24×8, whose rows 8..15 remain
    assert torch.equal(prepare(images), resize(images, (24, 8), "bicubic")[:, :, 8:16])


@pytest.mark.parametrize(
    ("table", "size", "shortest", "mode"),
    [
        ({"size": 224, "crop_size": 224, "do_center_crop": True, "resample": 3}, (224, 224), 224, "bicubic"),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 192}, "do_center_crop": True},
            (224, 192),
            256,
            "bicubic",
        ),
        ({"size": {"height": 224, "width": 224}, "resample": 2}, (224, 224), None, "bilinear"),
        ({"size": 224}, (224, 224), None, "bilinear"),
    ],
)
def test_every_spelling_is_read(
    tmp_path: Path,
    table: dict[str, Any],
    size: tuple[int, int],
    shortest: int | None,
    mode: Any,  # noqa: ANN401
) -> None:
    text = json.dumps({**table, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]})
    (tmp_path / "preprocessor_config.json").write_text(text)
    assert read_preprocess(tmp_path) == Preprocess(size, shortest, (0.1, 0.2, 0.3), (1.0, 1.0, 1.0), mode)


@pytest.mark.parametrize("wrong", [{"size": 16, "resample": 1}, {"size": {"longest_edge": 16}}])
def test_unknown_preprocessing_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    text = json.dumps({**wrong, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]})
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ValueError, match="preprocessor_config.json of"):
        read_preprocess(tmp_path)


def test_missing_preprocessing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot read the network in") as caught:
        read_preprocess(tmp_path)
    assert "\n" not in str(caught.value)


def test_views_start_with_the_picture_and_its_mirror(images: torch.Tensor) -> None:
    made = views(images, 5, seed=0)
    assert len(made) == 5
    assert torch.equal(made[0], images) and torch.equal(made[1], images.flip(-1))
    assert [torch.equal(a, b) for a, b in zip(made[:3], views(images, 3, seed=0), strict=True)] == [True] * 3
    assert not torch.equal(made[2], views(images, 3, seed=1)[2])


def test_a_view_of_a_picture_does_not_depend_on_the_batch(images: torch.Tensor) -> None:
    for whole, single in zip(views(images, 4, seed=3), views(images[2:3], 4, seed=3), strict=True):
        assert torch.allclose(whole[2:3], single, atol=1e-6)


def test_views_are_small_changes() -> None:
    # a smooth picture: a shift of at most 5 % of the side and a zoom of 10 % move this ramp by little, noise is 0.03
    ramp = torch.linspace(0.2, 0.8, 32).expand(1, 3, 32, 32)
    for k, view in enumerate(views(ramp, 6, seed=0)[2:]):
        straight = view.flip(-1) if k % 2 else view
        assert 0.01 < (straight - ramp).abs().mean() < 0.1
        assert 0 <= view.min() and view.max() <= 1
