"""Build Emoji Canvas part by part: `python -m tools.emoji_canvas PART [--work FOLDER] [--device cuda]`.

Parts, in order: art icons tokenizer clip clip-eval vae object style hazard detector reward-clip reward-swin denoiser
check package.
Each part is seeded, skips what it has already made and resumes from its checkpoint. `--smoke` runs a few steps of
everything to see that it works.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path

import torch

from tools.emoji_canvas import art
from tools.emoji_canvas.training import Recipe

# Recipes of the shipped version 3 (docs/lab.md); its denoiser was annealed by the clock and stopped at this many steps.
SEEDS = {"clip": 1, "vae": 2, "denoiser": 3, "object": 11, "style": 12, "hazard": 13, "detector": 21, "clip-eval": 31}
SEEDS |= {"reward-clip": 41, "reward-swin": 42}
RECIPES = {
    "clip": Recipe(steps=1500, batch=1024, learning_rate=1e-3, weight_decay=0.1),
    "clip-eval": Recipe(steps=1000, batch=1024, learning_rate=1e-3, weight_decay=0.1),
    "vae": Recipe(steps=2500, batch=256, learning_rate=1.5e-3, weight_decay=0.0),
    "object": Recipe(steps=4000, batch=256, learning_rate=2e-3, weight_decay=0.02),
    "style": Recipe(steps=6000, batch=256, learning_rate=2e-3, weight_decay=0.02),
    "hazard": Recipe(steps=2000, batch=256, learning_rate=2e-3, weight_decay=0.02),
    "detector": Recipe(steps=5000, batch=256, learning_rate=2e-3, weight_decay=0.05),
    "reward-clip": Recipe(steps=2000, batch=256, learning_rate=3e-4, weight_decay=0.05),
    "reward-swin": Recipe(steps=4000, batch=256, learning_rate=1e-3, weight_decay=0.05),
    "denoiser": Recipe(steps=4044, batch=512, learning_rate=1e-3, weight_decay=0.01, average=0.9995),
}
SCENES = 300_000
PARTS = (
    "art",
    "icons",
    "tokenizer",
    "clip",
    "clip-eval",
    "vae",
    "object",
    "style",
    "hazard",
    "detector",
    "reward-clip",
    "reward-swin",
    "denoiser",
    "check",
    "package",
)
OUTPUTS = {
    "tokenizer": "tokenizer/vocab.json",
    "clip": "clip",
    "clip-eval": "clip-eval",
    "vae": "vae",
    "denoiser": "unet",
    "reward-clip": "reward-clip/accuracy.json",
    "reward-swin": "reward-swin/accuracy.json",
    **{name: f"judges/{name}/accuracy.json" for name in ("object", "style", "hazard", "detector")},
}


def build(part: str, work: Path, device: torch.device, smoke: bool, compiled: bool, recipe: Recipe | None) -> None:
    """Run one part unless its output is already there."""
    if part in OUTPUTS and (work / OUTPUTS[part]).exists():
        logging.info("%s: already built", part)
        return
    scenes = 4096 if smoke else SCENES
    seed = SEEDS.get(part, 0)
    if recipe and smoke:
        recipe = replace(recipe, steps=4, batch=64, warmup=1)
    if part == "art":
        art.download(work)
    elif part == "icons":
        art.rasterise(work)
    elif part == "tokenizer":
        from tools.emoji_canvas import captions

        bank = captions.CaptionWriter(art.load(work, "main")[1], seed).scenes(60_000)
        captions.train_tokenizer(bank.captions, work / "tokenizer")
    elif part == "check":
        from tools.emoji_canvas import check

        check.main(work, device, images=1 if smoke else 4)
    elif part == "package":
        from tools.emoji_canvas import package

        package.main(work)
    else:
        _train(part, work, device, seed, scenes, compiled, recipe)


def _train(
    part: str, work: Path, device: torch.device, seed: int, scenes: int, compiled: bool, recipe: Recipe | None
) -> None:
    from tools.emoji_canvas import clip, denoiser, judges, rewards, vae

    assert recipe is not None, part
    if part in clip.SIZES:
        clip.train(part, work, device, recipe, seed, scenes)
    elif part == "vae":
        vae.train(work, device, recipe, seed, scenes)
    elif part.startswith("reward-"):
        rewards.train(part, work, device, recipe, seed)
    elif part == "denoiser":
        denoiser.train(work, device, recipe, seed, scenes, compiled)
    else:
        judges.train(part, work, device, recipe, seed)


def main() -> None:
    """Parse the command line and build the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", default=PARTS, metavar="PART", help="parts to build (default: all, in order)"
    )
    parser.add_argument("--work", type=Path, default=Path("build/emoji-canvas"), help="where everything is kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a few steps of each part")
    parser.add_argument("--compile", action="store_true", help="torch.compile the denoiser (worth it on a GPU)")
    parser.add_argument("--steps", type=int, help="another number of training steps")
    parser.add_argument("--until", type=float, help="end training by this time (seconds since 1970), rate annealed")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_float32_matmul_precision("high")
    for part in arguments.parts:
        recipe = RECIPES.get(part)
        if recipe and arguments.steps:
            recipe = replace(recipe, steps=arguments.steps)
        if recipe and arguments.until:
            recipe = replace(recipe, until=arguments.until)
        build(part, arguments.work, torch.device(arguments.device), arguments.smoke, arguments.compile, recipe)


if __name__ == "__main__":
    main()
