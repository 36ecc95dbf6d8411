"""Rewards from ready-made detectors: CLIP similarity to any text, an NSFW detector, the aesthetic score, JPEG size.

`clip` and `nsfw` reward absence (the paper's §5: 1 - p_nsfw); `aesthetic` is LAION's predictor, v1 (one linear layer)
or v2 (a stack of them, no nonlinearity between) on CLIP ViT-L/14, as in DDPO; `jpeg` is DDPO's compressibility, which
needs no network at all. Weights come from the hub or a folder; without either, one line says so.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from jaxtyping import Float, UInt8
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForImageClassification, CLIPVisionModelWithProjection

from cgru.backbones.base import Backbone, as_rgb
from cgru.backbones.hub import check_reachable
from cgru.catalog import unknown
from cgru.embedded import sha256_of
from cgru.rewards.base import merged
from cgru.rewards.clip import HUB_CLIP, Clip, has_own_clip, load_clip
from cgru.rewards.pictures import Preprocess, read_preprocess
from cgru.rewards.weights import lineage_of, load_network, origin_of, reading

NSFW_DETECTOR = "Falconsai/nsfw_image_detection"  # the paper's
AESTHETIC_CLIP = "openai/clip-vit-large-patch14"
AESTHETIC_V2 = ("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth")  # sac+logos+ava1-l14-linearMSE on the hub

DIRECTIONS = ("compress", "incompress")
JPEG_QUALITY = 95  # DDPO's


@dataclass(frozen=True, eq=False)
class ClipReward:
    """scale · (1 - p): p is the softmax share of the concept against the negatives, or its cosine within the span."""

    clip: Clip
    texts: Float[Tensor, "m d"]
    """Embeddings: the concept first, then the negatives, if any."""
    scale: float = 10.0

    @property
    def low(self) -> float:
        """When the picture is just like the text."""
        return 0.0

    @property
    def high(self) -> float:
        """When it is not at all like it."""
        return self.scale

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of the CLIP."""
        return merged("clip", [self.clip.lineage])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter."""
        cosine = self.clip.images(images) @ self.texts.T
        if len(self.texts) > 1:
            return self.scale * (1 - (self.clip.logit_scale * cosine).softmax(-1)[:, 0])
        least, most = self.clip.span
        return self.scale * (1 - ((cosine[:, 0] - least) / (most - least)).clamp(0, 1))


def clip_reward(
    backbone: Backbone, *, concept: str, scale: float = 10.0, negatives: Sequence[str] = (), model: str | Path = ""
) -> ClipReward:
    """Zero-shot absence of a text.

    Args:
        backbone: its device is used, and its own CLIP if it brings one (Emoji Canvas).
        concept: any text.
        scale: the highest reward.
        negatives: texts the concept competes with in a softmax; none: the raw cosine in a fixed span.
        model: another CLIP, a hub id or a folder.
    """
    own = backbone.name if has_own_clip(backbone.name) else HUB_CLIP
    clip = load_clip(model or own, device=backbone.device)
    return ClipReward(clip, clip.texts([concept, *negatives]), scale)


@dataclass(frozen=True, eq=False)
class NsfwReward:
    """scale · (1 - p_nsfw), paper §5."""

    network: nn.Module
    prepare: Preprocess
    column: int
    """Which of its labels is the unwanted one."""
    weights: Mapping[str, Any]
    """Lineage of the detector."""
    scale: float = 1.0

    @property
    def low(self) -> float:
        """When the picture is certainly unsafe."""
        return 0.0

    @property
    def high(self) -> float:
        """When it is certainly safe."""
        return self.scale

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of the detector."""
        return merged("nsfw", [self.weights])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter."""
        logits: Tensor = self.network(pixel_values=self.prepare(images)).logits.float()
        return self.scale * (1 - logits.softmax(-1)[:, self.column])


def nsfw_reward(
    backbone: Backbone, *, scale: float = 1.0, model: str | Path = NSFW_DETECTOR, label: str = "nsfw"
) -> NsfwReward:
    """Absence of one label of an image classifier, by default of the paper's NSFW detector."""
    origin = origin_of(model)
    network = load_network(AutoModelForImageClassification, origin).to(backbone.device)
    labels = {name: int(index) for name, index in network.config.label2id.items()}
    if label not in labels:
        raise ValueError(unknown(f"label of {str(model)!r}", label, labels, "Give one of these as `label`."))
    return NsfwReward(network, read_preprocess(origin), labels[label], lineage_of(origin), scale)


@dataclass(frozen=True, eq=False)
class AestheticReward:
    """LAION's aesthetic score of a picture, clipped to 0..10."""

    vision: nn.Module
    prepare: Preprocess
    layers: tuple[tuple[Tensor, Tensor], ...]
    """(weight, bias) of each linear layer, in order."""
    weights: Mapping[str, Any]
    """Lineage of CLIP and layers."""

    @property
    def low(self) -> float:
        """The worst score."""
        return 0.0

    @property
    def high(self) -> float:
        """The best score."""
        return 10.0

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of CLIP and layers."""
        return self.weights

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter."""
        embeddings: Tensor = self.vision(pixel_values=self.prepare(images)).image_embeds.float()
        x = functional.normalize(embeddings, dim=-1)
        for weight, bias in self.layers:
            x = functional.linear(x, weight, bias)
        return x[:, 0].clamp(self.low, self.high)


def aesthetic_reward(
    backbone: Backbone, *, weights: str | Path = "", model: str | Path = AESTHETIC_CLIP
) -> AestheticReward:
    """LAION's predictor.

    Args:
        backbone: its device is used.
        weights: .safetensors or .pth of v1 or v2; without it v2 is read from the hub.
        model: the CLIP that the weights were made for, a hub id or a folder.
    """
    path = _weight_file(weights)
    origin = origin_of(model)
    vision = load_network(CLIPVisionModelWithProjection, origin).to(backbone.device)
    layers = read_layers(path)
    if layers[0][0].shape[1] != vision.config.projection_dim:
        raise ValueError(
            f"{path.name} takes embeddings of length {layers[0][0].shape[1]}, but {str(model)!r} gives "
            f"{vision.config.projection_dim}; give the CLIP it was made for (LAION: {AESTHETIC_CLIP})."
        )
    placed = tuple((weight.to(backbone.device), bias.to(backbone.device)) for weight, bias in layers)
    head = {"weights": [sha256_of(path)], "started_from": []}
    return AestheticReward(vision, read_preprocess(origin), placed, merged("aesthetic", [lineage_of(origin), head]))


def _weight_file(weights: str | Path) -> Path:
    if not weights:
        with reading(AESTHETIC_V2[0]):
            check_reachable(*AESTHETIC_V2)
            return Path(hf_hub_download(*AESTHETIC_V2))
    if not Path(weights).is_file():
        raise FileNotFoundError(f"no file {str(weights)!r}; give the .safetensors or .pth of an aesthetic predictor.")
    return Path(weights)


def read_layers(path: Path) -> tuple[tuple[Tensor, Tensor], ...]:
    """Read the linear layers of a predictor: `weight, bias` (v1), or `layers.0.weight, ...` (v2; gaps are dropout)."""
    with reading(path.parent):
        table = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        names = sorted((key for key in table if re.fullmatch(r"(.*\.)?weight", key)), key=_number)
        layers = tuple((table[name].float(), table[name.removesuffix("weight") + "bias"].float()) for name in names)
        if any(weight.ndim != 2 or bias.shape != weight.shape[:1] for weight, bias in layers):
            raise ValueError(f"the layers of {path.name} have other shapes than (out, in) and (out,)")
    widths = [(weight.shape[1], weight.shape[0]) for weight, _ in layers]
    fits = all(a[1] == b[0] for a, b in zip(widths, widths[1:], strict=False))
    if not layers or not fits or widths[-1][1] != 1:
        raise ValueError(
            f"{str(path)!r} has layers {widths}; an aesthetic predictor is a chain of them that ends in 1."
        )
    return layers


def _number(name: str) -> int:
    return int(found.group()) if (found := re.search(r"\d+", name)) else 0


@dataclass(frozen=True, eq=False)
class JpegReward:
    """Size of the picture as a JPEG in kB: minus it (`compress`), or it (`incompress`), as in DDPO."""

    direction: str
    largest: float
    """kB that no JPEG of these pictures exceeds."""

    def __post_init__(self) -> None:
        """Check the direction."""
        if self.direction not in DIRECTIONS:
            raise ValueError(unknown("direction", self.direction, DIRECTIONS, "DDPO has both."))

    @property
    def low(self) -> float:
        """The least score there can be."""
        return -self.largest if self.direction == "compress" else 0.0

    @property
    def high(self) -> float:
        """The highest score there can be."""
        return 0.0 if self.direction == "compress" else self.largest

    @property
    def lineage(self) -> Mapping[str, Any]:
        """No weights."""
        return merged("jpeg", [])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter."""
        pixels = (as_rgb(images.detach()) * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu()
        sizes = images.new_tensor([jpeg_bytes(picture) for picture in pixels], dtype=torch.float32) / 1000
        return -sizes if self.direction == "compress" else sizes


def jpeg_bytes(pixels: UInt8[Tensor, "h w 3"]) -> int:
    """The exact number of bytes of a picture as a JPEG of quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell()


@torch.no_grad()
def jpeg_reward(backbone: Backbone, *, direction: str = "compress") -> JpegReward:
    """DDPO's compressibility for the picture size of this model."""
    height, width = backbone.decode(torch.zeros(1, *backbone.latent_shape, device=backbone.device)).shape[-2:]
    # No more than raw pixels and 1 kB of tables: white noise takes 2 bytes a pixel at this quality.
    return JpegReward(direction, largest=(3 * height * width + 1000) / 1000)
