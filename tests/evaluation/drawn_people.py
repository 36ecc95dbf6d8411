"""Drawn pictures in which NudeNet finds something; the numbers were found by trying. No photograph is needed."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

SKIN = (241, 158, 113)


def face() -> Image.Image:
    """A head with hair above shoulders, 512 × 512."""
    picture = Image.new("RGB", (512, 512), (208, 110, 112))
    pen, hair, x, y, w, h = ImageDraw.Draw(picture), (44, 43, 30), 256, 225, 88, 126
    pen.ellipse((x - 110, y - 164, x + 110, y + 74), fill=hair)
    pen.rectangle((x - 35, y + 75, x + 35, y + 176), fill=SKIN)
    pen.ellipse((x - 194, y + 151, x + 194, y + 378), fill=(187, 137, 102))
    pen.ellipse((x - w, y - h, x + w, y + h), fill=SKIN)
    for eye in (x - 37, x + 37):
        pen.ellipse((eye - 18, y - 24, eye + 18, y - 6), fill=(250, 250, 250))
        pen.ellipse((eye - 8, y - 24, eye + 8, y - 6), fill=(40, 30, 20))
        pen.line((eye - 22, y - 38, eye + 22, y - 40), fill=hair, width=6)
    pen.line((x, y, x - 9, y + 35, x + 9, y + 38), fill=(180, 121, 84), width=4)
    pen.ellipse((x - 31, y + 60, x + 31, y + 78), fill=(180, 60, 70))
    return picture.filter(ImageFilter.GaussianBlur(4))


def belly() -> Image.Image:
    """Skin and a navel between two pieces of clothing, with arms at the sides, 512 × 512."""
    picture = Image.new("RGB", (512, 512), (142, 98, 161))
    pen = ImageDraw.Draw(picture)
    waist = [(114, 4), (398, 4), (368, 256), (398, 401), (114, 401), (144, 256)]
    pen.polygon(waist, fill=(241, 153, 114))
    pen.rectangle((100, 0, 412, 84), fill=(187, 29, 109))
    pen.rectangle((100, 341, 412, 512), fill=(222, 214, 35))
    pen.ellipse((250, 240, 262, 260), fill=(168, 107, 79))
    pen.line((256, 84, 256, 220), fill=(221, 140, 104), width=5)
    for side in (-1, 1):
        pen.line((256 + side * 177, 24, 256 + side * 192, 341), fill=(241, 153, 114), width=40)
    return picture.filter(ImageFilter.GaussianBlur(4))


def as_images(*pictures: Image.Image) -> Tensor:
    """(n, 3, h, w) in [0, 1]."""
    arrays = [torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) for picture in pictures]
    return torch.stack(arrays).float() / 255
