"""Safe file writing: a kill, a full disk or a second process never leaves half a file or half a line."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Data = bytes | str | Callable[[BinaryIO], object]
"""The contents of a file, or a function that writes them."""


def atomic_write(path: Path, data: Data) -> None:
    """Write a complete file or nothing: after a failure the earlier file is unchanged and no other file is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, data: Data) -> None:
    """Write a file in place and flush it to disk; the caller then renames the file or its folder."""
    with path.open("wb") as file:
        if callable(data):
            data(file)
        else:
            file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def append_line(path: Path, line: bytes) -> None:
    """Append a complete line or nothing; it is on disk when this returns."""
    with path.open("ab", buffering=0) as file:  # unbuffered: closing must not try again what has just failed
        size = file.tell()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(size)  # half a line would spoil the next one
            raise write_failure(path, error) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    if sys.platform == "win32":
        return  # folders cannot be opened there
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network disks cannot do it
            raise
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open file until it is closed; False where another process has it."""
    try:
        if sys.platform == "win32":
            os.lseek(handle, 1 << 20, os.SEEK_SET)  # far behind the text, which others must be able to read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter is how Windows says it
        return False
    return True


def read_json(path: Path) -> dict[str, Any]:
    """The table that a JSON file holds."""
    return json_table(path.read_bytes(), repr(str(path)))


def parse_json(data: bytes | str) -> Any:  # noqa: ANN401 - whatever it says
    """The value of a JSON text; also raises ValueError if it is nested too deeply for Python."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def json_table(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in some bytes; anything else is an error that names their origin."""
    try:
        table = parse_json(data)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {data[:40]!r}; allowed: one JSON table, as cgru writes it. Restore or remove it.")
    return table


def to_json(value: object, *, indent: int | None = 2) -> str:
    """JSON followed by a line break; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def write_failure(path: Path, error: OSError) -> OSError:
    """The error for a file that could not be written."""
    why = error.strerror or str(error)
    return OSError(f"cannot write {str(path)!r} ({why}); what was saved before is intact. Make room, then resume.")
