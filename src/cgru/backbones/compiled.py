"""torch.compile for a model's denoiser, in place: the same weights, names and maths, in fewer and larger kernels.

In place (`nn.Module.compile`), so that edits, LoRA names and fingerprints see the network they know. The weights become
channels-last, which pays only here (eager it was slower on an H200). Each new shape of the input, and
a LoRA put on or taken off, costs another compilation of a minute or so: call it with batches of one size.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from cgru.backbones.base import Backbone, one_line

logger = logging.getLogger(__name__)


def compile_denoiser(
    backbone: Backbone, probe: Callable[[], object], *, backend: str | Callable[..., Any] = "inductor"
) -> float | None:
    """Compile the denoiser and return the seconds it took; None, after one warning, if it stays eager.

    Args:
        backbone: its denoiser is changed in place.
        probe: makes one call in the shape to come. torch compiles only then, so a failure shows here and not in a run.
        backend: as of torch.compile.
    """
    begun = time.perf_counter()
    denoiser: Any = backbone.denoiser  # torch's types leave memory_format out
    denoiser.to(memory_format=torch.channels_last)
    try:
        denoiser.compile(backend=backend, dynamic=False)
        probe()
    except Exception as error:  # no C++ compiler, no Triton, an operator it does not know: of almost any type
        logger.warning("torch.compile failed (%s); the denoiser runs as it is, slower", one_line(error))
        denoiser.to(memory_format=torch.contiguous_format)
        denoiser.compile(disable=True)
        return None
    return time.perf_counter() - begun
