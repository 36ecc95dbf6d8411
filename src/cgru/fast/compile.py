"""torch.compile for a model's networks, in place: the same weights, names and maths, in fewer and larger kernels.

In place (`nn.Module.compile`), so that edits, LoRA names and fingerprints see the same network. Weights become
channels-last, which pays off only when compiled (without, it was slower on an H200). Each new input shape, as well as
attaching or detaching a LoRA, costs another compilation of about a minute: call it with batches of one size.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from cgru.backbones.base import Backbone, one_line
from cgru.fast.groupnorm import ChannelGroupNorm, use_channel_norms

logger = logging.getLogger(__name__)

Backend = str | Callable[..., Any]
LEAST_MAP = {Transformer2DModel: 32, ResnetBlock2D: 1, ChannelGroupNorm: 4}
"""Module types that are compiled on their own, and how many times smaller than the largest map theirs may be. This
covers nearly all of a UNet's work. Each block shape costs 6 to 12 seconds of compilation, so residual blocks on smaller
maps, each with its own shape, are left alone except for their GroupNorms: without compilation those copy channels-last
maps back and forth. A norm costs 2 or 3 seconds, too much for a shape that occurs once. The smallest maps contribute
too little."""
INDUCTOR = {"triton.autotune_pointwise": False, "deterministic": True}
"""By default Inductor compiles several variants of each kernel and times them on the device: the first option turns
this off for elementwise kernels, the second for reductions. With one variant each, an H200 was ready in little more
than half the time and ran as fast (docs/lab.md). It also means that a resumed run uses the kernels it started with,
where timing might select others, which round differently."""
GRAPHS = 256
"""Limit of torch's cache of graphs, which blocks share; the default is 8, but a UNet has about 20 block shapes."""


def compile_denoiser(backbone: Backbone, probe: Callable[[], object], *, backend: Backend = "inductor") -> float | None:
    """Compile the whole denoiser and return the seconds it took; None, after a warning, if compilation failed.

    Args:
        backbone: its denoiser is changed in place.
        probe: makes one call with the shapes to come. torch compiles on that call, so failures show here, not in a run.
        backend: backend of torch.compile.
    """
    return compile_network(backbone.denoiser, probe, what="the denoiser", backend=backend)


def compile_network(
    network: nn.Module,
    probe: Callable[[], object],
    *,
    what: str,
    glimpse: Callable[[], object] | None = None,
    backend: Backend = "inductor",
    together: Callable[[Callable[[], str | None]], str | None] = lambda work: work(),
) -> float | None:
    """Like `compile_denoiser`, for any network; `what` names it in the warning.

    With `glimpse`, a call on one sample, only the network's blocks with large maps are compiled; a network without such
    blocks is compiled as a whole. `together` compiles on every rank and returns the first failure reason, or None: with
    several processes all compile or none does, because compiled and eager networks round differently.
    """
    begun, done = time.perf_counter(), list[nn.Module]()

    def failure() -> str | None:
        try:
            _compile(network, glimpse, backend, done)
            with torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=4 * GRAPHS):
                probe()
        except torch.OutOfMemoryError:
            raise  # not a failure of the compiler
        except Exception as error:  # no C++ compiler, no Triton, an unsupported operator: nearly any type
            return one_line(error)
        return None

    reason = together(failure)
    if reason is None:
        return time.perf_counter() - begun
    logger.warning("torch.compile failed (%s); %s runs without compilation, slower", reason, what)
    _lay_out(network, torch.contiguous_format)
    for part in done:
        part.compile(disable=True)
    return None


def _compile(network: nn.Module, glimpse: Callable[[], object] | None, backend: Backend, done: list[nn.Module]) -> None:
    """Mark the network, or blocks of it, for compilation on the next call; appends the marked parts to `done`."""
    use_channel_norms(network)
    # An option that this torch version lacks is no reason to run without compilation.
    known = {name: value for name, value in INDUCTOR.items() if name in torch._inductor.list_options()}
    options = known if backend == "inductor" else None
    parts = (_regions(network, glimpse) if glimpse else []) or [network]
    _lay_out(network, torch.channels_last)
    for part in parts:
        part.compile(backend=backend, dynamic=False, options=options)
        done.append(part)


def _lay_out(network: Any, memory: torch.memory_format) -> None:  # noqa: ANN401 - torch's types leave the format out
    network.to(memory_format=memory)


def _regions(network: nn.Module, glimpse: Callable[[], object]) -> list[nn.Module]:
    """Return the blocks worth a graph, and the GroupNorms outside them that can share one."""
    shapes: dict[nn.Module, torch.Size] = {}

    def look(part: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        shapes[part] = inputs[0].shape

    hooks = [part.register_forward_hook(look) for part in network.modules() if type(part) in LEAST_MAP]
    try:
        glimpse()
    finally:
        for hook in hooks:
            hook.remove()
    areas = {part: shape[2:].numel() for part, shape in shapes.items()}
    largest = max(areas.values(), default=0)
    large = [part for part, area in areas.items() if area * LEAST_MAP[type(part)] >= largest]
    blocks = [part for part in large if not isinstance(part, ChannelGroupNorm)]
    inside = {part for block in blocks for part in block.modules() if part is not block}
    norms = [part for part in large if isinstance(part, ChannelGroupNorm) and part not in inside]
    kinds = {norm: (shapes[norm], norm.num_groups, norm.eps) for norm in norms}
    uses = Counter(kinds.values())
    return [block for block in blocks if block not in inside] + [norm for norm in norms if uses[kinds[norm]] > 1]
