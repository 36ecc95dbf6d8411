"""Stable Diffusion 3 and 3.5 over diffusers' components: a transformer that predicts a velocity (flow matching).

The text embedding is that of two CLIP encoders side by side, padded with zeros, followed by T5's tokens, or by zeros
without T5, as in diffusers. The two pooled texts form one additional vector. The sampler is the SDE of `cgru.mdp.flow`
over the model's shifted sigmas, because an ODE has no density; with eta 0 it is diffusers' Euler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from cgru.backbones import latents, schedules
from cgru.backbones.base import guided
from cgru.backbones.loading import Loaded
from cgru.backbones.offload import Parking, bring, park, park_all
from cgru.backbones.text import clip_limit, conditioning, encoder_outputs, token_counts
from cgru.mdp.flow import FlowKernel
from cgru.mdp.trajectory import EMBEDDINGS, POOLED, Conditioning

T5_TOKENS = 256
"""Number of tokens that T5 reads, padding included: max_sequence_length of diffusers' pipeline."""


@dataclass(frozen=True, eq=False)
class StableDiffusion3:
    """A `Backbone` over the parts of a Stable Diffusion 3 pipeline; `load_model` builds it."""

    name: str
    denoiser: SD3Transformer2DModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModelWithProjection
    text_encoder_2: CLIPTextModelWithProjection
    tokenizer: CLIPTokenizer
    tokenizer_2: CLIPTokenizer
    scheduler: FlowMatchEulerDiscreteScheduler
    device: torch.device
    dtype: torch.dtype
    text_encoder_3: T5EncoderModel | None = None
    tokenizer_3: T5TokenizerFast | None = None
    parking: Parking | None = None
    """Moves idle text encoders and VAE off the device; None: all stay there (`cgru.fast.low_memory`)."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        return latents.latent_shape(self.denoiser)

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        """By the name of the pipeline's component."""
        clips = {"text_encoder": self.text_encoder, "text_encoder_2": self.text_encoder_2}
        return clips if self.text_encoder_3 is None else {**clips, "text_encoder_3": self.text_encoder_3}

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
        """How many tokens of a prompt the CLIP encoders read, start and end included; T5 reads more."""
        return min(
            clip_limit(self.tokenizer, self.text_encoder),
            clip_limit(self.tokenizer_2, self.text_encoder_2),
        )

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has for the CLIP encoder that takes more, start and end included."""
        pairs = zip(token_counts(self.tokenizer, texts), token_counts(self.tokenizer_2, texts), strict=True)
        return [max(pair) for pair in pairs]

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts; a prompt over the CLIP encoders' limit is cut there, with one warning that counts them."""
        return conditioning(prompts, self._read, self)

    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        columns, pooled = [], []
        for encoder, tokenizer in ((self.text_encoder, self.tokenizer), (self.text_encoder_2, self.tokenizer_2)):
            found = encoder_outputs(
                encoder, tokenizer, texts, length=self.max_tokens, parking=self.parking, output_hidden_states=True
            )
            outputs = [(output.hidden_states[-2], output[0]) for output in found]
            columns.append(torch.cat([hidden for hidden, _ in outputs]))
            pooled.append(torch.cat([row for _, row in outputs]))
        clip, t5 = torch.cat(columns, -1), self._read_t5(texts)
        clip = functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return {EMBEDDINGS: torch.cat([clip, t5], 1), POOLED: torch.cat(pooled, -1)}

    def _read_t5(self, texts: Sequence[str]) -> Tensor:
        if self.text_encoder_3 is None:
            width = self.denoiser.config.joint_attention_dim
            return torch.zeros((len(texts), T5_TOKENS, width), dtype=self.dtype, device=self.device)
        found = encoder_outputs(self.text_encoder_3, self.tokenizer_3, texts, length=T5_TOKENS, parking=self.parking)
        return torch.cat([output[0] for output in found])

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the velocity with guidance applied, float32; only the network's input is cast to its dtype."""
        park(self.parking, self.vae)
        return guided(self._denoise, x, time, cond, guidance=guidance)

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> FlowKernel:
        """Return the SDE over this model's sigmas on its device."""
        return schedules.flow(self.scheduler, self.name, steps, eta=eta, noisy_steps=noisy_steps, device=self.device)

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable."""
        bring(self.parking, self.vae)
        return latents.decoded(self.vae, x, batch_size)

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents: the mean of the posterior, no noise."""
        bring(self.parking, self.vae)
        return latents.encoded(self.vae, images, batch_size)

    def saving_memory(self, parking: Parking) -> "StableDiffusion3":
        """The model with checkpointing, in place, and with text encoders and VAE parked while they are idle."""
        self.denoiser.enable_gradient_checkpointing()
        return replace(self, parking=park_all(parking, (*self.text_encoders.values(), self.vae)))

    def _denoise(self, x: Tensor, time: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = self.denoiser(
            x.to(self.dtype),
            encoder_hidden_states=tensors[EMBEDDINGS].to(self.dtype),
            pooled_projections=tensors[POOLED].to(self.dtype),
            timestep=time,
            return_dict=False,
        )[0]
        return output


def build(loaded: Loaded) -> StableDiffusion3:
    """The backbone of loaded parts."""
    return StableDiffusion3(**loaded.fields())
