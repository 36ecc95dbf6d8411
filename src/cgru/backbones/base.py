"""The interface of a text-to-image model for the rest of the package, and classifier-free guidance.

`Backbone` is structural: an adapter needs no base class. Optional parts have small protocols of their own
(`HasTextEncoders`, `HasTextLimit`, `SavesMemory`, and `whitebox.HasWhiteBox`); code that needs one reports it if it is
missing. Latents are float32, scaled as the denoiser sees them. Images are float32 in [0, 1], n×3×h×w, or n×1×h×w for a
model that draws in grey. Device and dtype are chosen only here.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cgru import distributed
from cgru.backbones.offload import Parking
from cgru.catalog import unknown
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.trajectory import Conditioning

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Denoise = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(x, time, the conditioning's tensors) -> prediction, without guidance."""


@runtime_checkable
class Backbone(Protocol):
    """A text-to-image diffusion model: the policy's network, its sampler and its image space."""

    @property
    def name(self) -> str:
        """What it was loaded from."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch; (c, h, w) for pictures."""

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
        """The precision of the networks; latents and images are always float32."""

    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts, and the empty prompt for guidance."""

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the denoiser's output at x (n, *latent_shape) and time (n,), guided, float32; differentiable."""

    def kernel(self, steps: int, *, eta: float, noisy_steps: int | None = None) -> ReverseKernel:
        """Return the reverse kernel for a number of steps; eta is its noise, 0 to 1, in the first `noisy_steps`."""

    def decode(self, x: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn latents into images; differentiable. `batch_size` bounds memory."""

    def encode(self, images: Tensor, *, batch_size: int | None = None) -> Tensor:
        """Turn images into latents (the posterior's mean)."""


@runtime_checkable
class HasTextEncoders(Protocol):
    """A backbone whose text encoders can also be edited."""

    @property
    def text_encoders(self) -> Mapping[str, nn.Module]:
        """The text encoders by the name of the pipeline's component: text_encoder, text_encoder_2, ..."""


@runtime_checkable
class HasTextLimit(Protocol):
    """A backbone with a token limit; longer prompts are refused where pictures must show all of the prompt."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a prompt that it reads, start and end included."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has, start and end included."""


@runtime_checkable
class SavesMemory(Protocol):
    """A backbone that has a low-memory mode (`cgru.fast.low_memory`)."""

    def saving_memory(self, parking: Parking) -> Backbone:
        """The model with gradient checkpointing, in place, and with idle text encoders and decoder moved to the CPU."""


@runtime_checkable
class Wrapper(Protocol):
    """A backbone that wraps another one, which has the networks."""

    @property
    def inner(self) -> Backbone:
        """The other one."""


def unwrapped(backbone: Backbone) -> Backbone:
    """The innermost backbone: the one to ask for an optional part, such as `text_encoders`."""
    while isinstance(backbone, Wrapper) and isinstance(backbone.inner, Backbone):
        backbone = backbone.inner
    return backbone


@runtime_checkable
class HasClasses(Protocol):
    """A backbone that reads no text: its prompts are the names of its classes, or empty for no class."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Every prompt that it knows."""


def classes_of(backbone: Backbone) -> tuple[str, ...]:
    """The only prompts that a backbone accepts; empty if a prompt may be any text."""
    own = unwrapped(backbone)
    return tuple(own.classes) if isinstance(own, HasClasses) else ()


def networks_of(backbone: Backbone) -> dict[str, nn.Module]:
    """The networks that an edit may change, by role: "denoiser", and the text encoders under their own names."""
    own = unwrapped(backbone)
    others = own.text_encoders if isinstance(own, HasTextEncoders) else {}
    return {"denoiser": own.denoiser, **others}


def guided(denoise: Denoise, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
    """Apply classifier-free guidance: e(∅) + guidance · (e(c) - e(∅)), both passes in one batch, combined in float32.

    Guidance of at most 1 is the conditional prediction alone, as in diffusers, at half the cost.
    """
    if guidance <= 1:
        return denoise(x, time, cond.tensors).float()
    if not cond.unconditional:
        raise ValueError(
            f"guidance is {guidance:g}, but this model has nothing to be guided away from (no unconditional tensors); "
            "allowed: at most 1. Set sampling.guidance=1, or --guidance 1."
        )
    empty = cond.empty.tensors
    tensors = {name: torch.cat([empty[name], given]) for name, given in cond.tensors.items()}
    both = denoise(torch.cat([x, x]), torch.cat([time, time]), tensors).float()
    unconditional, conditional = both.chunk(2)
    return unconditional + guidance * (conditional - unconditional)


def as_rgb(images: Tensor) -> Tensor:
    """Pictures (n, c, h, w) with three channels, for networks and files that need them; grey is repeated."""
    channels = images.shape[1]
    if channels not in (1, 3):
        raise ValueError(
            f"pictures of {channels} channels; allowed: 1 (grey) or 3 (RGB). Correct the model's `decode`."
        )
    return images if channels == 3 else images.expand(-1, 3, *images.shape[2:])


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype for `fp32`, `bf16` or `fp16`."""
    names = {value: name for name, value in DTYPES.items()}
    given = names.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    if given not in DTYPES:
        raise ValueError(unknown("dtype", given, DTYPES, "Use fp32 unless memory is short."))
    return DTYPES[given]


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device to run on; `auto` takes a CUDA device if there is one (among processes its own), else the CPU.

    With several processes, `cuda` with or without a number is the process's own device, since processes that share a
    device would only slow each other down.
    """
    own = distributed.device()
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
    """Compute in true float32: by default convolutions on CUDA round to TF32, which alone moves a ratio by 1e-3."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def one_line(error: BaseException) -> str:
    """A library's error message as part of ours: one line, at most 200 characters.

    Advice to unpickle a whole file or to run a model's own code is removed, because both would run a stranger's code.
    """
    if "weights_only" in str(error):
        return "a pickle with more in it than tensors, which is never loaded"
    if "trust_remote_code" in str(error):
        return "it asks for Python code of its own, which is never run"
    return textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__


def _devices() -> list[str]:
    cuda = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if torch.cuda.is_available() else []
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
