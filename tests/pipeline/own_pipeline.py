"""What the pipeline tests hand in as "own_pipeline:...", and a child process that ends itself at a chosen moment.

A process that sends itself SIGKILL is gone as with `kill -9`, but at a moment that a test can name: the n-th log line,
rename, optimiser step or call of the reward.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cgru.config import from_dict
from cgru.pipeline import Interrupted, unlearn

INTERRUPTED, MISTAKE = 3, 2


@dataclass
class Countdown:
    """Ends the process, or does something else, at the n-th tick of one kind."""

    kind: str = ""
    left: int = 0
    signal: int = signal.SIGKILL

    def tick(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.signal)


COUNTDOWN = Countdown()


@dataclass
class Brightness:
    """Mean brightness, 0 to 1; NaN from the n-th call on if `nan_from` is set."""

    low: float = 0.0
    high: float = 1.0
    lineage: dict[str, Any] = field(default_factory=lambda: {"name": "brightness", "weights": [], "started_from": []})
    nan_from: int = 0
    calls: int = 0

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        COUNTDOWN.tick("reward")
        self.calls += 1
        scores = images.mean((1, 2, 3))
        return scores * torch.nan if self.nan_from and self.calls >= self.nan_from else scores


def brightness(backbone: object) -> Brightness:
    return Brightness()


@dataclass
class Darkness(Brightness):
    """The opposite: Emoji Canvas draws on light paper, so there is room to rise."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return 1 - images.mean((1, 2, 3))


def darkness(backbone: object) -> Darkness:
    return Darkness()


def turns_nan(backbone: object) -> Brightness:
    """Good for the warm start and one iteration."""
    return Brightness(nan_from=3)


@dataclass
class Cramped:
    """A denoiser's hook: from its `first` call with gradient on, more than `most` samples are too many."""

    most: int
    first: int = 1
    calls: int = 0

    def __call__(self, network: object, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls >= self.first and len(args[0]) > self.most:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")


def on_a_small_device(backbone: Any) -> Brightness:  # noqa: ANN401 - a backbone
    """Room for 2 pairs, which guidance makes 4 samples."""
    backbone.denoiser.register_forward_pre_hook(Cramped(most=4))
    return Brightness()


def on_a_device_that_fills_up(backbone: Any) -> Brightness:  # noqa: ANN401
    """Room for anything in the first iteration, 2 updates of 1 micro-batch, and then for nothing."""
    backbone.denoiser.register_forward_pre_hook(Cramped(most=0, first=3))
    return Brightness()


@dataclass
class Enormous(Brightness):
    """A reward that fits no device."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB.\nNone is free.")


def on_no_device(backbone: object) -> Enormous:
    return Enormous()


def child(table: dict[str, Any], out: str, kind: str, left: int, number: int) -> None:
    """Start or go on with a run, and end at the chosen moment; exit codes say how it ended otherwise."""
    torch.set_num_threads(1)
    COUNTDOWN.kind, COUNTDOWN.left, COUNTDOWN.signal = kind, left, number
    sys.addaudithook(lambda event, _: COUNTDOWN.tick("rename") if event == "os.rename" else None)
    register_optimizer_step_pre_hook(lambda *_: COUNTDOWN.tick("step"))
    try:
        unlearn(from_dict(table), out, listeners=(lambda _: COUNTDOWN.tick("log"),))
    except Interrupted:
        sys.exit(INTERRUPTED)
    except ValueError:
        sys.exit(MISTAKE)
