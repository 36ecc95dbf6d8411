"""The denoiser: a UNet2DConditionModel trained on cached latents and cached text states, half a GFLOP a call.

Scenes are encoded once, so that a step is the UNet alone. Noise prediction on SD's scaled-linear schedule,
min-SNR weights (gamma 5), a tenth of the captions dropped for classifier-free guidance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel

from tools.emoji_canvas import art
from tools.emoji_canvas.canvas import Composer, Layout
from tools.emoji_canvas.captions import CaptionWriter, Scenes, tokenize
from tools.emoji_canvas.training import Recipe, fit, generator_for, keep, log

LATENT = (4, 16, 16)
Objective = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def build() -> UNet2DConditionModel:
    """Cross-attention at every resolution, as in SD. `attention_head_dim` is diffusers' name for heads."""
    return UNet2DConditionModel(
        sample_size=LATENT[1],
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 80, 160),
        down_block_types=("CrossAttnDownBlock2D",) * 3,
        up_block_types=("CrossAttnUpBlock2D",) * 3,
        cross_attention_dim=192,
        attention_head_dim=(1, 2, 5),
        norm_num_groups=8,
    )


def scheduler() -> DDIMScheduler:
    """Stable Diffusion's schedule."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="epsilon",
    )


@dataclass(frozen=True)
class Bank:
    """Everything a training step reads: scaled latents, text states, and the state of the empty caption."""

    latents: Tensor
    text: Tensor
    empty: Tensor


@torch.no_grad()
def cache(work: Path, device: torch.device, seed: int, bank: Scenes, ids: Tensor, chunk: int = 2048) -> Bank:
    """Encode the scenes and their captions (token ids, the empty caption last) once."""
    scenes = len(bank.captions)
    composer = Composer(art.load(work, "main")[0], device)
    vae = AutoencoderKL.from_pretrained(work / "vae").to(device).eval()
    encoder = text_tower(work).to(device)
    latents = torch.empty((scenes, *LATENT), dtype=torch.float16, device=device)
    text = torch.empty((scenes + 1, ids.shape[1], 192), dtype=torch.float16, device=device)
    layout = Layout.of(bank, device)
    for start in range(0, scenes, chunk):
        part = slice(start, start + chunk)
        images = composer.scenes(layout.rows(part), generator_for(device, "cache", seed, start))
        latents[part] = vae.encode(images * 2 - 1).latent_dist.mean * vae.config.scaling_factor
    for start in range(0, scenes + 1, chunk):
        part = slice(start, start + chunk)
        text[part] = encoder(ids[part].long()).last_hidden_state
    return Bank(latents, text[:-1], text[-1])


def text_tower(work: Path) -> CLIPTextModel:
    """The text tower of the trained CLIP, frozen, float32."""
    return CLIPTextModel.from_pretrained(work / "clip", dtype=torch.float32).eval().requires_grad_(False)


def train(work: Path, device: torch.device, recipe: Recipe, seed: int, scenes: int, compiled: bool) -> None:
    """Train on the cached bank and save the averaged UNet as `work/unet`.

    Compiling takes minutes, so it is done on noise while the other parts may still be training; then it waits for them.
    """
    torch.manual_seed(seed)
    model = build().to(device)
    alphas = scheduler().alphas_cumprod.to(device)
    snr = alphas / (1 - alphas)
    network = torch.compile(model) if compiled else model

    def objective(x: Tensor, text: Tensor, generator: torch.Generator) -> Tensor:
        time_step = torch.randint(0, len(alphas), (len(x),), generator=generator, device=device)
        noise = torch.randn(x.shape, generator=generator, device=device)
        signal = alphas[time_step].sqrt()[:, None, None, None]
        noisy = signal * x + (1 - signal**2).sqrt() * noise
        error = (network(noisy, time_step, text).sample.float() - noise) ** 2
        return (error.flatten(1).mean(1) * (snr[time_step].clamp(max=5) / snr[time_step])).mean()

    bank = CaptionWriter(art.load(work, "main")[1], seed).scenes(scenes)
    ids = torch.from_numpy(tokenize([*bank.captions, ""], work / "tokenizer")).to(device)
    if compiled:
        _warm_up(model, objective, recipe.batch, device)
    _wait_for([work / "clip", work / "vae"])
    data = cache(work, device, seed, bank, ids)
    log.info("denoiser: %d scenes cached", scenes)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(0, scenes, (recipe.batch,), generator=generator, device=device)
        dropped = torch.rand((recipe.batch, 1, 1), generator=generator, device=device) < 0.1
        text = torch.where(dropped, data.empty, data.text[rows]).float()
        return objective(data.latents[rows].float(), text, generator)

    fit("denoiser", model, loss, recipe, work, device, save_every=2000)
    keep(model, work / "unet")


def _warm_up(model: UNet2DConditionModel, objective: Objective, batch: int, device: torch.device) -> None:
    clock = time.monotonic()
    generator = generator_for(device, "warm-up")
    x, text = torch.zeros((batch, *LATENT), device=device), torch.zeros((batch, 48, 192), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        objective(x, text, generator).backward()
    model.zero_grad(set_to_none=True)
    log.info("denoiser: compiled in %.0f s", time.monotonic() - clock)


def _wait_for(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(1)
