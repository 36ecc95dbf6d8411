"""Stable Diffusion 1.x and 2.x over diffusers' components; the embedded model Emoji Canvas is such a folder too.

A source is a hub id, a local folder in the diffusers layout, or the name `emoji-canvas`. Whatever scheduler the folder
names, its noise schedule is read as DDIM, because the policy needs a Gaussian step. All networks are frozen and run in
one dtype, the VAE too: critics decode every x_t (800 decodes an epoch in the paper), where float32 would cost several
times as much, and these VAEs work well in half precision. Results are returned as float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from cgru.backbones import latents, schedules
from cgru.backbones.base import guided
from cgru.backbones.families import SD
from cgru.backbones.loading import Loaded, load_parts
from cgru.backbones.offload import Parking, bring, park, park_all
from cgru.backbones.text import clip_limit, conditioning, encoder_outputs, token_counts
from cgru.backbones.whitebox import WhiteBox, opened
from cgru.mdp.kernel import DDIMKernel
from cgru.mdp.trajectory import EMBEDDINGS, Conditioning


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
    """Moves idle text encoder and VAE off the device; None: both stay there (`cgru.fast.low_memory`)."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        return latents.latent_shape(self.denoiser)

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        """By the name of the pipeline's component."""
        return {"text_encoder": self.text_encoder}

    @property
    def decoder(self) -> nn.Module:
        """The network that draws images from latents."""
        return self.vae.decoder

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of its images in pixels."""
        return latents.image_size(self.vae, self.latent_shape)

    @property
    def max_tokens(self) -> int:
        """How many tokens of a prompt it reads, start and end included."""
        return clip_limit(self.tokenizer, self.text_encoder)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has, start and end included."""
        return token_counts(self.tokenizer, texts)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts; a prompt over the model's token limit is cut, with one warning that counts them."""
        return conditioning(prompts, self._read, self)

    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        found = encoder_outputs(self.text_encoder, self.tokenizer, texts, length=self.max_tokens, parking=self.parking)
        return {EMBEDDINGS: torch.cat([output[0] for output in found])}

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the UNet's output with guidance applied, float32; only the network's input is cast to its dtype."""
        park(self.parking, self.vae)
        return guided(self._denoise, x, time, cond, guidance=guidance)

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> DDIMKernel:
        """Return DDIM over this model's schedule on its device."""
        return schedules.ddim(self.scheduler, self.name, steps, eta=eta, noisy_steps=noisy_steps, device=self.device)

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable."""
        bring(self.parking, self.vae)
        return latents.decoded(self.vae, x, batch_size)

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents: the mean of the posterior, no noise."""
        bring(self.parking, self.vae)
        return latents.encoded(self.vae, images, batch_size)

    def saving_memory(self, parking: Parking) -> "StableDiffusion":
        """The model with checkpointing, in place, and with text encoder and VAE parked while they are idle."""
        self.denoiser.enable_gradient_checkpointing()
        return replace(self, parking=park_all(parking, (self.text_encoder, self.vae)))

    def white_box(self) -> WhiteBox:
        """The model opened up, for attacks that need its gradients."""
        return opened(self)

    def _denoise(self, x: Tensor, time: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        embeddings = tensors[EMBEDDINGS].to(self.dtype)
        output: Tensor = self.denoiser(x.to(self.dtype), time, embeddings, return_dict=False)[0]
        return output


def build(loaded: Loaded) -> StableDiffusion:
    """The backbone of loaded parts."""
    return StableDiffusion(**loaded.fields())


def load_stable_diffusion(
    source: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "fp32",
    revision: str | None = None,
) -> StableDiffusion:
    """Load Stable Diffusion 1.x or 2.x as `load_model` does; another family is an error."""
    loaded = load_parts(source, device=device, dtype=dtype, revision=revision)
    if loaded.family is not SD:
        raise ValueError(f"{loaded.name!r} is a {loaded.family.name}; allowed: {SD.name}. Use load_model.")
    return build(loaded)
