"""Stable Diffusion 1.5's architecture with random weights, and what one call of each network costs in arithmetic.

The sizes are those of its own configs, written as differences from diffusers' and transformers' defaults, so nothing is
downloaded. Speed does not depend on the weights' values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, CLIPVisionConfig, CLIPVisionModelWithProjection

from cgru.backbones.sd import StableDiffusion
from cgru.embedded import ROOT

SD15 = "sd15-random"
UNET: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768}
VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SCHEDULE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
TINY = {"unet": (32, 64, 64, 64), "vae": (32, 32, 32, 32)}
"""Channels of a model of the same shape for trying the program on a CPU."""
TINY_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def random_sd15(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> StableDiffusion:
    """Stable Diffusion 1.5 without its weights; tokens are those of the embedded model, which do not matter here."""
    tokenizer = CLIPTokenizer.from_pretrained(ROOT / "emoji-canvas" / "tokenizer", model_max_length=77)
    marks = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {name: max(size // 24, 2) for name, size in TEXT.items()} | {"num_attention_heads": 4} if tiny else TEXT
    unet = {**UNET, "block_out_channels": TINY["unet"], "sample_size": 16} if tiny else UNET
    vae = {**VAE, "block_out_channels": TINY["vae"]} if tiny else VAE
    with torch.device(device):
        torch.manual_seed(0)
        parts = {
            "denoiser": UNet2DConditionModel(**{**unet, "cross_attention_dim": text["hidden_size"]}),
            "vae": AutoencoderKL(**vae),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**text, **marks)),
        }
    for network in parts.values():
        network.requires_grad_(False).eval().to(device, dtype)
    scheduler = DDIMScheduler(**SCHEDULE)
    return StableDiffusion(SD15, **parts, tokenizer=tokenizer, scheduler=scheduler, device=device, dtype=dtype)


def random_clip_b32(seed: int, *, tiny: bool) -> CLIPVisionModelWithProjection:
    """CLIP ViT-B/32's vision tower, whose sizes are transformers' defaults; float32 on the CPU."""
    torch.manual_seed(seed)
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**(TINY_VISION if tiny else {}))).eval()


def forward_tflop(model: StableDiffusion) -> dict[str, float]:
    """Per sample, of one forward pass of `denoiser` and `decoder`."""
    unet, vae = (copy.deepcopy(network).to("meta") for network in (model.denoiser, model.vae))
    x = torch.empty((1, *model.latent_shape), device="meta", dtype=model.dtype)
    text = torch.empty((1, model.max_tokens, unet.config.cross_attention_dim), device="meta", dtype=model.dtype)
    return {
        "denoiser": tflop(lambda: unet(x, torch.empty(1, device="meta"), text)),
        "decoder": tflop(lambda: vae.decode(x)),
    }


def clip_tflop(network: nn.Module) -> float:
    """Per picture, of one forward pass of a vision tower."""
    tower: Any = copy.deepcopy(network).to("meta")
    size = tower.config.image_size
    return tflop(lambda: tower(pixel_values=torch.empty((1, 3, size, size), device="meta")))


def tflop(call: Callable[[], object]) -> float:
    """Counted on the meta device, where nothing is computed; multiply and add are two."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 1e12
