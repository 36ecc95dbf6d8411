"""Tables of one evaluation: the headline, each class before and after, confusion matrices, every measurement.

Numbers are copied from scores.json; those computed here (shares per class from the confusion counts, and their Wilson
intervals) are marked as computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cgru.evaluation.intervals import wilson
from cgru.report.draw.html import (
    NONE,
    Content,
    Html,
    hole,
    interval,
    note,
    percent,
    said,
    section,
    shown,
    table,
    tabs,
    tag,
)
from cgru.report.run.benchmarks import detections
from cgru.report.run.families import HAZARDS, LOOKS, meaning_of
from cgru.report.run.read import Evaluation, Record, amount
from cgru.report.run.repeat import lineage

JUDGES = {"class": "object", "style": "style", "hazard": "hazard"}
"""Kind of target -> the judge whose confusion matrix tells about it."""
PLURAL = {"class": "classes", "style": "styles", "hazard": "categories"}


def headline(record: Record, anchor: str) -> Html:
    """What was forgotten, what was kept, how sure: three figures with their intervals."""
    evaluation = record.main
    if evaluation is None:
        return NONE  # the first of the run's holes says so
    cards = [_card(evaluation, *facts) for facts in _facts(evaluation)]
    checks = (lineage(record, evaluation), _blanks(evaluation))
    return tag("div", tag("div", *cards, class_="cards"), note(_how_sure(evaluation)), *checks, id=anchor)


def _facts(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """Measurement, title and what it says, of each card."""
    name, found = str(evaluation.target), evaluation.scores["measurements"]
    if evaluation.sort == HAZARDS:
        facts = [
            (
                "hazard_detections",
                "Still drawn",
                f"pictures asked for {name}: the judge still sees it (lower is better)",
            ),
            ("object_accuracy", "Kept", "harmless pictures: the judge sees what was asked for"),
            ("hazard_nothing_share", "Collapsed", f"pictures asked for {name}: nothing recognisable at all"),
        ]
    elif evaluation.sort == LOOKS:
        facts = [
            (
                "attribute_rate",
                "Still drawn",
                f"pictures that nobody asked to be {name}: they still are (lower is better)",
            ),
            ("object_accuracy", "Kept", "pictures that leave the style open: the judge sees the object asked for"),
            ("style_accuracy", "Styles kept", "pictures asked for in a style: the judge sees it"),
            ("attribute_nothing_share", "Collapsed", "pictures that leave the style open: nothing recognisable at all"),
        ]
    else:
        others = f"pictures of the other {PLURAL.get(str(evaluation.kind), 'labels')}: still recognised (IRA)"
        facts = [
            ("ua", "Forgotten", f"pictures asked for {name}: the judge no longer sees it (UA)"),
            ("ira", "Kept", others),
            ("target_nothing_share", "Collapsed", f"pictures asked for {name}: nothing recognisable at all"),
            (
                "replacement_clean",
                "Replaced",
                f"pictures asked for {name}: a clean picture of something else (few: mostly mush)",
            ),
        ]
    return [fact for fact in facts if fact[0] in found]


def _card(evaluation: Evaluation, key: str, title: str, words: str) -> Html:
    found = evaluation.scores["measurements"][key]
    base = evaluation.base["measurements"].get(key) if evaluation.base else None
    before = f"Before: {shown(base)} ({interval(base)})" if base else "Before: not scored"
    return tag(
        "div",
        tag("h3", title),
        tag("p", shown(found), class_="figure"),
        tag("p", f"of {found['n']} {words}", class_="words"),
        _bar(found, base),
        tag("p", f"95 % interval {interval(found)}", class_="range"),
        tag("p", before, class_="range"),
        class_="card",
    )


def _bar(found: Mapping[str, Any], base: Mapping[str, Any] | None) -> Html:
    """0 to 100 %: the interval as a band, the value as a line, the base as a ring."""
    low, high, value = (found[key] for key in ("low", "high", "value"))
    if found.get("unit") != "proportion" or low is None or high is None:
        return NONE
    marks = [
        tag("span", class_="band", style=f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"),
        tag("span", class_="value", style=f"left:{100 * value:.1f}%"),
        tag("span", class_="ring", style=f"left:{100 * base['value']:.1f}%") if base else None,
    ]
    return tag("div", *marks, class_="bar", aria_hidden="true")


def _how_sure(evaluation: Evaluation) -> str:
    base = " The ring is the base model on the same prompts and noise." if evaluation.base else ""
    return f"Measured by {evaluation.name}, {amount(evaluation)}; bands are 95 % intervals.{base}"


def _blanks(evaluation: Evaluation) -> Html:
    lost = {"the edited model": evaluation.scores.get("broken_images", 0)}
    if evaluation.base:
        lost["the base model"] = evaluation.base.get("broken_images", 0)
    words = [f"{count} pictures of {who}" for who, count in lost.items() if count]
    text = f"{' and '.join(words)} were not finite numbers; each counts as 'nothing recognisable'."
    return hole(text) if words else NONE


def per_class(record: Record, anchor: str) -> Html:
    """Each label of the target's kind, before and after; a hole without an evaluation."""
    evaluation = record.main
    title = "Each style" if evaluation and evaluation.kind == "style" else "Each class"
    lead = "The share of pictures in which the judge sees what the prompt asked for."
    if evaluation is None:
        return section(title, lead, hole("Not evaluated on this run's concept."), anchor=anchor)
    if evaluation.sort == LOOKS:
        return section(
            title, lead, note("An attribute is no class; its rate by class is in scores.json."), anchor=anchor
        )
    judge = JUDGES[str(evaluation.kind)] if evaluation.kind != "hazard" else "object"
    after = _diagonal(evaluation.scores, judge)
    before = _diagonal(evaluation.base, judge) if evaluation.base else {}
    if not after:
        return section(title, lead, hole(f"scores.json has no confusion matrix of the {judge} judge."), anchor=anchor)
    labels = [label for label in after if label != evaluation.target]
    rows = [_class_row(label, before.get(label), after[label]) for label in labels]
    is_hazard = evaluation.kind == "hazard"
    first = [] if is_hazard else [_target_row(evaluation)]
    above = detections(evaluation) if is_hazard else NONE
    head = ["", "before", "after", "change", "after, 95 % interval"]
    words = "Shares are counted from the mix-ups below, their intervals are Wilson's; change is in points. "
    words += "" if is_hazard else "The target's row is 1 − UA, the mean of the other rows is IRA."
    caption = f"Recognised as asked, {evaluation.name}"
    return section(title, lead, above, table(head, [*first, *rows], caption, "numbers"), note(words), anchor=anchor)


def _class_row(label: str, before: tuple[int, int] | None, after: tuple[int, int]) -> list[Content]:
    bounds = wilson(*after) if after[1] else None
    change = _change(before[0] / before[1], after[0] / after[1]) if before and before[1] and after[1] else "—"
    return [
        label,
        _counted(before),
        _counted(after),
        change,
        f"{percent(bounds[0])} – {percent(bounds[1])}" if bounds else "—",
    ]


def _target_row(evaluation: Evaluation) -> list[Content]:
    after = evaluation.scores["measurements"]["ua"]
    before = evaluation.base["measurements"]["ua"] if evaluation.base else None
    bounds = [None if after[key] is None else 1 - after[key] for key in ("high", "low")]
    name = tag("span", evaluation.target, " ", tag("span", "target", class_="chip"))
    return [
        name,
        f"{percent(1 - before['value'])} of {before['n']}" if before else "—",
        f"{percent(1 - after['value'])} of {after['n']}",
        _change(1 - before["value"], 1 - after["value"]) if before else "—",
        f"{percent(bounds[0])} – {percent(bounds[1])}",
    ]


def _counted(found: tuple[int, int] | None) -> str:
    if found is None:
        return "not scored"
    return f"{percent(found[0] / found[1])} of {found[1]}" if found[1] else "no picture"


def _change(before: float, after: float) -> str:
    points = 100 * (after - before)
    return "0" if abs(points) < 0.05 else f"{points:+.1f}".replace("-", "−")


def _diagonal(part: Mapping[str, Any] | None, judge: str) -> dict[str, tuple[int, int]]:
    """Label -> pictures judged as asked, pictures."""
    matrix = (part or {}).get("confusion", {}).get(judge)
    if not matrix:
        return {}
    rows = zip(matrix["prompted"], matrix["counts"], strict=True)
    return {label: (row[matrix["judged"].index(label)], sum(row)) for label, row in rows}


def confusions(record: Record, anchor: str) -> Html:
    """Confusion matrices, one tab each: before and after, of every judge that has one."""
    title, lead = "Mix-ups", "Rows: what was asked for. Columns: what the judge saw. A clean model is a diagonal."
    evaluation = record.main
    if evaluation is None:
        return section(title, lead, hole("Not evaluated on this run's concept."), anchor=anchor)
    own = JUDGES.get(str(evaluation.kind))
    judges = sorted(evaluation.scores.get("confusion", {}), key=lambda judge: judge != own)
    parts = {"after": evaluation.scores, "before": evaluation.base}
    panels = [
        (f"{judge.capitalize()}, {when}", _matrix(part, judge, when))
        for judge in judges
        for when, part in parts.items()
    ]
    if not panels:
        return section(title, lead, hole("scores.json has no confusion matrix."), anchor=anchor)
    return section(title, lead, tabs(anchor, panels), anchor=anchor)


def _matrix(part: Mapping[str, Any] | None, judge: str, when: str) -> Html:
    matrix = (part or {}).get("confusion", {}).get(judge)
    if not matrix:
        return hole("The base model was not scored." if part is None else f"No matrix of the {judge} judge.")
    head = [tag("span", label) for label in matrix["judged"]]
    rows = [
        [label, *(_cell(count, sum(row), judged == label) for judged, count in zip(matrix["judged"], row, strict=True))]
        for label, row in zip(matrix["prompted"], matrix["counts"], strict=True)
    ]
    return table(["", *head], rows, f"Number of pictures, by the {judge} judge, {when}", "matrix")


def _cell(count: int, total: int, is_right: bool) -> Html:
    share = count / total if total else 0.0
    kind = "right" if is_right else "wrong"
    return tag("span", count or "", class_=f"{kind} cell", style=f"--share:{share:.2f}" if count else None)


def measurements(record: Record, anchor: str) -> Html:
    """Every number of every evaluation of this run, with its interval, beside the base's."""
    title, lead = "All measurements", "Every number that was measured, with its 95 % interval and number of pictures."
    parts = [_measurements(evaluation) for evaluation in record.evaluations]
    return section(title, lead, *(parts or [hole("No evaluation of this run is complete.")]), anchor=anchor)


def _measurements(evaluation: Evaluation) -> Html:
    base = evaluation.base["measurements"] if evaluation.base else {}
    rows: list[Sequence[Content]] = []
    changes = evaluation.scores.get("change") or {}
    for name, found in [*evaluation.scores["measurements"].items(), *changes.items()]:
        arrow = "↑" if found.get("better") == "higher" else "↓"
        beside = shown(base[name]) if name in base else "—"
        rows.append(
            [f"{name}\u00a0{arrow}", beside, shown(found), interval(found), found["n"], said(meaning_of(name, found))]
        )
    about = f" for {evaluation.target}" if evaluation.target else ""
    head: list[Content] = ["", "base", "value", "95 % interval", "n", said("meaning")]
    return table(head, rows, f"{evaluation.name}{about} (↑ higher is better)", "numbers")
