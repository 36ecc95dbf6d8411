"""`cgru reproduce`: the paper's experiments at a scale, side by side and resumable, then one page."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.cli.live import duration
from cgru.cli.options import Reproduce
from cgru.cli.terminal import quiet_libraries, show
from cgru.experiments.cells import Cell
from cgru.experiments.paper import EXPERIMENTS, plan
from cgru.experiments.scales import find_scale
from cgru.experiments.work import last_line
from cgru.presets import EMBEDDED

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "reproduction.html"
MOST_WORKERS = 8
"""That are started unasked."""


def prepare_reproduce(options: Reproduce, root: Path) -> Callable[[], int]:
    """Check names and make the plan; nothing is written."""
    scale = find_scale(options.scale)
    only = [name.strip() for name in (options.only or "").split(",") if name.strip()]
    cells = plan(scale, options.model or EMBEDDED, options.data, only)
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers}; allowed: 1 or more. Leave it out for one per core.")
    if options.data is not None and not options.data.is_dir():
        raise FileNotFoundError(
            f"--data {str(options.data)!r} is no folder; allowed: one with what docs/reproduce.md lists."
        )
    out = options.out or Path("runs") / f"reproduce-{scale.name}"
    if options.dry_run:
        return lambda: dry_run(cells, out, options.device, options.json)
    quiet_libraries()
    from cgru.cli.plan import check_words
    from cgru.evaluation.store import check_writable
    from cgru.experiments.work import check_free

    for cell in cells:
        if cell.concept is not None and not cell.missing:
            check_words(cell.config(options.device))  # what does not fit is said now, not after an hour
    check_writable(out)
    check_free(out)
    return lambda: _work(options, cells, out, only)


def dry_run(cells: Sequence[Cell], out: Path, device: str, as_json: bool) -> int:
    """List the cells and what makes them by hand."""
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
    return out / "runs" / run_name(cell.config(device))


def _tell_plan(console: Console, rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    for row in rows:
        console.print(row["name"] + (f": not run, needs {row['not_run']}" if row["not_run"] else ""), soft_wrap=True)
        if not row["not_run"]:
            console.print("\n".join(f"  {line}" for line in row["commands"]), soft_wrap=True)
    ready = sum(not row["not_run"] for row in rows)
    console.print(f"{ready} of {len(rows)} cells can run; results and page: {out}", soft_wrap=True)


def _work(options: Reproduce, cells: Sequence[Cell], out: Path, only: Sequence[str]) -> int:
    from cgru.cli.terminal import quiet_libraries

    quiet_libraries()
    from cgru.backbones.base import pick_device
    from cgru.experiments.work import Order, reproduce

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
    try:
        records = reproduce(cells, order, workers, _teller(options, len(cells), begun), about=about)
    finally:
        write_page(out)  # also of what was done until Ctrl-C
    seconds = time.monotonic() - begun
    failed = {record["name"]: record["error"] for record in records if "error" in record}
    found = {"page": str(out / PAGE), "seconds": round(seconds, 1), "failed": failed}
    show(found, options.json, lambda console: _tell_end(console, found, seconds))
    return 1 if failed else 0


def write_page(out: Path) -> None:
    """The page and its figures as files: SVG, and PNG where the extra `figures` is installed."""
    from cgru.disk import atomic_write
    from cgru.report.figures import find_renderer, light, write_figures
    from cgru.report.paper_figures import figures
    from cgru.report.reproduced import read_reproduction
    from cgru.report.reproduction import reproduction_page

    found = read_reproduction(out)
    atomic_write(out / PAGE, reproduction_page(found))
    drawn, folder = figures(found), out / "figures"
    folder.mkdir(exist_ok=True)
    try:
        write_figures(drawn, folder, find_renderer())
    except ValueError:  # without resvg: drawings alone
        for name, svg in drawn.items():
            atomic_write(folder / f"{name}.svg", light(svg))


def _teller(options: Reproduce, total: int, begun: float) -> Callable[[Cell, Mapping[str, Any]], None]:
    def tell(cell: Cell, record: Mapping[str, Any]) -> None:
        if options.json:
            return
        took = record.get("seconds", {})
        state = f"failed: {last_line(record['error'])}" if "error" in record else "done"
        parts = ", ".join(f"{name} {duration(value)}" for name, value in took.items() if value >= 1)
        since = duration(time.monotonic() - begun)
        print(f"[{since}] {cell.name}: {state}{f' ({parts})' if parts else ''}", file=sys.stderr, flush=True)

    return tell


def _tell_end(console: Console, found: Mapping[str, Any], seconds: float) -> None:
    for name, error in found["failed"].items():
        console.print(f"failed, {name}: {last_line(error)}", soft_wrap=True)
    if found["failed"]:
        console.print("The same command tries these again and keeps the rest.")
    console.print(f"{duration(seconds)}; the page: {found['page']}", soft_wrap=True)
