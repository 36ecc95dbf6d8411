"""The reward networks of Emoji Canvas: the CLIP vision tower fine-tuned with class heads, and a Swin beside it.

Each has three heads (object, hazard, style). They see the generator's art only, never what is kept for the judges, and
they are of other families than judges (ResNet) and detector (ConvNeXt V2). Half of their pictures went through the VAE
with noise on the latent, so that the decoder's own artefacts are no way to fool them; two networks are harder to fool
than one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPVisionModelWithProjection, PreTrainedModel, SwinConfig, SwinModel

from tools.emoji_canvas import art
from tools.emoji_canvas.canvas import IMAGE_SIZE, uniform
from tools.emoji_canvas.degrade import recognisable, unrecognisable
from tools.emoji_canvas.judges import LABELS, Pool, draw_icons, label_of, pool
from tools.emoji_canvas.training import Recipe, fit, generator_for, keep, log

HEADS = ("object", "hazard", "style")
BANK = 120_000
LATENT_NOISE = 0.35
"""Largest noise on the scaled latent of a picture that is still to be recognised."""


def tower(name: str, work: Path) -> PreTrainedModel:
    """The network under the heads: the trained CLIP's vision tower, or an untrained Swin."""
    if name == "reward-clip":
        return CLIPVisionModelWithProjection.from_pretrained(work / "clip", dtype=torch.float32)
    return SwinModel(
        SwinConfig(
            image_size=IMAGE_SIZE,
            patch_size=4,
            embed_dim=48,
            depths=[2, 2, 2],
            num_heads=[2, 4, 8],
            window_size=4,
            drop_path_rate=0.05,
        )
    )


class Heads(nn.Module):
    """A linear head per question on the tower's pooled features."""

    def __init__(self, name: str, work: Path) -> None:
        """Load or make the tower; the heads start at zero."""
        super().__init__()
        self.tower = tower(name, work)
        self.width = int(self.tower.config.hidden_size)
        self.heads = nn.ModuleDict({head: nn.Linear(self.width, len(LABELS[head])) for head in HEADS})

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Logits of every head for [0, 1] pictures."""
        inner = self.tower.vision_model if isinstance(self.tower, CLIPVisionModelWithProjection) else self.tower
        features = inner(pixel_values=images * 2 - 1).pooler_output
        return {name: head(features).float() for name, head in self.heads.items()}


@dataclass(frozen=True)
class Source:
    """Icons drawn evenly over classes, hazards and the rest, and what each head should say of each."""

    pool: Pool
    labels: Tensor  # (icons, heads)


def source(work: Path, device: torch.device) -> Source:
    """The generator's art; the pool of the detector's labels keeps every icon."""
    icons, records = art.load(work, "main")
    labels = [[LABELS[head].index(label_of(head, record) or "") for head in HEADS] for record in records]
    return Source(pool("detector", icons, records, device), torch.tensor(labels, device=device))


@torch.no_grad()
def draw(given: Source, vae: AutoencoderKL, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Composites, every second one through the VAE with noise on its latent; labels (n, heads)."""
    images, icons = draw_icons(given.pool, count, generator, recolour=False)
    latents = vae.encode(images[::2] * 2 - 1).latent_dist.mean
    spread = uniform(0, LATENT_NOISE, (len(latents), 1, 1, 1), generator) / vae.config.scaling_factor
    latents = latents + spread * torch.randn(latents.shape, generator=generator, device=latents.device)
    images[::2] = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    return images, given.labels[icons]


def bank(given: Source, vae: AutoencoderKL, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures drawn once, uint8, with labels."""
    parts = [draw(given, vae, 1000, generator) for _ in range(max(1, count // 1000))]
    return torch.cat([(images * 255).round().byte() for images, _ in parts]), torch.cat([truth for _, truth in parts])


def train(name: str, work: Path, device: torch.device, recipe: Recipe, seed: int) -> None:
    """Train tower and heads and save them as `work/<name>`: the tower as transformers saves it, heads beside it."""
    given, vae = source(work, device), AutoencoderKL.from_pretrained(work / "vae").to(device).eval()
    torch.manual_seed(seed)
    model = Heads(name, work).to(device)
    pictures, truth = bank(given, vae, min(BANK, 512 * recipe.steps), generator_for(device, "reward-bank", name))
    nothing = torch.tensor([len(LABELS[head]) - 1 for head in HEADS], device=device)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(0, len(truth), (recipe.batch,), generator=generator, device=device)
        images = pictures[rows].float() / 255
        empty = unrecognisable(images[::10], generator)
        target = torch.cat([truth[rows], nothing.expand(len(empty), -1)])
        logits = model(torch.cat([recognisable(images, generator), empty]))
        losses = [F.cross_entropy(logits[head], target[:, k], label_smoothing=0.02) for k, head in enumerate(HEADS)]
        return torch.stack(losses).sum()

    fit(name, model, loss, recipe, work, device)
    save(model.half().float().eval(), work / name, accuracy(model, given, vae, generator_for(device, "measure", name)))


@torch.no_grad()
def accuracy(model: Heads, given: Source, vae: AutoencoderKL, generator: torch.Generator) -> dict[str, float]:
    """Share right per head on 4,000 fresh pictures of the kind it was trained on."""
    model.eval()
    right = []
    for _ in range(8):
        images, truth = draw(given, vae, 500, generator)
        logits = model(images)
        right.append(torch.stack([logits[head].argmax(1) == truth[:, k] for k, head in enumerate(HEADS)], 1))
    share = torch.cat(right).float().mean(0)
    return {head: round(share[k].item(), 4) for k, head in enumerate(HEADS)}


def save(model: Heads, folder: Path, measured: dict[str, float]) -> None:
    """The tower as transformers saves it; the heads and their labels beside it."""
    keep(model.tower, folder)
    tensors = {key: value.contiguous().cpu() for key, value in model.heads.state_dict().items()}
    save_file(tensors, folder / "heads.safetensors", metadata={"format": "pt"})
    table = {"labels": {head: LABELS[head] for head in HEADS}, "image_size": IMAGE_SIZE, "mean": 0.5, "std": 0.5}
    (folder / "heads.json").write_text(json.dumps(table, indent=1))
    (folder / "accuracy.json").write_text(json.dumps(measured))
    log.info("%s: %s", folder.name, json.dumps(measured))
