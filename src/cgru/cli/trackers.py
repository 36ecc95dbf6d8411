"""Trackers (TensorBoard, wandb, trackio) through accelerate, as one listener of a run; none by default."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cgru.config import KEYS, RunConfig, to_dict
from cgru.pipeline.observer import Listener
from cgru.runs import run_name

# Any one of these makes the tracker work.
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
NUMBER = int | float


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed; accelerate would only leave it out."""
    if name and not any(importlib.util.find_spec(package) for package in PACKAGES[name]):
        raise ValueError(
            f"tracker {name!r} needs the package {PACKAGES[name][0]!r}, which is not installed; run "
            f"`pip install {PACKAGES[name][0]}`, or leave tracker empty (metrics.jsonl holds the same numbers)."
        )


@contextmanager
def tracking(config: RunConfig, out: str | Path) -> Iterator[tuple[Listener, ...]]:
    """The listener that the config's tracker asks for, none for an empty one; `out` is the parent of the run's folder.

    The tracker starts with the first record, because before it there may be no run folder to write to.
    """
    if not config.tracker:
        yield ()
        return
    check_tracker(config.tracker)
    from accelerate import Accelerator

    started: list[Accelerator] = []

    def log(record: dict[str, float | int | str]) -> None:
        if not started:
            started.append(Accelerator(log_with=config.tracker, project_dir=Path(out) / run_name(config)))
            started[0].init_trackers("cgru", config=_flat(config))
        numbers = {key: value for key, value in record.items() if isinstance(value, NUMBER) and key != "iteration"}
        started[0].log(numbers, step=int(record["iteration"]))

    try:
        yield (log,)
    finally:
        for accelerator in started:
            accelerator.end_training()


def _flat(config: RunConfig) -> dict[str, Any]:
    """Dotted keys -> plain values: trackers take numbers and texts only."""
    table, found = to_dict(config), {}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        value = table[section][name] if section else table[name]
        found[key] = str(value) if isinstance(value, list) else value
    return found
