"""A tiny CLIP vision tower (8 px, patch 4, width 16, 3 layers), prompts and trajectories for the critic tests."""

import torch
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from cgru.critic.tower import Tower
from cgru.mdp.trajectory import Conditioning, Trajectory

TEXT_WIDTH = 6


def tiny_clip(seed: int = 0) -> CLIPVisionModelWithProjection:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=8,
        )
        return CLIPVisionModelWithProjection(config).eval()


def conditioning(n: int, seed: int = 0) -> Conditioning:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(n, 5, TEXT_WIDTH, generator=generator)
    empty = {"embeddings": torch.zeros(1, 5, TEXT_WIDTH)}
    return Conditioning(tuple(f"prompt {i}" for i in range(n)), {"embeddings": embeddings}, empty)


def trajectory(n: int, times: list[int], reward: torch.Tensor | None = None) -> Trajectory:
    """Random latents 4×4×4; what the critics look at is made by the tests."""
    generator = torch.Generator().manual_seed(7)
    t = len(times)
    return Trajectory(
        x=torch.randn(n, t + 1, 4, 4, 4, generator=generator),
        log_prob=torch.zeros(n, t),
        time=torch.tensor(times),
        stochastic=torch.ones(t, dtype=torch.bool),
        seeds=torch.arange(n),
        cond=conditioning(n),
        guidance=1.0,
        reward=reward,
    )


def tiny_tower() -> Tower:
    """The same weights each time; a critic owns its tower, so each needs its own."""
    return Tower(tiny_clip(), (0.5, 0.4, 0.3), (0.2, 0.3, 0.5))


def pictures(n: int, size: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))
