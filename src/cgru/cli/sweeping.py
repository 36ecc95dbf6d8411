"""`cgru sweep`: concepts × seeds × methods on Ray, side by side and resumable, then one comparison page."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.catalog import unknown
from cgru.cli import options as asked
from cgru.cli.live import duration
from cgru.cli.parse import SETTING
from cgru.cli.reproducing import dry_run
from cgru.cli.terminal import names_of, show
from cgru.experiments.cells import Cell
from cgru.experiments.cluster import Share, check_installed, check_share
from cgru.experiments.sweep import Sweep, plan

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "comparison.html"
DEVICES = ("auto", "cpu", "cuda")
Record = Mapping[str, Any]


def prepare_sweep(options: asked.Sweep, root: Path) -> Callable[[], int]:
    """Check everything that can be checked here, then find the cluster; nothing is written."""
    sweep = read_sweep(options)
    cells = plan(sweep)
    _check_options(options)
    check_share(options.share)
    if options.dry_run:
        return lambda: dry_run(cells, options.out, options.device, options.json)
    from cgru.evaluation.store import check_writable
    from cgru.experiments.cluster import connect, disconnect, fit_share
    from cgru.experiments.work import check_free

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
    return lambda: _work(options, cells, share)


def read_sweep(options: asked.Sweep) -> Sweep:
    """What the words and lists of the command line mean."""
    settings = tuple(word for word in options.words if SETTING.match(word))
    return Sweep(
        concepts=tuple(word for word in options.words if not SETTING.match(word)),
        seeds=tuple(_seed(name) for name in names_of(options.seeds)),
        methods=names_of(options.methods),
        model=options.model,
        preset=options.preset,
        settings=settings,
        benchmarks=None if options.benchmarks is None else names_of(options.benchmarks),
        images=options.images,
    )


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--seeds has {text!r}; allowed: whole numbers from 0, with commas between. Try --seeds 0,1,2")
    return int(text)


def _check_options(options: asked.Sweep) -> None:
    if options.retries < 0:
        raise ValueError(f"--retries {options.retries}; allowed: 0 or more. Give 0 for one try only.")
    if options.device not in DEVICES:
        raise ValueError(unknown("device", options.device, DEVICES, "Which GPU a run gets is Ray's choice."))


def _check_benchmarks(cells: Sequence[Cell], root: Path) -> None:
    """A name or a target that does not fit is said now, not after the training."""
    from cgru.evaluation.request import Request, find_benchmark

    for measure in dict.fromkeys(measure for cell in cells for measure in cell.measures):
        request = Request("", measure.benchmark, images=measure.images, root=root)
        find_benchmark(request).task(measure.target)


def _work(options: asked.Sweep, cells: Sequence[Cell], share: Share) -> int:
    from cgru.cli.board import shown
    from cgru.experiments.cluster import RayPool, disconnect, dispatch
    from cgru.experiments.work import Order, carry_out

    out = options.out.resolve()  # a worker has a folder of its own
    begun = time.monotonic()
    about = {"command": shlex.join(["cgru", *sys.argv[1:]]), "share": {"cpus": share.cpus, "gpus": share.gpus}}
    try:
        pool = RayPool(Order(out, share.device, share.threads), share)
        with shown(cells, out, is_quiet=options.json) as board:
            records = carry_out(
                cells,
                out,
                lambda left: dispatch(left, pool, options.retries, board.again, board.look),
                board.told,
                about=about,
            )
    except KeyboardInterrupt:
        print(f"cgru: interrupted; the same command goes on with {str(options.out)!r}.", file=sys.stderr)
        return 130
    finally:
        disconnect()
    failed = {record["name"]: record["error"] for record in records if "error" in record}
    page = write_page(out, records)
    found = {
        "out": str(options.out),
        "page": None if page is None else str(options.out / page),
        "seconds": round(time.monotonic() - begun, 1),
        "cells": records,
        "failed": failed,
    }
    show(found, options.json, lambda console: _tell_end(console, found))
    return 1 if failed else 0


def write_page(out: Path, records: Sequence[Record]) -> str | None:
    """Compare the runs that were trained; those that were not are named at the top. None: there is no run at all."""
    from cgru.cli.board import last_line
    from cgru.report.page import build
    from cgru.report.records import read_record
    from cgru.runs import atomic_write

    runs = [read_record(out / record["run"]) for record in records if record.get("run")]
    lost = [f"Failed: {record['name']}. {last_line(record['error'])}" for record in records if "error" in record]
    if not runs:
        return None
    atomic_write(out / PAGE, build(runs, lost=lost))
    return PAGE


def _tell_end(console: Console, found: Record) -> None:
    from cgru.cli.board import last_line

    for name, error in found["failed"].items():
        console.print(f"failed, {name}: {last_line(error)}", soft_wrap=True)
    if found["failed"]:
        console.print("The same command tries these again and keeps the rest.")
    what = "no run was finished" if found["page"] is None else f"the page: {found['page']}"
    console.print(f"{duration(found['seconds'])}; {what}", soft_wrap=True)
