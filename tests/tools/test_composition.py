"""Composition and degradation: where an icon lands, what colour it has, what is left of it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tools.emoji_canvas.canvas import Composer, Layout, Placement, over, render
from tools.emoji_canvas.degrade import recognisable, unrecognisable
from tools.emoji_canvas.vocabulary import COLOURS

CPU = torch.device("cpu")


@pytest.fixture
def composer() -> Composer:
    """Icon 0: an opaque red square that fills its canvas. Icon 1: its left half only. Icon 2: red at half opacity."""
    icons = np.zeros((3, 128, 128, 4), dtype=np.uint8)
    icons[0] = (255, 0, 0, 255)
    icons[1, :, :64] = (255, 0, 0, 255)
    icons[2] = (255, 0, 0, 128)
    return Composer(icons, CPU)


def placed(scale: float = 1.0, shift: tuple[float, float] = (0.0, 0.0), flip: float = 1.0) -> Placement:
    return Placement(torch.tensor([scale]), torch.tensor([shift]), torch.tensor([flip]), torch.zeros(1))


def test_scale_is_the_share_of_the_width(composer: Composer) -> None:
    alpha = composer.place(torch.tensor([0]), placed(scale=0.5))[0, 3]
    assert alpha.mean().item() == pytest.approx(0.25, abs=0.01)
    assert alpha[32, 32] == 1 and alpha[4, 4] == 0


def test_shift_is_in_half_canvases_and_flip_mirrors(composer: Composer) -> None:
    right = composer.place(torch.tensor([0]), placed(scale=0.5, shift=(0.5, 0.0)))[0, 3]
    assert right[32, 48] == 1 and right[32, 16] == 0
    half, mirrored = (composer.place(torch.tensor([1]), placed(flip=flip))[0, 3] for flip in (1.0, -1.0))
    assert half[32, 10] == 1 and half[32, 54] == 0
    assert torch.allclose(half.flip(1), mirrored, atol=1e-3)


def test_half_opacity_blends_with_the_ground(composer: Composer) -> None:
    image = over(composer.place(torch.tensor([2]), placed()), torch.ones(1, 3, 64, 64))
    # 128/255 of red over white: red stays 1, green and blue are what shines through.
    assert image[0, :, 32, 32].tolist() == pytest.approx([1.0, 127 / 255, 127 / 255], abs=2e-3)


def test_scenes_have_the_named_ground_and_both_objects(composer: Composer) -> None:
    blue = list(COLOURS).index("blue")
    layout = Layout(torch.tensor([0, 0]), torch.tensor([-1, 0]), torch.tensor([blue, blue]))
    one, two = composer.scenes(layout, torch.Generator().manual_seed(0))
    ground = torch.tensor(COLOURS["blue"]) / 255
    assert torch.allclose(two[:, 0, 0], ground, atol=2e-3)
    red = (two[0] > 0.9) & (two[1] < 0.1)
    assert red[:, :32].any() and red[:, 32:].any() and not red[:, 31:33].all()
    assert ((one[0] > 0.9) & (one[1] < 0.1)).float().mean() > 0.6


def test_rendering_repeats_with_the_seed(composer: Composer) -> None:
    count = 5
    layout = Layout(
        torch.zeros(count, dtype=torch.long), torch.full((count,), -1), torch.zeros(count, dtype=torch.long)
    )
    first, again, other = (render(composer, layout, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.dtype == torch.uint8 and first.shape == (count, 3, 64, 64)


@pytest.mark.parametrize("degrade", [recognisable, unrecognisable])
def test_degraded_pictures_stay_pictures(degrade: object) -> None:
    images = torch.rand(11, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    result: Tensor = degrade(images, torch.Generator().manual_seed(1))  # type: ignore[operator]
    assert result.shape == images.shape
    assert result.min() >= 0 and result.max() <= 1 and result.isfinite().all()


def test_a_recognisable_picture_stays_close_and_an_unrecognisable_one_does_not() -> None:
    stripes = (torch.arange(64) // 8 % 2).float().expand(20, 3, 64, 64)
    mild = recognisable(stripes, torch.Generator().manual_seed(0))
    ruined = unrecognisable(stripes, torch.Generator().manual_seed(0))

    def likeness(images: Tensor) -> Tensor:
        return torch.stack(
            [
                torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
                for a, b in zip(images, stripes, strict=True)
            ]
        )

    assert likeness(mild).min() > 0.7
    assert likeness(ruined).nan_to_num().abs().max() < 0.5
