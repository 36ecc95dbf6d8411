"""The paper's tables of object removal from the cells of a reproduction: by method, by class, confusions, paraphrases.

Averages and bold numbers are computed here. Means over classes and seeds are shown with their n and their interval, a
percentile bootstrap over classes; missing measurements are marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cgru.embedded import load_lexicon
from cgru.evaluation.intervals import cluster_bootstrap
from cgru.report.draw.html import (
    NOT_RUN,
    Content,
    Html,
    hole,
    interval,
    note,
    percent,
    section,
    shown,
    table,
    tabs,
    tag,
)
from cgru.report.paper.read import Done, Reproduction
from cgru.report.run.read import Evaluation

OBJECTS = ("canvas", "unlearncanvas")
COLUMNS = {"ua": "UA ↑", "ira": "IRA ↑", "average": "average ↑", "cra": "CRA ↑", "frechet": "Fréchet distance ↓"}
FRECHET = {
    False: "The Fréchet distance is between the object judge's features: it is no FID of the literature.",
    True: "The Fréchet distance is FID against MJHQ-30K, which the paper may not have used.",
}
"""Whether there is an evaluation by `fid` -> what the column is."""
PARAPHRASE = "paraphrase"
WORDED = {"paraphrase_ua": "UA ↑", "paraphrase_ua_unseen_words": "UA, held-out words ↑", "paraphrase_ira": "IRA ↑"}
Labelled = tuple[str, Mapping[str, float]]
"""A class, and the values measured when it was to be forgotten."""
ACRONYM = 4
"""Letters of the longest: CGRU, DDPO, DPOK."""


def objects(found: Reproduction) -> Html:
    """Table 1: each method over the classes."""
    title, lead = "Object removal", "Each class is removed by a run of its own; a row is the mean over its classes."
    if words := mixed(found):
        return section(title, lead, hole(words), anchor="objects")
    rows = {method: _scores(found, method) for method in methods(found)}
    means = {method: {key: mean(scores, key) for key in COLUMNS} for method, scores in rows.items()}
    # Bold only where all methods removed the same classes: else the mean tells of the classes, too.
    is_fair = len({tuple(sorted(label for label, _ in scores)) for scores in rows.values()}) == 1
    values = {key: [row[key] for row in means.values()] if is_fair else [] for key in COLUMNS}
    best = {key: _best(values[key], is_lower="↓" in words) for key, words in COLUMNS.items()}
    body: list[list[Content]] = [_base_row(found)] if found.of("objects", is_base=True) else []
    for method, row in means.items():
        cells = [_mean_cell(row[key], best[key]) for key in COLUMNS]
        planned = len([done for done in found.of("objects") if done.cell.method == method])
        body.append([label_of(method), *cells, f"{len(rows[method])} of {planned}"])
    words = (
        "Average is (UA + IRA) / 2. Small: 95 % interval, bootstrap over classes. Bold: best of the methods, computed, "
        f"where all removed the same classes. {FRECHET[_has_fid(found)]}"
    )
    head = ["", *COLUMNS.values(), "runs"]
    first = table(head, body, "Methods, mean over classes", "numbers")
    return section(title, lead, first, note(words), _in_other_words(found), anchor="objects")


def _in_other_words(found: Reproduction) -> Html | None:
    """The same by benchmark `paraphrase`, which the paper does not have; None where no cell was to measure it."""
    planned = [done for done in found.of("objects") if any(m.benchmark == PARAPHRASE for m in done.cell.measures)]
    if not planned:
        return None
    parts: dict[str, list[Labelled]] = {"base model": [], **{label_of(method): [] for method in methods(found)}}
    for done in planned:
        if hit := done.find(PARAPHRASE):
            label = str(done.cell.concept)
            parts[label_of(done.cell.method)].append((label, _values(hit.scores)))
            if hit.base and done.cell.method == methods(found)[0]:  # the same pictures for every method
                parts["base model"].append((label, _values(hit.base)))
    body: list[list[Content]] = [
        [who, *(_mean_cell(mean(rows, key)) for key in WORDED), len(rows)] for who, rows in parts.items()
    ]
    words = "Synonyms, breeds and sentences that no training prompt had: is the class gone in other words, too?"
    caption = "Prompts in other words (benchmark paraphrase), mean over classes"
    return tag("div", note(words), table(["", *WORDED.values(), "runs"], body, caption, "numbers"))


def _values(scores: Mapping[str, Any]) -> dict[str, float]:
    return {key: row["value"] for key, row in scores["measurements"].items()}


def methods(found: Reproduction) -> list[str]:
    """In the plan's order, ours first."""
    return list(dict.fromkeys(done.cell.method for done in found.of("objects")))


def label_of(method: str) -> str:
    """A method as the paper's tables write it: acronyms in capitals, words as they are."""
    return method.upper() if len(method) <= ACRONYM else method


def of_objects(done: Done) -> Evaluation | None:
    """The evaluation that has UA and IRA."""
    return next((hit for name in OBJECTS if (hit := done.find(name)) and hit.target), None)


def _scores(found: Reproduction, method: str) -> list[Labelled]:
    """Class and values of each finished run of a method."""
    runs = [done for done in found.of("objects") if done.cell.method == method]
    return [(str(done.cell.concept), _averaged(hit.scores) | _fid(done)) for done in runs if (hit := of_objects(done))]


def _averaged(scores: Mapping[str, Any]) -> dict[str, float]:
    values = _values(scores)
    frechet = {"frechet": values["frechet_judge"]} if "frechet_judge" in values else {}
    return {**values, **frechet, "average": (values["ua"] + values["ira"]) / 2}


def mixed(found: Reproduction) -> str:
    """Why there is no mean over the runs; empty where there is."""
    return " ".join(filter(None, (found.mixed("objects", name) for name in (*OBJECTS, PARAPHRASE, "fid"))))


def _has_fid(found: Reproduction) -> bool:
    return any(done.find("fid") for done in found.of("objects"))


def _fid(done: Done) -> dict[str, float]:
    """FID of a model other than Emoji Canvas, by a benchmark of its own."""
    hit = done.find("fid")
    values = [value for key, value in _values(hit.scores).items() if key.startswith("fid_")] if hit else []
    return {"frechet": values[0]} if values else {}


def mean(rows: Sequence[Labelled], key: str) -> dict[str, Any] | None:
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
    """The base by the same benchmark: the floor of UA and the ceiling of IRA, from the runs' own targets."""
    ours = [done for done in found.of("objects") if done.cell.method == methods(found)[0]]
    rows = [(str(done.cell.concept), _averaged(hit.base)) for done in ours if (hit := of_objects(done)) and hit.base]
    means = {key: mean(rows, key) for key in COLUMNS}
    # No interval over classes: all rows are one model's, which differs only in what is left out as the target.
    return ["base model", *(NOT_RUN if row is None else shown(row) for row in means.values()), "—"]


def classes(found: Reproduction) -> Html:
    """The appendix' table: UA and IRA of each class; several seeds are averaged."""
    title, lead = "Each class", "UA: the class is no longer seen in its own pictures. IRA: the other classes still are."
    names = load_lexicon().classes
    head: list[Content] = ["class"]
    for method in methods(found):
        head += [f"{label_of(method)} UA ↑", f"{label_of(method)} IRA ↑"]
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


def _best(rows: Sequence[Mapping[str, Any] | None], *, is_lower: bool) -> float | None:
    values = [row["value"] for row in rows if row is not None]
    if len(values) < 2:
        return None  # nothing to be better than
    return min(values) if is_lower else max(values)
