"""Talking to people and to machines: JSON or words on stdout, a bar on stderr, pictures as files."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru import processes

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console
    from rich.progress import TaskID


def show(record: Mapping[str, Any], as_json: bool, tell: Callable[[Console], None]) -> int:
    """The one JSON document for machines, or words for people; 0.

    Words are printed as they are: rich would read "[red]" or ":cat:" in a user's path or model name as its markup.
    """
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return 0
    from rich.console import Console

    tell(Console(markup=False, emoji=False, highlight=False))
    return 0


def names_of(text: str | None) -> tuple[str, ...]:
    """The names in an option that takes several, with commas between them."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


@contextlib.contextmanager
def progress_bar(is_quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr when a person is looking; nothing when piped."""
    if is_quiet or not sys.stderr.isatty() or not processes.is_main():
        yield lambda what, done, total: None
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


def save_png(path: Path, picture: Image) -> None:
    """Write a picture whole or not at all."""
    from cgru.evaluation.store import write_atomic

    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    write_atomic(path, buffer.getvalue())


def quiet_libraries() -> None:
    """Their loading bars and notes would break "quiet when piped" and "one line"; their errors still raise."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    importlib.import_module("cgru.backbones.sd")  # diffusers sets its own level while it is imported
    # huggingface_hub warns at each of its retries; when they have failed, our one line says so.
    for library in ("diffusers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # They warn about each other's old arguments, which no user of ours can change.
    warnings.filterwarnings("ignore", module="huggingface_hub|diffusers|transformers|peft")
