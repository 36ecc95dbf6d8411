"""timm's ViT by hand: random tensors in its layout, and its computation in plain torch, for the tests of the judges."""

import math
from pathlib import Path

import torch
from torch import Tensor

WIDTH, DEPTH, MLP, PATCH, SIDE = 128, 2, 96, 8, 16  # two heads of 64; 2 × 2 patches


def timm_state(outputs: int, seed: int) -> dict[str, Tensor]:
    """Random weights, so that no part of the network is idle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float = 0.3) -> Tensor:
        return torch.randn(size, generator=generator) * std

    # Embeddings of 1e-3: their variance is near timm's epsilon of 1e-6, so that another epsilon would be seen.
    state = {"cls_token": normal(1, 1, WIDTH, std=1e-3), "pos_embed": normal(1, 5, WIDTH, std=1e-3)}
    state["patch_embed.proj.weight"] = normal(WIDTH, 3, PATCH, PATCH, std=1e-4)
    state["patch_embed.proj.bias"] = normal(WIDTH, std=1e-3)
    for i in range(DEPTH):
        shapes = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
        shapes |= {"mlp.fc1": (MLP, WIDTH), "mlp.fc2": (WIDTH, MLP)}
        for layer, size in shapes.items():
            state[f"blocks.{i}.{layer}.weight"] = normal(*size, std=0.2)
            state[f"blocks.{i}.{layer}.bias"] = normal(size[0])
        for layer in ("norm1", "norm2"):
            state[f"blocks.{i}.{layer}.weight"] = 1 + normal(WIDTH)
            state[f"blocks.{i}.{layer}.bias"] = normal(WIDTH)
    state |= {"norm.weight": 1 + normal(WIDTH), "norm.bias": normal(WIDTH)}
    return state | {"head.weight": normal(outputs, WIDTH), "head.bias": normal(outputs)}


def timm_logits(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """(n, outputs) of pictures (n, 3, SIDE, SIDE) as timm's VisionTransformer computes them, in float64."""
    state, x = {name: value.double() for name, value in state.items()}, x.double()

    def linear(h: Tensor, layer: str) -> Tensor:
        return h @ state[f"{layer}.weight"].T + state[f"{layer}.bias"]

    def norm(h: Tensor, layer: str) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * state[f"{layer}.weight"] + state[f"{layer}.bias"]

    # Row by row of patches; each patch channel by channel, as the convolution's weights are.
    patches = [x[:, :, r : r + PATCH, c : c + PATCH].flatten(1) for r in (0, PATCH) for c in (0, PATCH)]
    kernel = state["patch_embed.proj.weight"].flatten(1).T
    embedded = torch.stack(patches, 1) @ kernel + state["patch_embed.proj.bias"]
    h = torch.cat([state["cls_token"].expand(len(x), 1, WIDTH), embedded], 1) + state["pos_embed"]
    for i in range(DEPTH):
        block = f"blocks.{i}"
        # (n, tokens, 3 × heads × 64) -> q, k, v of (n, heads, tokens, 64)
        fused = linear(norm(h, f"{block}.norm1"), f"{block}.attn.qkv")
        q, k, v = fused.reshape(len(x), 5, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
        looked_at = ((q @ k.transpose(-1, -2)) / math.sqrt(64)).softmax(-1) @ v
        h = h + linear(looked_at.transpose(1, 2).reshape(len(x), 5, WIDTH), f"{block}.attn.proj")
        inner = linear(norm(h, f"{block}.norm2"), f"{block}.mlp.fc1")
        h = h + linear(inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))), f"{block}.mlp.fc2")
    return linear(norm(h, "norm")[:, 0], "head")


def write_judges(folder: Path) -> Path:
    """Both checkpoints as the official ones are: weights under a key, beside other things."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, outputs, seed in (("style50_cls", 20, 1), ("style50", 51, 2)):
        torch.save({"model_state_dict": timm_state(outputs, seed), "epoch": 3}, folder / f"{name}.pth")
    return folder
