"""The report: one HTML file that opens from disk, of one run or of several; nothing is loaded from anywhere else.

    page = build([read_record("runs/dogs-cgru-s0-3f9a1c2e")])

If the page would exceed its size limit, pictures are left out; numbers never are.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cgru.report.draw import pictures
from cgru.report.draw.html import NONE, Content, Html, hole, joined, section, tag
from cgru.report.draw.svg import PALETTE
from cgru.report.paper import literature
from cgru.report.run import attacks, benchmarks, compare, repeat, tables, training
from cgru.report.run.read import Record

LIMIT = 8_000_000
"""Bytes of a page."""
PAIRS = (16, 8, 4, 0)
"""Pictures before and after that are tried, of the concept and of the rest each: the first that fits."""
EXAMPLES = 8
"""Attacked prompts with pictures, at most."""
PARTS = {
    "pictures": "Before and after",
    "progress": "During training",
    "classes": "Each class",
    "confusion": "Mix-ups",
    "plane": "Trade-off",
    "curves": "Reward",
    "stability": "Stability",
    "critic": "Critic",
    "attack": "Attack",
    "benchmarks": "Other benchmarks",
    "measurements": "All measurements",
    "protocol": "How to repeat this",
    "literature": "From the literature",
}
"""Anchor -> words of the contents."""
REPORT = "report.html"
"""The file in a run folder."""


def build(records: Sequence[Record], limit: int = LIMIT, *, lost: Sequence[str] = ()) -> str:
    """The page of one run, or a comparison of several, of at most `limit` bytes.

    Args:
        records: the runs.
        limit: bytes; pictures go first, then, of several runs, the parts of single ones.
        lost: what is missing of the whole, such as runs that failed, in a sentence each.
    """
    named = compare.name_runs(records)
    for count in PAIRS:
        page = _page(named, [_run(run, count, is_single=len(named) == 1) for run in named], lost)
        if len(page.encode()) <= limit:
            return page
    page = _page(named, [_elsewhere(named)], lost)
    if len(named) > 1 and len(page.encode()) <= limit:
        return page
    raise ValueError(
        f"the page of {len(records)} runs is over {limit / 1e6:g} MB without a picture before and after; allowed: "
        "fewer runs at once. Report them in parts."
    )


def _page(named: Sequence[compare.Named], runs: Sequence[Html], lost: Sequence[str]) -> str:
    records = [run.record for run in named]
    is_single = len(records) == 1
    title = f"Unlearning {records[0].concept}" if is_single else f"Unlearning: {len(records)} runs compared"
    parts: list[Content] = [_contents(named), *(hole(words) for words in lost)]
    parts += [] if is_single else [compare.comparison(named)]
    parts += [*runs, literature.block("r0-literature")]
    footer = "Made by cgru report from the files of the run alone; it loads nothing else."
    return frame(title, "Unlearning report", joined(_subtitle(records)), joined(parts), footer)


def _elsewhere(named: Sequence[compare.Named]) -> Html:
    """In place of the runs' own parts, where they are too many for a page."""
    rows = (
        tag("p", f"{run.letter}  {run.name}: cgru report {shlex.quote(str(run.record.run.path))}", id=run.anchor)
        for run in named
    )
    return tag("article", hole("Too many runs for their own parts on this page; each has a page of its own:"), *rows)


def frame(title: str, kicker: str, about: Content, parts: Content, footer: str) -> str:
    """A whole document around the parts: styles, colours and the script are inside it."""
    head = joined(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            Html(f"<style>{_colours()}{_asset('page.css')}</style>"),
        ]
    )
    top = about if isinstance(about, Html) else tag("p", about, class_="sub")
    header = tag("header", tag("p", kicker, class_="kicker"), tag("h1", title), top)
    body = tag("main", header, parts, tag("footer", footer))
    script = Html(f"<script>{_asset('page.js')}</script>")
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", body, script), lang="en").text + "\n"


def _subtitle(records: Sequence[Record]) -> list[Html]:
    if len(records) > 1:
        concepts = ", ".join(dict.fromkeys(record.concept for record in records))
        return [tag("p", f"To be forgotten: {concepts}.", class_="sub")]
    return [tag("p", _about(records[0]), class_="sub")]


def _about(record: Record) -> str:
    config = record.run.config
    preset = f", preset {config.preset}" if config.preset else ""
    made = f", {record.iterations} of {config.length} iterations" if config.length > 1 else ""
    return f"{config.model}, method {config.method}{preset}, seed {config.seed}{made}."


def _contents(named: Sequence[compare.Named]) -> Html:
    """Links to the runs; of a single one, to its parts."""
    if len(named) == 1:
        links = {f"{named[0].anchor}-{part}": words for part, words in PARTS.items()}
    else:
        links = {"comparison": "Comparison", **{run.anchor: f"{run.letter} {run.name}" for run in named}}
        links["r0-literature"] = PARTS["literature"]
    return tag("nav", *(tag("a", words, href=f"#{anchor}") for anchor, words in links.items()), aria_label="Contents")


def _run(run: compare.Named, count: int, *, is_single: bool) -> Html:
    record, prefix = run.record, run.anchor
    heading: list[Content] = []
    if not is_single:
        about = f"To be forgotten: {record.concept}. {_about(record)}"
        heading = [tag("h2", f"{run.letter}  {run.name}", id=run.anchor), tag("p", about, class_="sub")]
    parts: list[Content] = [
        _guarded(tables.headline, record, f"{prefix}-headline"),
        _holes(record),
        _guarded(partial(pictures.before_after, limit=count), record, f"{prefix}-pictures"),
        _guarded(pictures.progression, record, f"{prefix}-progress"),
        _guarded(tables.per_class, record, f"{prefix}-classes"),
        _guarded(tables.confusions, record, f"{prefix}-confusion"),
        _plane(run, f"{prefix}-plane") if is_single else None,
    ]
    parts += [
        _guarded(part, record, f"{prefix}-{part.__name__}")
        for part in (training.curves, training.stability, training.critic)
    ]
    parts.append(_guarded(partial(attacks.attack, limit=min(count, EXAMPLES)), record, f"{prefix}-attack"))
    rest = (benchmarks.benchmarks, tables.measurements, repeat.protocol)
    parts += [_guarded(part, record, f"{prefix}-{part.__name__}") for part in rest]
    return tag("article", *heading, *parts, class_="run")


def _guarded(part: Callable[[Record, str], Html], record: Record, anchor: str) -> Html:
    """A part of the page; where a file is not shaped as this version writes it, the hole that says so."""
    try:
        return part(record, anchor)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        name = anchor.rpartition("-")[2]
        return hole(
            f"The part '{name}' cannot be read from the files of {record.run.path} ({type(error).__name__}: {error})."
        )


def _holes(record: Record) -> Html:
    """Everything that is missing, in one place at the top; the sections say it again where it would stand."""
    if not record.holes:
        return NONE
    return tag("div", *(hole(words) for words in record.holes), class_="holes")


def _plane(run: compare.Named, anchor: str) -> Html:
    title, lead = (
        "Forgetting against keeping",
        "Forgetting is easy if everything else may break; this shows both at once.",
    )
    groups = compare.families([run])
    if not groups:
        return section(title, lead, hole("Not evaluated on this run's concept."), anchor=anchor)
    drawn = [joined([tag("h4", group[0].evaluation.name), compare.own_plane(group)]) for group in groups]
    return section(title, lead, *drawn, anchor=anchor)


def _colours() -> str:
    """The drawings' palette as variables of the page, light and dark."""
    light, dark = ("".join(f"--{name}:{shades[i]};" for name, shades in PALETTE.items()) for i in range(2))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
