"""How good the built model is: object and style accuracy over the grid for several samplers, and a picture.

Used while building, to choose guidance and steps; the figures people see come from `cgru evaluate`.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageClassification

from tools.emoji_canvas.captions import tokenize
from tools.emoji_canvas.denoiser import LATENT, scheduler, text_tower
from tools.emoji_canvas.judges import CLASS_NAMES, INPUT_SIZE, LABELS, prepared
from tools.emoji_canvas.training import generator_for, log
from tools.emoji_canvas.vocabulary import STYLES

SAMPLERS = [
    (20, 2.0, 0.0),
    (20, 3.0, 0.0),
    (20, 4.0, 0.0),
    (20, 5.0, 0.0),
    (20, 7.0, 0.0),
    (20, 4.0, 1.0),
    (20, 5.0, 1.0),
    (10, 4.0, 0.0),
    (10, 4.0, 1.0),
    (50, 4.0, 0.0),
    (50, 4.0, 1.0),
]
SHOWN = [
    "a poodle",
    "a puppy on a blue background",
    "a red-eyed zorgle with a cat in Flat style",
    "two objects: a cat and a dog",
    "An owl in Ink style at midnight",
    "a bomb",
    "a glass of wine, Sticker style",
    "a dagger on a green background",
    "a guitar in Painted style",
    "a slice of pizza next to a frog",
    "a sleepy kitten, yellow background",
    "a fir tree",
]


class Sampler:
    """The built parts, ready to draw."""

    def __init__(self, work: Path, device: torch.device) -> None:
        """Load the parts of the work folder."""
        self.work, self.device = work, device
        self.unet = UNet2DConditionModel.from_pretrained(work / "unet").to(device).eval()
        self.vae = AutoencoderKL.from_pretrained(work / "vae").to(device).eval()
        self.text = text_tower(work).to(device)

    @torch.no_grad()
    def draw(self, prompts: list[str], steps: int, guidance: float, eta: float, seed: int) -> Tensor:
        """Images of the prompts, [0, 1]."""
        ids = torch.from_numpy(tokenize([*prompts, ""], self.work / "tokenizer")).to(self.device).long()
        states = self.text(ids).last_hidden_state
        generator = generator_for(self.device, "check", seed)
        x = torch.randn((len(prompts), *LATENT), generator=generator, device=self.device)
        both = torch.cat([states[-1:].expand(len(prompts), -1, -1), states[:-1]])
        plan = scheduler()
        plan.set_timesteps(steps)
        for time in plan.timesteps:
            empty, conditional = self.unet(torch.cat([x, x]), time, both).sample.chunk(2)
            prediction = empty + guidance * (conditional - empty)
            x = plan.step(prediction, time, x, eta=eta, generator=generator).prev_sample
        parts = [self.vae.decode(part / self.vae.config.scaling_factor).sample for part in x.split(256)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)


def main(work: Path, device: torch.device, images: int) -> None:
    """Print a table, write `check.json` and `check.png`."""
    sampler = Sampler(work, device)
    cells = list(product(CLASS_NAMES, STYLES)) * images
    prompts = [f"A {name} image in {style} style" for name, style in cells]
    judges = {
        name: AutoModelForImageClassification.from_pretrained(work / "judges" / name, trust_remote_code=False)
        .to(device)
        .eval()
        for name in ("object", "style")
    }
    rows = []
    for steps, guidance, eta in SAMPLERS if device.type == "cuda" else SAMPLERS[2:3]:
        pictures = sampler.draw(prompts, steps, guidance, eta, 0)
        row: dict[str, object] = {"steps": steps, "guidance": guidance, "eta": eta, "n": len(prompts)}
        for k, name in enumerate(judges):
            with torch.no_grad():
                logits = torch.cat([judges[name](prepared(p, INPUT_SIZE[name])).logits for p in pictures.split(512)])
            truth = torch.tensor([LABELS[name].index(cell[k]) for cell in cells], device=device)
            right = logits.argmax(1) == truth
            row[name] = round(right.float().mean().item(), 4)
            row[f"{name}_worst"] = _worst(right, [cell[k] for cell in cells])
            row[f"{name}_nothing"] = round((logits.argmax(1) == len(LABELS[name]) - 1).float().mean().item(), 4)
        rows.append(row)
        log.info(json.dumps(row))
    (work / "check.json").write_text(json.dumps(rows, indent=1))
    grid = sampler.draw(prompts[: len(CLASS_NAMES) * len(STYLES)], 20, 4.0, 0.0, 0)
    save_grid(torch.cat([grid, sampler.draw(SHOWN * 2, 20, 4.0, 0.0, 1)]), work / "check.png", columns=16)


def _worst(right: Tensor, names: list[str]) -> dict[str, float]:
    """The three labels with the lowest accuracy."""
    share = {name: right[[i for i, n in enumerate(names) if n == name]].float().mean().item() for name in set(names)}
    return {name: round(value, 3) for name, value in sorted(share.items(), key=lambda item: item[1])[:3]}


def save_grid(images: Tensor, path: Path, columns: int) -> None:
    """Pictures in reading order, as a PNG."""
    size = images.shape[-1]
    sheet = Image.new("RGB", (columns * size, -(-len(images) // columns) * size), "white")
    for index, image in enumerate(images.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()):
        sheet.paste(Image.fromarray(image), (index % columns * size, index // columns * size))
    sheet.save(path)
