"""What is on disk before what: contents, then the name, then the folder's entry, as a power cut would find them.

What fsync did cannot be seen from here, so its calls are looked at as they happen, through the interpreter's own
profiler; nothing is replaced.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from cgru.atomic_io import append_line, atomic_write

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux' list of open files")


@contextmanager
def disk_calls(folder: Path) -> Iterator[list[tuple[str, dict[str, int]]]]:
    """(fsync or replace, what is open in the folder then and how much of it is written), in order."""
    seen: list[tuple[str, dict[str, int]]] = []

    def noted(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called in (os.fsync, os.replace, os.rename):
            sys.setprofile(None)
            files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
            names = [os.readlink(file) for file in files if file.exists()]
            mine = [Path(name) for name in names if name.startswith(str(folder))]
            seen.append((called.__name__, {path.name: path.is_file() * path.stat().st_size for path in mine}))
            sys.setprofile(noted)

    sys.setprofile(noted)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("data", ["grüße", b"bytes", lambda file: file.write(b"from a function")])
def test_contents_are_on_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, data: str | bytes | Callable
) -> None:
    path = tmp_path / "file"
    with disk_calls(tmp_path) as seen:
        atomic_write(path, data)
    temporary, size = f".file.{os.getpid()}.tmp", len(path.read_bytes())
    assert size > 0
    assert seen == [("fsync", {temporary: size}), ("replace", {}), ("fsync", {tmp_path.name: 0})]


def test_a_line_is_on_disk_when_it_is_added(tmp_path: Path) -> None:
    with disk_calls(tmp_path) as seen:
        append_line(tmp_path / "lines", b"one\n")
        append_line(tmp_path / "lines", b"two\n")
    assert seen == [("fsync", {"lines": 4}), ("fsync", {"lines": 8})]
