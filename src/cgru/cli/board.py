"""A sweep while it goes on: a live table for a person at a terminal, a line for each event when piped.

What a run is doing is read from the sweep's folder, where its worker says where it is and how far it has come.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cgru.cli.live import duration
from cgru.experiments.cells import Cell
from cgru.experiments.cluster import note_of
from cgru.experiments.work import RUNS, last_line, read_done
from cgru.runs import METRICS, read_metrics, run_name

if TYPE_CHECKING:
    from rich.console import Group

State = Literal["at work", "failed", "waiting", "done"]
ORDER: tuple[State, ...] = ("at work", "failed", "waiting", "done")
"""As they stand in the table, whose end is cut where the terminal is low."""
ASK_EVERY = 30.0
"""Seconds between two looks for a node with room."""
NO_ROOM = "nothing is at work: no live node has room for a run; waits for one that has (Ctrl-C ends it)"
Say = Callable[[str], None]


@dataclass
class Row:
    """One cell."""

    cell: Cell
    metrics: Path | None
    """None: the base model, which is not trained."""
    iterations: int
    state: State = "waiting"
    where: str = ""
    note: str = ""


@dataclass
class Board:
    """What is known of every cell; `say` hears each event in one line."""

    out: Path
    rows: Mapping[str, Row]
    say: Say
    begun: float = field(default_factory=time.monotonic)
    notice: str = ""
    """What holds of all cells."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is at work, as far as the folder tells."""
        return not any(row.state == "at work" for row in self.rows.values())

    def look(self) -> None:
        """Read from the folder what has changed."""
        for row in self.rows.values():
            if row.state == "waiting" and (note := _read_note(note_of(self.out, row.cell))):
                row.state, row.where = "at work", note["host"]
                since = f", going on from iteration {note['from_iteration']}" if note["from_iteration"] else ""
                self._event(row, f"at work on {row.where}{since}")
            if row.state == "at work":
                row.note = _progress(row)

    def again(self, cell: Cell, record: Mapping[str, Any]) -> None:
        """A try has failed, and another follows."""
        row = self.rows[cell.name]
        row.state, row.where, row.note = "waiting", "", f"again after: {last_line(record['error'])}"
        self._event(row, row.note)

    def told(self, cell: Cell, record: Mapping[str, Any]) -> None:
        """A cell is done, or has failed for good."""
        row = self.rows[cell.name]
        if "error" in record:
            row.state, row.note = "failed", last_line(record["error"])
            self._event(row, f"failed: {row.note}")
            return
        parts = ", ".join(f"{name} {duration(value)}" for name, value in record["seconds"].items() if value >= 1)
        row.state, row.note = "done", parts
        self._event(row, f"done{f' ({parts})' if parts else ''}")

    def notify(self, notice: str) -> None:
        """Say what holds of all cells, once for as long as it holds; empty: nothing does."""
        if notice and notice != self.notice:
            self.say(f"[{self._since()}] {notice}")
        self.notice = notice

    def table(self) -> Group:
        """All cells, those at work first, under a line that counts them."""
        from rich.console import Group
        from rich.table import Table

        counts = Counter(row.state for row in self.rows.values())
        told = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
        notice = f"; {self.notice}" if self.notice else ""
        table = Table(box=None, pad_edge=False)
        for name in ("cell", "state", "on", "how far"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for row in sorted(self.rows.values(), key=lambda row: ORDER.index(row.state)):
            table.add_row(row.cell.name, row.state, row.where, row.note)
        title = f"{len(self.rows)} cells: {told}; {self._since()}{notice}"
        return Group(title, table)  # as the table's own it would be broken at its width

    def _event(self, row: Row, what: str) -> None:
        self.say(f"[{self._since()}] {row.cell.name}: {what}")

    def _since(self) -> str:
        return duration(time.monotonic() - self.begun)


@dataclass
class Lookout:
    """Looks at the board, and while nothing is at work also for a node with room: without one Ray waits in silence."""

    board: Board
    has_room: Callable[[], bool]
    every: float = ASK_EVERY
    asked: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Call it often."""
        self.board.look()
        now = time.monotonic()
        if not self.board.is_idle:
            self.asked = now
            self.board.notify("")
        elif now - self.asked >= self.every:
            self.asked = now
            self.board.notify("" if self.has_room() else NO_ROOM)


@contextmanager
def shown(cells: Sequence[Cell], out: Path, *, is_quiet: bool) -> Iterator[Board]:
    """The board of these cells, shown by who is looking."""
    rows = {cell.name: _row(cell, out) for cell in cells}
    if is_quiet or not sys.stderr.isatty():
        say: Say = (lambda line: None) if is_quiet else (lambda line: print(line, file=sys.stderr, flush=True))
        yield Board(out, rows, say)
        return
    from rich.console import Console
    from rich.live import Live

    board = Board(out, rows, lambda line: None)
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with Live(get_renderable=board.table, console=console, refresh_per_second=2, redirect_stdout=False):
        yield board


def _row(cell: Cell, out: Path) -> Row:
    state: State = "waiting" if read_done(out, cell) is None else "done"
    if cell.concept is None:
        return Row(cell, None, 0, state)
    config = cell.config("auto")
    return Row(cell, out / RUNS / run_name(config) / METRICS, config.policy.iterations, state)


def _read_note(file: Path) -> Mapping[str, Any] | None:
    try:
        note: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not begun
        return None
    return note


def _progress(row: Row) -> str:
    if row.metrics is None:
        return "measuring the base"
    try:
        records = [record for record in read_metrics(row.metrics) if "iteration" in record]
    except (OSError, ValueError):  # the run is being made
        records = []
    if not records:
        return "reward and critic"
    if len(records) >= row.iterations:
        return "measuring"
    reward = records[-1].get("reward/mean")
    told = f", reward {reward:.2f}" if isinstance(reward, float | int) else ""  # null: not finite
    return f"iteration {len(records)} of {row.iterations}{told}"
