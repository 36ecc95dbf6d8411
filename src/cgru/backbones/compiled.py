"""torch.compile for a model's denoiser, in place: the same weights, names and maths, in fewer and larger kernels.

In place (`nn.Module.compile`), so that edits, LoRA names and fingerprints see the network they know. The weights become
channels-last, which pays only here (eager it was slower on an H200). Each new shape of the input, and
a LoRA put on or taken off, costs another compilation of a minute or so: call it with batches of one size.
"""

import logging
import time
from collections.abc import Callable

import torch

from cgru.backbones.base import Backbone, one_line

logger = logging.getLogger(__name__)


def compile_denoiser(backbone: Backbone, probe: Callable[[], object], *, backend: str = "inductor") -> float | None:
    """Compile the denoiser and return the seconds it took; None, after one warning, if it stays eager.

    Args:
        backbone: its denoiser is changed in place.
        probe: makes one call in the shape to come. torch compiles only then, so a failure shows here and not in a run.
        backend: torch.compile's; "eager" only traces, for tests.
    """
    begun = time.perf_counter()
    backbone.denoiser.to(memory_format=torch.channels_last)
    backbone.denoiser.compile(backend=backend, dynamic=False)
    try:
        probe()
    except Exception as error:  # no C++ compiler, no Triton, an operator it does not know: of almost any type
        logger.warning("torch.compile failed (%s); the denoiser runs as it is, slower", one_line(error))
        backbone.denoiser.to(memory_format=torch.contiguous_format)
        backbone.denoiser.compile(disable=True)
        return None
    return time.perf_counter() - begun
