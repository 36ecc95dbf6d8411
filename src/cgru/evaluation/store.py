"""The files of one evaluation: jobs.jsonl, predictions.jsonl, scores.json and the pictures of the grid.

scores.json is written last: where it is, the folder is complete. While a new evaluation works in the same folder, the
earlier one's is called scores.previous.json. Finished files appear under their name only when whole (temporary name,
flush, rename). While a run is under way its predictions are appended to predictions.partial.jsonl, batch by batch, so
that a killed run continues where it stopped.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cgru import processes
from cgru.evaluation.base import Job

Row = dict[str, Any]
SCORES, PREVIOUS = "scores.json", "scores.previous.json"
FILES = ("jobs.jsonl", "predictions.jsonl", "predictions.partial.jsonl", SCORES, PREVIOUS, "grid.png")
FOLDERS = ("samples", "base")
PNG_END = b"\0\0\0\0IEND\xaeB\x60\x82"
"""The last chunk of every PNG."""
ANOTHER_PLACE = "allowed: a new folder, or one of the same evaluation. Choose another --out."


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # there only if the disk was full or the program was stopped


def save_picture(path: Path, picture: Image.Image) -> None:
    """A whole PNG or nothing."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    write_atomic(path, buffer.getvalue())


def is_whole_png(path: Path) -> bool:
    """Whether a PNG is there to its end; one that was copied half, or lost its end with the power, is not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(-min(path.stat().st_size, len(PNG_END)), os.SEEK_END)
        return file.read() == PNG_END


def write_json(path: Path, value: object) -> None:
    """One JSON document, indented for people."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON record per line."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def check_writable(folder: Path) -> None:
    """Fail before any work if `folder` cannot be made or written; leaves nothing behind."""
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        # A real file is tried: permission bits say nothing about read-only or virtual file systems.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        reason = error.strerror or str(error)
        allowed = "allowed: a folder you may write to. Choose another --out."
        raise PermissionError(f"cannot write to {str(folder)!r} ({reason}); {allowed}") from error


def check_contents(folder: Path) -> None:
    """Fail before any work if something in `folder` is in the way of an evaluation's files or would be lost."""
    for name in (*FILES, *FOLDERS):
        path = folder / name
        if path.exists() and path.is_dir() != (name in FOLDERS):
            kind, wanted = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
            raise ValueError(f"{str(path)!r} is {kind}, where an evaluation keeps {wanted}; {ANOTHER_PLACE}")
    PredictionFile(folder, key="").read()


def check_protocol(folder: Path, expected: Mapping[str, Any]) -> None:
    """Fail before any work if `folder` holds scores of a benchmark or protocol that differs from the expected one.

    Scores that a stopped evaluation has set aside count as well.
    """
    for path in (path for path in (folder / SCORES, folder / PREVIOUS) if path.is_file()):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            found = {"benchmark": stored["benchmark"], "version": stored["version"], **stored["protocol"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} holds no scores of cgru, or not all of them; {ANOTHER_PLACE}") from error
        wanted = json.loads(json.dumps(expected))  # as read back from a file
        if differing := [name for name in wanted if found.get(name) != wanted[name]]:
            what = f"results of another protocol (other {', '.join(differing)})"
            raise ValueError(f"{str(path)!r} holds {what}, which would be lost; {ANOTHER_PLACE}")


@contextmanager
def scores_pending(folder: Path) -> Iterator[None]:
    """While inside, and after a failure inside, there is no scores.json; the earlier one is kept under another name."""
    if (folder / SCORES).is_file():
        (folder / SCORES).replace(folder / PREVIOUS)
    yield
    (folder / PREVIOUS).unlink(missing_ok=True)


@dataclass(frozen=True)
class PredictionFile:
    """predictions.jsonl of one folder, for one key (a hash of protocol and model)."""

    folder: Path
    key: str

    @property
    def whole(self) -> Path:
        """All predictions: those of the last evaluation in job order, then others of the same key."""
        return self.folder / "predictions.jsonl"

    @property
    def partial(self) -> Path:
        """What a run under way has so far; each of several processes has its own."""
        who = f"-{processes.rank()}" if processes.rank() else ""
        return self.folder / f"predictions.partial{who}.jsonl"

    @property
    def partials(self) -> list[Path]:
        """Those of all processes, also of a run that had more of them."""
        return sorted(self.folder.glob("predictions.partial*.jsonl"))

    def read(self) -> dict[str, Row]:
        """Rows by job id; those of another model or protocol, and a line cut off by a kill, are passed over."""
        rows = list(_rows(self.whole, may_be_cut=False))
        rows += [row for path in self.partials for row in _rows(path, may_be_cut=True)]
        return {row["id"]: row for row in rows if row["key"] == self.key}

    def append(self, rows: Sequence[Row]) -> None:
        """Keep a batch's rows, safe against a kill after this call."""
        with self.partial.open("a", encoding="utf-8") as file:
            # The leading newline closes a line that a kill may have cut off, so that it spoils no new row.
            file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, rows: Sequence[Row]) -> None:
        """Replace the partial files by the whole one."""
        write_lines(self.whole, rows)
        for path in self.partials:
            path.unlink()


def _rows(path: Path, *, may_be_cut: bool) -> Iterator[Row]:
    """The rows of a file, none if there is no file; an error if it holds something else than predictions."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # Written whole, but perhaps copied half: then it ends in one of our lines, without its end.
            if may_be_cut or (number == len(lines) and line.startswith('{"id": "')):
                continue  # that job is drawn again
            row = None
        if not isinstance(row, dict) or not {"id", "key"} <= row.keys():
            raise ValueError(f"{str(path)!r} holds {line[:40]!r}, which is no prediction of cgru; {ANOTHER_PLACE}")
        yield row


def job_row(job: Job) -> Row:
    """A job as a line of jobs.jsonl."""
    own = {} if job.guidance is None else {"guidance": job.guidance}
    return {"id": job.id, "prompt": job.prompt, "seed": job.seed, "labels": dict(job.labels), **own}


def pack(features: np.ndarray) -> str:
    """A float32 vector as base64: exact, and a fifth of its decimal digits."""
    return base64.b64encode(features.astype("<f4").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """The inverse of `pack`."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4")
