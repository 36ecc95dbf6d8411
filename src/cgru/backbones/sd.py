"""Stable Diffusion 1.x and 2.x over diffusers' components; the embedded model Emoji Canvas is such a folder too.

A source is a hub id, a local folder in the diffusers layout, or the name `emoji-canvas`. Whatever scheduler the folder
names, its noise schedule is read as DDIM, because the policy needs a Gaussian step. All networks are frozen and run in
one dtype, the VAE too: critics decode every x_t (800 decodes an epoch in the paper), where float32 would cost several
times as much, and these VAEs are sound in half precision. Results come back as float32.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, UNet2DConditionModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from cgru.backbones.base import guided, parse_dtype, pick_device
from cgru.backbones.quiet import no_progress_bars
from cgru.catalog import nearest
from cgru.mdp.kernel import DDIMKernel, ddim_kernel
from cgru.mdp.trajectory import Conditioning

logger = logging.getLogger(__name__)

EMOJI_CANVAS = "emoji-canvas"
ASSETS = Path(__file__).parents[1] / "assets"
ALLOWED = f"'{EMOJI_CANVAS}', a diffusers folder, or a hub id 'owner/name'"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

# Component -> (its classes, a file that must be in its folder). Old folders name the fast tokenizer, now the only one.
COMPONENTS = {
    "unet": ({"UNet2DConditionModel"}, "config.json"),
    "vae": ({"AutoencoderKL"}, "config.json"),
    "text_encoder": ({"CLIPTextModel"}, "config.json"),
    "tokenizer": ({"CLIPTokenizer", "CLIPTokenizerFast"}, "tokenizer_config.json"),
    "scheduler": (None, "scheduler_config.json"),
}
WITH_WEIGHTS = ("unet", "vae", "text_encoder")
TEXT_BATCH = 64


@dataclass(frozen=True, eq=False)
class StableDiffusion:
    """A `Backbone` over the parts of a Stable Diffusion pipeline; build it with `load_stable_diffusion`."""

    name: str
    denoiser: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    scheduler: DDIMScheduler
    device: torch.device
    dtype: torch.dtype

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        size = self.denoiser.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return (self.denoiser.config.in_channels, height, width)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of its images in pixels."""
        scale = 2 ** (len(self.vae.config.block_out_channels) - 1)
        return (self.latent_shape[1] * scale, self.latent_shape[2] * scale)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts; a prompt over the model's token limit is cut, with one warning that counts them."""
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts are {prompts!r}; give a list with at least one prompt")
        # Each text once: training prompts repeat, and equal prompts then get equal bits.
        texts = list(dict.fromkeys(["", *prompts]))
        tokens = self._tokenize(texts)
        table = torch.cat([self.text_encoder(part)[0] for part in tokens.split(TEXT_BATCH)])
        places = {text: i for i, text in enumerate(texts)}
        return Conditioning(tuple(prompts), table[[places[prompt] for prompt in prompts]], table[:1])

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the UNet's output with guidance applied, float32; only the network's input is cast to its dtype."""
        return guided(self._denoise, x, time, cond, guidance=guidance)

    def kernel(self, steps: int, *, eta: float) -> DDIMKernel:
        """Return DDIM over this model's schedule on its device."""
        limit = self.scheduler.config.num_train_timesteps
        if not 1 <= steps <= limit:
            raise ValueError(f"{steps} denoising steps; {self.name} allows 1 to {limit}")
        schedule = DDIMScheduler.from_config(self.scheduler.config)
        schedule.set_timesteps(steps)
        return ddim_kernel(
            schedule.alphas_cumprod,
            schedule.timesteps[:steps],  # "trailing" gives one too many, time -1, for some counts (61, 103, ...)
            final_alpha=float(schedule.final_alpha_cumprod),
            eta=eta,
            prediction_type=schedule.config.prediction_type,
        ).to(self.device)

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable."""
        return _in_batches(self._decode, x, batch_size)

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents: the mean of the posterior, no noise."""
        return _in_batches(self._encode, images, batch_size)

    def _tokenize(self, texts: Sequence[str]) -> Tensor:
        limit = min(self.tokenizer.model_max_length, self.text_encoder.config.max_position_embeddings)
        lengths = [len(ids) for ids in self.tokenizer(list(texts), verbose=False)["input_ids"]]
        if too_long := sum(length > limit for length in lengths):
            logger.warning("%d of %d prompts are longer than %d tokens and were cut", too_long, len(texts) - 1, limit)
        padded = self.tokenizer(
            list(texts), padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
        )
        tokens: Tensor = padded["input_ids"].to(self.device)
        return tokens

    def _denoise(self, x: Tensor, time: Tensor, embeddings: Tensor) -> Tensor:
        output: Tensor = self.denoiser(x.to(self.dtype), time, embeddings.to(self.dtype), return_dict=False)[0]
        return output

    def _decode(self, x: Tensor) -> Tensor:
        z = (x / self.vae.config.scaling_factor).to(self.dtype)
        images: Tensor = self.vae.decode(z, return_dict=False)[0].float()
        return (images / 2 + 0.5).clamp(0, 1)

    def _encode(self, images: Tensor) -> Tensor:
        posterior = self.vae.encode((images * 2 - 1).to(self.dtype), return_dict=False)[0]
        latents: Tensor = posterior.mode().float() * self.vae.config.scaling_factor
        return latents


def load_stable_diffusion(
    source: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "fp32",
    revision: str | None = None,
) -> StableDiffusion:
    """Load Stable Diffusion 1.x or 2.x, frozen and in eval mode.

    Args:
        source: `emoji-canvas`, a folder in the diffusers layout, or a hub id.
        device: as in `pick_device`.
        dtype: `fp32`, `bf16` or `fp16`, for all networks.
        revision: branch, tag or commit of a hub id.
    """
    place, precision = pick_device(device), parse_dtype(dtype)
    origin = resolve_source(source)
    with no_progress_bars() if isinstance(origin, Path) else nullcontext():
        parts = _read(origin, precision, revision)
    _check_sizes(str(source), parts)
    for network in (parts["denoiser"], parts["vae"], parts["text_encoder"]):
        network.requires_grad_(False).eval().to(place)
    return StableDiffusion(name=str(source), device=place, dtype=precision, **parts)


def resolve_source(source: str | Path) -> Path | str:
    """Return the folder that `source` stands for, checked for completeness, or the hub id as it is."""
    folder = ASSETS / EMOJI_CANVAS if str(source) == EMOJI_CANVAS else Path(source).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder
    if str(source) == EMOJI_CANVAS:
        raise FileNotFoundError(
            f"the embedded model is not at {folder}; reinstall cgru or build it: tools/emoji_canvas"
        )
    if isinstance(source, str) and HUB_ID.fullmatch(source):
        return source
    raise FileNotFoundError(f"no model {str(source)!r}; allowed: {ALLOWED}.{_guess(folder)}")


def _guess(folder: Path) -> str:
    # Neighbours of the missing folder are the likeliest meaning of a mistyped path.
    siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    close = nearest(str(folder), [EMOJI_CANVAS, *siblings])
    return f" Did you mean {close!r}?" if close else " Check the spelling, or give a folder with model_index.json."


def _check_folder(folder: Path) -> None:
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no model_index.json, so it is not a diffusers model; allowed: {ALLOWED}. "
            "Give the folder that save_pretrained wrote."
        )
    missing = [f"{part}/{file}" for part, (_, file) in COMPONENTS.items() if not (folder / part / file).is_file()]
    missing += [f"{part}/*.safetensors" for part in WITH_WEIGHTS if not _has_weights(folder / part)]
    if missing:
        raise FileNotFoundError(
            f"model folder {str(folder)!r} lacks {', '.join(missing)}; it needs {', '.join(COMPONENTS)}. "
            "Save the whole pipeline again with save_pretrained."
        )


def _has_weights(folder: Path) -> bool:
    return any(file.suffix in (".safetensors", ".bin") for file in folder.glob("*"))


def _read(origin: Path | str, dtype: torch.dtype, revision: str | None) -> dict[str, Any]:
    where = {} if revision is None else {"revision": revision}
    # The dtype is said for all networks: left out, diffusers casts to float32 while transformers keeps what is stored.
    try:
        _check_index(str(origin), DiffusionPipeline.load_config(origin, **where))
        return {
            "denoiser": UNet2DConditionModel.from_pretrained(origin, subfolder="unet", torch_dtype=dtype, **where),
            "vae": AutoencoderKL.from_pretrained(origin, subfolder="vae", torch_dtype=dtype, **where),
            "text_encoder": CLIPTextModel.from_pretrained(origin, subfolder="text_encoder", dtype=dtype, **where),
            "tokenizer": CLIPTokenizer.from_pretrained(origin, subfolder="tokenizer", **where),
            "scheduler": ddim_scheduler(DDIMScheduler.load_config(origin, subfolder="scheduler", **where)),
        }
    except (OSError, SafetensorError) as error:
        raise FileNotFoundError(_read_failure(origin, str(error))) from error


def _read_failure(origin: Path | str, reason: str) -> str:
    first_line = (reason.strip().splitlines() or ["no reason given"])[0]
    if isinstance(origin, Path):
        return f"cannot read the model in {str(origin)!r}: {first_line} Save or download it again."
    return (
        f"{origin!r} is no folder here and could not be read from the hub ({first_line.rstrip('.')}); "
        f"allowed: {ALLOWED}. Check the spelling, the network and, for a gated model, `hf auth login`."
    )


def _check_index(name: str, index: Mapping[str, Any]) -> None:
    for part, (classes, _) in COMPONENTS.items():
        _, found = index.get(part) or (None, None)
        if found is None or (classes is not None and found not in classes):
            wanted = "a scheduler" if classes is None else " or ".join(sorted(classes))
            raise ValueError(
                f"{name!r} is a {index.get('_class_name')} whose {part} is {found}; Stable Diffusion 1.x and 2.x have "
                f"{wanted} there. Use such a model."
            )


def _check_sizes(name: str, parts: Mapping[str, Any]) -> None:
    # An inpainting UNet takes 9 channels; XL's cross-attention is wider than its first text encoder.
    unet, vae, text = (parts[part].config for part in ("denoiser", "vae", "text_encoder"))
    if unet.in_channels != vae.latent_channels or unet.cross_attention_dim != text.hidden_size:
        raise ValueError(
            f"{name!r} has a UNet for {unet.in_channels} channels and text width {unet.cross_attention_dim}, "
            f"but its VAE gives {vae.latent_channels} and its text encoder {text.hidden_size}; "
            "use a text-to-image Stable Diffusion 1.x or 2.x model"
        )


def ddim_scheduler(config: Mapping[str, Any]) -> DDIMScheduler:
    """Read any Stable Diffusion scheduler config as DDIM.

    Clipping or thresholding x̂0 is for pixel models; our kernel does neither, so a config that asks for it is an error.
    A config that is silent on it (Euler, DPM) means no clipping, where DDIM's own default is to clip. The steps offset
    is 1, as diffusers' StableDiffusionPipeline sets it whatever the file says, so that both give the same pictures.
    """
    for setting in ("clip_sample", "thresholding"):
        if config.get(setting):
            raise ValueError(
                f"the scheduler config has {setting} = true, which is for pixel models; "
                f"set {setting} to false in scheduler/scheduler_config.json"
            )
    if config.get("steps_offset", 1) != 1 and config.get("timestep_spacing", "leading") == "leading":
        logger.warning("scheduler steps_offset %s read as 1, as diffusers does", config["steps_offset"])
    return DDIMScheduler.from_config({**config, "clip_sample": False, "steps_offset": 1})


def _in_batches(apply: Callable[[Tensor], Tensor], x: Tensor, batch_size: int | None) -> Tensor:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    return torch.cat([apply(part) for part in x.split(batch_size or max(len(x), 1))])
