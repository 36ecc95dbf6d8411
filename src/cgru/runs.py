"""A run folder: config, manifest, metrics, stages and checkpoints, safe against kill -9 and a full disk at any moment.

Markers come last: done.json says that a stage is complete, checkpoint.json that a checkpoint is. One process at a time
works on a run: inside `locked()`, which also clears away what a killed one left. Reading needs no lock.

    run = Run.create(Path("runs"), config)            # or Run.open(folder)
    with run.locked():
        done = run.latest("3-policy")                 # (iteration, folder) or None
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cgru.config import FREE, RunConfig, diff, dump, fingerprint, from_dict, load, to_dict
from cgru.disk import (
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

Scalar = float | int | str | None

CONFIG, MANIFEST, METRICS, DONE, INDEX = "config.yaml", "manifest.json", "metrics.jsonl", "done.json", "checkpoint.json"
LIBRARIES = ("cgru", "torch", "diffusers", "transformers", "peft")
CHECKPOINT = re.compile(r"checkpoint-(\d+)(\.old)?")
LEFTOVERS = (".*.tmp", "stages/**/.*.tmp", "edit/.*.tmp", "samples/.*.tmp")  # eval/ has its own writers, maybe at work

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run folder and its resolved config; make it with `create` or `open`."""

    path: Path
    config: RunConfig

    @classmethod
    def create(cls, parent: str | Path, config: RunConfig, extra: Mapping[str, Any] | None = None) -> Run:
        """Make the run's folder under `parent`, or open it when it is there with the same config.

        Of an existing run the FREE keys (device, memory, tracker, checkpoint_every, samples_every) may differ: those
        given here count for this process, config.yaml keeps those of the first start.

        Args:
            extra: facts for manifest.json under "extra"; left alone when the run exists, see `annotate`.
        """
        folder = Path(parent) / run_name(config)
        try:
            if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
                _make(folder, config, extra or {})
        except OSError as error:
            if not (folder / MANIFEST).is_file():  # else: another process was faster with the same run
                why = error.strerror or str(error)
                allowed = "allowed: a folder you may write to. Choose another, or make room."
                raise OSError(f"cannot make the run {str(folder)!r} ({why}); {allowed}") from error
        stored = cls.open(folder).config
        _refuse_changes(folder, stored, config, "was started with another config")
        return cls(folder, config)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run folder; its config.yaml must say what it said at the start, but for FREE keys."""
        folder = Path(path)
        if not folder.exists():
            raise FileNotFoundError(f"no run at {str(path)!r}; allowed: a run folder. Start one with `cgru unlearn`.")
        missing = [name for name in (CONFIG, MANIFEST) if not (folder / name).is_file()]
        if missing:
            what = "a folder" if folder.is_dir() else "a file"
            raise ValueError(
                f"{str(path)!r} is {what} and no run: it has no {' and no '.join(missing)}; allowed: a folder made by "
                "`cgru unlearn`. Move it away, or give another."
            )
        config = load(folder / CONFIG)
        original = from_dict(read_json(folder / MANIFEST).get("config", {}))
        _refuse_changes(folder, original, config, f"has a changed {CONFIG}")
        return cls(folder, config)

    @property
    def manifest(self) -> dict[str, Any]:
        """What manifest.json says: versions, commit, platform, argv, start, config, extra."""
        return read_json(self.path / MANIFEST)

    def annotate(self, **facts: Any) -> None:  # noqa: ANN401 - anything JSON holds
        """Add facts to "extra" of manifest.json, such as hashes of weights or a batch that was sized automatically."""
        now = self.manifest
        self.save(MANIFEST, to_json(now | {"extra": now["extra"] | facts}))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process; refuse if another holds it. The OS lets go however the process ends.

        Clears away what a killed process left: temporary files, old checkpoints, a cut last line of metrics.jsonl.
        A forked child shares the lock and keeps it while it lives.
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
        os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)  # behind it stands a line that was not finished

    def stage(self, name: str) -> Path:
        """The folder of a stage, made if it is not there."""
        assert Path(name).name == name, f"stage {name!r} is not one plain folder name"
        folder = self.path / "stages" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def is_done(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return (self.path / "stages" / stage / DONE).is_file()

    def finish(self, stage: str, record: Mapping[str, Any]) -> None:
        """Mark a stage as complete, after everything it produced was written; the record goes into done.json."""
        atomic_write(self.stage(stage) / DONE, to_json(dict(record)))

    def outcome(self, stage: str) -> dict[str, Any]:
        """The record that a complete stage was finished with."""
        return read_json(self.path / "stages" / stage / DONE)

    def save(self, name: str, data: Data) -> Path:
        """Write a file of the run, whole or not at all; folders in `name` are made."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)
        return path

    def log(self, record: Mapping[str, Scalar]) -> None:
        """Append one flat record to metrics.jsonl; it is on disk when this returns. NaN and infinity become null."""
        nested = [key for key, value in record.items() if not isinstance(value, Scalar)]
        assert not nested, f"metrics are flat numbers and texts; these are not: {nested}"
        append_line(self.path / METRICS, to_json(dict(record), indent=None).encode())

    def truncate_log(self, iteration: int) -> None:
        """Drop the records of iterations from `iteration` on, which will be done again; records without one stay."""
        lines = _lines(self.path / METRICS)
        kept = [line for line, record in lines if "iteration" not in record or record["iteration"] < iteration]
        if len(kept) < len(lines):
            atomic_write(self.path / METRICS, b"".join(kept))

    def checkpoint(self, stage: str, files: Mapping[str, Data], iteration: int) -> Path:
        """Keep `files` as the state of a stage after `iteration`; earlier checkpoints go once this one is in place."""
        folder = self.stage(stage) / f"checkpoint-{iteration}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            _fill(temporary, files, iteration)
            if folder.exists():  # saved before, e.g. on Ctrl-C; `latest` finds it under its other name, too
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
        """The newest whole checkpoint of a stage and its iteration; None when there is none."""
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
    """The records of a metrics.jsonl; null stands for NaN or infinity. A last line cut by a kill is passed over."""
    return [record for _, record in _lines(Path(path))]


def _make(folder: Path, config: RunConfig, extra: Mapping[str, Any]) -> None:
    # The folder appears whole or not at all, so there is no run without its config and manifest.
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
    free: dict[str, Any] = {key: getattr(before, key) for key in FREE}
    changes = diff(before, replace(now, **free))
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
    # Newest first; of one iteration the one that is not set aside. A missing folder has none.
    found = [(match, path) for path in stage.glob("checkpoint-*") if (match := CHECKPOINT.fullmatch(path.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), pair[0][2] is None), reverse=True)
    return [(int(match[1]), path) for match, path in found]


def _is_whole(folder: Path) -> bool:
    # Renaming makes it whole; this also sees a folder that was copied half or lost a file.
    try:
        files: dict[str, int] = read_json(folder / INDEX)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _remove_others(kept: Path) -> None:
    for _, folder in _checkpoints(kept.parent):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)  # if killed in the middle: no longer whole, so passed over


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    if not path.is_file():
        raise FileNotFoundError(f"no metrics at {str(path)!r}; allowed: the metrics.jsonl of a run.")
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [(line, json_table(line, f"line {number} of {str(path)!r}")) for number, line in enumerate(whole, 1)]


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
    """The commit of the checkout that tracks a source file, "-dirty" behind it if files were changed.

    A package installed inside someone's own repository is not tracked there, so it gets no commit of theirs. A copy
    without git, as on a borrowed machine, has the one that the environment variable CGRU_COMMIT names, if any.
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
