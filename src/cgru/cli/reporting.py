"""`cgru report`: read the runs first, then write one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cgru.cli.options import Report
from cgru.cli.terminal import show

if TYPE_CHECKING:
    from cgru.report.run.read import Record

Work = Callable[[], int]
MOST = 24
"""Most runs on one page."""


def prepare_report(options: Report, root: Path) -> Work:
    """Read every run and build the page, so that any error is raised before a file is written."""
    from cgru.atomic_io import atomic_write
    from cgru.evaluation.store import check_writable
    from cgru.report.run.page import REPORT, build
    from cgru.report.run.read import read_record

    _check_runs(options)
    out = _place(options, REPORT)
    check_writable(out.absolute().parent)
    records = [read_record(path) for path in options.runs]
    page = build(records)
    drawn = _drawn(options, records)
    holes = {str(record.run.path): list(record.holes) for record in records}

    def work() -> int:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, page)
        files = [str(path) for path in drawn()]
        found = {"report": str(out), "bytes": len(page.encode()), "holes": holes, "figures": files}
        told = [f"{len(files) // 2} figures as SVG and PNG: {options.figures}"] if files else []
        told += [f"missing, {path}: {words}" for path, sentences in holes.items() for words in sentences]
        return show(found, options.json, lambda console: console.print("\n".join([*told, str(out)]), soft_wrap=True))

    return work


def _drawn(options: Report, records: Sequence[Record]) -> Callable[[], list[Path]]:
    """The function that writes the figures. Problems with the folder or the renderer raise here, before any writing."""
    from cgru.evaluation.store import check_writable
    from cgru.report.run.figures import all_figures, find_renderer, write_figures

    folder = options.figures
    if folder is None:
        return list
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--figures {str(folder)!r} is a file; allowed: a folder. Give another name.")
    check_writable(folder)
    render, figures = find_renderer(), all_figures(records)
    return lambda: write_figures(figures, folder, render)


def _check_runs(options: Report) -> None:
    count = len(options.runs)
    if not 1 <= count <= MOST:
        raise ValueError(f"{count} runs; allowed: 1 to {MOST}. Try: cgru report runs/dogs-cgru-s0-3f9a1c2e")
    resolved = [Path(path).resolve() for path in options.runs]
    twice = next((path for path in resolved if resolved.count(path) > 1), None)
    if twice:
        raise ValueError(f"the run {str(twice)!r} is given twice; allowed: each run once. Leave one out.")


def _place(options: Report, name: str) -> Path:
    if options.out is None:
        return Path(options.runs[0]) / name if len(options.runs) == 1 else Path("runs") / name
    if options.out.is_dir():
        raise ValueError(f"--out {str(options.out)!r} is a folder; allowed: a file. Give FILE.html in it.")
    if options.out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {str(options.out)!r}; allowed: a FILE.html. Give that ending.")
    return options.out
