"""The autoencoder: 64x64x3 pictures to 16x16x4 latents of unit variance, decode under 0.6 GFLOP.

Loss: L1 and squared error, the same on image gradients (icons are edges), and a small KL that keeps latents smooth
enough for a denoiser's errors to stay invisible.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from tools.emoji_canvas import art
from tools.emoji_canvas.canvas import IMAGE_SIZE, Composer, Layout, render
from tools.emoji_canvas.captions import CaptionWriter
from tools.emoji_canvas.training import Recipe, fit, keep, log

KL_WEIGHT = 1e-4


def build() -> AutoencoderKL:
    """SD's autoencoder class at the size of an emoji."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
    )


def edges(images: Tensor) -> tuple[Tensor, Tensor]:
    """Horizontal and vertical differences."""
    return images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]


def reconstruction(model: AutoencoderKL, images: Tensor, generator: torch.Generator) -> Tensor:
    """The training loss of one batch; images in [0, 1]."""
    target = images * 2 - 1
    posterior = model.encode(target).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator, device=images.device)
    decoded = model.decode(posterior.mean + posterior.std * noise).sample.float()
    loss = F.l1_loss(decoded, target) + 2 * F.mse_loss(decoded, target)
    for ours, theirs in zip(edges(decoded), edges(target), strict=True):
        loss = loss + F.l1_loss(ours, theirs)
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).float().mean()
    return loss + KL_WEIGHT * kl


def train(work: Path, device: torch.device, recipe: Recipe, seed: int, scenes: int) -> None:
    """Train, measure the latents' scale, save the diffusers folder `work/vae`."""
    icons, records = art.load(work, "main")
    bank = CaptionWriter(records, seed).scenes(scenes)
    pictures = render(Composer(icons, device), Layout.of(bank, device), seed)
    torch.manual_seed(seed)
    model = build().to(device)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(0, scenes, (recipe.batch,), generator=generator, device=device)
        return reconstruction(model, pictures[rows].float() / 255, generator)

    fit("vae", model, loss, recipe, work, device)
    model.eval().float()
    images = pictures[:512].float() / 255
    with torch.no_grad():
        latents = model.encode(images * 2 - 1).latent_dist.mean
        decoded = model.decode(latents).sample.clamp(-1, 1) / 2 + 0.5
    model.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))
    psnr = -10 * torch.log10(((decoded - images) ** 2).flatten(1).mean(1)).mean().item()
    log.info("vae: %.2f dB, latent mean %.3f std %.3f", psnr, latents.mean().item(), latents.std().item())
    keep(model, work / "vae")
