"""A CLIP with both towers: pictures and texts in one space, for zero-shot rewards.

From the hub (or a folder) it is a whole CLIPModel with its tokenizer and preprocessing. Emoji Canvas has its own: the
vision tower in `clip`, `clip/text_projection.safetensors`, and the pipeline's text encoder, which is CLIP's text tower.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import CLIPModel, CLIPTextModel, CLIPTokenizer, CLIPVisionModelWithProjection

from cgru.embedded import EMBEDDED, ROOT
from cgru.rewards.base import merged
from cgru.rewards.pictures import Preprocess, read_preprocess
from cgru.rewards.weights import lineage_of, load_network, origin_of, reading

TEXT_PROJECTION = "text_projection.safetensors"
HUB_CLIP = "openai/clip-vit-base-patch32"  # the paper's

# Between which cosines "not at all like the text" and "just like it" lie: raw cosines use a part of -1..1 only.
HUB_SPAN = (0.0, 0.4)  # OpenAI's models: about 0.1 (unrelated) to 0.35 (the caption itself)
EMOJI_SPAN = (-0.2, 0.8)  # measured: unrelated -0.15 to 0.36, the class itself 0.57 to 0.68


@dataclass(frozen=True, eq=False)
class Clip:
    """Both towers as functions; embeddings have length 1."""

    look: Callable[[Tensor], Tensor]
    """Prepared pictures -> embeddings."""
    read: Callable[[Sequence[str]], Tensor]
    """Texts -> embeddings."""
    prepare: Preprocess
    logit_scale: float
    """What cosines are multiplied by before a softmax."""
    span: tuple[float, float]
    lineage: Mapping[str, Any]

    def images(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """Embed pictures [0, 1]; differentiable."""
        return functional.normalize(self.look(self.prepare(images)).float(), dim=-1)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Float[Tensor, "m d"]:
        """Embed texts; too long ones are cut at the model's limit."""
        return functional.normalize(self.read(list(texts)).float(), dim=-1)


def load_clip(source: str | Path, *, device: str | torch.device = "cpu") -> Clip:
    """Load a hub id, a CLIPModel folder, or a pipeline folder with a `clip` beside its text encoder."""
    folder = pipeline_folder(source)
    return _load_pipeline_clip(folder, device) if has_own_clip(source) else _load_clip_model(origin_of(source), device)


def pipeline_folder(source: str | Path) -> Path:
    """The folder of a model, by the name it was loaded with."""
    return ROOT / EMBEDDED if str(source) == EMBEDDED else Path(source)


def has_own_clip(source: str | Path) -> bool:
    """Whether a text-to-image model brings the CLIP its text encoder was trained in."""
    return (pipeline_folder(source) / "clip" / TEXT_PROJECTION).is_file()


def _load_clip_model(origin: Path | str, device: str | torch.device) -> Clip:
    model = load_network(CLIPModel, origin).to(device)
    with reading(origin):
        tokenizer = CLIPTokenizer.from_pretrained(origin, trust_remote_code=False)
    longest = model.config.text_config.max_position_embeddings
    return Clip(
        look=lambda pixels: model.get_image_features(pixel_values=pixels).pooler_output,
        read=lambda texts: model.get_text_features(**_tokens(tokenizer, texts, longest).to(device)).pooler_output,
        prepare=read_preprocess(origin),
        logit_scale=float(model.logit_scale.exp()),
        span=HUB_SPAN,
        lineage=lineage_of(origin),
    )


def _load_pipeline_clip(folder: Path, device: str | torch.device) -> Clip:
    vision = load_network(CLIPVisionModelWithProjection, folder / "clip").to(device)
    text = load_network(CLIPTextModel, folder / "text_encoder").to(device)
    with reading(folder):
        tokenizer = CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer", trust_remote_code=False)
        stored = load_file(folder / "clip" / TEXT_PROJECTION)
    projection = stored["text_projection.weight"].float().to(device)
    size, longest = vision.config.image_size, text.config.max_position_embeddings
    return Clip(
        look=lambda pixels: vision(pixel_values=pixels).image_embeds,
        read=lambda texts: text(**_tokens(tokenizer, texts, longest).to(device)).pooler_output @ projection.T,
        # trained on pictures from -1 to 1 (tools/emoji_canvas/clip.py)
        prepare=Preprocess((size, size), None, (0.5,), (0.5,), "bilinear"),
        logit_scale=float(stored["logit_scale"].float().exp()),
        span=EMOJI_SPAN,
        lineage=merged("clip", [lineage_of(folder / part) for part in ("clip", "text_encoder")]),
    )


def _tokens(tokenizer: Any, texts: Sequence[str], longest: int) -> Any:  # noqa: ANN401 - untyped library
    return tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
