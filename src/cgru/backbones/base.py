"""What every text-to-image model offers to the rest of the package, and classifier-free guidance, which all share.

`Backbone` is structural: an adapter needs no base class. Latents are as the denoiser sees them (scaled), float32;
images are float32, [0, 1], n×3×h×w. Device and dtype are chosen here and nowhere else.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cgru import processes
from cgru.catalog import unknown
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Conditioning

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Denoise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, time, text embeddings) -> prediction, without guidance."""


@runtime_checkable
class Backbone(Protocol):
    """A text-to-image diffusion model: the policy's network, its sampler and its image space."""

    @property
    def name(self) -> str:
        """What it was loaded from."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent (c, h, w)."""

    @property
    def denoiser(self) -> nn.Module:
        """What policies and edits touch."""

    @property
    def decoder(self) -> nn.Module:
        """The network that draws images from latents."""

    @property
    def device(self) -> torch.device:
        """Where all parts live."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision its networks run in; latents and images are float32 all the same."""

    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts, and the empty prompt for guidance."""

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the denoiser's output at x (n, c, h, w) and time (n,), guidance applied, float32; differentiable."""

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> ReverseKernel:
        """Return the reverse kernel for a number of steps; eta is its noise, 0 to 1, in the first `noisy_steps`."""

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable. `batch_size` bounds memory."""

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents (the posterior's mean)."""


def guided(denoise: Denoise, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
    """Apply classifier-free guidance: e(∅) + guidance · (e(c) - e(∅)), both passes in one batch, combined in float32.

    Guidance of at most 1 is the conditional prediction alone, as in diffusers, at half the cost.
    """
    if guidance <= 1:
        return denoise(x, time, cond.embeddings).float()
    embeddings = torch.cat([cond.unconditional.expand_as(cond.embeddings), cond.embeddings])
    both = denoise(torch.cat([x, x]), torch.cat([time, time]), embeddings).float()
    unconditional, conditional = both.chunk(2)
    return unconditional + guidance * (conditional - unconditional)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype for `fp32`, `bf16` or `fp16`."""
    names = {value: name for name, value in DTYPES.items()}
    given = names.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    if given not in DTYPES:
        raise ValueError(unknown("dtype", given, DTYPES, "Use fp32 unless memory is short."))
    return DTYPES[given]


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device to run on; `auto` takes a CUDA device if there is one (among processes its own), else the CPU.

    Among processes `cuda`, with a number or not, is the process's own: several on one device would only be in each
    other's way.
    """
    own = processes.device()
    if own is not None and str(device).partition(":")[0] in ("auto", own.type):
        return own
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = _devices()
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise ValueError(unknown("device", str(device), ["auto", *available], "Use auto to let cgru choose.")) from None
    if str(picked) not in available:
        raise ValueError(
            f"device {str(device)!r} does not exist on this machine; available: auto, {', '.join(available)}. "
            "Use auto to let cgru choose."
        )
    return picked


@contextmanager
def exact_float32() -> Iterator[None]:
    """Float32 that is float32: on CUDA convolutions round to TF32 by default, which moves a ratio by 1e-3 at once."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def one_line(error: Exception) -> str:
    """A library's message, fit for the middle of ours: one line, 200 characters at most."""
    return textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__


def _devices() -> list[str]:
    cuda = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
