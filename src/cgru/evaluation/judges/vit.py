"""UnlearnCanvas' judges (arXiv 2402.11846): ViTs in timm's layout, run by transformers.

timm cannot be imported here (it needs torchvision), so its tensors are renamed and its fused q, k, v layer is split.
The layout is checked tensor by tensor first: nothing may be missing, superfluous or of another shape. Pictures pass
through JPEG, as the official samplers save them, then through Pillow's bilinear resize in 8 bits, as in the official
classifier script. The official judges have no label "nothing": it is added with probability 0, for broken pictures.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from cgru.backbones.base import one_line
from cgru.embedded import sha256_of
from cgru.evaluation.base import NOTHING
from cgru.evaluation.drawing import to_pictures

STATE = "model_state_dict"
"""Key of the weights in the official checkpoints."""
HEAD_WIDTH = 64  # in every plain ViT of timm; tensor shapes do not reveal it
NORM_EPSILON = 1e-6  # timm's; transformers' default is 1e-12
MEAN = STD = 0.5
JPEG = {"quality": 75, "subsampling": "4:2:0"}
"""Pillow's defaults, used by the official samplers; written out so that a later Pillow cannot change them."""

# timm -> transformers names, for layers and parameters of the model and of one block; q, k, v separately.
WHOLE = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a ViT."""

    width: int
    depth: int
    mlp: int
    patch: int
    tokens: int
    """Number of patches plus the class token."""
    outputs: int

    @property
    def image(self) -> int:
        """Side of the square input picture."""
        return round((self.tokens - 1) ** 0.5) * self.patch

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return timm's name -> shape for every required tensor."""
        width = self.width
        layers: dict[str, tuple[int, ...]] = {"patch_embed.proj": (width, 3, self.patch, self.patch)}
        for i in range(self.depth):
            sizes = {"norm1": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width)}
            sizes |= {"norm2": (width,), "mlp.fc1": (self.mlp, width), "mlp.fc2": (width, self.mlp)}
            layers |= {f"blocks.{i}.{name}": size for name, size in sizes.items()}
        layers |= {"norm": (width,), "head": (self.outputs, width)}
        wanted: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, width), "pos_embed": (1, self.tokens, width)}
        for name, size in layers.items():
            wanted |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
        return wanted

    def config(self) -> ViTConfig:
        """Return the same dimensions as a transformers config."""
        return ViTConfig(
            hidden_size=self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.width // HEAD_WIDTH,
            intermediate_size=self.mlp,
            image_size=self.image,
            patch_size=self.patch,
            num_labels=self.outputs,
            layer_norm_eps=NORM_EPSILON,
            hidden_act="gelu",
            qkv_bias=True,
        )


@dataclass(frozen=True, eq=False)
class VitJudge:
    """A classifier with its labels and lineage."""

    labels: tuple[str, ...]
    """The checkpoint's outputs in order, then NOTHING."""
    network: Any
    weights_sha256: str
    lineage: Mapping[str, Any]

    @torch.inference_mode()
    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (n, labels), 0 for NOTHING, and class-token features (n, d) of pictures [0, 1]."""
        seen = prepared(images, self.network.config.image_size).to(self.network.device)
        features = self.network.vit(seen).last_hidden_state[:, 0]
        chances = self.network.classifier(features).softmax(-1)
        return functional.pad(chances, (0, 1)), features


def prepared(images: Tensor, size: int) -> Tensor:
    """Prepare pictures as the official script does: 8 bits, JPEG, resized, in [-1, 1]; (n, 3, size, size)."""
    pictures = [
        through_jpeg(picture).resize((size, size), Image.Resampling.BILINEAR) for picture in to_pictures(images)
    ]
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    return (pixels.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD


def through_jpeg(picture: Image.Image) -> Image.Image:
    """Return a picture as read back from the official samplers' files."""
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", **JPEG)
    return Image.open(buffer, formats=("JPEG",)).convert("RGB")


def load_vit(
    path: Path, labels: Sequence[str], lineage: Mapping[str, Any], *, device: str | torch.device = "cpu"
) -> VitJudge:
    """Load a judge from a checkpoint (.pth or .safetensors) whose outputs are `labels` in this order."""
    state = read_state(path)
    shape = shape_of(path, state)
    if shape.outputs != len(labels):
        known = f"{len(labels)}, from {labels[0]!r} to {labels[-1]!r}"
        advice = "Is it the other judge's checkpoint, or the one of 60 styles?"
        raise ValueError(f"{str(path)!r} has {shape.outputs} outputs; allowed: {known}. {advice}")
    with torch.device("meta"):
        network = ViTForImageClassification(shape.config())
    network.load_state_dict(renamed(state, shape), assign=True)
    weights = sha256_of(path)
    about = {**lineage, "weights": [weights]}
    return VitJudge((*labels, NOTHING), network.requires_grad_(False).eval().to(device), weights, about)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by timm's names, in float32; no code in a pickle is executed."""
    try:
        stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # for a damaged file torch raises nearly any type
        advice = (
            "Download it again; files with anything but tensors and plain values are not read: save the weights alone."
        )
        raise ValueError(f"cannot read the checkpoint {str(path)!r} ({one_line(error)}). {advice}") from error
    state = stored.get(STATE, stored) if isinstance(stored, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        allowed = f"allowed: timm's tensors by name, alone or under {STATE!r}"
        raise ValueError(f"{str(path)!r} has no state dict; {allowed}. Give the official file.")
    return {str(name): value.float() for name, value in state.items()}


def shape_of(path: Path, state: Mapping[str, Tensor]) -> Shape:
    """Return the dimensions of a state dict; raise a one-line error for missing, superfluous or misshapen tensors."""
    told = {
        name: state[name].shape for name in ("pos_embed", "patch_embed.proj.weight", "head.weight") if name in state
    }
    first = state.get("blocks.0.mlp.fc1.weight")
    numbers = [int(name.split(".")[1]) for name in state if name.startswith("blocks.") and name.split(".")[1].isdigit()]
    if len(told) < 3 or first is None or [len(size) for size in told.values()] != [3, 4, 2]:
        some = ", ".join(repr(name) for name in list(state)[:3]) or "nothing"
        raise ValueError(f"{str(path)!r} is not a ViT in timm's layout (it has {some}). Give the official file.")
    (_, tokens, width), (_, _, patch, _), (outputs, _) = told.values()
    shape = Shape(width, max(numbers) + 1, first.shape[0], patch, tokens, outputs)
    wanted = shape.tensors()
    wrong = [name for name in wanted if name not in state or tuple(state[name].shape) != wanted[name]]
    if spoilt := [*wrong, *(name for name in state if name not in wanted)]:
        what = f"{len(spoilt)} tensors are missing, superfluous or misshapen, first {spoilt[0]!r}"
        raise ValueError(f"{str(path)!r} is not a complete ViT in timm's layout: {what}. Give the official file.")
    if width % HEAD_WIDTH or (shape.image // patch) ** 2 != tokens - 1:
        sizes = f"width {width}, {tokens} tokens"
        raise ValueError(
            f"{str(path)!r} is not a plain ViT ({sizes}); allowed: heads of {HEAD_WIDTH}, a square picture."
        )
    return shape


def renamed(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Rename timm's tensors to transformers'; q, k and v are thirds of timm's fused layer, in this order."""
    names = dict(WHOLE)
    for i in range(shape.depth):
        names |= {f"blocks.{i}.{ours}": f"vit.layers.{i}.{theirs}" for ours, theirs in BLOCK.items()}
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, part = name.rpartition(".")
        if layer.endswith("attn.qkv"):
            block = layer.split(".")[1]
            thirds = zip(QKV, value.chunk(3), strict=True)
            found |= {f"vit.layers.{block}.{place}.{part}": third.clone() for place, third in thirds}
        else:
            found[f"{names[layer]}.{part}" if layer else names[name]] = value
    return found
