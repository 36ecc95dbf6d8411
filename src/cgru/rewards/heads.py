"""A vision tower with linear class heads: what concept rewards look at pictures with (paper §5: CLIP and a class head).

A heads folder holds the tower as transformers saves it (config.json, model.safetensors), heads.safetensors
(`object.weight`, `object.bias`, ...), heads.json (labels of each head, image_size, mean, std) and lineage.json.
Everything is frozen and in eval mode, yet differentiable with respect to the pictures, because attacks need that.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPVisionModelWithProjection, SwinModel

from cgru.backbones.base import as_rgb
from cgru.backbones.loading import no_progress_bars
from cgru.catalog import unknown
from cgru.embedded import EMBEDDED, ROOT, sha256_of
from cgru.rewards.pictures import Mode, Preprocess, fitted, normalise, read_preprocess
from cgru.rewards.weights import lineage_of, load_network, origin_of, read_json, reading

EMOJI_CANVAS = ROOT / EMBEDDED
SHIPPED = {name: EMOJI_CANVAS / "reward" / name for name in ("clip", "swin")}

# model_type of config.json -> class; a whole CLIP ("clip") has a vision tower in it.
TOWERS: Mapping[str, Any] = {
    "clip_vision_model": CLIPVisionModelWithProjection,
    "clip": CLIPVisionModelWithProjection,
    "swin": SwinModel,
}


class Tower(nn.Module):
    """A frozen vision network with its preprocessing: pictures -> pooled features."""

    def __init__(
        self,
        network: nn.Module,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        lineage: Mapping[str, Any],
        shortest: int | None = None,
        mode: Mode = "bilinear",
    ) -> None:
        """Wrap a CLIPVisionModelWithProjection or SwinModel.

        Args:
            network: frozen here.
            image_size: side of the pictures that it reads.
            mean: one number or one per channel.
            std: the same.
            lineage: of its weights.
            shortest: the shortest side is resized to this and the centre cropped; None: straight to `image_size`.
            mode: of resizing.
        """
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.image_size = image_size
        self.mean, self.std = tuple(mean), tuple(std)
        self.shortest, self.mode = shortest, mode
        self.lineage = lineage

    @property
    def width(self) -> int:
        """Length of a feature vector."""
        return int(self.network.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def resized(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 s s"]:
        """Pictures at the size and with the three channels that the network reads, still [0, 1]."""
        size = (self.image_size, self.image_size)
        if images.shape[-2:] == size:  # such as views of pictures that were resized before
            return as_rgb(images).float()
        return fitted(as_rgb(images), size, self.shortest, self.mode)

    def forward(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Pooled features of pictures [0, 1] of any size."""
        pixels = normalise(self.resized(images), self.mean, self.std)
        # CLIP's features are those before its projection to the space shared with text
        is_clip = isinstance(self.network, CLIPVisionModelWithProjection)
        inner = self.network.vision_model if is_clip else self.network
        pooled: Tensor = inner(pixel_values=pixels).pooler_output  # type: ignore[operator]
        return pooled.float()


class ClassHeads(nn.Module):
    """A tower and one linear head per question; `labels[head]` names the columns of its logits."""

    def __init__(self, tower: Tower, heads: Mapping[str, nn.Linear], labels: Mapping[str, Sequence[str]]) -> None:
        """Freeze tower and heads; `lineage` is the tower's until `load_heads` reads another."""
        super().__init__()
        self.tower = tower
        self.heads = nn.ModuleDict(heads)
        self.labels = {head: tuple(names) for head, names in labels.items()}
        self.lineage = tower.lineage
        self.requires_grad_(False).eval()

    def forward(self, images: Float[Tensor, "n c h w"]) -> dict[str, Float[Tensor, "n _"]]:
        """Logits of every head, float32, for pictures [0, 1] of any size."""
        features = self.tower(images)
        return {name: head(features) for name, head in self.heads.items()}


def load_networks(names: Sequence[str | Path], *, device: str | torch.device = "cpu") -> tuple[ClassHeads, ...]:
    """Load the members of an ensemble: `clip` and `swin` are shipped with Emoji Canvas, anything else is a folder."""
    if not names:
        raise ValueError(
            f"no reward networks given; allowed: {', '.join(SHIPPED)} or heads folders. Give at least one."
        )
    return tuple(load_heads(SHIPPED.get(str(name), Path(name)), device=device) for name in names)


def load_heads(folder: Path, *, device: str | torch.device = "cpu") -> ClassHeads:
    """Load a heads folder."""
    if not (folder / "heads.json").is_file():
        advice = "Give one of these or a folder with heads.json, as training writes it."
        raise FileNotFoundError(unknown("reward network", str(folder), SHIPPED, advice))
    labels = read_json(folder, "heads.json")["labels"]
    with reading(folder):
        tensors = load_file(folder / "heads.safetensors")
        heads = {head: _linear(tensors, head, len(names)) for head, names in labels.items()}
    model = ClassHeads(load_tower(folder), heads, labels)
    return model.to(device)


def _linear(tensors: Mapping[str, Tensor], head: str, labels: int) -> nn.Linear:
    weight, bias = tensors[f"{head}.weight"].float(), tensors[f"{head}.bias"].float()
    if len(weight) != labels:
        raise ValueError(f"head {head!r} has {len(weight)} rows for {labels} labels")
    linear = nn.Linear(weight.shape[1], labels)
    linear.load_state_dict({"weight": weight, "bias": bias})
    return linear


def save_heads(model: ClassHeads, folder: Path, *, name: str = "", record: Mapping[str, Any] | None = None) -> None:
    """Write a heads folder; `record` (such as the held-out accuracy) goes into its lineage.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.tower.network.save_pretrained(folder)  # type: ignore[operator]
    tensors = {key: value.contiguous().cpu() for key, value in model.heads.state_dict().items()}
    save_file(tensors, folder / "heads.safetensors", metadata={"format": "pt"})
    tower = model.tower
    table = {"labels": model.labels, "image_size": tower.image_size, "mean": list(tower.mean), "std": list(tower.std)}
    table |= {"shortest": tower.shortest, "mode": tower.mode}
    (folder / "heads.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    lineage = {
        "name": name or folder.name,
        "started_from": [*tower.lineage["weights"], *tower.lineage["started_from"]],
        "weights_sha256": sha256_of(folder / "model.safetensors"),
        **(record or {}),
    }
    (folder / "lineage.json").write_text(json.dumps(lineage, indent=1) + "\n", encoding="utf-8")


def load_tower(source: str | Path, *, device: str | torch.device = "cpu") -> Tower:
    """Load a vision tower: `emoji-canvas`, a hub id such as openai/clip-vit-base-patch32, or a folder."""
    origin = EMOJI_CANVAS / "clip" if source == EMBEDDED else origin_of(source)
    kind = read_json(origin, "config.json").get("model_type", "")
    if kind not in TOWERS:
        raise ValueError(unknown("kind of vision tower", str(kind), TOWERS, f"Use another network than {source!s}."))
    prepare = _preprocess(origin)
    network = load_network(TOWERS[kind], origin)
    tower = Tower(
        network,
        image_size=prepare.size[0],
        mean=prepare.mean,
        std=prepare.std,
        lineage=lineage_of(origin),
        shortest=prepare.shortest,
        mode=prepare.mode,
    )
    return tower.to(device)


def _preprocess(origin: Path | str) -> Preprocess:
    if isinstance(origin, Path) and (origin / "heads.json").is_file():
        table = read_json(origin, "heads.json")
        side, shortest = int(table["image_size"]), table.get("shortest")
        mean, std, mode = _numbers(table["mean"]), _numbers(table["std"]), table.get("mode", "bilinear")
        return Preprocess((side, side), shortest, mean, std, mode)
    if origin == EMOJI_CANVAS / "clip":  # trained on pictures from -1 to 1 (tools/emoji_canvas/clip.py)
        side = int(read_json(origin, "config.json")["image_size"])
        return Preprocess((side, side), None, (0.5,), (0.5,), "bilinear")
    return read_preprocess(origin)


def _numbers(value: float | Sequence[float]) -> tuple[float, ...]:
    return (float(value),) if isinstance(value, int | float) else tuple(float(number) for number in value)
