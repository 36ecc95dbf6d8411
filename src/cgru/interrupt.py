"""Ctrl-C during a run: the first one stops it cleanly after the current iteration, the second one at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The run was stopped by Ctrl-C, is saved and can be resumed; its argument is the run's folder."""


class Stoppable(Protocol):
    """Work that checks `stop` after each iteration."""

    stop: bool


@contextmanager
def interruptible(work: Stoppable) -> Iterator[None]:
    """Set `work.stop` on the first Ctrl-C; raise KeyboardInterrupt on the second."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        if work.stop:
            raise KeyboardInterrupt
        work.stop = True
        logger.warning(
            "stopping after this iteration; press Ctrl-C again to stop at once (back to the last checkpoint)"
        )

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
