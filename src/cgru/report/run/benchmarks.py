"""Tables of the benchmarks other than the headline: detections by category, other wordings, picture quality.

Each table shows n, intervals and the command that repeats it. A benchmark without scores is marked "not run".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cgru.embedded import EMBEDDED, main_benchmark
from cgru.evaluation.intervals import wilson
from cgru.report.draw.html import (
    NOT_RUN,
    Content,
    Html,
    command,
    hole,
    interval,
    note,
    percent,
    said,
    section,
    shown,
    table,
    tag,
)
from cgru.report.run.families import METRICS, PARAPHRASES, metric_of
from cgru.report.run.read import Evaluation, Record
from cgru.report.run.repeat import evaluate_command, first_command

Part = Mapping[str, Any]
WORDINGS = {
    "": "all wordings",
    "_name": "its name, in another sentence",
    "_synonym": "synonyms",
    "_breed": "breeds and kinds",
    "_reworded": "other sentences",
    "_unseen_words": "words that training never used",
}
"""End of a measurement's name -> which prompts."""
REMEMBERED = 8
"""Prompts listed that bring the concept back most often."""


def benchmarks(record: Record, anchor: str) -> Html:
    """What was measured at a glance, then a table for each benchmark beside the headline."""
    title, lead = "Other benchmarks", "The same edit under other questions: other words, picture quality, detections."
    own = [found for found in record.evaluations if not found.is_attack and found is not record.main]
    parts: list[Content] = [overview(record)]
    parts += [detections_block(record, found) for found in own if "detections" in found.scores]
    parts += [paraphrase_block(record, found) for found in own if found.sort == PARAPHRASES]
    scored = [found for found in own if metric_of(found.scores)]
    parts += [tag("h4", "Picture quality"), quality_table(scored)]
    parts += [command(evaluate_command(record, found)) for found in scored]
    return section(title, lead, *parts, anchor=anchor)


def overview(record: Record) -> Html:
    """One row for each benchmark: its first figure before and after; "not run" and how, for those that have none."""
    rows = [_overview_row(found) for found in record.evaluations]
    run = {str(found.scores["benchmark"]).partition("-")[0] for found in record.evaluations}
    missing = [name for name in expected(record) if name not in run]
    rows += [[name, *[NOT_RUN] * 5] for name in missing]
    head = ["benchmark", "figure", "before", "after", "after, 95 % interval", "n"]
    lines = tag("pre", "\n".join(first_command(record, name) for name in missing), tabindex=0)
    how = tag("details", tag("summary", "Commands for what was not run"), lines) if missing else None
    return tag("div", table(head, rows, "What was measured", "numbers"), how)


def expected(record: Record) -> tuple[str, ...]:
    """Benchmarks of which a page says that they were not run; wordings are there for Emoji Canvas' labels alone."""
    if record.run.config.model != EMBEDDED:
        return (*METRICS, "unlearndiffatk")
    own = main_benchmark(record.concept)
    if own == "attribute":  # no words name it, so there are none to attack with
        return (own, *METRICS)
    return (own, *(("paraphrase",) if own == "canvas" else ()), *METRICS, "unlearndiffatk")


def _overview_row(evaluation: Evaluation) -> list[Content]:
    measured = evaluation.scores["measurements"]
    kind = evaluation.sort
    name = kind.needed[0] if kind else next(iter(measured), None)
    about = f"{evaluation.name}{f' for {evaluation.target}' if evaluation.target else ''}"
    if name is None:
        return [about, "nothing measured", *[NOT_RUN] * 4]
    before = (evaluation.base or {}).get("measurements", {}).get(name)
    row = measured[name]
    arrow = "↑" if row.get("better") == "higher" else "↓"
    return [about, f"{name}\u00a0{arrow}", shown(before) if before else NOT_RUN, shown(row), interval(row), row["n"]]


def detections_block(record: Record, evaluation: Evaluation) -> Html:
    """Detections before and after with the command; for a benchmark that is not the run's headline."""
    heading = f"{evaluation.name}{f' for {evaluation.target}' if evaluation.target else ''}: what is still drawn?"
    return tag("div", tag("h4", heading), detections(evaluation), command(evaluate_command(record, evaluation)))


def detections(evaluation: Evaluation) -> Html:
    """By category and in all, before and after: how many detections, and in what share of pictures."""
    after = evaluation.scores.get("detections")
    before = (evaluation.base or {}).get("detections")
    if not after:
        return hole("scores.json has no detections by category.")
    names = [*after["by_category"], "total"]
    rows: list[list[Content]] = [
        [name if name != "total" else tag("strong", name), *_counts(before, name), *_counts(after, name)]
        for name in names
    ]
    head = ["", "before", "of pictures", "after", "of pictures", "after, 95 % interval"]
    least = f", score at least {after['threshold']:g}" if "threshold" in after else ""
    caption = f"Detections in {after['pictures']} explicit pictures{least}"
    return tag(
        "div",
        table(
            head, [_with_interval(row, after, name) for row, name in zip(rows, names, strict=True)], caption, "numbers"
        ),
        note(_how_counted(after)),
        _reduction(evaluation),
    )


def _counts(part: Part | None, name: str) -> list[Content]:
    """Detections of a category, and the share of pictures with one or more; the total is summed here."""
    if part is None:
        return [NOT_RUN, NOT_RUN]
    return [_detected(part, name), percent(_pictures(part, name) / part["pictures"]) if part["pictures"] else "—"]


def _detected(part: Part, name: str) -> int:
    return int(sum(part["by_category"].values()) if name == "total" else part["by_category"].get(name, 0))


def _pictures(part: Part, name: str) -> int:
    """Pictures with a detection: counted apart where a detector finds several things in one, else one each."""
    if "pictures_with_any" not in part:
        return _detected(part, name)
    return int(part["pictures_with_any"] if name == "total" else part["pictures_by_category"].get(name, 0))


def _with_interval(row: list[Content], part: Part, name: str) -> list[Content]:
    if not part["pictures"]:
        return [*row, "—"]
    low, high = wilson(_pictures(part, name), part["pictures"])
    return [*row, f"{percent(low)} – {percent(high)}"]


def _how_counted(part: Part) -> str:
    if "pictures_with_any" in part:
        each = "A picture may hold several detections: shares count pictures with one or more"
    else:
        each = "The judge names one thing in a picture, so detections and pictures are the same count"
    return f"{each}; the total is summed from the rows, intervals are Wilson's."


def _reduction(evaluation: Evaluation) -> Html | None:
    changes: Mapping[str, Part] = evaluation.scores.get("change") or {}
    found = [f"{name}: {shown(row)} ({interval(row)})" for name, row in changes.items() if "reduction" in name]
    return note(f"Share of the base model's detections that is gone: {'; '.join(found)}.") if found else None


def paraphrase_block(record: Record, evaluation: Evaluation) -> Html:
    """By kind of wording, before and after, and the prompts that bring the concept back most."""
    heading = f"{evaluation.name} for {evaluation.target}: forgotten in other words?"
    parts = [wordings(evaluation), _remembered(evaluation), command(evaluate_command(record, evaluation))]
    return tag("div", tag("h4", heading), *parts)


def wordings(evaluation: Evaluation) -> Html:
    """The share that is forgotten by kind of wording; then what is kept."""
    rows = [[words, *_cells(evaluation, f"paraphrase_ua{end}")] for end, words in WORDINGS.items()]
    rows.append(["other classes kept (IRA)", *_cells(evaluation, "paraphrase_ira")])
    rows.append(["nothing recognisable ↓", *_cells(evaluation, "paraphrase_nothing_share")])
    head = ["wording", "before", "after", "after, 95 % interval", "n"]
    return table(head, rows, f"Pictures in which {evaluation.target} is no longer seen (UA ↑)", "numbers")


def _cells(evaluation: Evaluation, name: str) -> list[Content]:
    """Before, after, interval, n of a measurement."""
    row = evaluation.scores["measurements"].get(name)
    before = (evaluation.base or {}).get("measurements", {}).get(name)
    first: Content = shown(before) if before else NOT_RUN
    return [first, shown(row), interval(row), row["n"]] if row else [first, NOT_RUN, NOT_RUN, NOT_RUN]


def _remembered(evaluation: Evaluation) -> Html | None:
    prompts: Mapping[str, Part] = evaluation.scores.get("by_prompt") or {}
    seen = sorted((row["seen"] / row["pictures"], prompt) for prompt, row in prompts.items() if row["seen"])[::-1]
    if not prompts:
        return None
    if not seen:
        return note(f"None of the {len(prompts)} prompts brings it back.")
    rows: list[Sequence[Content]] = [
        [prompt, f"{prompts[prompt]['seen']} of {prompts[prompt]['pictures']}"] for _, prompt in seen[:REMEMBERED]
    ]
    caption = f"Wordings after which it is still seen most ({len(seen)} of {len(prompts)} show it at least once)"
    return tag("details", tag("summary", "Which words bring it back"), table(["prompt", "seen"], rows, caption))


def quality_table(evaluations: Sequence[Evaluation]) -> Html:
    """fid, kid, cmmd, clipscore with their variants, then the user's own metrics; one of the four may be "not run".

    No interval where the benchmark gives none: a distance of two sets has no simple one.
    """
    rows: list[list[Content]] = []
    for metric in dict.fromkeys([*METRICS, *filter(None, (metric_of(found.scores) for found in evaluations))]):
        found = [evaluation for evaluation in evaluations if metric_of(evaluation.scores) == metric]
        rows += [row for evaluation in found for row in _quality_rows(evaluation)]
        rows += [] if found else [[metric, *[NOT_RUN] * 6]]
    head: list[Content] = ["figure", "variant", "before", "after", "after, 95 % interval", "n", said("against")]
    return table(head, rows, "Picture quality; figures of two variants never compare", "numbers")


def _quality_rows(evaluation: Evaluation) -> list[list[Content]]:
    found, measured = evaluation.protocol, evaluation.scores["measurements"]
    against = found.get("reference")
    what = str(against.get("what", "")) if isinstance(against, Mapping) else "the prompts"
    changes: Mapping[str, Part] = evaluation.scores.get("change") or {}
    rows: list[list[Content]] = []
    for name, row in measured.items():
        arrow = "↑" if row.get("better") == "higher" else "↓"
        told = said(what)
        rows.append([f"{name}\u00a0{arrow}", str(found.get("variant", "?")), *_cells(evaluation, name), told])
    for name, row in changes.items():
        told = said("the base model's pictures on the same noise")
        rows.append([name, str(found.get("variant", "?")), "—", shown(row), interval(row), row["n"], told])
    return rows
