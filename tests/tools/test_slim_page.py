"""Slimming a page changes the format of its pictures and nothing else."""

import base64
import io
import re

import numpy as np
from PIL import Image

from tools.slim_page import slim


def as_png(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_pictures_become_smaller_and_show_the_same() -> None:
    ramp = np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3)  # smooth, with noise that PNG has to keep
    pixels = (ramp + np.random.default_rng(0).normal(0, 4, ramp.shape)).clip(0, 255).astype(np.uint8)
    before = f'<p>1 &lt; 2</p><img src="{as_png(pixels)}" alt="a"><img src="data:image/svg+xml;base64,AAAA">'
    after = slim(before)
    assert len(after) < len(before) / 2
    (found,) = re.findall(r"data:image/webp;base64,([^\"]+)", after)
    with Image.open(io.BytesIO(base64.b64decode(found))) as picture:
        assert picture.size == (64, 64)
        assert np.abs(np.asarray(picture.convert("RGB"), dtype=float) - pixels).mean() < 6
    assert re.sub(r"data:image/[pw][^\"]+", "", after) == re.sub(r"data:image/[pw][^\"]+", "", before)


def test_a_picture_that_would_grow_and_a_slim_page_stay_as_they_are() -> None:
    page = f'<img src="{as_png(np.zeros((1, 1, 3), dtype=np.uint8))}">'
    assert slim(slim(page)) == slim(page)
    assert len(slim(page)) <= len(page)
