"""`cgru sweep`: run concepts × seeds × methods on Ray, then write one comparison page; can be resumed."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.catalog import unknown
from cgru.cli import options as asked
from cgru.cli.parse import SETTING
from cgru.cli.progress_run import duration
from cgru.cli.reproducing import check_cells, dry_run
from cgru.cli.terminal import names_of, one_line, show
from cgru.experiments.cells import Cell
from cgru.experiments.cluster import Share, check_installed, check_share
from cgru.experiments.local_runner import last_line
from cgru.experiments.sweep import Sweep, benchmark_of, plan
from cgru.quiet import quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "comparison.html"
DEVICES = ("auto", "cpu", "cuda")
Record = Mapping[str, Any]


def prepare_sweep(options: asked.Sweep, root: Path) -> Callable[[], int]:
    """Check everything that can be checked here, then find the cluster; nothing is written."""
    sweep = read_sweep(options)
    _check_options(options)
    check_share(options.share)
    quiet_libraries()
    cells = plan(sweep, root)
    check_cells(cells, options.device)
    if options.dry_run:
        return lambda: dry_run(cells, options.out, options.device, options.json)
    from cgru.evaluation.store import check_writable
    from cgru.experiments.cluster import connect, disconnect, fit_share
    from cgru.experiments.local_runner import check_free

    check_installed()
    check_writable(options.out)
    check_free(options.out)
    _check_benchmarks(cells, root)
    nodes = connect(options.address)
    try:
        share = fit_share(nodes, options.device, options.share)
    except ValueError:
        disconnect()
        raise
    return lambda: work(options, cells, share)


def read_sweep(options: asked.Sweep) -> Sweep:
    """The sweep that the command line describes."""
    settings = tuple(word for word in options.words if SETTING.match(word))
    return Sweep(
        concepts=tuple(word for word in options.words if not SETTING.match(word)),
        seeds=tuple(_seed(name) for name in names_of(options.seeds)),
        methods=None if options.methods is None else names_of(options.methods),
        model=options.model,
        preset=options.preset,
        settings=settings,
        benchmarks=None if options.benchmarks is None else names_of(options.benchmarks),
        images=options.images,
    )


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--seeds has {text!r}; allowed: whole numbers from 0, separated by commas. Try --seeds 0,1,2")
    return int(text)


def _check_options(options: asked.Sweep) -> None:
    if options.retries < 0:
        raise ValueError(f"--retries {options.retries}; allowed: 0 or more. Give 0 for one try only.")
    if options.device not in DEVICES:
        raise ValueError(unknown("device", options.device, DEVICES, "Which GPU a run gets is Ray's choice."))


def _check_benchmarks(cells: Sequence[Cell], root: Path) -> None:
    """Refuse a target that does not suit the benchmark now, not after the training."""
    for measure in dict.fromkeys(measure for cell in cells for measure in cell.measures):
        benchmark_of(measure, root).task(measure.target)


def work(options: asked.Sweep, cells: Sequence[Cell], share: Share) -> int:
    """Do what is left, disconnect from the cluster and report the outcome; returns the exit code."""
    from cgru.experiments.cluster import disconnect

    begun = time.monotonic()
    try:
        # Ray reports lost nodes on stdout until we disconnect; stdout is for the result, so this goes to stderr.
        with redirect_stdout(sys.stderr):
            try:
                records = _carry_out(options, cells, share)
            finally:
                disconnect()
    except KeyboardInterrupt:
        print(f"cgru: interrupted; the same command continues {str(options.out)!r}.", file=sys.stderr)
        return 130
    except (ValueError, ConnectionError) as error:  # another sweep took the folder meanwhile; the cluster is gone
        print(f"cgru: {one_line(error)}", file=sys.stderr)
        return 1
    return tell(options, records, time.monotonic() - begun)


def _carry_out(options: asked.Sweep, cells: Sequence[Cell], share: Share) -> Sequence[Record]:
    from cgru.cli.progress_sweep import Lookout, shown
    from cgru.experiments.cluster import RayPool, dispatch
    from cgru.experiments.local_runner import Order, carry_out

    out = options.out.resolve()  # a worker has a folder of its own
    about = {"command": shlex.join(["cgru", *sys.argv[1:]]), "share": {"cpus": share.cpus, "gpus": share.gpus}}
    pool = RayPool(Order(out, share.device, share.threads), share)
    with shown(cells, out, is_quiet=options.json, device=share.device) as board:
        lookout = Lookout(board, pool.has_room)
        return carry_out(
            cells,
            out,
            lambda left: dispatch(left, pool, options.retries, board.again, lookout.look),
            board.told,
            about=about,
        )


def tell(options: asked.Sweep, records: Sequence[Record], seconds: float) -> int:
    """Write the page and report the outcome of the cells, even if writing fails; returns the exit code."""
    failed = {record["name"]: record["error"] for record in records if "error" in record}
    try:
        page = write_page(options.out, records)
        reason = None if page else "no run was finished"
    except Exception as error:  # a damaged file must not end a long sweep with a traceback
        page, reason = None, f"no page ({last_line(str(error) or type(error).__name__)})"
    found = {
        "out": str(options.out),
        "page": None if page is None else str(options.out / page),
        "no_page": reason,
        "seconds": round(seconds, 1),
        "cells": records,
        "failed": failed,
    }
    show(found, options.json, lambda console: _tell_end(console, found))
    return 1 if failed or page is None else 0


def write_page(out: Path, records: Sequence[Record]) -> str | None:
    """Write a comparison of the finished runs, which names the failed cells at its top; None if there is no run."""
    from cgru.atomic_io import atomic_write
    from cgru.report.run.page import build
    from cgru.report.run.read import read_record

    runs = [read_record(out / record["run"]) for record in records if record.get("run")]
    lost = [f"Failed: {record['name']}. {last_line(record['error'])}" for record in records if "error" in record]
    if not runs:
        return None
    atomic_write(out / PAGE, build(runs, lost=lost))
    return PAGE


def _tell_end(console: Console, found: Record) -> None:
    for name, error in found["failed"].items():
        console.print(f"failed, {name}: {last_line(error)}", soft_wrap=True)
    if found["failed"]:
        console.print("Run the same command again to retry these; finished cells are kept.")
    what = found["no_page"] or f"the page: {found['page']}"
    console.print(f"{duration(found['seconds'])}; {what}", soft_wrap=True)
