"""The two CLIPs: one whose text tower conditions the denoiser and whose vision tower rewards and critics start from,
and a smaller one, trained apart (other seed, sizes and augmentation), for evaluation only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTokenizer, CLIPVisionConfig

from tools.emoji_canvas import art
from tools.emoji_canvas.canvas import IMAGE_SIZE, Composer, Layout, render
from tools.emoji_canvas.captions import MAX_TOKENS, CaptionWriter, tokenize
from tools.emoji_canvas.degrade import recognisable
from tools.emoji_canvas.training import Recipe, fit, generator_for, keep, log

SIZES = {  # text width, text layers, vision width, vision layers, shared width
    "clip": (192, 4, 192, 6, 128),
    "clip-eval": (128, 3, 128, 5, 96),
}


def build(name: str, tokenizer: CLIPTokenizer) -> CLIPModel:
    """A CLIPModel of the named size for 64-pixel images, patch 8."""
    text_width, text_layers, width, layers, shared = SIZES[name]
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=text_width,
        intermediate_size=4 * text_width,
        num_hidden_layers=text_layers,
        num_attention_heads=text_width // 32,
        max_position_embeddings=MAX_TOKENS,
        projection_dim=shared,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        image_size=IMAGE_SIZE,
        patch_size=8,
        projection_dim=shared,
    )
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=shared))


def contrast(model: CLIPModel, images: Tensor, ids: Tensor) -> Tensor:
    """Symmetric InfoNCE; a batch holds some equal captions, whose columns share the target evenly."""
    output = model(input_ids=ids, pixel_values=images * 2 - 1)
    logits = output.logits_per_text.float()
    same = (ids[:, None] == ids[None]).all(-1).float()
    target = same / same.sum(1, keepdim=True)
    return -0.5 * ((target * logits.log_softmax(1)).sum(1).mean() + (target * logits.log_softmax(0)).sum(0).mean())


def train(name: str, work: Path, device: torch.device, recipe: Recipe, seed: int, scenes: int) -> None:
    """Train the named CLIP on captioned scenes and save it as a transformers folder `work/<name>`."""
    icons, records = art.load(work, "main")
    bank = CaptionWriter(records, seed).scenes(scenes)
    ids = torch.from_numpy(tokenize(bank.captions, work / "tokenizer")).to(device)
    pictures = render(Composer(icons, device), Layout.of(bank, device), seed)
    torch.manual_seed(seed)
    model = build(name, CLIPTokenizer.from_pretrained(work / "tokenizer")).to(device)

    def loss(generator: torch.Generator) -> Tensor:
        rows = torch.randint(0, len(ids), (recipe.batch,), generator=generator, device=device)
        images = pictures[rows].float() / 255
        if name == "clip-eval":
            images = recognisable(images, generator)
        return contrast(model, images, ids[rows].long())

    fit(name, model, loss, recipe, work, device)
    keep(model, work / name)
    report(model, pictures, ids, device)


@torch.no_grad()
def report(model: CLIPModel, pictures: Tensor, ids: Tensor, device: torch.device) -> None:
    """Log how often the right caption of 256 is ranked first: a sanity figure, not a result."""
    model.eval()
    generator = generator_for(device, "clip-report")
    rows = torch.randint(0, len(ids), (256,), generator=generator, device=device)
    images = pictures[rows].float() / 255
    output = model(input_ids=ids[rows].long(), pixel_values=images * 2 - 1)
    top = output.logits_per_image.argmax(1)
    right = (ids[rows][top] == ids[rows]).all(1).float().mean().item()
    log.info("clip: right caption of 256 first for %.3f", right)
