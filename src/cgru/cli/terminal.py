"""Terminal output: the result as JSON or text on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cgru import distributed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


EVERY = 60.0
"""Seconds between two lines of progress where no bar is shown."""
NARROWEST = 60
"""Columns: in a narrower table words would be one letter wide."""
LONG_WORD = re.compile(r"(\S{200})\S{100,}")
"""A very long word in a message, such as the contents of a file given by mistake; only its start is printed."""


def one_line(message: Exception | str) -> str:
    """A message for stderr: in one line, with very long words cut."""
    return LONG_WORD.sub(r"\1 ...", " ".join(str(message).split()))


def show(record: Mapping[str, Any], as_json: bool, tell: Callable[[Console], None]) -> int:
    """Print the record as one JSON document, or as text by `tell`; returns the exit code 0.

    Markup is off: rich would interpret "[red]" or ":cat:" in a user's path or model name.
    """
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return 0
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    console.width = max(console.width, NARROWEST)
    tell(console)
    return 0


def names_of(text: str | None) -> tuple[str, ...]:
    """The names in an option that takes several, separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


@contextlib.contextmanager
def heartbeat(tell: Callable[[], str], every: float = EVERY) -> Iterator[None]:
    """Print a line of progress on stderr every `every` seconds while the `with` block runs, for logs."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(every):
            print(tell(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def progress_bar(is_quiet: bool, every: float = EVERY) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr at a terminal; a line now and then when piped and for --json."""
    if not distributed.is_main():
        yield lambda what, done, total: None
        return
    if is_quiet or not sys.stderr.isatty():
        state = ["not started yet"]

        def note(what: str, done: int, total: int) -> None:
            state[0] = f"{what}: {done} of {total}"

        with heartbeat(lambda: state[0], every):
            yield note
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        rows: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in rows:
                rows[what] = bar.add_task(what, total=total)
            bar.update(rows[what], completed=done)

        yield report
