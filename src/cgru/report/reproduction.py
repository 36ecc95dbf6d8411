"""The page of `cgru reproduce`: every table and figure of the paper from the files of its cells, and what was not run.

A cell that is missing, failed or was made by another definition is a marked hole, never a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from cgru.report import literature, paper_figures, paper_objects, paper_tables
from cgru.report.html import Content, Html, command, hole, joined, section, table, tag
from cgru.report.page import frame
from cgru.report.reproduced import Done, Reproduction

SECTIONS = (
    paper_objects.objects,
    paper_objects.classes,
    paper_objects.confusions,
    paper_figures.trade_off,
    paper_figures.before_after,
    paper_tables.safety,
    paper_tables.attacks,
    paper_figures.against_ddpo,
    paper_figures.stability,
    paper_tables.critics,
)
PARTS = {
    "objects": "Object removal",
    "classes": "Each class",
    "confusion": "Mix-ups",
    "plane": "Trade-off",
    "pictures": "Pictures",
    "safety": "Safety",
    "attack": "Attack",
    "ddpo": "CGRU and DDPO",
    "ratios": "Ratios",
    "critic": "Critic",
    "literature": "Published numbers",
    "cells": "How to repeat this",
}
"""Anchor -> words of the contents."""


def reproduction_page(found: Reproduction) -> str:
    """One self-contained HTML file."""
    plan = found.plan
    title = f"The paper's experiments, scale {plan['scale']}"
    parts: list[Content] = [
        _contents(),
        _summary(found),
        *(part(found) for part in SECTIONS),
        literature.block("literature"),
        _cells(found),
    ]
    done = sum(cell.state == "done" for cell in found.cells)
    about = f"{plan['model']}; {done} of {len(found.cells)} cells done; {_machines(found)}."
    return frame(
        title, "Reproduction", about, joined(parts), "Made by cgru reproduce from its own files; it loads nothing else."
    )


def _contents() -> Html:
    links = (tag("a", words, href=f"#{anchor}") for anchor, words in PARTS.items())
    return tag("nav", *links, aria_label="Contents")


def _summary(found: Reproduction) -> Html:
    holes = found.holes
    if not holes:
        return tag("p", "Every cell of this scale was run.", class_="lead")
    shown = joined(tag("li", words) for words in holes)
    return tag("details", tag("summary", f"Missing: {len(holes)} entries"), tag("ul", shown), class_="holes")


def _machines(found: Reproduction) -> str:
    records = [done.record for done in found.cells if done.record and "device" in done.record]
    devices = sorted({str(record["device"]) for record in records})
    commits = sorted({str(record.get("commit"))[:12] for record in records})
    return f"{', '.join(devices) or 'nothing run yet'}; commit {', '.join(commits) or 'none'}"


def _cells(found: Reproduction) -> Html:
    rows: Sequence[Sequence[Content]] = [
        [done.cell.name, done.state, _seconds(done), _commands(found, done)] for done in found.cells
    ]
    inner = table(["cell", "state", "seconds", "the same by hand"], rows, "Cells of this plan", "facts")
    lead = "One command makes this page; each cell can also be made by hand."
    parts = [command(str(found.plan["command"])), tag("details", tag("summary", f"{len(rows)} cells"), inner)]
    if errors := [
        (done.cell.name, str(done.record["error"])) for done in found.cells if done.record and "error" in done.record
    ]:
        parts += [joined([hole(f"{name} failed."), tag("pre", text, tabindex=0)]) for name, text in errors]
    return section("How to repeat this", lead, *parts, anchor="cells")


def _seconds(done: Done) -> str:
    taken = (done.record or {}).get("seconds", {})
    return ", ".join(f"{name} {value:.0f}" for name, value in taken.items() if value >= 1) or "—"


def _commands(found: Reproduction, done: Done) -> Html:
    run = (done.record or {}).get("run")
    place = str(found.out / run) if run else None
    return tag("pre", "\n".join(done.cell.commands(place)), tabindex=0)
