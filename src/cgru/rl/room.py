"""When the device's memory runs out in an iteration: batches are halved once, and what failed is done again.

Only work that changes nothing until it is whole is done again: rollouts, decoding, values, the gradient of an update.
Among processes an error in one is raised in all (`processes.alike`), so all of them halve together.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from cgru.backbones.base import one_line
from cgru.backbones.steady import OneShape
from cgru.rl.problem import Problem
from cgru.rl.update import TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class Room:
    """The problem in batches that fit; `problem` is another one after memory ran out."""

    problem: Problem
    after_halving: Callable[[Problem], None] = lambda _: None
    """Told of the new problem, e.g. to keep its sizes in the run."""
    is_halved: bool = False

    def attempt(self, what: str, work: Callable[[Problem], T]) -> T:
        """Do the work; where memory runs out, once more in half the batches. The second time it is a TrainingError."""
        while True:
            try:
                return work(self.problem)
            except torch.OutOfMemoryError as error:
                reason = one_line(error)
            # Out of the except block: the error's frames, which hold the failed graph, are gone.
            self._halve(what, reason)

    def _halve(self, what: str, reason: str) -> None:
        before = self.problem.sizes
        if self.is_halved or before.update == 1:
            raise out_of_memory(f"{what}, micro-batches of {before.update}: {reason}")
        self.problem, self.is_halved = halved(self.problem), True
        clear_memory()
        now = self.problem.sizes
        slower = "; compiled graphs do not fit that and are not used until the run is resumed, so it is slower"
        logger.warning(
            "out of memory in %s (%s): going on with half the batches, %d pairs per update instead of %d%s",
            what,
            reason,
            now.update,
            before.update,
            slower if isinstance(self.problem.backbone, OneShape) and self.problem.backbone.one_graph else "",
        )
        self.after_halving(self.problem)


def halved(problem: Problem) -> Problem:
    """The problem in half the batches: rollouts too, which in half precision round as updates only in equal batches."""
    sizes, backbone = problem.sizes.halved(), problem.backbone
    if isinstance(backbone, OneShape):
        backbone = replace(backbone, batch=sizes.update, decode_batch=sizes.decode)
    return replace(problem, sizes=sizes, backbone=backbone)


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
