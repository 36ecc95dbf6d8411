"""A run while it goes on: a live panel for a person at a terminal, a line now and then when piped, nothing for --json.

All of it goes to stderr: stdout is for the result.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

Record = dict[str, float | int | str]
LINES = 20
"""A piped run says about this many lines."""
SHARES = {
    "watch/target_share": "still shows the concept",
    "watch/keep_share": "keeps what it should",
    "watch/nothing_share": "shows nothing",
}


@dataclass
class Progress:
    """What is known of a run so far; `heard` is its listener."""

    folder: Path
    iterations: int
    done: int = 0
    reward: float = float("nan")
    best: float = float("nan")
    shares: dict[str, float] = field(default_factory=dict)
    """The outside detector's last look."""
    times: list[float] = field(default_factory=list)

    def heard(self, record: Record) -> None:
        """Take a record into account."""
        self.times.append(time.monotonic())
        self.done = int(record["iteration"]) + 1
        self.reward = float(record["reward/mean"])
        self.best = max(self.reward, self.best) if self.best == self.best else self.reward
        self.shares |= {key: float(record[key]) for key in SHARES if key in record}

    @property
    def left(self) -> float | None:
        """Seconds left, by the mean of the last iterations; None before the second."""
        recent = self.times[-11:]
        if len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (self.iterations - self.done)

    @property
    def strip(self) -> Path:
        """The newest sample strip, or the folder they come to."""
        found = sorted((self.folder / "samples").glob("[0-9]*.png"))
        return found[-1] if found else self.folder / "samples"


@contextlib.contextmanager
def following(folder: Path, iterations: int, *, is_quiet: bool) -> Iterator[Callable[[Record], None]]:
    """The listener that shows a run's progress, by who is looking."""
    progress = Progress(folder, iterations)
    if is_quiet:
        yield progress.heard
        return
    # The log last: its handler writes to what sys.stderr is now, which the panel has replaced.
    with _panel(progress) if sys.stderr.isatty() else _lines(progress) as listener, _telling_log():
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
        if progress.done % every == 0 or progress.done in (1, progress.iterations):
            print(line(progress), file=sys.stderr, flush=True)

    yield hear


def line(progress: Progress) -> str:
    """Progress in one line."""
    parts = [f"iteration {progress.done}/{progress.iterations}", f"reward {progress.reward:.2f}"]
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
        table.add_row("stage", "reward and critic (Alg. 1), then the policy's first iteration")
    else:
        table.add_row("iteration", f"{progress.done} of {progress.iterations}")
        table.add_row("", ProgressBar(progress.iterations, progress.done, width=40))
        table.add_row("reward", f"{progress.reward:.2f} (best {progress.best:.2f})")
        table.add_row("left", "…" if progress.left is None else duration(progress.left))
    if progress.shares:
        seen = ", ".join(f"{share:.0%} {SHARES[key]}" for key, share in progress.shares.items())
        table.add_row("outside look", seen)
    table.add_row("samples", str(progress.strip))
    return table


def duration(seconds: float) -> str:
    """A span of time for people: 45 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _telling_log() -> Iterator[None]:
    """What the package logs (parity, alarms, stopping) as lines on stderr."""
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
