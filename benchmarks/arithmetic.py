"""What an epoch costs in arithmetic, counted, and what the device can do at most: parts of benchmarks/epoch.py."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from loops import Clock
from paper_loop import fast_settings, settings
from sd15 import clip_tflop, forward_tflop, random_clip_b32, random_sd15

from cgru.backbones.base import parse_dtype, pick_device
from cgru.config import RLConfig
from cgru.critic.views import SHRINKS


def counted(options: argparse.Namespace) -> dict[str, Any]:
    """TFLOP of one sample in each network, and of each piece of the epoch, exact and `fast`."""
    model = random_sd15(pick_device(options.device), parse_dtype(options.dtype), tiny=options.tiny)
    one = {**forward_tflop(model), "clip": clip_tflop(random_clip_b32(0, tiny=options.tiny))}
    config = settings(options)
    return {"of_one": one, "pieces": _pieces(config, one), "pieces_fast": _pieces(fast_settings(config), one)}


def _pieces(config: RLConfig, one: dict[str, float]) -> dict[str, float]:
    n, steps, share = config.policy.trajectories, config.sampling.steps, config.policy.step_fraction
    looked_at = n * steps * (1.0 if config.policy.step_choice == "each" else share)
    sampled = n * steps * (2 if config.sampling.guidance > 1 else 1) * one["denoiser"]
    fitted = config.critic.online_updates * min(config.critic.batch, looked_at)
    return {
        "sampling": sampled,
        "decoding": (n + looked_at / SHRINKS[config.critic.decode] ** 2) * one["decoder"],
        "reward": n * one["clip"],
        "critic": (looked_at + 3 * fitted) * one["clip"],
        "policy update": 2 * sampled * share,
    }


def ceiling(options: argparse.Namespace) -> dict[str, Any]:
    """TFLOP/s of a large matrix product of random numbers, the best of three lots of ten."""
    device, dtype = pick_device(options.device), parse_dtype(options.dtype)
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    clock, lots = Clock(device), ("warm-up", "1", "2", "3")
    for lot in lots:
        with clock.part(lot):
            for _ in range(10):
                a @ b
    best = min(clock.spent[lot].seconds for lot in lots[1:])
    return {"side": side, "dtype": options.dtype, "tflops": 10 * 2 * side**3 / best / 1e12}
