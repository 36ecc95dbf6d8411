"""Stable Diffusion XL over diffusers' components: two text encoders, pooled text and the picture's sizes.

The UNet cross-attends to the second-to-last hidden states of both encoders, side by side. It also receives the pooled
text of the second encoder and six numbers: original size, corner of the crop and target size. Ours describe an
uncropped picture of the model's own size, as in diffusers' pipeline. The noise schedule is read as DDIM, with the
file's offset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from cgru.backbones import latents, schedules
from cgru.backbones.base import guided
from cgru.backbones.loading import Loaded
from cgru.backbones.offload import Parking, bring, park, park_all
from cgru.backbones.text import clip_limit, conditioning, encoder_outputs, token_counts
from cgru.mdp.kernel import DDIMKernel
from cgru.mdp.trajectory import EMBEDDINGS, POOLED, Conditioning

SIZES = "time_ids"


@dataclass(frozen=True, eq=False)
class StableDiffusionXL:
    """A `Backbone` over the parts of a Stable Diffusion XL pipeline; `load_model` builds it."""

    name: str
    denoiser: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    text_encoder_2: CLIPTextModelWithProjection
    tokenizer: CLIPTokenizer
    tokenizer_2: CLIPTokenizer
    scheduler: DDIMScheduler
    device: torch.device
    dtype: torch.dtype
    zeros_for_empty: bool
    """Whether guidance uses zeros instead of the embedding of the empty prompt."""
    parking: Parking | None = None
    """Moves idle text encoders and VAE off the device; None: all stay there (`cgru.fast.low_memory`)."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        return latents.latent_shape(self.denoiser)

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        """By the name of the pipeline's component."""
        return {"text_encoder": self.text_encoder, "text_encoder_2": self.text_encoder_2}

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
        """How many tokens of a prompt both encoders read, start and end included."""
        return min(
            clip_limit(self.tokenizer, self.text_encoder),
            clip_limit(self.tokenizer_2, self.text_encoder_2),
        )

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has for the encoder that takes more, start and end included."""
        pairs = zip(token_counts(self.tokenizer, texts), token_counts(self.tokenizer_2, texts), strict=True)
        return [max(pair) for pair in pairs]

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts; a prompt over the model's token limit is cut, with one warning that counts them."""
        cond = conditioning(prompts, self._read, self)
        height, width = self.image_size
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32, device=self.device)
        zeros = {name: torch.zeros_like(row) for name, row in cond.unconditional.items()}
        return Conditioning(
            cond.prompts,
            {**cond.tensors, SIZES: sizes.repeat(len(cond), 1)},
            zeros if self.zeros_for_empty else cond.unconditional,
        )

    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        columns, pooled = [], []
        for encoder, tokenizer in ((self.text_encoder, self.tokenizer), (self.text_encoder_2, self.tokenizer_2)):
            found = encoder_outputs(
                encoder, tokenizer, texts, length=self.max_tokens, parking=self.parking, output_hidden_states=True
            )
            outputs = [(output.hidden_states[-2], output[0]) for output in found]
            columns.append(torch.cat([hidden for hidden, _ in outputs]))
            pooled = [row for _, row in outputs]  # the second encoder's projection of the whole prompt
        return {EMBEDDINGS: torch.cat(columns, -1), POOLED: torch.cat(pooled)}

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

    def saving_memory(self, parking: Parking) -> "StableDiffusionXL":
        """The model with checkpointing, in place, and with text encoders and VAE parked while they are idle."""
        self.denoiser.enable_gradient_checkpointing()
        return replace(self, parking=park_all(parking, (self.text_encoder, self.text_encoder_2, self.vae)))

    def _denoise(self, x: Tensor, time: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = self.denoiser(
            x.to(self.dtype),
            time,
            tensors[EMBEDDINGS].to(self.dtype),
            added_cond_kwargs={"text_embeds": tensors[POOLED].to(self.dtype), "time_ids": tensors[SIZES]},
            return_dict=False,
        )[0]
        return output


def build(loaded: Loaded) -> StableDiffusionXL:
    """The backbone of loaded parts."""
    vae: AutoencoderKL = loaded.parts["vae"]
    if loaded.dtype == torch.float16 and vae.config.force_upcast:
        vae.float()  # it overflows in float16, so diffusers decodes in float32, too
    is_zero = bool(loaded.index.get("force_zeros_for_empty_prompt", True))
    return StableDiffusionXL(**loaded.fields(), zeros_for_empty=is_zero)
