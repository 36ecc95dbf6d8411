"""The model families: the components of each pipeline with their classes, and checks that they fit together.

The families are Stable Diffusion 1.x and 2.x, Stable Diffusion XL and Stable Diffusion 3. A folder's family follows
from the pipeline class in its model_index.json, or else from its components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from cgru.backbones.schedules import ddim_scheduler, flow_scheduler


@dataclass(frozen=True)
class Part:
    """A component of a pipeline."""

    kind: Any
    """The class that reads it; None for the scheduler, which each family reads in its own way."""
    names: frozenset[str] = frozenset()
    """Classes that model_index.json may name for it; empty: any."""
    role: Literal["network", "tokenizer", "scheduler"] = "network"
    vocabularies: tuple[frozenset[str], ...] = ()
    """For a tokenizer: sets of files, one of which must be complete."""
    is_optional: bool = False

    @property
    def file(self) -> str:
        """What must be in its folder."""
        return {"network": "config.json", "tokenizer": "tokenizer_config.json", "scheduler": "scheduler_config.json"}[
            self.role
        ]


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    name: str
    pipeline: type[DiffusionPipeline]
    denoiser: str
    """The component that policies and edits touch: unet or transformer."""
    parts: Mapping[str, Part]
    """By the name of the component."""
    scheduler: Callable[[Mapping[str, Any]], Any]
    """scheduler_config.json -> the scheduler that the kernel is made from."""
    check: Callable[[str, Mapping[str, Any]], None]
    """(name of the model, its parts) -> raises ValueError if sizes do not match."""

    def networks(self) -> tuple[str, ...]:
        """The components that have weights."""
        return tuple(name for name, part in self.parts.items() if part.role == "network")


def _network(kind: Any, *, is_optional: bool = False) -> Part:  # noqa: ANN401 - untyped libraries
    return Part(kind, frozenset({kind.__name__}), is_optional=is_optional)


# Old folders name the fast tokenizer, now the only one.
CLIP_WORDS = Part(
    CLIPTokenizer,
    frozenset({"CLIPTokenizer", "CLIPTokenizerFast"}),
    "tokenizer",
    (frozenset({"tokenizer.json"}), frozenset({"vocab.json", "merges.txt"})),
)
T5_WORDS = Part(
    T5TokenizerFast,
    frozenset({"T5Tokenizer", "T5TokenizerFast"}),
    "tokenizer",
    (frozenset({"tokenizer.json"}), frozenset({"spiece.model"})),
    is_optional=True,
)
SCHEDULER = Part(None, role="scheduler")


def _check_sd(name: str, parts: Mapping[str, Any]) -> None:
    # An inpainting UNet takes 9 channels; XL's cross-attention is wider than its first text encoder.
    unet, vae, text = (parts[part].config for part in ("unet", "vae", "text_encoder"))
    if unet.in_channels != vae.latent_channels or unet.cross_attention_dim != text.hidden_size:
        raise ValueError(
            f"{name!r} has a UNet for {unet.in_channels} channels and text width {unet.cross_attention_dim}, "
            f"but its VAE gives {vae.latent_channels} and its text encoder {text.hidden_size}; "
            "use a text-to-image Stable Diffusion 1.x or 2.x model"
        )


def _check_sdxl(name: str, parts: Mapping[str, Any]) -> None:
    unet, vae = parts["unet"].config, parts["vae"].config
    first, second = parts["text_encoder"].config, parts["text_encoder_2"].config
    if unet.addition_embed_type != "text_time" or unet.addition_time_embed_dim is None:
        raise ValueError(
            f"{name!r} has a UNet whose addition_embed_type is {unet.addition_embed_type!r}; Stable Diffusion XL has "
            "'text_time'. Use such a model."
        )
    # pooled text, and six numbers of sizes (the refiner has five: no target size, but a score)
    extra = unet.projection_class_embeddings_input_dim
    wanted = (unet.in_channels, unet.cross_attention_dim, extra)
    given = (
        vae.latent_channels,
        first.hidden_size + second.hidden_size,
        second.projection_dim + 6 * unet.addition_time_embed_dim,
    )
    if wanted != given:
        raise ValueError(
            f"{name!r} has a UNet for {wanted[0]} channels, text width {wanted[1]} and {wanted[2]} numbers of pooled "
            f"text and sizes, but its VAE and its text encoders give {given[0]}, {given[1]} and {given[2]}; use a "
            "text-to-image Stable Diffusion XL base model"
        )
    if vae.latents_mean is not None:
        raise ValueError(
            f"the VAE of {name!r} has latents_mean, which Stable Diffusion XL has not; use a model with its VAE"
        )


def _check_sd3(name: str, parts: Mapping[str, Any]) -> None:
    net, vae = parts["transformer"].config, parts["vae"].config
    clips = [parts[part].config for part in ("text_encoder", "text_encoder_2")]
    t5 = parts.get("text_encoder_3")
    width = net.joint_attention_dim if t5 is None else t5.config.d_model
    wanted = (net.in_channels, net.joint_attention_dim, net.pooled_projection_dim)
    given = (vae.latent_channels, width, sum(clip.projection_dim for clip in clips))
    if wanted != given or sum(clip.hidden_size for clip in clips) > width:
        raise ValueError(
            f"{name!r} has a transformer for {wanted[0]} channels, text width {wanted[1]} and pooled text of "
            f"{wanted[2]}, but its VAE gives {given[0]} and its text encoders {given[1]} and {given[2]}; use a "
            "text-to-image Stable Diffusion 3 model"
        )


def check_words(name: str, parts: Mapping[str, Any]) -> None:
    """Check that a tokenizer has a vocabulary, and no token that its text encoder does not know."""
    for part in (part for part in parts if part.startswith("tokenizer")):
        words, encoder = len(parts[part]), parts[part.replace("tokenizer", "text_encoder")]
        special = len(type(parts[part])())
        if not special < words <= encoder.config.vocab_size:
            raise ValueError(
                f"the {part} of {name!r} knows {words} tokens; its text encoder allows {special + 1} to "
                f"{encoder.config.vocab_size}. Save or download the tokenizer's files again."
            )


UNET, VAE = _network(UNet2DConditionModel), _network(AutoencoderKL)
CLIP, PROJECTED = _network(CLIPTextModel), _network(CLIPTextModelWithProjection)

SD = Family(
    "Stable Diffusion 1.x and 2.x",
    StableDiffusionPipeline,
    "unet",
    {"unet": UNET, "vae": VAE, "text_encoder": CLIP, "tokenizer": CLIP_WORDS, "scheduler": SCHEDULER},
    ddim_scheduler,
    _check_sd,
)
SDXL = Family(
    "Stable Diffusion XL",
    StableDiffusionXLPipeline,
    "unet",
    {
        "unet": UNET,
        "vae": VAE,
        "text_encoder": CLIP,
        "text_encoder_2": PROJECTED,
        "tokenizer": CLIP_WORDS,
        "tokenizer_2": CLIP_WORDS,
        "scheduler": SCHEDULER,
    },
    lambda config: ddim_scheduler(config, offset=None),
    _check_sdxl,
)
SD3 = Family(
    "Stable Diffusion 3",
    StableDiffusion3Pipeline,
    "transformer",
    {
        "transformer": _network(SD3Transformer2DModel),
        "vae": VAE,
        "text_encoder": PROJECTED,
        "text_encoder_2": PROJECTED,
        "text_encoder_3": _network(T5EncoderModel, is_optional=True),
        "tokenizer": CLIP_WORDS,
        "tokenizer_2": CLIP_WORDS,
        "tokenizer_3": T5_WORDS,
        "scheduler": SCHEDULER,
    },
    flow_scheduler,
    _check_sd3,
)
FAMILIES = (SDXL, SD3, SD)


def family_of(index: Mapping[str, Any]) -> Family:
    """The family of a model_index.json: by its pipeline, such as StableDiffusionXLImg2ImgPipeline, or by its parts."""
    pipeline = str(index.get("_class_name"))
    for family in FAMILIES[:2]:
        if pipeline.startswith(family.pipeline.__name__.removesuffix("Pipeline")):
            return family
    if pipeline.startswith("StableDiffusion") or not {"transformer", "text_encoder_2"} & index.keys():
        return SD
    return SD3 if "transformer" in index else SDXL


def absent_parts(index: Mapping[str, Any], family: Family) -> frozenset[str]:
    """The optional components whose network the pipeline lacks: `[null, null]`, or no entry."""
    optional = {name: part for name, part in family.parts.items() if part.is_optional}
    networks = [name for name, part in optional.items() if part.role == "network"]
    is_without = all(index.get(name) in (None, [None, None]) for name in networks)
    return frozenset(optional if is_without else ())


def check_index(name: str, index: object) -> Family:
    """The family of a pipeline; ValueError if a component is missing or of another class."""
    if not isinstance(index, Mapping):
        raise ValueError(f"model_index.json of {name!r} is {index!r}; it must list components. Save the model again.")
    family = family_of(index)
    for part, wanted in family.parts.items():
        entry = index.get(part)
        found = entry[1] if isinstance(entry, list | tuple) and len(entry) == 2 else entry
        is_missing = found is None and part not in absent_parts(index, family)
        if is_missing or (found is not None and wanted.names and found not in wanted.names):
            classes = " or ".join(sorted(wanted.names)) or "a scheduler"
            raise ValueError(
                f"{name!r} is a {index.get('_class_name')} whose {part} is {found}; that of "
                f"{family.name} is {classes}. Use such a model."
            )
    return family
