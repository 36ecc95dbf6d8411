"""When the device's memory runs out in an iteration: batches are halved once, and what failed is done again.

Only work that changes nothing until it is whole is done again: rollouts, decoding, values, the gradient of an update.
Among processes an error in one is raised in all (`processes.alike`), so all of them halve together.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from cgru.backbones.base import one_line
from cgru.backbones.steady import OneShape
from cgru.rl.problem import Batches, Problem, Sizes
from cgru.rl.update import TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class Room:
    """The problem in batches that fit; `problem` is another one after memory ran out."""

    problem: Problem
    after_halving: Callable[[Problem], None] = lambda _: None
    """Told of the new problem, e.g. to keep its sizes in the run."""
    halved: set[Batches] = field(default_factory=set)
    """Of what batches were halved already."""
    is_checked: bool = False
    """Whether this start has seen that ratios are 1 right after collection."""

    def attempt(self, what: str, work: Callable[[Problem], T], *, of: Batches = "pairs") -> T:
        """Do the work; where memory runs out, once more in half the batches. The second time it is a TrainingError."""
        while True:
            try:
                return work(self.problem)
            except torch.OutOfMemoryError as error:
                reason = one_line(error)
            # Out of the except block: the error's frames, which hold the failed graph, are gone.
            self._halve(what, reason, of)

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
            "out of memory in %s (%s): going on with half the batches, %s instead of %s%s",
            what,
            reason,
            _words(now, of),
            _words(before, of),
            "; compiled graphs do not fit that and are not used until the run is resumed" if is_compiled else "",
        )
        self.after_halving(self.problem)


def halved(problem: Problem, of: Batches) -> Problem:
    """The problem in half the batches: of pairs rollouts too, which in half precision round alike in equal batches."""
    sizes, backbone = problem.sizes.halved(of), problem.backbone
    if isinstance(backbone, OneShape):
        # No graph fits smaller pairs, so there is none to be shared by rollouts and updates either.
        one_graph = backbone.one_graph and of != "pairs"
        backbone = replace(backbone, batch=sizes.update, decode_batch=sizes.decode, one_graph=one_graph)
    return replace(problem, sizes=sizes, backbone=backbone)


def _words(sizes: Sizes, of: Batches) -> str:
    return f"{sizes.update} pairs" if of == "pairs" else f"{sizes.decode} latents to decode, {sizes.score} to score"


def out_of_memory(what: str) -> TrainingError:
    """The error that ends a run, in words."""
    return TrainingError(
        f"out of memory ({what}); allowed: what fits the device. What was saved is intact: free the device, or give "
        "the same command with memory=low. Lower policy.micro_batch or critic.batch for another run."
    )


def clear_memory() -> None:
    """Give back what a failed attempt left behind."""
    gc.collect()  # errors that travelled between processes are in cycles with their frames
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
