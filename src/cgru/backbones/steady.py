"""A backbone whose networks see one shape and one graph only: what a policy in bf16 needs, and a compiled one.

How a network rounds depends on the shape of its input, in bf16 by enough that the ratio right after collection would
not be 1. A compiled network is moreover a set of graphs, one for each shape, and one with and one without gradients;
each costs a compilation and rounds in its own way. So every call is cut into parts of one size, the last one filled
up, and compiled rollouts go through the graph of the updates (what that keeps for a backward pass is dropped at once):
the same kernels on the same shapes. What still depends on a sample's place in its part, `placeless` takes away, if the
part is a power of two (`pipeline.sizes`).
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

from cgru import processes
from cgru.backbones.base import Backbone
from cgru.backbones.compiled import Backend, compile_network
from cgru.backbones.placeless import make_placeless
from cgru.backbones.subpixel import use_subpixels
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Conditioning

logger = logging.getLogger(__name__)

AT_ONCE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention without cuDNN's, which plans each new shape: on an H200 4.6 seconds for shapes that come only once."""


@dataclass(frozen=True, eq=False)
class OneShape:
    """A `Backbone` around another; results do not depend on how many samples a call has."""

    inner: Backbone
    batch: int
    """Samples per call of the denoiser; guidance doubles them."""
    decode_batch: int
    """Latents per call of the decoder."""
    one_graph: bool = False
    """Predict as if for an update also where no gradient is asked for: one graph of a compiled network serves both."""
    compile_seconds: Mapping[str, float] = field(default_factory=dict)
    """What compiling took, by network; empty where nothing is compiled."""

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self.inner.name

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""
        return self.inner.latent_shape

    @property
    def denoiser(self) -> nn.Module:
        """What policies and edits touch."""
        return self.inner.denoiser

    @property
    def decoder(self) -> nn.Module:
        """The network that draws images from latents."""
        return self.inner.decoder

    @property
    def device(self) -> torch.device:
        """Where all parts live."""
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision its networks run in."""
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
                # Blocks before the first LoRA have a gradient, too: one more graph would cost more than their backward.
                states = states.detach().requires_grad_() if self.one_graph else states
                part = self.inner.predict(states, times, texts, guidance=guidance)
            found.append((part if is_wanted else part.detach())[: len(x[some])])
        return torch.cat(found) if len(found) > 1 else found[0]

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> ReverseKernel:
        """Return the reverse kernel for a number of steps."""
        return self.inner.kernel(steps, eta=eta, noisy_steps=noisy_steps)

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; parts have one size, whatever `batch_size` says."""
        parts = (x[some] for some in _parts(len(x), self.decode_batch))
        return torch.cat([self.inner.decode(_filled(part, self.decode_batch))[: len(part)] for part in parts])

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents (the posterior's mean)."""
        return self.inner.encode(images, batch_size=batch_size)


def steady_backbone(backbone: Backbone, *, batch: int, decode_batch: int) -> OneShape:
    """The backbone with predictions whose bits depend on neither the number of samples in a call nor their order.

    Args:
        backbone: its denoiser's convolutions are replaced in place (`placeless`).
        batch: samples per call of the denoiser: the micro-batch of the updates, in half precision a power of two.
        decode_batch: latents per call of the decoder.
    """
    make_placeless(backbone.denoiser)
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
    """The backbone with denoiser and decoder compiled, LoRA and all; what fails to compile stays as it is.

    Among processes all must call it: what fails in one stays as it is in all.

    Args:
        backbone: its networks are changed in place; put the LoRA on first.
        batch: samples per call of the denoiser: the micro-batch of the updates.
        decode_batch: latents per call of the decoder.
        guidance: of the run; above 1 it doubles the denoiser's batch.
        shrink: above 1, the decoder is compiled for latents so many times smaller, the critic's: nearly all it gets.
        regional: compile the denoiser's blocks, of which many are alike, and not the whole: much sooner ready.
        backend: as of torch.compile.
    """
    plain = steady_backbone(backbone, batch=batch, decode_batch=decode_batch)
    steady = replace(plain, one_graph=True)
    x, time, cond = processes.alike(lambda: _one_sample(backbone))

    def update() -> None:
        with torch.enable_grad():
            prediction = steady.predict(x, time, cond, guidance=guidance)
            if prediction.requires_grad:  # not without a LoRA
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
    compiled = partial(compile_network, backend=backend, together=processes.first_found)
    seconds = compiled(backbone.denoiser, update, what="the denoiser", glimpse=blocks)
    if seconds is None:  # said so; the decoder would fail alike, and say so again
        return plain
    use_subpixels(backbone.decoder)
    more = compiled(backbone.decoder, decode, what="the decoder")
    logger.info("compiled the denoiser in %.0f s, the decoder %s", seconds, f"in {more:.0f} s" if more else "not")
    return replace(steady, compile_seconds={"denoiser": seconds, "decoder": more or 0.0})


def _one_sample(backbone: Backbone) -> tuple[Tensor, Tensor, Conditioning]:
    x = torch.zeros((1, *backbone.latent_shape), device=backbone.device)
    return x, torch.zeros(1, device=backbone.device, dtype=torch.long), backbone.encode_text([""])


@contextmanager
def no_recompiles() -> Iterator[None]:
    """What was compiled is used, and nothing else is compiled: an unforeseen shape runs as it is, slower."""
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
    shared = len(cond.unconditional) == 1
    unconditional = cond.unconditional if shared else _filled(cond.unconditional, size)
    return Conditioning(prompts, _filled(cond.embeddings, size), unconditional)
