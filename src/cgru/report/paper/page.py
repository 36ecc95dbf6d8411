"""The page of `cgru reproduce`: every table and figure of the paper, made from the files of the cells.

A cell that is missing, has failed or belongs to another definition is shown as a marked hole, never as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cgru.report.draw.html import Content, Html, command, hole, joined, section, table, tag
from cgru.report.paper import figures, literature, objects, tables
from cgru.report.paper.read import Done, Reproduction
from cgru.report.run.page import LIMIT, frame

Section = Callable[[Reproduction], Html]
SECTIONS: Mapping[Section, str] = {
    objects.objects: "objects",
    objects.classes: "objects",
    objects.confusions: "objects",
    figures.trade_off: "objects",
    figures.before_after: "objects",
    tables.safety: "safety",
    tables.attacks: "safety",
    figures.against_ddpo: "ddpo",
    figures.stability: "objects",
    tables.critics: "critic",
}
"""Section -> the experiment it is made of, in the paper's order."""
PAIRS = (6, 3, 1, 0)
"""Pictures before and after that are tried, of the concept and of the rest each: the first that fits."""
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
ANCHORS = dict(zip(SECTIONS, PARTS, strict=False))
"""Section -> its anchor: both tables have one order."""


def reproduction_page(found: Reproduction, limit: int = LIMIT) -> str:
    """One self-contained HTML file of at most `limit` bytes; pictures may be left out for this, numbers never are."""
    for count in PAIRS:
        page = _page(found, count)
        if len(page.encode()) <= limit:
            break
    return page


def _page(found: Reproduction, count: int) -> str:
    plan = found.plan
    title = f"The paper's experiments, scale {plan['scale']}"
    parts: list[Content] = [
        _contents(),
        _summary(found),
        *(_part(found, experiment, part, count) for part, experiment in SECTIONS.items()),
        literature.block("literature"),
        _cells(found),
    ]
    done = sum(cell.state == "done" for cell in found.cells)
    about = f"{plan['model']}; {done} of {len(found.cells)} cells done; {_machines(found)}."
    return frame(
        title, "Reproduction", about, joined(parts), "Made by cgru reproduce from its own files; it loads nothing else."
    )


def _part(found: Reproduction, experiment: str, part: Section, count: int) -> Html:
    """A section; where its experiment is not in the plan (--only), the hole that says so."""
    if any(done.cell.experiment == experiment for done in found.cells):
        return figures.before_after(found, count) if part is figures.before_after else part(found)
    anchor = ANCHORS[part]
    return section(PARTS[anchor], "", hole(f"Not asked for: the plan has no cells of {experiment}."), anchor=anchor)


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
    place = found.out / run if run else None
    device = str(found.plan.get("device", "auto"))
    return tag("pre", "\n".join(done.cell.commands(place, device)), tabindex=0)
