"""A backbone whose networks see a single batch shape and graph, as a policy in bf16 or a compiled one requires.

How a network rounds depends on the shape of its input, in bf16 by enough that the ratio right after collection would
not be 1. A compiled network also has a separate graph for each shape, and for calls with and without gradients; each
graph costs a compilation and rounds differently. Every call is therefore split into parts of one size, the last one
padded, and compiled rollouts use the graph of the updates (whatever it stores for a backward pass is freed at once):
the same kernels on the same shapes. `batch_invariant` removes the remaining dependence on a sample's position in its
part, if the part size is a power of two (`cgru.rl.batch_size`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cgru import distributed
from cgru.backbones.base import Backbone
from cgru.fast.batch_invariant import make_batch_invariant
from cgru.fast.compile import Backend, compile_network
from cgru.fast.subpixel import use_subpixels
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Conditioning

logger = logging.getLogger(__name__)

AT_ONCE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends without cuDNN's, which plans for each new shape: 4.6 seconds on an H200 for one-off shapes."""


@dataclass(frozen=True, eq=False)
class OneShape:
    """Wraps a `Backbone`; its results do not depend on the number of samples in a call."""

    inner: Backbone
    batch: int
    """Samples per call of the denoiser; guidance doubles this."""
    decode_batch: int
    """Latents per call of the decoder."""
    one_graph: bool = False
    """Predict as in an update even when no gradient is needed, so that one graph of a compiled network serves both."""
    compile_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent compiling, by network; empty if nothing is compiled."""

    @property
    def name(self) -> str:
        """Return the source it was loaded from."""
        return self.inner.name

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch."""
        return self.inner.latent_shape

    @property
    def denoiser(self) -> nn.Module:
        """Return the network that policies and edits change."""
        return self.inner.denoiser

    @property
    def decoder(self) -> nn.Module:
        """Return the network that turns latents into images."""
        return self.inner.decoder

    @property
    def device(self) -> torch.device:
        """Return the device of all parts."""
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision its networks run in."""
        return self.inner.dtype

    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts, and the empty prompt for guidance."""
        return self.inner.encode_text(prompts)

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the denoiser's output, guidance applied, float32; differentiable in the denoiser's weights."""
        is_wanted, found = torch.is_grad_enabled(), []
        for some in _parts(len(x), self.batch):
            states, times = (_filled(rows[some], self.batch) for rows in (x, time))
            texts = _filled_text(cond[some], self.batch)
            with torch.set_grad_enabled(is_wanted or self.one_graph):
                # Inputs get a gradient so that blocks before the first LoRA need no graph of their own, which would
                # cost more than their backward pass.
                states = states.detach().requires_grad_() if self.one_graph else states
                part = self.inner.predict(states, times, texts, guidance=guidance)
            found.append((part if is_wanted else part.detach())[: len(x[some])])
        return torch.cat(found) if len(found) > 1 else found[0]

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> ReverseKernel:
        """Return the reverse kernel for a number of steps."""
        return self.inner.kernel(steps, eta=eta, noisy_steps=noisy_steps)

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images, in parts of a fixed size; `batch_size` is ignored."""
        parts = (x[some] for some in _parts(len(x), self.decode_batch))
        return torch.cat([self.inner.decode(_filled(part, self.decode_batch))[: len(part)] for part in parts])

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents (the posterior's mean)."""
        return self.inner.encode(images, batch_size=batch_size)


def steady_backbone(backbone: Backbone, *, batch: int, decode_batch: int) -> OneShape:
    """Return the backbone with predictions that do not depend on the number or order of the samples in a call.

    Args:
        backbone: its denoiser's convolutions are replaced in place (`batch_invariant`).
        batch: samples per call of the denoiser: the micro-batch of the updates, a power of two in half precision.
        decode_batch: latents per call of the decoder.
    """
    make_batch_invariant(backbone.denoiser)
    return OneShape(backbone, batch, decode_batch)


def compiled_backbone(
    backbone: Backbone,
    *,
    batch: int,
    decode_batch: int,
    guidance: float,
    shrink: int = 1,
    regional: bool = True,
    backend: Backend = "inductor",
) -> Backbone:
    """Return the backbone with denoiser (LoRA included) and decoder compiled; what fails to compile runs eagerly.

    With several processes, all must call it: if compilation fails in one, all run that network eagerly.

    Args:
        backbone: its networks are changed in place; attach the LoRA first.
        batch: samples per call of the denoiser: the micro-batch of the updates.
        decode_batch: latents per call of the decoder.
        guidance: the run's guidance; above 1 it doubles the denoiser's batch.
        shrink: if above 1, compile the decoder for latents this many times smaller, the critic's, which are most calls.
        regional: compile the denoiser's blocks, many of which are alike, instead of the whole; ready much sooner.
        backend: backend of torch.compile.
    """
    plain = steady_backbone(backbone, batch=batch, decode_batch=decode_batch)
    steady = replace(plain, one_graph=True)
    x, time, cond = distributed.alike(lambda: _one_sample(backbone))

    def update() -> None:
        with torch.enable_grad():
            prediction = steady.predict(x, time, cond, guidance=guidance)
            if prediction.requires_grad:  # False without a LoRA
                prediction.sum().backward()
        backbone.denoiser.zero_grad()

    @torch.no_grad()
    def glimpse() -> None:
        with sdpa_kernel(AT_ONCE):
            backbone.predict(x, time, cond, guidance=1.0)

    def decode() -> None:
        with torch.no_grad():
            steady.decode(x[..., ::shrink, ::shrink])

    blocks = glimpse if regional else None
    compiled = partial(compile_network, backend=backend, together=distributed.first_found)
    seconds = compiled(backbone.denoiser, update, what="the denoiser", glimpse=blocks)
    if seconds is None:  # the warning is out; the decoder would fail for the same reason and repeat it
        return plain
    use_subpixels(backbone.decoder)
    more = compiled(backbone.decoder, decode, what="the decoder")
    logger.info("compiled the denoiser in %.0f s, the decoder %s", seconds, f"in {more:.0f} s" if more else "not")
    return replace(steady, compile_seconds={"denoiser": seconds, "decoder": more or 0.0})


def _one_sample(backbone: Backbone) -> tuple[Tensor, Tensor, Conditioning]:
    x = torch.zeros((1, *backbone.latent_shape), device=backbone.device)
    return x, backbone.kernel(1, eta=0.0).timesteps.to(backbone.device), backbone.encode_text([""])


@contextmanager
def no_recompiles() -> Iterator[None]:
    """Use what has been compiled and compile nothing else: an unforeseen shape runs eagerly, slower."""
    with torch.compiler.set_stance("eager_on_recompile"):
        yield


def _parts(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]


def _filled(rows: Tensor, size: int) -> Tensor:
    missing = size - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def _filled_text(cond: Conditioning, size: int) -> Conditioning:
    if len(cond) == size:
        return cond
    prompts = (*cond.prompts, *[cond.prompts[-1]] * (size - len(cond)))
    tensors = {name: _filled(rows, size) for name, rows in cond.tensors.items()}
    # one row is shared, so it stays one
    unconditional = {k: rows if len(rows) == 1 else _filled(rows, size) for k, rows in cond.unconditional.items()}
    return Conditioning(prompts, tensors, unconditional)
