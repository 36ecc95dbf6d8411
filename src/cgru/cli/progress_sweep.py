"""Progress of a sweep: a live table at a terminal, a line for each event when piped.

When piped and for --json, a line now and then also counts the cells. The state of each run is read from the sweep's
folder, where its worker records the host and the iteration.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cgru.atomic_io import parse_json
from cgru.cli.progress_run import duration
from cgru.cli.terminal import EVERY, heartbeat
from cgru.experiments.cells import Cell
from cgru.experiments.cluster import note_of
from cgru.experiments.local_runner import RUNS, last_line, read_done
from cgru.experiments.settings import config_of
from cgru.runs import METRICS, read_metrics, run_name

if TYPE_CHECKING:
    from rich.console import Group

State = Literal["at work", "failed", "waiting", "done"]
ORDER: tuple[State, ...] = ("at work", "failed", "waiting", "done")
"""Order of the rows in the table; a small terminal cuts off the end."""
ASK_EVERY = 30.0
"""Seconds between two checks for a node with room."""
NO_ROOM = "nothing is running: no live node has room for a run; waiting for one (Ctrl-C ends the sweep)"
Say = Callable[[str], None]


@dataclass
class Row:
    """One cell."""

    cell: Cell
    metrics: Path | None
    """None for the base model, which is not trained."""
    iterations: int
    state: State = "waiting"
    where: str = ""
    note: str = ""


@dataclass
class Board:
    """The state of every cell; `say` is called with one line for each event."""

    out: Path
    rows: Mapping[str, Row]
    say: Say
    begun: float = field(default_factory=time.monotonic)
    notice: str = ""
    """A notice about the whole sweep."""

    @property
    def is_idle(self) -> bool:
        """Whether no cell is at work, according to the sweep's folder."""
        return not any(row.state == "at work" for row in self.rows.values())

    def look(self) -> None:
        """Update the rows from the sweep's folder."""
        for row in self.rows.values():
            if row.state == "waiting" and (note := _read_note(note_of(self.out, row.cell))):
                row.state, row.where = "at work", note["host"]
                since = f", continuing from iteration {note['from_iteration']}" if note["from_iteration"] else ""
                self._event(row, f"at work on {row.where}{since}")
            if row.state == "at work":
                row.note = _progress(row)

    def again(self, cell: Cell, record: Mapping[str, Any]) -> None:
        """Report that a try has failed and the cell will be tried again."""
        row = self.rows[cell.name]
        row.state, row.where, row.note = "waiting", "", f"will be retried after: {last_line(record['error'])}"
        self._event(row, row.note)

    def told(self, cell: Cell, record: Mapping[str, Any]) -> None:
        """Report that a cell is done, or has failed for the last time."""
        row = self.rows[cell.name]
        if "error" in record:
            row.state, row.note = "failed", last_line(record["error"])
            self._event(row, f"failed: {row.note}")
            return
        parts = ", ".join(f"{name} {duration(value)}" for name, value in record["seconds"].items() if value >= 1)
        row.state, row.note = "done", parts
        self._event(row, f"done{f' ({parts})' if parts else ''}")

    def notify(self, notice: str) -> None:
        """Report a notice about the whole sweep once, as long as it does not change; empty: there is none."""
        if notice and notice != self.notice:
            self.say(f"[{self._since()}] {notice}")
        self.notice = notice

    def table(self) -> Group:
        """A line that counts the cells, and a table of all cells, those at work first."""
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name in ("cell", "state", "on", "how far"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for row in sorted(self.rows.values(), key=lambda row: ORDER.index(row.state)):
            table.add_row(row.cell.name, row.state, row.where, row.note)
        return Group(self.summary(), table)  # as the table's own title it would be broken at its width

    def summary(self) -> str:
        """How many cells there are in each state."""
        counts = Counter(row.state for row in self.rows.values())
        told = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
        notice = f"; {self.notice}" if self.notice else ""
        return f"{len(self.rows)} cells: {told}; {self._since()}{notice}"

    def _event(self, row: Row, what: str) -> None:
        self.say(f"[{self._since()}] {row.cell.name}: {what}")

    def _since(self) -> str:
        return duration(time.monotonic() - self.begun)


@dataclass
class Lookout:
    """Updates the board and, while no cell is at work, checks for a node with room; Ray itself would wait silently."""

    board: Board
    has_room: Callable[[], bool]
    every: float = ASK_EVERY
    asked: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Update the board; call this often."""
        self.board.look()
        now = time.monotonic()
        if not self.board.is_idle:
            self.asked = now
            self.board.notify("")
        elif now - self.asked >= self.every:
            self.asked = now
            self.board.notify("" if self.has_room() else NO_ROOM)


@contextmanager
def shown(
    cells: Sequence[Cell], out: Path, *, is_quiet: bool, device: str = "auto", every: float = EVERY
) -> Iterator[Board]:
    """The board of these cells, shown as the terminal or pipe allows."""
    rows = {cell.name: _row(cell, out, device) for cell in cells}
    if is_quiet or not sys.stderr.isatty():
        say: Say = (lambda line: None) if is_quiet else (lambda line: print(line, file=sys.stderr, flush=True))
        board = Board(out, rows, say)
        with heartbeat(board.summary, every):
            yield board
        return
    from rich.console import Console
    from rich.live import Live

    board = Board(out, rows, lambda line: None)
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with Live(get_renderable=board.table, console=console, refresh_per_second=2, redirect_stdout=False):
        yield board


def _row(cell: Cell, out: Path, device: str) -> Row:
    state: State = "waiting" if read_done(out, cell) is None else "done"
    if cell.concept is None:
        return Row(cell, None, 0, state)
    config = config_of(cell, device)
    return Row(cell, out / RUNS / run_name(config) / METRICS, config.length, state)


def _read_note(file: Path) -> Mapping[str, Any] | None:
    try:
        note: Mapping[str, Any] = parse_json(file.read_text(encoding="utf-8"))
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
