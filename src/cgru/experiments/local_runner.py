"""Run the cells of a plan on this machine: several at a time, each resumable; a failed cell does not stop the others.

OUT/plan.json lists the cells. OUT/cells/NAME.json is the result of a cell: run, evaluations, attacks and seconds, or
the error. OUT/runs and OUT/base hold the runs and evaluations of the base. A cell is not repeated if its result has the
cell's fingerprint and its run still exists. On a CPU each worker is a process with one thread: for a small model, two
processes are faster than two threads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cgru.atomic_io import atomic_write, parse_json, try_lock
from cgru.experiments.cells import Assault, Cell, Measure, Options
from cgru.experiments.settings import config_of
from cgru.runs import commit_of

PLAN, LOCK = "plan.json", ".lock"
CELLS, RUNS, BASE = "cells", "runs", "base"
FILES = ("reference", "source")
"""Options that are paths."""
Record = dict[str, Any]
Told = Callable[[Cell, Record], None]
"""Called with each cell when it is done, and its record."""
Execute = Callable[[Sequence[Cell]], Iterator[tuple[Cell, Record]]]
"""Runs cells, in any order, and yields the record of each."""


@dataclass(frozen=True)
class Order:
    """What a worker needs beside the cell."""

    out: Path
    device: str
    threads: int | None
    """On a CPU; None: torch's own choice."""


def reproduce(
    cells: Sequence[Cell], order: Order, workers: int, told: Told, *, about: Mapping[str, Any]
) -> list[Record]:
    """Run what is left of the plan in processes of this machine; returns the records of all cells in the plan's
    order."""
    return carry_out(cells, order.out, lambda left: _worked(left, order, workers), told, about=about)


def carry_out(
    cells: Sequence[Cell], out: Path, execute: Execute, told: Told, *, about: Mapping[str, Any]
) -> list[Record]:
    """Run what is left of the plan and write its files; returns the records of all cells in the plan's order."""
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    with only_one(out):
        return _carry_out(cells, out, execute, told, about)


def _carry_out(
    cells: Sequence[Cell], out: Path, execute: Execute, told: Told, about: Mapping[str, Any]
) -> list[Record]:
    write_plan(out, cells, about)
    done = {cell.name: record for cell in cells if (record := read_done(out, cell)) is not None}
    for cell in cells:
        if cell.missing:
            done[cell.name] = _write(out, cell, {"not_run": cell.missing})
    left = [cell for cell in cells if cell.name not in done]
    for cell, record in execute(left):
        done[cell.name] = _write(out, cell, record)
        told(cell, record)
    return [done[cell.name] for cell in cells]


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Refuse a second command in the same folder, which would run the same cells."""
    with (out / LOCK).open("w") as file:
        if not try_lock(file.fileno()):
            advice = "allowed: one at a time. Wait, or give --out FOLDER."
            raise ValueError(f"another cgru command is at work in {str(out)!r}; {advice}")
        yield


def check_free(out: Path) -> None:
    """The same before anything is started or written."""
    if (out / LOCK).is_file():
        with only_one(out):
            pass


def write_plan(out: Path, cells: Sequence[Cell], about: Mapping[str, Any]) -> None:
    """The contents of plan.json; experiments planned by an earlier command of the same scale and model are kept."""
    rows = [{**asdict(cell), "fingerprint": cell.fingerprint} for cell in cells]
    asked = {cell.experiment for cell in cells}
    try:
        before = parse_json((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if all(before.get(key) == about.get(key) for key in ("scale", "model")):
        rows += [row for row in before.get("cells", []) if row["experiment"] not in asked]
    atomic_write(out / PLAN, json.dumps({**about, "cells": rows}, indent=1, ensure_ascii=False) + "\n")


def read_record(out: Path, cell: Cell) -> Record | None:
    """The result of a cell; None if there is none for the cell's current definition."""
    try:
        record: Record = parse_json((out / CELLS / f"{cell.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("fingerprint") == cell.fingerprint else None


def read_done(out: Path, cell: Cell) -> Record | None:
    """The record of a cell that need not be repeated: it did not fail, and its run still exists."""
    record = read_record(out, cell)
    if record is None or "error" in record:
        return None
    run = record.get("run")
    return record if run is None or (out / run).is_dir() else None


def last_line(error: str) -> str:
    """Of a traceback what went wrong."""
    return next(reversed(error.strip().splitlines()), "an error without text")


def _write(out: Path, cell: Cell, found: Record) -> Record:
    record = {"name": cell.name, "fingerprint": cell.fingerprint, **found}
    atomic_write(out / CELLS / f"{cell.name}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def _worked(cells: Sequence[Cell], order: Order, workers: int) -> Iterator[tuple[Cell, Record]]:
    if workers == 1 or len(cells) <= 1:
        yield from ((cell, attempt(cell, order)) for cell in cells)
        return
    left = list(cells)
    for cell, record in _pooled(left, order, workers):
        left.remove(cell)
        yield cell, record
    for cell in left:  # a killed worker ends its pool, so each remaining cell now gets its own pool
        done = list(_pooled([cell], order, 1))
        yield done[0] if done else (cell, {"error": "its process was killed; out of memory? Try fewer --workers."})


def _pooled(cells: Sequence[Cell], order: Order, workers: int) -> Iterator[tuple[Cell, Record]]:
    """Yield cells as they finish; stops when a worker is killed."""
    # Spawned, because a CUDA context does not survive a fork. The workers receive Ctrl-C, too.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(cells)), mp_context=context, max_tasks_per_child=1) as pool:
        waiting: dict[Future[Record], Cell] = {pool.submit(attempt, cell, order): cell for cell in cells}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            return
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def attempt(cell: Cell, order: Order) -> Record:
    """Run a cell; an error becomes a record, so that the others continue."""
    from cgru.quiet import quiet_libraries

    quiet_libraries()  # before anything is imported that would speak
    from cgru.interrupt import Interrupted

    try:
        return do(cell, order)
    except Interrupted:
        raise KeyboardInterrupt from None  # the run is saved; the plan ends here, too
    except (ValueError, OSError) as error:
        return {"error": str(error).strip() or type(error).__name__}
    except Exception:
        return {"error": traceback.format_exc()}


def do(cell: Cell, order: Order) -> Record:
    """Train, evaluate and attack; work that is already done is not repeated."""
    _limit_threads(order)
    begun = time.monotonic()
    run = _train(cell, order) if cell.concept is not None else None
    trained = time.monotonic()
    subject = cell.model if run is None else str(run)
    evaluations = _evaluate(cell, subject, order)
    evaluated = time.monotonic()
    attacks = [_attack(assault, subject, cell, order) for assault in cell.assaults]
    seconds = {
        "training": round(trained - begun, 1),
        "evaluation": round(evaluated - trained, 1),
        "attack": round(time.monotonic() - evaluated, 1),
    }
    folders = {"run": _inside(order.out, run), "evaluations": evaluations, "attacks": attacks}
    return {**folders, "seconds": seconds, **_provenance(order.device)}


def _train(cell: Cell, order: Order) -> Path:
    from cgru.config import RLConfig
    from cgru.pipeline import fit_critic, unlearn
    from cgru.pipeline.trackers import tracking

    config, runs = config_of(cell, order.device), order.out / RUNS
    if cell.stage == "critic":
        assert isinstance(config, RLConfig), f"{cell.method} has no critic"
        return fit_critic(config, runs).path
    with tracking(config, runs) as listeners:
        return unlearn(config, runs, listeners=listeners).path


def _evaluate(cell: Cell, subject: str, order: Order) -> list[str | None]:
    """Run all benchmarks of a cell in one process, so that they share common pictures."""
    from cgru.evaluation.drawing import Gallery

    gallery = Gallery()
    return [_measure(measure, subject, cell, order, gallery) for measure in cell.measures]


def _measure(measure: Measure, subject: str, cell: Cell, order: Order, gallery: Any) -> str | None:  # noqa: ANN401
    from cgru.evaluation.picture_grid import before_after, save_png
    from cgru.evaluation.request import Request
    from cgru.evaluation.runner import is_shown
    from cgru.evaluation.session import prepare, run

    options = _options(measure.options)
    place = order.out / BASE / measure.benchmark
    session = prepare(
        Request(
            subject,
            measure.benchmark,
            images=measure.images,
            target=measure.target,
            out=place if cell.concept is None else None,
            device=order.device,
            **options,
        )
    )
    if cell.concept is not None:
        reuse(place, session.out / "base")
    run(replace(session, gallery=gallery))
    if session.base and session.task and any(is_shown(job) for job in session.jobs):
        save_png(session.out / "before_after.png", before_after(session.out))
    return _inside(order.out, session.out)


def reuse(known: Path, base: Path) -> None:
    """Copy the predictions of the base's own cell into a base folder; their keys match, so nothing is drawn again."""
    if base.exists() or not (known / "scores.json").is_file():  # at work, or not there
        return
    copy = base.with_name(f".base.{os.getpid()}.tmp")
    base.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(known / "samples", copy / "samples")
        shutil.copy2(known / "predictions.jsonl", copy)
        copy.rename(base)
    except OSError:  # shutil.Error is one, too: then they are drawn
        shutil.rmtree(copy, ignore_errors=True)


def _attack(assault: Assault, subject: str, cell: Cell, order: Order) -> str | None:
    from cgru.attacks.session import AttackRequest, prepare_attack, run_attack

    options = _options(assault.options)
    session = prepare_attack(
        AttackRequest(
            subject,
            assault.target,
            prompts=assault.prompts,
            schedule=assault.schedule,
            tokens=assault.tokens,
            without_word=assault.without_word,
            out=order.out / BASE / "attack" if cell.concept is None else None,
            device=order.device,
            **options,
        )
    )
    run_attack(session)
    return _inside(order.out, session.out)


def _options(given: Options) -> dict[str, Any]:
    return {key: Path(value) if key in FILES else value for key, value in given}


def _limit_threads(order: Order) -> None:
    import torch

    if order.threads is not None:
        torch.set_num_threads(order.threads)


def _inside(out: Path, path: Path | None) -> str | None:
    """A path as it is stored: relative, so that the folder can be moved."""
    return None if path is None else os.path.relpath(path, out)


def _provenance(device: str) -> Record:
    import torch

    from cgru.backbones.base import pick_device
    from cgru.evaluation.session import LIBRARIES

    picked = pick_device(device)
    name = torch.cuda.get_device_name(picked) if picked.type == "cuda" else f"{picked.type}, {platform.machine()}"
    return {
        "device": name,
        "commit": commit_of(Path(__file__)),
        "versions": {name: version(name) for name in LIBRARIES},
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
