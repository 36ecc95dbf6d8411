"""From our pictures ([0, 1], n×c×h×w) to what a network reads, and augmented views; plain torch, differentiable.

`Preprocess` does what transformers' image processors do (resize, centre crop, normalise), read from their
preprocessor_config.json. `views` makes a reward harder to fool: mirrored, shifted, scaled and noisy copies.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from cgru.backbones.base import as_rgb
from cgru.rewards.weights import read_json

Mode = Literal["bilinear", "bicubic"]
RESAMPLE: Mapping[int, Mode] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers

# Ours: small enough that every view still shows what the picture shows, large enough to blur pixel-exact tricks.
SCALE, SHIFT, NOISE = 0.1, 0.05, 0.03


@dataclass(frozen=True)
class Preprocess:
    """Resize, crop and normalise."""

    size: tuple[int, int]
    """Height and width the network receives."""
    shortest: int | None
    """Resize the shortest side to this, then crop the centre; None: straight to `size`."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mode: Mode

    def __call__(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 height width"]:
        """Prepare pictures of any size, of one channel or three."""
        return normalise(fitted(as_rgb(images), self.size, self.shortest, self.mode), self.mean, self.std)


def read_preprocess(origin: Path | str) -> Preprocess:
    """Read preprocessor_config.json, of old and new transformers, of a folder or a hub id."""
    table = read_json(origin, "preprocessor_config.json")
    is_cropped = bool(table.get("do_center_crop", False))
    size, crop = table.get("size", 224), table.get("crop_size", 224)
    shortest = size.get("shortest_edge") if isinstance(size, dict) else (size if is_cropped else None)
    return Preprocess(
        size=_pair(crop if is_cropped else size, origin),
        shortest=shortest,
        mean=tuple(float(number) for number in table["image_mean"]),
        std=tuple(float(number) for number in table["image_std"]),
        mode=_mode(table.get("resample", 3 if is_cropped else 2), origin),
    )


def _mode(resample: int, origin: Path | str) -> Mode:
    # left out, it is what the image processors of CLIP (which crops) and ViT (which does not) do
    if resample not in RESAMPLE:
        raise ValueError(
            f"preprocessor_config.json of {str(origin)!r} has resample {resample}; only 2 (bilinear) and 3 (bicubic) "
            "are known. Use another network."
        )
    return RESAMPLE[resample]


def _pair(size: Any, origin: Path | str) -> tuple[int, int]:  # noqa: ANN401 - a number or a table
    if isinstance(size, int):
        return (size, size)
    if {"height", "width"} <= size.keys():
        return (size["height"], size["width"])
    raise ValueError(f"preprocessor_config.json of {str(origin)!r} has size {size}; it must give height and width.")


def resize(images: Float[Tensor, "n c h w"], size: tuple[int, int], mode: Mode) -> Float[Tensor, "n c height width"]:
    """Resize as Pillow does (antialiased when shrinking); float32, within [0, 1]."""
    images = images.float()
    if images.shape[-2:] == size:
        return images
    # bicubic overshoots at edges; Pillow clips there too
    return functional.interpolate(images, size, mode=mode, align_corners=False, antialias=True).clamp(0, 1)


def fitted(
    images: Float[Tensor, "n c h w"], size: tuple[int, int], shortest: int | None, mode: Mode
) -> Float[Tensor, "n c height width"]:
    """Resize as an image processor does: the shortest side to `shortest`, then the centre; None: straight to `size`."""
    if shortest is None:
        return resize(images, size, mode)
    height, width = images.shape[-2:]
    shorter = min(height, width)
    return centre_crop(resize(images, (shortest * height // shorter, shortest * width // shorter), mode), size)


def centre_crop(images: Float[Tensor, "n c h w"], size: tuple[int, int]) -> Float[Tensor, "n c height width"]:
    """Cut the centre out."""
    height, width = size
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    return images[..., top : top + height, left : left + width]


def normalise(
    images: Float[Tensor, "n c h w"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Tensor, "n c h w"]:
    """(images - mean) / std, each one number or one per channel."""
    return (images - images.new_tensor(mean).view(-1, 1, 1)) / images.new_tensor(std).view(-1, 1, 1)


def views(images: Float[Tensor, "n c h w"], count: int, seed: int) -> list[Float[Tensor, "n c h w"]]:
    """The pictures themselves, mirrored, then shifted, scaled and noisy ones, `count` in all.

    What happens in a view depends on the seed and the view's number only, not on the picture's place in the batch:
    the same picture always gets the same reward.
    """
    generator = torch.Generator().manual_seed(seed)
    moved = [_jittered(images, generator, is_mirrored=k % 2 == 1) for k in range(count - 2)]
    return [images, images.flip(-1), *moved][:count]


def _jittered(images: Tensor, generator: torch.Generator, *, is_mirrored: bool) -> Tensor:
    zoom, right, down = (torch.rand(3, generator=generator) * 2 - 1).tolist()
    factor = 1 + SCALE * zoom
    # affine_grid counts from -1 to 1, so a shift by a share of the side is twice that
    rows = [[-factor if is_mirrored else factor, 0, 2 * SHIFT * right], [0, factor, 2 * SHIFT * down]]
    grid = functional.affine_grid(
        torch.tensor(rows, device=images.device).expand(len(images), 2, 3), list(images.shape), align_corners=False
    )
    noise = torch.randn(images.shape[1:], generator=generator).to(images.device)
    moved = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return (moved + NOISE * noise).clamp(0, 1)
