"""torch.compile for a model's networks, in place: the same weights, names and maths, in fewer and larger kernels.

In place (`nn.Module.compile`), so that edits, LoRA names and fingerprints see the network they know. The weights become
channels-last, which pays only here (eager it was slower on an H200). Each new shape of the input, and
a LoRA put on or taken off, costs another compilation of a minute or so: call it with batches of one size.
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
from cgru.backbones.groupnorm import ChannelGroupNorm, use_channel_norms

logger = logging.getLogger(__name__)

Backend = str | Callable[..., Any]
LEAST_MAP = {Transformer2DModel: 32, ResnetBlock2D: 1, ChannelGroupNorm: 4}
"""What is compiled by itself, and how many times smaller than the largest its map may be: nearly all of a UNet's work.
Each shape of a block costs 6 to 12 seconds of compilation, so residual blocks on smaller maps, each of a shape of its
own, are left alone but for their GroupNorms: those copy channels-last maps to and fro where they are not compiled. A
norm costs 2 or 3 seconds, too much of a start for shapes that only one has. The smallest maps hold too little."""
INDUCTOR = {"triton.autotune_pointwise": False, "deterministic": True}
"""Inductor would compile several forms of each kernel and time them on the device: elementwise ones but for the first
option, reductions but for the second. With one form of each an H200 was ready in little more than half the time and as
fast (docs/lab.md). A resumed run has the kernels it began with, too, where timing might choose others, which round
otherwise."""
GRAPHS = 256
"""Blocks share torch's cache of graphs, which holds 8 by default; a UNet has some 20 blocks that differ in shape."""


def compile_denoiser(backbone: Backbone, probe: Callable[[], object], *, backend: Backend = "inductor") -> float | None:
    """Compile the denoiser as a whole and return the seconds it took; None, after one warning, if it stays eager.

    Args:
        backbone: its denoiser is changed in place.
        probe: makes one call in the shape to come. torch compiles only then, so a failure shows here and not in a run.
        backend: as of torch.compile.
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
    """As `compile_denoiser`, for any network; `what` names it in the warning.

    With `glimpse`, a call on one sample, only blocks of the network are compiled: those that it shows to be large. A
    network without such blocks is compiled as a whole. `together` does the work, which ends in why it failed, and says
    why it failed in any process: among several, all are compiled or none, as the two round differently.
    """
    begun, done = time.perf_counter(), list[nn.Module]()

    def failure() -> str | None:
        try:
            _compile(network, glimpse, backend, done)
            with torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=4 * GRAPHS):
                probe()
        except torch.OutOfMemoryError:
            raise  # which has nothing to do with compiling
        except Exception as error:  # no C++ compiler, no Triton, an operator it does not know: of almost any type
            return one_line(error)
        return None

    reason = together(failure)
    if reason is None:
        return time.perf_counter() - begun
    logger.warning("torch.compile failed (%s); %s runs as it is, slower", reason, what)
    _lay_out(network, torch.contiguous_format)
    for part in done:
        part.compile(disable=True)
    return None


def _compile(network: nn.Module, glimpse: Callable[[], object] | None, backend: Backend, done: list[nn.Module]) -> None:
    """Have torch compile the network, or blocks of it, when next called; `done` learns which parts."""
    use_channel_norms(network)
    options = _known(INDUCTOR) if backend == "inductor" else None
    parts = (_regions(network, glimpse) if glimpse else []) or [network]
    _lay_out(network, torch.channels_last)
    for part in parts:
        part.compile(backend=backend, dynamic=False, options=options)
        done.append(part)


def _lay_out(network: Any, memory: torch.memory_format) -> None:  # noqa: ANN401 - torch's types leave the format out
    network.to(memory_format=memory)


def _known(options: dict[str, bool]) -> dict[str, bool]:
    """Those that this torch has: none of them is worth a run that is not compiled."""
    return {name: value for name, value in options.items() if name in torch._inductor.list_options()}


def _regions(network: nn.Module, glimpse: Callable[[], object]) -> list[nn.Module]:
    """The blocks worth a graph, and GroupNorms outside them that can share one."""
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
