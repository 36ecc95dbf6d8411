"""A run folder: config, manifest, metrics, stages and checkpoints, safe against kill -9 and a full disk at any moment.

Markers are written last: done.json marks a complete stage, checkpoint.json a complete checkpoint. Only one process at a
time works on a run, inside `locked()`, which also removes what a killed process left behind. Reading needs no lock.

    run = Run.create(Path("runs"), config)            # or Run.open(folder)
    with run.locked():
        done = run.latest("3-policy")                 # (iteration, folder) or None
"""

from __future__ import annotations

import logging
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cgru.atomic_io import (
    Data,
    append_line,
    atomic_write,
    json_table,
    read_json,
    sync_folder,
    to_json,
    try_lock,
    write_failure,
    write_synced,
)
from cgru.config import FREE, RunConfig, diff, dump, fingerprint, from_dict, load, to_dict
from cgru.edit_folder import NOTE_FILE

Scalar = float | int | str | None
Listener = Callable[[Mapping[str, Scalar]], None]
"""Called with each record that a run logs."""

CONFIG, MANIFEST, METRICS, DONE, INDEX = "config.yaml", "manifest.json", "metrics.jsonl", "done.json", "checkpoint.json"
LIBRARIES = ("cgru", "torch", "diffusers", "transformers", "peft")
CHECKPOINT = re.compile(r"checkpoint-(\d+)(\.old)?")
LARGEST = 2**63
"""Largest whole number accepted in a record; a larger one could not be plotted."""
# Not eval/: an evaluation may be writing there.
LEFTOVERS = (".*.tmp", "stages/**/.*.tmp", "edit/.*.tmp", "samples/.*.tmp")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run folder and its resolved config; make it with `create` or `open`."""

    path: Path
    config: RunConfig
    listeners: tuple[Listener, ...] = ()
    is_reopened: bool = False
    """Whether it was opened from its folder alone (`cgru resume`); FREE keys then keep the values of the first
    start."""

    @classmethod
    def create(cls, parent: str | Path, config: RunConfig, extra: Mapping[str, Any] | None = None) -> Run:
        """Make the run's folder under `parent`, or open it if it exists with the same config.

        FREE keys (device, memory, tracker, checkpoint_every, samples_every) may differ from an existing run: the values
        given here apply to this process, and config.yaml keeps those of the first start.

        Args:
            extra: facts for manifest.json under "extra"; left alone when the run exists, see `annotate`.
        """
        folder = Path(parent) / run_name(config)
        try:
            if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
                _make(folder, config, extra or {})
        except OSError as error:
            if not (folder / MANIFEST).is_file():  # otherwise another process has just made the same run
                why = error.strerror or str(error)
                allowed = "allowed: a folder you may write to. Choose another, or make room."
                raise OSError(f"cannot make the run {str(folder)!r} ({why}); {allowed}") from error
        stored = cls.open(folder, code=(config.method,)).config
        _refuse_changes(folder, stored, config, "was started with another config")
        return cls(folder, config)

    @classmethod
    def open(cls, path: str | Path, *, code: Collection[str] = ()) -> Run:
        """Open a run folder; its config.yaml must not have changed since the start, except for FREE keys.

        Args:
            path: the folder.
            code: user code ("module:attr") that the config may import; any other such method gives a `StoredConfig`.
        """
        folder = Path(path)
        if not folder.exists():
            raise FileNotFoundError(f"no run at {str(path)!r}; allowed: a run folder. Start one with `cgru unlearn`.")
        missing = [name for name in (CONFIG, MANIFEST) if not (folder / name).is_file()]
        if missing:
            what = "a folder" if folder.is_dir() else "a file"
            raise ValueError(
                f"{str(path)!r} is {what} and not a run: it has no {' and no '.join(missing)}; allowed: a folder made "
                "by `cgru unlearn`. Move it away, or give another."
            )
        config = load(folder / CONFIG, code=code)
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest.get("extra"), dict):
            raise ValueError(f"{str(folder / MANIFEST)!r} has no table 'extra', which each run has. Restore the file.")
        original = from_dict(manifest.get("config", {}), code=code)
        _refuse_changes(folder, original, config, f"has a changed {CONFIG}")
        return cls(folder, config, is_reopened=True)

    @property
    def manifest(self) -> dict[str, Any]:
        """The contents of manifest.json: versions, commit, platform, argv, start, config, extra."""
        return read_json(self.path / MANIFEST)

    def annotate(self, **facts: Any) -> None:  # noqa: ANN401 - anything JSON holds
        """Add facts to "extra" of manifest.json, such as hashes of weights or a batch that was sized automatically."""
        now = self.manifest
        self.save(MANIFEST, to_json(now | {"extra": now["extra"] | facts}))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for this process, or refuse if another holds the lock. The OS releases it when the process ends.

        Also removes what a killed process left: temporary files, old checkpoints, an incomplete last line of
        metrics.jsonl. A forked child shares the lock and keeps it until it ends.
        """
        with (self.path / ".lock").open("a+", encoding="utf-8") as file:
            if not try_lock(file.fileno()):
                holder = (self.path / ".lock").read_text(encoding="utf-8") or "another process"
                raise ValueError(
                    f"the run {str(self.path)!r} is in use by {holder}; allowed: one process at a time. "
                    "Wait for it or stop it, then resume."
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            self._clean()
            yield

    def _clean(self) -> None:
        leftovers = [path for pattern in LEFTOVERS for path in self.path.glob(pattern)]
        for path in [*leftovers, *self.path.parent.glob(f".{self.path.name}.*.tmp")]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for stage in (self.path / "stages").glob("*/"):
            newest = self.latest(stage.name)
            if newest:
                _remove_others(newest[1])
        metrics = self.path / METRICS
        metrics.touch()
        os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)  # drops an unfinished last line

    def stage(self, name: str) -> Path:
        """The folder of a stage, made if it does not exist."""
        assert Path(name).name == name, f"stage {name!r} is not one plain folder name"
        folder = self.path / "stages" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def is_done(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return (self.path / "stages" / stage / DONE).is_file()

    @property
    def has_edit(self) -> bool:
        """Whether the run is finished: edit/edit.json, which is written last, exists with the files that it lists."""
        folder = self.path / "edit"
        note = folder / NOTE_FILE
        return note.is_file() and all((folder / name).is_file() for name in read_json(note).get("files", {}))

    def finish(self, stage: str, record: Mapping[str, Any]) -> None:
        """Mark a stage as complete; call it after all its files are written. The record is stored in done.json."""
        atomic_write(self.stage(stage) / DONE, to_json(dict(record)))

    def outcome(self, stage: str) -> dict[str, Any]:
        """The record of a complete stage, from done.json."""
        return read_json(self.path / "stages" / stage / DONE)

    def save(self, name: str, data: Data) -> Path:
        """Write a file of the run, completely or not at all; folders in `name` are made."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)
        return path

    def log(self, record: Mapping[str, Scalar]) -> None:
        """Append one flat record to metrics.jsonl, then pass it to the listeners. NaN and infinity become null."""
        for key, value in record.items():
            if not isinstance(value, Scalar):
                raise ValueError(f"cannot log {key!r} = {value!r:.60}; allowed: numbers and texts. Give float(value).")
        append_line(self.path / METRICS, to_json(dict(record), indent=None).encode())
        for listener in self.listeners:
            listener(record)

    def truncate_log(self, iteration: int) -> None:
        """Drop the records from `iteration` on, which will be repeated; records without an iteration stay."""
        lines = _lines(self.path / METRICS)
        kept = [line for line, record in lines if "iteration" not in record or record["iteration"] < iteration]
        if len(kept) < len(lines):
            atomic_write(self.path / METRICS, b"".join(kept))

    def checkpoint(self, stage: str, files: Mapping[str, Data], iteration: int) -> Path:
        """Save `files` as the state of a stage after `iteration`; earlier checkpoints are deleted afterwards."""
        folder = self.stage(stage) / f"checkpoint-{iteration}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            _fill(temporary, files, iteration)
            if folder.exists():  # saved before, e.g. on Ctrl-C; `latest` also finds it under the name it gets here
                aside = folder.with_name(f"{folder.name}.old")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            temporary.rename(folder)
            sync_folder(folder.parent)
        except OSError as error:
            raise write_failure(folder, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _remove_others(folder)
        return folder

    def latest(self, stage: str) -> tuple[int, Path] | None:
        """The newest complete checkpoint of a stage and its iteration; None if there is none."""
        for iteration, folder in _checkpoints(self.path / "stages" / stage):
            if _is_whole(folder):
                return iteration, folder
            logger.warning("the checkpoint %s is incomplete and passed over", folder)
        return None


def run_name(config: RunConfig) -> str:
    """concept-method-seed-confighash, such as dogs-cgru-s0-3f9a1c2e; the same settings give the same name."""
    concept, method = (re.sub(r"[\W_]+", "-", name.lower()).strip("-")[:40] for name in (config.concept, config.method))
    return f"{concept or 'concept'}-{method or 'method'}-s{config.seed}-{fingerprint(config)}"


def read_metrics(path: str | Path) -> list[dict[str, Scalar]]:
    """The records of a metrics.jsonl; null stands for NaN or infinity. An incomplete last line is ignored."""
    return [{key: _finite(value) for key, value in record.items()} for _, record in _lines(Path(path))]


def _make(folder: Path, config: RunConfig, extra: Mapping[str, Any]) -> None:
    # The folder appears complete or not at all, so every run has its config and manifest.
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    contents = {CONFIG: dump(config), METRICS: "", MANIFEST: to_json(_facts(config) | {"extra": dict(extra)})}
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, text in contents.items():
            write_synced(temporary / name, text)
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_changes(folder: Path, before: RunConfig, now: RunConfig, why: str) -> None:
    changes = [line for line in diff(before, now) if line.partition(":")[0] not in FREE]
    if changes:
        raise ValueError(
            f"the run {str(folder)!r} {why} ({'; '.join(changes)}); allowed to differ: {', '.join(FREE)}. Undo the "
            "change, or start another run with the new settings."
        )


def _fill(folder: Path, files: Mapping[str, Data], iteration: int) -> None:
    assert all(Path(name).name == name != INDEX for name in files), f"not plain file names: {list(files)}"
    for name, data in files.items():
        write_synced(folder / name, data)
    sizes = {name: (folder / name).stat().st_size for name in files}
    write_synced(folder / INDEX, to_json({"iteration": iteration, "files": sizes}))
    sync_folder(folder)


def _checkpoints(stage: Path) -> list[tuple[int, Path]]:
    # Newest first; for one iteration, the checkpoint that was not renamed to .old comes first.
    found = [(match, path) for path in stage.glob("checkpoint-*") if (match := CHECKPOINT.fullmatch(path.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), pair[0][2] is None), reverse=True)
    return [(int(match[1]), path) for match, path in found]


def _is_whole(folder: Path) -> bool:
    # Renaming makes a checkpoint complete; this also detects a folder that was copied in part or lost a file.
    try:
        files = read_json(folder / INDEX).get("files")
        return isinstance(files, dict) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError):
        return False


def _remove_others(kept: Path) -> None:
    for _, folder in _checkpoints(kept.parent):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)  # if killed in between, the checkpoint counts as incomplete


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    if not path.is_file():
        raise FileNotFoundError(f"no metrics at {str(path)!r}; allowed: the metrics.jsonl of a run.")
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [(line, _record(line, f"line {number} of {str(path)!r}")) for number, line in enumerate(whole, 1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = json_table(line, where)
    for key, value in record.items():
        is_number = not isinstance(value, int) or abs(value) <= LARGEST
        if not isinstance(value, Scalar) or not is_number or (key == "iteration" and not _counts(value)):
            found = f"{key} = {str(value)[:40]}"
            raise ValueError(f"{where} has {found}; allowed: what cgru logs, flat numbers and texts. Restore the file.")
    return record


def _counts(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _finite(value: Scalar) -> Scalar:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _facts(config: RunConfig) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "commit": commit_of(Path(__file__)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "fingerprint": fingerprint(config),
        "config": to_dict(config),
    }


def commit_of(file: Path) -> str | None:
    """The commit of the checkout that tracks a source file, followed by "-dirty" if files were changed.

    A package installed inside another repository is not tracked there, so that repository's commit is not used. For a
    copy without git, the environment variable CGRU_COMMIT can name the commit.
    """
    said = os.environ.get("CGRU_COMMIT")
    git = ["git", "--no-optional-locks", "-C", str(file.parent)]
    tracked = ["ls-files", "--error-unmatch", file.name]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answers = [subprocess.run([*git, *ask], capture_output=True, timeout=10) for ask in (tracked, describe)]
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a checkout too slow to ask
        return said
    return said if any(answer.returncode for answer in answers) else answers[1].stdout.decode().strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
