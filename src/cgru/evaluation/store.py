"""Files of one evaluation: jobs.jsonl, predictions.jsonl, scores.json and the pictures of the grid.

scores.json is written last: a folder that has it is complete. While a new evaluation runs in the same folder, the
earlier file is kept as scores.previous.json. Files get their final name only when complete (temporary name, flush,
rename). A running evaluation appends its predictions to predictions.partial.jsonl, batch by batch, so that it can
continue after a kill.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cgru import distributed
from cgru.atomic_io import atomic_write, parse_json
from cgru.evaluation.base import Job

Row = dict[str, Any]
SCORES, PREVIOUS = "scores.json", "scores.previous.json"
FILES = ("jobs.jsonl", "predictions.jsonl", "predictions.partial.jsonl", SCORES, PREVIOUS, "grid.png")
FOLDERS = ("samples", "base")
PNG_END = b"\0\0\0\0IEND\xaeB\x60\x82"
"""The last chunk of every PNG."""
ANOTHER_PLACE = "allowed: a new folder, or one of the same evaluation. Choose another --out."


def is_whole_png(path: Path) -> bool:
    """Return whether a complete PNG exists; a truncated one (half copied, power failure) does not count."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(-min(path.stat().st_size, len(PNG_END)), os.SEEK_END)
        return file.read() == PNG_END


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON record per line."""
    atomic_write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def check_writable(folder: Path) -> None:
    """Raise before any work if `folder` cannot be created or written to; leaves nothing behind."""
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        # Try a real file: permission bits say nothing about read-only or virtual file systems.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        reason = error.strerror or str(error)
        allowed = "allowed: a folder you may write to. Choose another --out."
        raise PermissionError(f"cannot write to {str(folder)!r} ({reason}); {allowed}") from error


def check_contents(folder: Path) -> None:
    """Raise before any work if `folder` contains something that would block an evaluation's files or be lost."""
    for name in (*FILES, *FOLDERS):
        path = folder / name
        if path.exists() and path.is_dir() != (name in FOLDERS):
            kind, wanted = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
            raise ValueError(f"{str(path)!r} is {kind}, where an evaluation keeps {wanted}; {ANOTHER_PLACE}")
    PredictionFile(folder, key="").read()


def check_protocol(folder: Path, expected: Mapping[str, Any]) -> None:
    """Raise before any work if `folder` holds scores of another benchmark or protocol than the expected one.

    Scores set aside by an interrupted evaluation count as well.
    """
    for path in (path for path in (folder / SCORES, folder / PREVIOUS) if path.is_file()):
        try:
            stored = parse_json(path.read_text(encoding="utf-8"))
            found = {"benchmark": stored["benchmark"], "version": stored["version"], **stored["protocol"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not a complete scores.json of cgru; {ANOTHER_PLACE}") from error
        wanted = json.loads(json.dumps(expected))  # in the form it has when read from a file
        if differing := [name for name in wanted if found.get(name) != wanted[name]]:
            what = f"results of another protocol (different {', '.join(differing)})"
            raise ValueError(f"{str(path)!r} holds {what}, which would be lost; {ANOTHER_PLACE}")


@contextmanager
def scores_pending(folder: Path) -> Iterator[None]:
    """Keep scores.json under another name inside the block and after a failure in it, so no stale one is ever read."""
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
        """Return the file of all predictions: the last evaluation's in job order, then others with the same key."""
        return self.folder / "predictions.jsonl"

    @property
    def partial(self) -> Path:
        """Return the file that a running evaluation appends to; each process has its own."""
        who = f"-{distributed.rank()}" if distributed.rank() else ""
        return self.folder / f"predictions.partial{who}.jsonl"

    @property
    def partials(self) -> list[Path]:
        """Return the partial files of all processes, including those of an earlier run with more processes."""
        return sorted(self.folder.glob("predictions.partial*.jsonl"))

    def read(self) -> dict[str, Row]:
        """Return rows by job id; skips rows of another model or protocol, and a truncated last line."""
        rows = list(_rows(self.whole, may_be_cut=False))
        rows += [row for path in self.partials for row in _rows(path, may_be_cut=True)]
        return {row["id"]: row for row in rows if row["key"] == self.key}

    def append(self, rows: Sequence[Row]) -> None:
        """Append a batch's rows; after this call they survive a kill."""
        with self.partial.open("a", encoding="utf-8") as file:
            # The leading newline ends a line that a kill may have truncated, so that no new row is damaged.
            file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, rows: Sequence[Row]) -> None:
        """Replace the partial files by the complete one."""
        write_lines(self.whole, rows)
        for path in self.partials:
            path.unlink()


def _rows(path: Path, *, may_be_cut: bool) -> Iterator[Row]:
    """Yield the rows of a file, none if it does not exist; raise ValueError for anything but predictions."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = parse_json(line)
        except ValueError:
            # The file was written completely but may have been copied halfway: then its last line is truncated.
            if may_be_cut or (number == len(lines) and line.startswith('{"id": "')):
                continue  # that job is drawn again
            row = None
        if not isinstance(row, dict) or not {"id", "key"} <= row.keys():
            raise ValueError(f"{str(path)!r} holds {line[:40]!r}, which is not a prediction of cgru; {ANOTHER_PLACE}")
        yield row


def job_row(job: Job) -> Row:
    """Return a job as a row of jobs.jsonl."""
    own = {} if job.guidance is None else {"guidance": job.guidance}
    return {"id": job.id, "prompt": job.prompt, "seed": job.seed, "labels": dict(job.labels), **own}


def pack(features: np.ndarray) -> str:
    """Encode a float32 vector as base64: exact, and a fifth of the size of its decimal digits."""
    return base64.b64encode(features.astype("<f4").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """Decode what `pack` encoded."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4")
