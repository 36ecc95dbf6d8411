"""Batch sizes that fit this machine, and whether it needs the low-memory mode; found once and kept in the run.

On CUDA the cost of a pair is measured: one real forward and backward pass on one pair and on two give what is fixed and
what each adds. The arithmetic (`fitted`, `choose`) is apart from the measuring (`measured`). On a CPU memory is rarely
what is short, so sizes there are those that were fastest: Emoji Canvas on two cores, 32 to 64 samples a pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cgru import processes
from cgru.backbones.adapter import attach, detach
from cgru.backbones.base import Backbone, pick_device
from cgru.backbones.lean import low_memory
from cgru.config import RunConfig
from cgru.rl.problem import Sizes
from cgru.rl.room import clear_memory

logger = logging.getLogger(__name__)

GIB = 2**30
SHARE = 0.9
"""Of the free memory that is counted on: what is cut into pieces cannot all be used."""
ENOUGH = 4
"""Pairs at once under which the full-speed mode is none: a device is then better filled in the low-memory mode."""
LOW_TOTAL = 11 * GIB
"""What the low-memory mode takes of any device: a card of 12 GB less what its driver takes."""
LOW_DECODE = 8


@dataclass(frozen=True)
class Limits:
    """What fills the device, beyond which nothing was faster; and what is left free."""

    rollout: int
    update: int
    decode: int
    score: int
    reserve: int
    """Bytes for what is not there yet when costs are measured: reward, critic with its optimiser, kept states."""


SMALL = Limits(rollout=1024, update=512, decode=1024, score=1024, reserve=GIB // 2)
# 16 pairs of Stable Diffusion 1.5 are 32 samples with guidance, and take 36 GiB (findings.md §3). Decoding 64 at 512
# pixels has layers beyond 32-bit indices. CLIP ViT-B/32 as reward and as critic with AdamW is 1.8 GiB.
LARGE = Limits(rollout=32, update=16, decode=16, score=256, reserve=3 * GIB)


@dataclass(frozen=True)
class Line:
    """Bytes that n at once take: fixed + each · n."""

    fixed: int
    each: int


TOO_MUCH = Line(2**62, 1)
"""The cost of what did not fit even alone."""


@dataclass(frozen=True)
class Costs:
    """What was measured, in bytes."""

    free: int
    used: int
    """By this process, the model above all."""
    update: Line
    decode: Line


def sized(config: RunConfig, backbone: Backbone, sizes: Sizes | None = None) -> tuple[Backbone, Sizes]:
    """The model in the mode that fits, changed in place, and its sizes; `sizes` are those of an earlier start."""
    sizes = sizes or fitting_sizes(config, backbone)
    return (low_memory(backbone) if sizes.low_memory else backbone), sizes


def machine(config: RunConfig) -> dict[str, Any]:
    """What sizes are found for: on another device they may not fit, and among other processes they fill none."""
    device = pick_device(config.device)
    name = device.type
    if name == "cuda":
        card = torch.cuda.get_device_properties(device)
        name = f"{card.name}, {card.total_memory / GIB:.0f} GiB"
    return {"device": name, "processes": processes.count()}


def describe_sizes(sizes: Sizes) -> str:
    """The sizes in words, for the log."""
    mode = "low-memory" if sizes.low_memory else "full-speed"
    return f"{sizes.rollout} trajectories, {sizes.update} pairs and {sizes.decode} latents at once, {mode} mode"


def fitting_sizes(config: RunConfig, backbone: Backbone) -> Sizes:
    """Batch sizes for this machine; on CUDA a model that needs the low-memory mode has its checkpointing on after."""
    is_small = torch.Size(backbone.latent_shape).numel() <= 4096
    if backbone.device.type != "cuda":
        rollout, update, decode, score = (64, 64, 64, 256) if is_small else (2, 1, 1, 32)
        rollout, update = _batches(config, rollout, update)
        return Sizes(rollout, update, decode, score, config.memory == "low")
    meter = CudaMeter(backbone.device)
    return choose(
        config,
        SMALL if is_small else LARGE,
        fast=lambda: measured(config, backbone, meter),
        low=lambda: measured(config, low_memory(backbone), meter),
    )


def fitted(free: int, fixed: int, each: int, most: int) -> int:
    """How many fit into `free` bytes, at most `most`: a multiple of 4, or 2, or 1; 0 where not even one does."""
    count = min(most, (free - fixed) // each)
    return count - count % 4 if count >= 4 else max(0, min(count, 2))


def choose(config: RunConfig, limits: Limits, *, fast: Callable[[], Costs], low: Callable[[], Costs]) -> Sizes:
    """Sizes by what is measured in the full-speed mode and, if that is not taken, in the other; says which in one line.

    Args:
        config: its `memory` and `policy.micro_batch` count.
        limits: of the kind of model.
        fast: measures the full-speed mode.
        low: measures the low-memory mode, after which the model stays in it.
    """
    if config.memory != "low":
        found, pairs = _sizes(config, limits, fast(), is_low=False)
        if config.memory == "fast" or pairs >= min(config.policy.micro_batch or ENOUGH, limits.update):
            return found
    return _sizes(config, limits, low(), is_low=True)[0]


def _sizes(config: RunConfig, limits: Limits, costs: Costs, *, is_low: bool) -> tuple[Sizes, int]:
    # The sizes, and how many pairs do fit: a micro-batch that was asked for is taken whether it fits or not.
    budget = int(SHARE * (_free(costs, is_low) - limits.reserve))
    pairs = fitted(budget, costs.update.fixed, costs.update.each, limits.update)
    most_decoded = min(limits.decode, LOW_DECODE) if is_low else limits.decode
    decode = fitted(budget, costs.decode.fixed, costs.decode.each, most_decoded)
    rollout, update = _batches(config, min(limits.rollout, 2 * max(1, pairs)), max(1, pairs))
    logger.info(
        "memory: %s mode, %d pairs per update and %d latents per decode (a pair takes %.2g GiB, %.3g GiB are free)",
        "low-memory" if is_low else "full-speed",
        update,
        max(1, decode),
        costs.update.each / GIB,
        costs.free / GIB,
    )
    return Sizes(rollout, update, max(1, decode), limits.score, is_low), pairs


def _batches(config: RunConfig, rollout: int, update: int) -> tuple[int, int]:
    """Trajectories sampled and pairs updated together, given what fits of each.

    In half precision, or compiled, both go through networks of one shape (`backbones.steady`), which fill up what is
    left over. In half precision it is a power of two: with 10, 12 and 14 pairs a sample's bits were seen to depend on
    its place in the batch on an H200, with 1 to 6, 8 and 16 not. In float32 it is equal parts of the trajectories.
    """
    if config.dtype == "fp32" and not config.compile:
        return rollout, config.policy.micro_batch or update
    own = math.ceil(config.policy.trajectories / processes.count())
    if config.dtype == "fp32":
        part = math.ceil(own / math.ceil(own / update))
    else:
        # The largest that fits, and no more than is needed: what rollouts fill up costs less than slower updates.
        part = min(1 << (own - 1).bit_length(), 1 << (update.bit_length() - 1))
    # Among many processes each has few trajectories but still many pairs, and very small batches are slow.
    size = config.policy.micro_batch or max(part, min(ENOUGH, update))
    return size, size


def _free(costs: Costs, is_low: bool) -> int:
    return min(costs.free, LOW_TOTAL - costs.used) if is_low else costs.free


class Meter(Protocol):
    """Bytes of a device's memory."""

    def free(self) -> int:
        """Left for anyone."""

    def used(self) -> int:
        """Held by tensors of this process."""

    def peak(self, work: Callable[[], object]) -> int:
        """Held at most in the course of some work, beyond what is held before."""


@dataclass(frozen=True)
class CudaMeter:
    """What torch's allocator says of a CUDA device."""

    device: torch.device

    def free(self) -> int:
        """Left for anyone."""
        clear_memory()
        return torch.cuda.mem_get_info(self.device)[0]

    def used(self) -> int:
        """Held by tensors of this process."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self, work: Callable[[], object]) -> int:
        """Held at most in the course of some work, beyond what is held before."""
        clear_memory()
        before = self.used()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before


def measured(config: RunConfig, backbone: Backbone, meter: Meter) -> Costs:
    """What updates and decodes take; the model has a LoRA on meanwhile."""
    policy = config.policy
    attach(backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets=policy.targets, seed=0)
    try:
        update = _line(meter, lambda n: _update(backbone, n, config.sampling.guidance))
    finally:
        detach(backbone.denoiser)
    decode = _line(meter, lambda n: _decode(backbone, n))
    return Costs(meter.free(), meter.used(), update, decode)


def _line(meter: Meter, work: Callable[[int], object]) -> Line:
    try:
        work(1)  # libraries take their workspace in the first call and keep it
        one, two = meter.peak(lambda: work(1)), meter.peak(lambda: work(2))
    except torch.OutOfMemoryError:
        return TOO_MUCH
    each = max(1, two - one)
    return Line(max(0, one - each), each)


def _update(backbone: Backbone, n: int, guidance: float) -> None:
    times = torch.full((n,), 500, device=backbone.device)
    with torch.enable_grad():
        found = backbone.predict(_latents(backbone, n), times, backbone.encode_text([""] * n), guidance=guidance)
        found.square().mean().backward()
    backbone.denoiser.zero_grad()


@torch.no_grad()
def _decode(backbone: Backbone, n: int) -> None:
    backbone.decode(_latents(backbone, n))


def _latents(backbone: Backbone, n: int) -> Tensor:
    return torch.zeros((n, *backbone.latent_shape), device=backbone.device)
