"""`cgru reproduce`: run the paper's experiments at a scale, several cells at a time, then write one page."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.cli.options import Reproduce
from cgru.cli.progress_run import duration
from cgru.cli.terminal import heartbeat, show
from cgru.embedded import EMBEDDED
from cgru.experiments.cells import Cell
from cgru.experiments.local_runner import last_line
from cgru.experiments.paper import EXPERIMENTS, plan
from cgru.experiments.scales import find_scale
from cgru.experiments.settings import config_of
from cgru.quiet import quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "reproduction.html"
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
MOST_WORKERS = 8
"""Most workers that are started by default."""


def prepare_reproduce(options: Reproduce, root: Path) -> Callable[[], int]:
    """Check names and make the plan; nothing is written."""
    scale = find_scale(options.scale)
    only = [name.strip() for name in (options.only or "").split(",") if name.strip()]
    cells = plan(scale, options.model or EMBEDDED, options.data, only)
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers}; allowed: 1 or more. Leave it out for one per core.")
    if options.data is not None and not options.data.is_dir():
        raise FileNotFoundError(
            f"--data {str(options.data)!r} is not a folder; allowed: a folder as docs/reproduce.md describes it."
        )
    if not DEVICE.fullmatch(options.device):
        raise ValueError(f"--device {options.device!r}; allowed: auto, cpu, cuda, cuda:1, ... Give one of these.")
    out = options.out or Path("runs") / f"reproduce-{scale.name}"
    quiet_libraries()
    check_cells(cells, options.device)  # report a bad setting now, not after an hour
    if options.dry_run:
        return lambda: dry_run(cells, out, options.device, options.json)
    from cgru.evaluation.store import check_writable
    from cgru.experiments.local_runner import check_free

    check_writable(out)
    check_free(out)
    return lambda: _work(options, cells, out, only)


def check_cells(cells: Sequence[Cell], device: str) -> None:
    """Check each run as `cgru unlearn` would, assuming that all nodes are installed like this machine.

    A shipped, local or cached model is not loaded. One's own is, once, because only then it says what prompts it reads.
    """
    from cgru.backbones import is_own_loader, load_model
    from cgru.pipeline.unlearning import check, oom_as_message
    from cgru.rl.oom_retry import clear_memory
    from cgru.rl.preflight import check_accepted

    configs = [config_of(cell, device) for cell in cells if cell.concept is not None and not cell.missing]
    for config in configs:
        check(config)
    own = [config for config in configs if is_own_loader(config.model)]
    for name, dtype in dict.fromkeys((config.model, config.dtype) for config in own):
        with oom_as_message():
            backbone = load_model(name, dtype=dtype)  # the device of a sweep may be another node's
        for config in own:
            if (config.model, config.dtype) == (name, dtype):
                check_accepted(config, backbone)
        del backbone
        clear_memory()


def dry_run(cells: Sequence[Cell], out: Path, device: str, as_json: bool) -> int:
    """List the cells, and the commands to run each by hand."""
    rows = [
        {
            "name": cell.name,
            "not_run": cell.missing or None,
            "commands": cell.commands(_run_folder(cell, device, out), device),
        }
        for cell in cells
    ]
    return show({"out": str(out), "cells": rows}, as_json, lambda console: _tell_plan(console, rows, out))


def _run_folder(cell: Cell, device: str, out: Path) -> Path | None:
    from cgru.runs import run_name

    if cell.concept is None or cell.missing:
        return None
    return out / "runs" / run_name(config_of(cell, device))


def _tell_plan(console: Console, rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    for row in rows:
        console.print(row["name"] + (f": not run, needs {row['not_run']}" if row["not_run"] else ""), soft_wrap=True)
        if not row["not_run"]:
            console.print("\n".join(f"  {line}" for line in row["commands"]), soft_wrap=True)
    ready = sum(not row["not_run"] for row in rows)
    console.print(f"{ready} of {len(rows)} cells can run; results and page: {out}", soft_wrap=True)


def _work(options: Reproduce, cells: Sequence[Cell], out: Path, only: Sequence[str]) -> int:
    from cgru.quiet import quiet_libraries

    quiet_libraries()
    from cgru.backbones.base import pick_device
    from cgru.experiments.local_runner import Order, reproduce

    is_cpu = pick_device(options.device).type == "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = options.workers or (min(cores, MOST_WORKERS) if is_cpu else 1)
    order = Order(out, options.device, max(1, cores // workers) if is_cpu else None)
    begun = time.monotonic()
    about = {
        "scale": options.scale,
        "model": options.model or EMBEDDED,
        "only": list(only) or list(EXPERIMENTS),
        "command": shlex.join(["cgru", *sys.argv[1:]]),
        "device": options.device,
        "workers": workers,
        "threads": order.threads,
    }
    teller = Teller(len(cells), options.json, begun)
    try:
        with heartbeat(teller.summary):
            records = reproduce(cells, order, workers, teller.told, about=about)
    finally:
        write_page(out)  # also after Ctrl-C, with the cells done so far
    seconds = time.monotonic() - begun
    failed = {record["name"]: record["error"] for record in records if "error" in record}
    found = {"page": str(out / PAGE), "seconds": round(seconds, 1), "failed": failed}
    show(found, options.json, lambda console: _tell_end(console, found, seconds))
    return 1 if failed else 0


def write_page(out: Path) -> None:
    """Write the page and its figures: SVG, and PNG if the extra `figures` is installed."""
    from cgru.atomic_io import atomic_write
    from cgru.report.paper.figures import figures
    from cgru.report.paper.page import reproduction_page
    from cgru.report.paper.read import read_reproduction
    from cgru.report.run.figures import find_renderer, light, write_figures

    found = read_reproduction(out)
    atomic_write(out / PAGE, reproduction_page(found))
    drawn, folder = figures(found), out / "figures"
    folder.mkdir(exist_ok=True)
    try:
        write_figures(drawn, folder, find_renderer())
    except ValueError:  # without resvg: SVG only
        for name, svg in drawn.items():
            atomic_write(folder / f"{name}.svg", light(svg))


@dataclass
class Teller:
    """Reports on stderr which cells are done or have failed."""

    total: int
    is_quiet: bool
    begun: float
    done: int = 0

    def told(self, cell: Cell, record: Mapping[str, Any]) -> None:
        """Report that a cell is done or has failed."""
        self.done += 1
        if self.is_quiet:
            return
        took = record.get("seconds", {})
        state = f"failed: {last_line(record['error'])}" if "error" in record else "done"
        parts = ", ".join(f"{name} {duration(value)}" for name, value in took.items() if value >= 1)
        since = duration(time.monotonic() - self.begun)
        print(f"[{since}] {cell.name}: {state}{f' ({parts})' if parts else ''}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """How many cells are done."""
        return f"[{duration(time.monotonic() - self.begun)}] {self.done} of {self.total} cells done"


def _tell_end(console: Console, found: Mapping[str, Any], seconds: float) -> None:
    for name, error in found["failed"].items():
        console.print(f"failed, {name}: {last_line(error)}", soft_wrap=True)
    if found["failed"]:
        console.print("Run the same command again to retry these; finished cells are kept.")
    console.print(f"{duration(seconds)}; the page: {found['page']}", soft_wrap=True)
