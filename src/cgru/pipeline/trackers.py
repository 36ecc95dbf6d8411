"""Trackers (TensorBoard, wandb, trackio) through accelerate, as one listener of a run; none by default.

A tracker is a copy of metrics.jsonl for people who look at many runs. If it fails, the run goes on without it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.config import RunConfig, keys, to_dict
from cgru.runs import Scalar, run_name

if TYPE_CHECKING:
    from accelerate import Accelerator

    from cgru.runs import Listener

logger = logging.getLogger(__name__)

# Any one of these makes the tracker work.
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
PROJECT = "cgru"
"""Of wandb and trackio; in the run's folder the name of TensorBoard's."""


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed; accelerate would only leave it out."""
    if name and not any(_is_installed(package) for package in PACKAGES[name]):
        raise ValueError(
            f"tracker {name!r} needs the package {PACKAGES[name][0]!r}, which is not installed; run "
            f"`pip install {PACKAGES[name][0]}`, or leave tracker empty (metrics.jsonl holds the same numbers)."
        )


def _is_installed(package: str) -> bool:
    # By its metadata: a folder `wandb`, as wandb leaves behind, could be imported, too.
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


@contextmanager
def tracking(config: RunConfig, out: str | Path) -> Iterator[tuple[Listener, ...]]:
    """The listener that the config's tracker asks for, none for an empty one; `out` is the parent of the run's folder.

    The tracker starts with the first record, because before it there may be no run folder to write to.
    """
    if not config.tracker:
        yield ()
        return
    check_tracker(config.tracker)
    tracker = Tracker(config, Path(out) / run_name(config))
    try:
        yield (tracker.heard,)
    finally:
        tracker.end()


@dataclass(eq=False)
class Tracker:
    """Passes records on while its package takes them."""

    config: RunConfig
    folder: Path
    accelerator: Accelerator | None = None
    has_failed: bool = False

    def heard(self, record: Mapping[str, Scalar]) -> None:
        """Numbers and texts (the alarm) under the record's iteration."""
        if self.has_failed:
            return
        with self._told():
            step = int(record.get("iteration") or 0)
            accelerator = self.accelerator = self.accelerator or self._started(step)
            accelerator.log({key: value for key, value in record.items() if key != "iteration"}, step=step)

    def end(self) -> None:
        """Close what was started."""
        if self.accelerator is not None:
            with self._told():
                self.accelerator.end_training()
                if self.config.tracker == "trackio":  # it does not know yet, and would say so on stdout at exit
                    import_module("trackio").finish()

    def _started(self, step: int) -> Accelerator:
        from accelerate import Accelerator

        accelerator = Accelerator(log_with=self.config.tracker, project_dir=self.folder)
        accelerator.init_trackers(PROJECT, config=_flat(self.config), init_kwargs=_options(self.folder, step))
        return accelerator

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with redirect_stdout(sys.stderr):  # trackio greets on stdout, which is for the result
                yield
        except Exception as error:  # no login, no network, a full disk: each package has its own; the run is worth more
            self.has_failed = True
            why = " ".join(str(error).split())
            logger.warning(
                "tracker %r failed (%s: %s); the run goes on without it, metrics.jsonl holds the same numbers.",
                self.config.tracker,
                type(error).__name__,
                why,
            )


def _options(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """Name the run after its folder, and go on with it after a resume.

    Iterations that were logged but not saved are then done again: TensorBoard drops those of before (`purge_step`),
    the others keep them.
    """
    named = {"name": folder.name, "resume": "allow"}
    return {
        "tensorboard": {"purge_step": step},
        "wandb": {**named, "id": folder.name, "dir": str(folder)},
        "trackio": named,
    }


def _flat(config: RunConfig) -> dict[str, Any]:
    """Dotted keys -> plain values: trackers take numbers and texts only."""
    table, found = to_dict(config), {}
    for key in keys(type(config)):
        section, _, name = key.rpartition(".")
        value = table[section][name] if section else table[name]
        found[key] = str(value) if isinstance(value, list) else value
    return found
