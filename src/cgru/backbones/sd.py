"""Stable Diffusion 1.x and 2.x over diffusers' components; the embedded model Emoji Canvas is such a folder too.

A source is a hub id, a local folder in the diffusers layout, or the name `emoji-canvas`. Whatever scheduler the folder
names, its noise schedule is read as DDIM, because the policy needs a Gaussian step. All networks are frozen and run in
one dtype, the VAE too: critics decode every x_t (800 decodes an epoch in the paper), where float32 would cost several
times as much, and these VAEs are sound in half precision. Results come back as float32.
"""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from cgru.backbones.base import guided, parse_dtype, pick_device
from cgru.backbones.parking import Parking
from cgru.backbones.parts import ALLOWED, EMOJI_CANVAS, check_folder, read_parts
from cgru.backbones.quiet import no_progress_bars
from cgru.catalog import nearest
from cgru.mdp.kernel import DDIMKernel, ddim_kernel
from cgru.mdp.trajectory import Conditioning

logger = logging.getLogger(__name__)

ASSETS = Path(__file__).parents[1] / "assets"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

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
    parking: Parking | None = None
    """Where text encoder and VAE wait while they are idle; None: all stay (`cgru.backbones.lean`)."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        size = self.denoiser.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return (self.denoiser.config.in_channels, height, width)

    @property
    def decoder(self) -> nn.Module:
        """The network that draws images from latents."""
        return self.vae.decoder

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of its images in pixels."""
        scale = 2 ** (len(self.vae.config.block_out_channels) - 1)
        return (self.latent_shape[1] * scale, self.latent_shape[2] * scale)

    @property
    def max_tokens(self) -> int:
        """How many tokens of a prompt it reads, start and end included."""
        return min(self.tokenizer.model_max_length, self.text_encoder.config.max_position_embeddings)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts; a prompt over the model's token limit is cut, with one warning that counts them."""
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts are {prompts!r}; give a list with at least one prompt")
        # Each text once: training prompts repeat, and equal prompts then get equal bits.
        texts = list(dict.fromkeys(["", *prompts]))
        self._warn_of_cut(prompts, texts)
        tokens = self._tokenize(texts)
        self._bring(self.text_encoder)
        table = torch.cat([self.text_encoder(part)[0] for part in tokens.split(TEXT_BATCH)])
        self._park(self.text_encoder)
        places = {text: i for i, text in enumerate(texts)}
        return Conditioning(tuple(prompts), table[[places[prompt] for prompt in prompts]], table[:1])

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the UNet's output with guidance applied, float32; only the network's input is cast to its dtype."""
        self._park(self.vae)
        return guided(self._denoise, x, time, cond, guidance=guidance)

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> DDIMKernel:
        """Return DDIM over this model's schedule on its device."""
        if not 1 <= steps <= self.max_steps:
            raise ValueError(f"{steps} denoising steps; {self.name} allows 1 to {self.max_steps}")
        return ddim_kernel(
            self.scheduler.alphas_cumprod,
            self._timesteps(steps),
            final_alpha=float(self.scheduler.final_alpha_cumprod),
            eta=eta,
            prediction_type=self.scheduler.config.prediction_type,
            noisy_steps=noisy_steps,
        ).to(self.device)

    @property
    def max_steps(self) -> int:
        """The most denoising steps whose times the model was trained on: 999 of 1000 where they start at time 1."""
        times = self.scheduler.config.num_train_timesteps
        return next((steps for steps in range(times, 0, -1) if int(self._timesteps(steps).max()) < times), 0)

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable."""
        self._bring(self.vae)
        return _in_batches(self._decode, x, batch_size)

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents: the mean of the posterior, no noise."""
        self._bring(self.vae)
        return _in_batches(self._encode, images, batch_size)

    def _bring(self, network: nn.Module) -> None:
        if self.parking is not None:
            self.parking.bring(network)

    def _park(self, network: nn.Module) -> None:
        if self.parking is not None:
            self.parking.park(network)

    def _timesteps(self, steps: int) -> Tensor:
        schedule = DDIMScheduler.from_config(self.scheduler.config)
        schedule.set_timesteps(steps)
        times: Tensor = schedule.timesteps[:steps]  # "trailing" lists one too many, time -1, for some counts (61, 103)
        return times

    def _warn_of_cut(self, prompts: Sequence[str], texts: Sequence[str]) -> None:
        lengths = [len(ids) for ids in self.tokenizer(list(texts), verbose=False)["input_ids"]]
        too_long = {text for text, length in zip(texts, lengths, strict=True) if length > self.max_tokens}
        if cut := sum(prompt in too_long for prompt in prompts):
            logger.warning(
                "%d of %d prompts are longer than %d tokens and were cut", cut, len(prompts), self.max_tokens
            )

    def _tokenize(self, texts: Sequence[str]) -> Tensor:
        padded = self.tokenizer(
            list(texts), padding="max_length", max_length=self.max_tokens, truncation=True, return_tensors="pt"
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
        parts = read_parts(origin, precision, revision)
    for network in (parts["denoiser"], parts["vae"], parts["text_encoder"]):
        network.requires_grad_(False).eval().to(place)
    return StableDiffusion(name=str(source), device=place, dtype=precision, **parts)


def resolve_source(source: str | Path) -> Path | str:
    """Return the folder that `source` stands for, checked for completeness, or the hub id as it is."""
    folder = ASSETS / EMOJI_CANVAS if str(source) == EMOJI_CANVAS else Path(source)
    if folder.is_dir():
        check_folder(folder)
        return folder
    if str(source) == EMOJI_CANVAS:
        raise FileNotFoundError(
            f"the embedded model is not at {folder}; reinstall cgru or build it: tools/emoji_canvas"
        )
    if isinstance(source, str) and HUB_ID.fullmatch(source):
        # `models/sd15` beside a folder `models` is a mistyped path, not worth the hub's 30 s of retries
        if folder.parent.is_dir():
            hub = f"For a hub id, run where there is no folder {str(folder.parent)!r}."
            raise FileNotFoundError(f"no folder {source!r}; allowed: {ALLOWED}.{_guess(folder)} {hub}")
        return source
    raise FileNotFoundError(f"no model {str(source)!r}; allowed: {ALLOWED}.{_guess(folder)}")


def _guess(folder: Path) -> str:
    # Neighbours of the missing folder are the likeliest meaning of a mistyped path.
    siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    close = nearest(str(folder), [EMOJI_CANVAS, *siblings])
    return f" Did you mean {close!r}?" if close else " Check the spelling, or give a folder with model_index.json."


def _in_batches(apply: Callable[[Tensor], Tensor], x: Tensor, batch_size: int | None) -> Tensor:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    return torch.cat([apply(part) for part in x.split(batch_size or max(len(x), 1))])
