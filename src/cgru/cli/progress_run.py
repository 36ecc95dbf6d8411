"""Progress of a run: a live panel at a terminal, a line now and then when piped and for --json.

Everything is printed to stderr, because stdout is for the result.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.cli.terminal import EVERY, heartbeat

if TYPE_CHECKING:
    from rich.table import Table

Record = Mapping[str, Any]
FIGURES = {"reward/mean": "reward", "loss": "loss"}
"""Metric -> its name on the screen; a method logs one of these."""
LINES = 20
"""A piped run prints about this many lines."""
SHARES = {
    "watch/target_share": "still shows the concept",
    "watch/keep_share": "keeps what it should",
    "watch/nothing_share": "shows nothing",
}


@dataclass
class Progress:
    """What is known about a run so far; `heard` is the listener of the run."""

    folder: Path
    iterations: int
    done: int = 0
    figure: str | None = None
    """What `value` is: the reward, or the loss if the method has no reward; None if it logs neither."""
    value: float = float("nan")
    best: float = float("nan")
    shares: dict[str, float] = field(default_factory=dict)
    """The last shares reported by the outside detector."""
    times: list[float] = field(default_factory=list)

    def heard(self, record: Record) -> None:
        """Update the progress with the record of an iteration."""
        if "iteration" not in record:
            return
        self.times.append(time.monotonic())
        self.done = int(_number(record, "iteration")) + 1
        for key in FIGURES.keys() & record.keys():
            self.figure, self.value = FIGURES[key], float("nan") if record[key] is None else _number(record, key)
            better = max if self.figure == "reward" else min
            self.best = better(self.value, self.best) if self.best == self.best else self.value
        self.shares |= {key: _number(record, key) for key in SHARES if key in record}

    @property
    def left(self) -> float | None:
        """Estimated seconds left, from the mean of the last iterations; None before the second iteration."""
        recent = self.times[-11:]
        if len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (self.iterations - self.done)

    @property
    def strip(self) -> Path:
        """The newest strip of sample pictures, or the folder for them."""
        found = sorted((self.folder / "samples").glob("[0-9]*.png"))
        return found[-1] if found else self.folder / "samples"


def _number(record: Record, key: str) -> float:
    value = record[key]
    if not isinstance(value, int | float):  # a user's own method may log anything
        raise ValueError(f"cannot show {key!r} = {value!r:.60}; allowed: a number. Log texts under another key.")
    return float(value)


@contextlib.contextmanager
def following(
    folder: Path, iterations: int, *, is_quiet: bool, every: float = EVERY
) -> Iterator[Callable[[Record], None]]:
    """A listener that shows a run's progress as the terminal or pipe allows."""
    progress = Progress(folder, iterations)
    if is_quiet:
        with heartbeat(lambda: line(progress), every):
            yield progress.heard
        return
    if sys.stderr.isatty():
        # The log comes last, because its handler writes to the current sys.stderr, which the panel has replaced.
        with _panel(progress) as listener, _telling_log():
            yield listener
        return
    with heartbeat(lambda: line(progress), every), _lines(progress) as listener, _telling_log():
        yield listener


@contextlib.contextmanager
def _panel(progress: Progress) -> Iterator[Callable[[Record], None]]:
    from rich.console import Console
    from rich.live import Live

    # stderr is redirected meanwhile, so that warnings appear above the panel; stdout is left alone for the result.
    with Live(
        get_renderable=lambda: _table(progress),
        console=Console(stderr=True, markup=False, emoji=False, highlight=False),
        refresh_per_second=2,
        redirect_stdout=False,
    ) as live:

        def hear(record: Record) -> None:
            progress.heard(record)
            live.refresh()

        yield hear


@contextlib.contextmanager
def _lines(progress: Progress) -> Iterator[Callable[[Record], None]]:
    every = max(1, progress.iterations // LINES)

    def hear(record: Record) -> None:
        progress.heard(record)
        if "iteration" not in record:
            return
        if progress.done % every == 0 or progress.done in (1, progress.iterations):
            print(line(progress), file=sys.stderr, flush=True)

    yield hear


def line(progress: Progress) -> str:
    """Progress in one line."""
    if not progress.done:
        return f"iteration 0/{progress.iterations}: preparing"
    parts = [f"iteration {progress.done}/{progress.iterations}"]
    parts += [f"{progress.figure} {shown(progress.value)}"] if progress.figure else []
    parts += [f"{SHARES[key]} {share:.0%}" for key, share in progress.shares.items()]
    if progress.left is not None:
        parts.append(f"{duration(progress.left)} left")
    return ", ".join(parts)


def _table(progress: Progress) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if not progress.done:
        table.add_row("stage", "preparing (reward and critic of a policy gradient), then the first iteration")
    else:
        table.add_row("iteration", f"{progress.done} of {progress.iterations}")
        table.add_row("", ProgressBar(progress.iterations, progress.done, width=40))
        if progress.figure:
            table.add_row(progress.figure, f"{shown(progress.value)} (best {shown(progress.best)})")
        table.add_row("time left", "…" if progress.left is None else duration(progress.left))
    if progress.shares:
        seen = ", ".join(f"{share:.0%} {SHARES[key]}" for key, share in progress.shares.items())
        table.add_row("outside detector", seen)
    table.add_row("samples", str(progress.strip))
    return table


def shown(value: float) -> str:
    """A reward or a loss with two decimals, or more if the number is small."""
    return f"{value:.2f}" if not 0 < abs(value) < 0.1 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """A duration as text: 45 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _telling_log() -> Iterator[None]:
    """Print the package's log messages (parity, alarms, stopping) on stderr."""
    logger = logging.getLogger("cgru")
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
