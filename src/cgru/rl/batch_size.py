"""Find batch sizes for this machine and whether it needs the low-memory mode; done once and stored in the run.

On CUDA the cost of a pair is measured: one real forward and backward pass with one pair and one with two give the fixed
and the per-pair cost. The arithmetic (`fitted`, `choose`) is separate from the measurement (`measured`). On a CPU
memory is rarely the limit, so the sizes there are the fastest found: 32 to 64 samples per pass for Emoji Canvas on two
cores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cgru import distributed
from cgru.backbones.base import Backbone, pick_device
from cgru.config import RLConfig
from cgru.fast.low_memory import low_memory
from cgru.lora.train import attach, detach
from cgru.rl.oom_retry import clear_memory
from cgru.rl.state import Sizes

logger = logging.getLogger(__name__)

GIB = 2**30
SHARE = 0.9
"""Share of the free memory to plan with; fragmentation makes the rest unusable."""
ENOUGH = 4
"""If fewer pairs than this fit in the full-speed mode, the low-memory mode uses the device better."""
LOW_TOTAL = 11 * GIB
"""Most memory that the low-memory mode uses on any device: a 12 GB card minus its driver's share."""
LOW_DECODE = 8


@dataclass(frozen=True)
class Limits:
    """Largest sizes to use, beyond which nothing got faster, and the memory to leave free."""

    rollout: int
    update: int
    decode: int
    score: int
    reserve: int
    """Bytes for what is not allocated yet during the measurement: reward, critic and its optimiser, stored states."""


SMALL = Limits(rollout=1024, update=512, decode=1024, score=1024, reserve=GIB // 2)
# 16 pairs of Stable Diffusion 1.5 are 32 samples with guidance and take 36 GiB (measured on H200). Decoding 64 at 512
# pixels has layers beyond 32-bit indexing. CLIP ViT-B/32 as reward and as critic with AdamW takes 1.8 GiB.
LARGE = Limits(rollout=32, update=16, decode=16, score=256, reserve=3 * GIB)


@dataclass(frozen=True)
class Line:
    """Bytes for n items at once: fixed + each · n."""

    fixed: int
    each: int


TOO_MUCH = Line(2**62, 1)
"""Cost of work that did not fit even for one item."""


@dataclass(frozen=True)
class Costs:
    """Measured memory, in bytes."""

    free: int
    used: int
    """Held by this process, mostly by the model."""
    update: Line
    decode: Line


def sized(config: RLConfig, backbone: Backbone, sizes: Sizes | None = None) -> tuple[Backbone, Sizes]:
    """Return the model, switched to the low-memory mode in place if needed, and its sizes (given on resume)."""
    sizes = sizes or fitting_sizes(config, backbone)
    return (low_memory(backbone) if sizes.low_memory else backbone), sizes


def machine(config: RLConfig) -> dict[str, Any]:
    """Describe what sizes depend on: they are measured again on another device or with another number of processes."""
    device = pick_device(config.device)
    name = device.type
    if name == "cuda":
        card = torch.cuda.get_device_properties(device)
        name = f"{card.name}, {card.total_memory / GIB:.0f} GiB"
    return {"device": name, "processes": distributed.count()}


def describe_sizes(sizes: Sizes) -> str:
    """Return the sizes as text for the log."""
    mode = "low-memory" if sizes.low_memory else "full-speed"
    return f"{sizes.rollout} trajectories, {sizes.update} pairs and {sizes.decode} latents at once, {mode} mode"


def fitting_sizes(config: RLConfig, backbone: Backbone) -> Sizes:
    """Return batch sizes for this machine; a CUDA model that needs the low-memory mode is left in that mode."""
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
    """Return how many items fit into `free` bytes, at most `most`: a multiple of 4, or 2, 1, or 0 if none fits."""
    # n = min(most, (free - fixed) / each), rounded down to a multiple of 4
    count = min(most, (free - fixed) // each)
    return count - count % 4 if count >= 4 else max(0, min(count, 2))


def choose(config: RLConfig, limits: Limits, *, fast: Callable[[], Costs], low: Callable[[], Costs]) -> Sizes:
    """Return sizes for the full-speed mode if enough fits, else for the low-memory mode; log the choice.

    Args:
        config: only `memory` and `policy.micro_batch` are read.
        limits: limits for this kind of model.
        fast: measures the full-speed mode.
        low: measures the low-memory mode and leaves the model in it.
    """
    if config.memory != "low":
        found, pairs = _sizes(config, limits, fast(), is_low=False)
        if config.memory == "fast" or pairs >= min(config.policy.micro_batch or ENOUGH, limits.update):
            return found
    return _sizes(config, limits, low(), is_low=True)[0]


def _sizes(config: RLConfig, limits: Limits, costs: Costs, *, is_low: bool) -> tuple[Sizes, int]:
    # Returns the sizes and the number of pairs that fit; a configured micro-batch is used whether it fits or not.
    free = min(costs.free, LOW_TOTAL - costs.used) if is_low else costs.free
    budget = int(SHARE * (free - limits.reserve))
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


def _batches(config: RLConfig, rollout: int, update: int) -> tuple[int, int]:
    """Return how many trajectories to sample and pairs to update together, given how many of each fit.

    In half precision, or compiled, both run at one fixed batch shape (`cgru.fast.fixed_batch`), which pads smaller
    batches. In half precision the size is a power of two: on an H200, with 10, 12 and 14 pairs, a sample's bits
    depended on its place in the batch; with 1 to 6, 8 and 16 they did not. In float32 it splits the trajectories
    evenly.
    """
    if config.dtype == "fp32" and not config.compile:
        return rollout, config.policy.micro_batch or update
    own = math.ceil(config.policy.trajectories / distributed.count())
    if config.dtype == "fp32":
        part = math.ceil(own / math.ceil(own / update))
    else:
        # The largest power of two that fits, but not above what is needed: padding costs less than slow updates.
        part = min(1 << (own - 1).bit_length(), 1 << (update.bit_length() - 1))
    # With many processes each has few trajectories but still many pairs, and very small batches are slow.
    size = config.policy.micro_batch or max(part, min(ENOUGH, update))
    return size, size


@runtime_checkable
class Meter(Protocol):
    """Memory of one device, in bytes."""

    def free(self) -> int:
        """Return the memory free for any process."""

    def used(self) -> int:
        """Return the memory held by tensors of this process."""

    def peak(self, work: Callable[[], object]) -> int:
        """Return the peak memory during `work`, minus what was held before."""


@dataclass(frozen=True)
class CudaMeter:
    """Memory of a CUDA device as reported by torch's allocator."""

    device: torch.device

    def free(self) -> int:
        """Return the memory free for any process."""
        clear_memory()
        return torch.cuda.mem_get_info(self.device)[0]

    def used(self) -> int:
        """Return the memory held by tensors of this process."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self, work: Callable[[], object]) -> int:
        """Return the peak memory during `work`, minus what was held before."""
        clear_memory()
        before = self.used()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before


def measured(config: RLConfig, backbone: Backbone, meter: Meter) -> Costs:
    """Measure the memory of updates and decodes; a LoRA is attached for the update."""
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
        work(1)  # a library allocates its workspace in the first call and keeps it
        one, two = meter.peak(lambda: work(1)), meter.peak(lambda: work(2))
    except torch.OutOfMemoryError:
        return TOO_MUCH
    # bytes(n) = fixed + each · n, from n = 1 and n = 2
    each = max(1, two - one)
    return Line(max(0, one - each), each)


def _update(backbone: Backbone, n: int, guidance: float) -> None:
    times = backbone.kernel(1, eta=0.0).timesteps.to(backbone.device).expand(n)
    with torch.enable_grad():
        found = backbone.predict(_latents(backbone, n), times, backbone.encode_text([""] * n), guidance=guidance)
        found.square().mean().backward()
    backbone.denoiser.zero_grad()


@torch.no_grad()
def _decode(backbone: Backbone, n: int) -> None:
    backbone.decode(_latents(backbone, n))


def _latents(backbone: Backbone, n: int) -> Tensor:
    return torch.zeros((n, *backbone.latent_shape), device=backbone.device)
