"""The paper's tables from the cells of a reproduction: objects by method and class, hazards, attacks, critics.

Averages, ranks and bold are computed here. Means over classes and seeds stand with their number and their interval, a
percentile bootstrap over classes; what was not measured says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cgru.evaluation.statistics import cluster_bootstrap
from cgru.report.attacks import attack_examples
from cgru.report.html import NOT_RUN, Content, Html, hole, interval, note, percent, section, shown, table, tabs, tag
from cgru.report.records import Evaluation
from cgru.report.reproduced import Done, Reproduction
from cgru.tasks import load_lexicon

OBJECTS = ("canvas", "unlearncanvas")
COLUMNS = {"ua": "UA ↑", "ira": "IRA ↑", "average": "average ↑", "cra": "CRA ↑", "frechet_judge": "Fréchet distance ↓"}
SAFETY = ("hazard", "i2p")
EXAMPLES = 4
"""Attacked prompts that are shown of each model."""


def sections(found: Reproduction) -> list[Html]:
    """All of them, in the paper's order."""
    return [
        objects(found),
        classes(found),
        confusions(found),
        safety(found),
        attacks(found),
        critics(found),
    ]


def objects(found: Reproduction) -> Html:
    """Table 1: each method over the classes."""
    title, lead = "Object removal", "Each class is removed by a run of its own; a row is the mean over its classes."
    rows = {method: _scores(found, method) for method in methods(found)}
    means = {method: {key: mean(scores, key) for key in COLUMNS} for method, scores in rows.items()}
    best = {key: _best([row[key] for row in means.values()], is_lower="↓" in words) for key, words in COLUMNS.items()}
    body: list[list[Content]] = [_base_row(found)] if found.of("objects", is_base=True) else []
    for method, row in means.items():
        cells = [_mean_cell(row[key], best[key]) for key in COLUMNS]
        planned = len([done for done in found.of("objects") if done.cell.method == method])
        body.append([method.upper(), *cells, f"{len(rows[method])} of {planned}"])
    words = (
        "Average is (UA + IRA) / 2. Small: 95 % interval, bootstrap over classes. Bold: best of the methods, computed. "
        "The Fréchet distance is between the object judge's features: it is no FID of the literature."
    )
    head = ["", *COLUMNS.values(), "runs"]
    return section(
        title, lead, table(head, body, "Methods, mean over classes", "numbers"), note(words), anchor="objects"
    )


def methods(found: Reproduction) -> list[str]:
    """In the plan's order."""
    return list(dict.fromkeys(done.cell.method for done in found.of("objects")))


def of_objects(done: Done) -> Evaluation | None:
    """The evaluation that has UA and IRA."""
    return next((hit for name in OBJECTS if (hit := done.find(name)) and hit.target), None)


def _scores(found: Reproduction, method: str) -> list[tuple[str, dict[str, float]]]:
    """Class and values of each finished run of a method."""
    rows = []
    for done in found.of("objects"):
        evaluation = of_objects(done) if done.cell.method == method else None
        if evaluation:
            values = {key: row["value"] for key, row in evaluation.scores["measurements"].items()}
            values["average"] = (values["ua"] + values["ira"]) / 2
            rows.append((str(done.cell.concept), values))
    return rows


def mean(rows: Sequence[tuple[str, Mapping[str, float]]], key: str) -> dict[str, Any] | None:
    """Mean with a bootstrap interval over classes; None where nothing was measured."""
    kept = [(label, row[key]) for label, row in rows if row.get(key) is not None]
    if not kept:
        return None
    values, labels = np.array([value for _, value in kept]), [label for label, _ in kept]
    bounds = cluster_bootstrap(values, labels, ["all"] * len(kept)) if len(set(labels)) > 1 else (None, None)
    unit = "distance" if key.startswith("frechet") else "proportion"
    return {"value": float(values.mean()), "low": bounds[0], "high": bounds[1], "n": len(kept), "unit": unit}


def _mean_cell(found: Mapping[str, Any] | None, best: float | None = None) -> Html:
    if found is None:
        return NOT_RUN
    cell = tag("span", shown(found), tag("small", interval(found)))
    return tag("strong", cell) if found["value"] == best else cell


def _base_row(found: Reproduction) -> list[Content]:
    """The base under the same benchmark: the floor of UA and the ceiling of IRA, from the runs' own targets."""
    measured = [hit.base["measurements"] for done in found.of("objects") if (hit := of_objects(done)) and hit.base]
    labels = [str(done.cell.concept) for done in found.of("objects") if (hit := of_objects(done)) and hit.base]
    rows = []
    for label, part in zip(labels, measured, strict=True):
        values = {key: row["value"] for key, row in part.items()}
        values["average"] = (values["ua"] + values["ira"]) / 2
        rows.append((label, values))
    return ["base model", *(_mean_cell(mean(rows, key)) for key in COLUMNS), "—"]


def classes(found: Reproduction) -> Html:
    """The appendix' table: UA and IRA of each class; several seeds are averaged."""
    title, lead = "Each class", "UA: the class is no longer seen in its own pictures. IRA: the other classes still are."
    names = load_lexicon().classes
    head: list[Content] = ["class"]
    for method in methods(found):
        head += [f"{method.upper()} UA ↑", f"{method.upper()} IRA ↑"]
    body = [
        [name, *(cell for method in methods(found) for cell in _class_cells(found, method, name))] for name in names
    ]
    words = "Small: 95 % interval of the run (of several seeds: lowest to highest)."
    return section(title, lead, table(head, body, "UA and IRA by class", "numbers"), note(words), anchor="classes")


def _class_cells(found: Reproduction, method: str, label: str) -> list[Content]:
    runs = [done for done in found.of("objects") if done.cell.method == method and done.cell.concept == label]
    hits = [hit.scores["measurements"] for done in runs if (hit := of_objects(done))]
    return [_over_seeds([hit[key] for hit in hits]) for key in ("ua", "ira")]


def _over_seeds(rows: Sequence[Mapping[str, Any]]) -> Html:
    if not rows:
        return NOT_RUN
    if len(rows) == 1:
        return tag("span", shown(rows[0]), tag("small", interval(rows[0])))
    values = [row["value"] for row in rows]
    span = f"{percent(min(values))} – {percent(max(values))}"
    return tag("span", percent(sum(values) / len(values)), tag("small", span))


def confusions(found: Reproduction) -> Html:
    """One matrix per target class, after removal by our method."""
    title, lead = "Mix-ups", "Rows: what was asked for. Columns: what the judge saw. One tab for each removed class."
    ours = methods(found)[:1]
    panels = [
        (f"{done.cell.concept}{f', seed {done.cell.seed}' if done.cell.seed else ''}", matrix(hit.scores))
        for done in found.of("objects")
        if done.cell.method in ours and (hit := of_objects(done))
    ]
    parts: list[Content] = [tabs("confusion", panels)] if panels else [hole("No class was removed and measured.")]
    return section(title, lead, *parts, anchor="confusion")


def matrix(scores: Mapping[str, Any], judge: str = "object") -> Html:
    """The confusion matrix of a judge; cells without a picture are empty."""
    counts = scores.get("confusion", {}).get(judge) or next(iter(scores.get("confusion", {}).values()), None)
    if not counts:
        return hole("scores.json has no confusion matrix.")
    rows = [
        [
            label,
            *(_matrix_cell(value, sum(row), seen == label) for seen, value in zip(counts["judged"], row, strict=True)),
        ]
        for label, row in zip(counts["prompted"], counts["counts"], strict=True)
    ]
    head: list[Content] = ["", *(tag("span", label) for label in counts["judged"])]
    return table(head, rows, "Number of pictures, by the judge, after", "matrix")


def _matrix_cell(count: int, total: int, is_right: bool) -> Content:
    if not count:
        return ""
    kind = "right" if is_right else "wrong"
    return tag("span", count, class_=f"{kind} cell", style=f"--share:{count / total:.2f}")


def safety(found: Reproduction) -> Html:
    """The nudity table, or its twin of hazards: detections by category and in all, and CLIPScore."""
    title, lead = "Safety", "How often explicit prompts still show what was to be forgotten, before and after."
    base, runs = found.of("safety", is_base=True), found.of("safety")
    hits = [(_who(done), hit, done) for done in [*base, *runs] if (hit := _first(done, SAFETY))]
    if not hits:
        return section(title, lead, hole("Not run: no model without the concept was measured."), anchor="safety")
    names = list(hits[0][1].scores["detections"]["by_category"])
    body = [[who, *_counts(hit, names), _clipscore(done)] for who, hit, done in hits]
    pictures = hits[0][1].scores["detections"]["pictures"]
    head = ["", *names, "total ↓", "of pictures", "CLIPScore ↑"]
    reductions = [_reduction(who, hit) for who, hit, _ in hits]
    words = (
        f"{pictures} explicit pictures. CLIPScore of the evaluation-only CLIP on canvas' prompts; small: 95 % interval."
    )
    parts = [table(head, body, "Pictures in which a category is seen", "numbers"), *reductions, note(words)]
    return section(title, lead, *parts, anchor="safety")


def _counts(hit: Evaluation, names: Sequence[str]) -> list[Content]:
    counted = hit.scores["detections"]["by_category"]
    row = [counted.get(name, 0) for name in names]
    rate = hit.scores["measurements"].get("hazard_detections")
    share = tag("span", shown(rate), tag("small", interval(rate))) if rate else "—"
    return [*row, tag("strong", sum(row)), share]


def _clipscore(done: Done) -> Html:
    hit = done.find("clipscore")
    if hit is None:
        return NOT_RUN
    name = next(key for key in hit.scores["measurements"] if key.startswith("clipscore"))
    row = hit.scores["measurements"][name]
    return tag("span", f"{row['value']:.2f}", tag("small", f"{row['low']:.2f} – {row['high']:.2f}"))


def _reduction(who: str, hit: Evaluation) -> Html | None:
    rows = {key: row for key, row in (hit.scores.get("change") or {}).items() if key.endswith("reduction")}
    if not rows:
        return None
    row = next(iter(rows.values()))
    return note(f"{who}: {shown(row)} fewer than the base on the same noise (95 % interval {interval(row)}).")


def attacks(found: Reproduction) -> Html:
    """The attack table."""
    title = "Attack"
    lead = (
        "UnlearnDiffAtk searches words that bring the concept back; the share of prompts that show it before and after."
    )
    hits = [(_who(done), hit, done) for done in _safety_cells(found) if (hit := done.find("unlearndiffatk"))]
    if not hits:
        return section(title, lead, hole("Not run: no attack was made."), anchor="attack")
    body: list[list[Content]] = [
        [_attacked(who, hit), *(_share(hit, key) for key in ("pre_asr", "post_asr")), _effort(hit)]
        for who, hit, _ in hits
    ]
    head = ["", "pre-ASR ↓", "post-ASR ↓", "prompts and schedule"]
    words = "The base is attacked with the concept's word taken out of its prompts: a working attack brings it back."
    parts: list[Content] = [table(head, body, "Attack success rates", "numbers"), note(words)]
    for who, hit, _ in hits:
        parts += [tag("h4", _attacked(who, hit)), *attack_examples(hit, EXAMPLES)]
    return section(title, lead, *parts, anchor="attack")


def _safety_cells(found: Reproduction) -> list[Done]:
    return [*found.of("safety", is_base=True), *found.of("safety")]


def _attacked(who: str, hit: Evaluation) -> str:
    return f"{who}, without the word" if hit.protocol.get("without_word") else who


def _share(hit: Evaluation, key: str) -> Html:
    row = hit.scores["measurements"].get(key)
    return tag("span", shown(row), tag("small", interval(row))) if row else NOT_RUN


def _effort(hit: Evaluation) -> str:
    schedule = hit.protocol.get("schedule", {})
    found = hit.protocol.get("targets", {}).get("found", "?")
    return f"{found} of {hit.protocol.get('prompts', '?')} prompts, {schedule.get('name', '?')}"


def critics(found: Reproduction) -> Html:
    """FiLM or not: how often the critic's likeliest class is the prompt's, from noisy states at any timestep."""
    title = "Critic with and without FiLM"
    lead = "A critic that knows how noisy its picture is should tell more from it; both saw the same trajectories."
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for done in found.of("critic"):
        kind = next(text.partition("=")[2] for text in done.cell.settings if text.startswith("critic.kind="))
        groups.setdefault(kind, [])
        if done.run and done.run.fit and done.run.fit.get("accuracy") is not None:
            groups[kind].append(done.run.fit)
    body = [
        [kind, *(_spread(fits, key) for key in ("accuracy", "macro_precision")), _fitted(fits)]
        for kind, fits in groups.items()
    ]
    if not body:
        return section(title, lead, hole("Not run at this scale or for this model."), anchor="critic")
    words = "Argmax over 20 classes on held-out trajectories, every timestep alike. ±: standard deviation over seeds."
    head = ["critic", "accuracy ↑", "macro precision ↑", "held out"]
    return section(
        title, lead, table(head, body, "Critics of the base policy", "numbers"), note(words), anchor="critic"
    )


def _spread(fits: Sequence[Mapping[str, Any]], key: str) -> Content:
    values = [fit[key] for fit in fits]
    if not values:
        return NOT_RUN
    deviation = f" ± {100 * float(np.std(values, ddof=1)):.1f}" if len(values) > 1 else ""
    return f"{100 * sum(values) / len(values):.1f}{deviation} %"


def _fitted(fits: Sequence[Mapping[str, Any]]) -> str:
    return "—" if not fits else f"{fits[0]['held_out']} trajectories, {len(fits)} seed{'s' * (len(fits) > 1)}"


def _who(done: Done) -> str:
    if done.cell.concept is None:
        return "base model"
    return f"{done.cell.method.upper()}, seed {done.cell.seed}"


def _first(done: Done, names: Iterable[str]) -> Evaluation | None:
    return next((hit for name in names if (hit := done.find(name))), None)


def _best(rows: Sequence[Mapping[str, Any] | None], *, is_lower: bool) -> float | None:
    values = [row["value"] for row in rows if row is not None]
    if len(values) < 2:
        return None  # nothing to be better than
    return min(values) if is_lower else max(values)
