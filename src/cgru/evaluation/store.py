"""The files of one evaluation: jobs.jsonl, predictions.jsonl, scores.json and the pictures of the grid.

Finished files appear under their name only when whole (temporary name, flush, rename). While a run is under way its
predictions are appended to predictions.partial.jsonl, batch by batch, so that a killed run continues where it stopped.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cgru.evaluation.base import Job

Row = dict[str, Any]


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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


@dataclass(frozen=True)
class PredictionFile:
    """predictions.jsonl of one folder, for one key (a hash of protocol and model)."""

    folder: Path
    key: str

    @property
    def whole(self) -> Path:
        """All predictions, in job order."""
        return self.folder / "predictions.jsonl"

    @property
    def partial(self) -> Path:
        """What a run under way has so far."""
        return self.folder / "predictions.partial.jsonl"

    def read(self) -> dict[str, Row]:
        """Rows by job id; those of another model or protocol, and a line cut off by a kill, are passed over."""
        rows = [row for path in (self.whole, self.partial) if path.is_file() for row in _complete_rows(path)]
        return {row["id"]: row for row in rows if row["key"] == self.key}

    def append(self, rows: Sequence[Row]) -> None:
        """Keep a batch's rows, safe against a kill after this call."""
        with self.partial.open("a", encoding="utf-8") as file:
            # The leading newline closes a line that a kill may have cut off, so that it spoils no new row.
            file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, rows: Sequence[Row]) -> None:
        """Replace the partial file by the whole one."""
        write_lines(self.whole, rows)
        self.partial.unlink(missing_ok=True)


def _complete_rows(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a kill in the middle of a write: that job is drawn again
    return rows


def job_row(job: Job) -> Row:
    """A job as a line of jobs.jsonl."""
    return {"id": job.id, "prompt": job.prompt, "seed": job.seed, "labels": dict(job.labels)}


def pack(features: np.ndarray) -> str:
    """A float32 vector as base64: exact, and a fifth of its decimal digits."""
    return base64.b64encode(features.astype("<f4").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """The inverse of `pack`."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4")
