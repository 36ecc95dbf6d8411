"""Recover from CUDA OOM: halve the batch once and retry.

Only work that changes nothing until it is complete is retried: rollouts, decoding, values, the gradient of an update.
Among processes an error in one is raised in all (`distributed.alike`), so all of them halve together.

    for attempt in memory.attempts("rollouts"):
        with attempt as problem:
            trajectory = collect(problem, ...)
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch

from cgru.backbones.base import one_line
from cgru.fast.fixed_batch import OneShape
from cgru.rl.state import Batches, Problem, Sizes
from cgru.rl.update import TrainingError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Memory:
    """The problem in batches that fit; after an out-of-memory error `problem` has smaller ones."""

    problem: Problem
    after_halving: Callable[[Problem], None] = lambda _: None
    """Called with the new problem, e.g. to keep its sizes in the run."""
    halved: set[Batches] = field(default_factory=set)
    """Which batches were halved already."""

    def attempts(self, what: str, *, of: Batches = "pairs") -> Iterator[Attempt]:
        """Yield an attempt until one succeeds: two at most, since a second halving is a TrainingError."""
        while True:
            attempt = Attempt(self)
            yield attempt
            if attempt.reason is None:
                return
            self._halve(what, attempt.reason, of)

    def _halve(self, what: str, reason: str, of: Batches) -> None:
        before, backbone = self.problem.sizes, self.problem.backbone
        now = before.halved(of)
        if of in self.halved or now == before:
            raise out_of_memory(f"{what}, {_words(before, of)}: {reason}")
        self.problem = halved(self.problem, of)
        self.halved.add(of)
        clear_memory()
        is_compiled = isinstance(backbone, OneShape) and backbone.one_graph
        logger.warning(
            "out of memory in %s (%s): retrying with half the batch, %s instead of %s%s",
            what,
            reason,
            _words(now, of),
            _words(before, of),
            "; compiled graphs do not fit that and are not used until the run is resumed" if is_compiled else "",
        )
        self.after_halving(self.problem)


@dataclass(eq=False)
class Attempt:
    """One try at a block; `with attempt as problem` catches an out-of-memory error and keeps its reason."""

    memory: Memory
    reason: str | None = None

    def __enter__(self) -> Problem:
        """Return the problem in the batches that are to be tried."""
        return self.memory.problem

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool:
        """Suppress an out-of-memory error; with it go its frames, which hold the failed graph."""
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        self.reason = one_line(error)
        return True


def halved(problem: Problem, of: Batches) -> Problem:
    """The problem in half the batches. With pairs go rollouts: in half precision both must round alike."""
    sizes, backbone = problem.sizes.halved(of), problem.backbone
    if isinstance(backbone, OneShape):
        # No graph fits smaller pairs, so there is none to be shared by rollouts and updates either.
        one_graph = backbone.one_graph and of != "pairs"
        backbone = replace(backbone, batch=sizes.update, decode_batch=sizes.decode, one_graph=one_graph)
    return replace(problem, sizes=sizes, backbone=backbone)


def _words(sizes: Sizes, of: Batches) -> str:
    return f"{sizes.update} pairs" if of == "pairs" else f"{sizes.decode} latents to decode, {sizes.score} to score"


def out_of_memory(what: str) -> TrainingError:
    """The error that ends a run which ran out of memory twice."""
    return TrainingError(
        f"out of memory ({what}); allowed: what fits the device. What was saved is intact: free the device, or give "
        "the same command with memory=low. Lower policy.micro_batch or critic.batch for another run."
    )


def clear_memory() -> None:
    """Free what a failed attempt left behind."""
    gc.collect()  # errors that travelled between processes are in cycles with their frames
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
