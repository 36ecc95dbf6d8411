"""Several runs side by side: only numbers of one protocol share a plane, a ranking or a mean.

A family is a set of evaluations with the same benchmark, version and protocol; only the model and what it was to forget
may differ. Ranks and bold stay within one target of a family; means go over the runs of one recipe (the same settings,
other seeds or concepts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cgru.config import fingerprint
from cgru.report.charts import COLOURS, Spot, plane
from cgru.report.html import NONE, Content, Html, figure, hole, interval, joined, note, percent, shown, table, tag
from cgru.report.records import Evaluation, Record, comparable, differing, is_same, pictures_a_prompt

GRID = {"ua": "UA ↑", "ira": "IRA ↑", "cra": "CRA ↑"}
GRID_MEANING = "UA: forgotten. IRA: other labels of the same kind kept. CRA: labels of the other kind kept. "
GRID_PLANE = ("forgotten (UA)", "kept (IRA)")
COLUMNS = {
    "canvas": GRID,
    "unlearncanvas": GRID,
    "hazard": {"hazard_detections": "hazards drawn ↓", "object_accuracy": "objects kept ↑"},
}
MEANINGS = {
    "canvas": GRID_MEANING,
    "unlearncanvas": GRID_MEANING,
    "hazard": "",
}
PLANES = {
    "canvas": GRID_PLANE,
    "unlearncanvas": GRID_PLANE,
    "hazard": ("hazards no longer drawn", "objects kept"),
}


@dataclass(frozen=True)
class Named:
    """A run, its folder's name, its letter in planes, and the anchor of its part of the page."""

    letter: str
    name: str
    anchor: str
    record: Record


@dataclass(frozen=True)
class Entry:
    """One run's evaluation of its own concept."""

    named: Named
    evaluation: Evaluation

    @property
    def record(self) -> Record:
        """The run."""
        return self.named.record

    def value(self, key: str) -> float | None:
        """A measurement; None where this evaluation has none."""
        found = self.evaluation.scores["measurements"].get(key)
        return None if found is None else found["value"]

    def is_higher_better(self, key: str) -> bool:
        """Which way is better, as scores.json says."""
        return bool(self.evaluation.scores["measurements"][key].get("better") == "higher")


def families(runs: Sequence[Named]) -> list[list[Entry]]:
    """Evaluations of the runs' own concepts, grouped by what makes them comparable."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for named in runs:
        record = named.record
        own = [found for found in record.evaluations if found.headline and is_same(found.target, record.concept)]
        for evaluation in own:
            key = (evaluation.name, comparable(evaluation.protocol))
            groups.setdefault(key, []).append(Entry(named, evaluation))
    return list(groups.values())


def comparison(runs: Sequence[Named]) -> Html:
    """The top of a page of several runs: a plane and a table for each family, and what could not be compared."""
    groups = families(runs)
    drawn = {entry.named.anchor for group in groups for entry in group}
    missing = [f"{named.letter} ({named.name})" for named in runs if named.anchor not in drawn]
    parts: list[Content] = [_warning(groups)] if len(groups) > 1 else []
    parts += [_family(group) for group in groups]
    if missing:
        text = f"In no table and no plane, because not evaluated on what was to be forgotten: {', '.join(missing)}."
        parts.append(hole(text))
    return tag("section", tag("h2", "Comparison", id="comparison"), *parts, class_="comparison")


def own_plane(entries: Sequence[Entry]) -> Html:
    """The plane of a family, with the base models as rings."""
    benchmark = entries[0].evaluation.scores["benchmark"]
    spots = [spot for i, entry in enumerate(entries) for spot in _spots(entry, COLOURS[i % len(COLOURS)])]
    spots = [*_distinct([spot for spot in spots if spot.is_base]), *(spot for spot in spots if not spot.is_base)]
    has_one_target = len({entry.evaluation.target for entry in entries}) == 1
    x_title, y_title = PLANES[benchmark]
    drawing = plane(spots, x_title, y_title, has_front=has_one_target)
    words = "Crosses are 95 % intervals, rings are base models. Top right is best: the concept gone, the rest intact."
    alt = f"{x_title} against {y_title}: " + "; ".join(
        f"{spot.label} {percent(spot.forgotten[0])} and {percent(spot.kept[0])}" for spot in spots
    )
    if not any(spot.is_base for spot in spots):
        words += " No base model was scored."
    return figure(drawing, alt, words)


def ranks(values: Sequence[float | None], *, is_higher_better: bool) -> list[int | None]:
    """1 is best; equal values share a rank, those without a value have none.

    >>> ranks([0.9, None, 0.9, 0.5], is_higher_better=True)
    [1, None, 1, 3]
    """
    signed = [None if value is None else (-value if is_higher_better else value) for value in values]
    known = [value for value in signed if value is not None]
    return [None if value is None else 1 + sum(other < value for other in known) for value in signed]


def total(entry: Entry) -> float | None:
    """Sum of a table's columns, each turned so that higher is better; None where one is missing."""
    keys = COLUMNS[entry.evaluation.scores["benchmark"]]
    values = [entry.value(key) for key in keys]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value if entry.is_higher_better(key) else 1 - value for key, value in zip(keys, known, strict=True))


def _warning(groups: Sequence[Sequence[Entry]]) -> Html:
    versions = sorted({group[0].evaluation.name for group in groups})
    if len(versions) > 1:
        why = f"They come from different benchmarks or versions ({', '.join(versions)})"
    else:
        keys = sorted({key for group in groups[1:] for key in _differing(groups[0], group)})
        why = f"Their protocols differ in {', '.join(keys)}"
    apart = "so they stand in separate tables: never ranked, averaged or drawn together"
    return tag("p", f"These runs are not all comparable. {why}, {apart}.", class_="warning")


def _differing(one: Sequence[Entry], other: Sequence[Entry]) -> list[str]:
    return differing(one[0].evaluation.protocol, other[0].evaluation.protocol)


def _family(group: Sequence[Entry]) -> Html:
    first = group[0].evaluation
    targets = list(dict.fromkeys(str(entry.evaluation.target) for entry in group))
    heading = f"{first.name}, {pictures_a_prompt(first)}: {len(group)} run{'s' * (len(group) > 1)}"
    columns = COLUMNS[first.scores["benchmark"]]
    rows = [row for target in targets for row in _rows([e for e in group if e.evaluation.target == target])]
    sums = " + ".join(title.split(",")[0].rstrip(" ↑↓") for title in columns.values())
    head = ["run", "to forget", *columns.values(), "sum", "rank", "recipe"]
    words = (
        f"{MEANINGS[first.scores['benchmark']]}Small: 95 % intervals. Bold: best of those to forget the same. "
        f"Sum: {sums} in points, each turned so that more is better; the rank follows it. Where intervals overlap, a "
        "rank says little."
    )
    tables = [table(head, rows, f"Runs on {first.name}", "numbers"), note(words), _means(group)]
    return tag("div", tag("h3", heading), own_plane(group), *tables, class_="family")


def _rows(entries: Sequence[Entry]) -> list[list[Content]]:
    """The runs that were to forget the same, with bold and ranks among them alone."""
    keys = COLUMNS[entries[0].evaluation.scores["benchmark"]]
    best = {key: _best(entries, key) for key in keys}
    totals = [total(entry) for entry in entries]
    order = ranks(totals, is_higher_better=True) if len(entries) > 1 else [None] * len(entries)
    rows: list[list[Content]] = []
    for entry, summed, rank in zip(entries, totals, order, strict=True):
        cells = [
            _cell(entry, key, is_best=entry.value(key) is not None and entry.value(key) == best[key]) for key in keys
        ]
        link = joined([tag("b", entry.named.letter), " ", tag("a", entry.named.name, href=f"#{entry.named.anchor}")])
        shown_sum = "—" if summed is None else f"{100 * summed:.1f}"
        rank_cell = "—" if rank is None else rank
        told: list[Content] = [link, str(entry.evaluation.target)]
        rows.append(
            [
                *told,
                *cells,
                shown_sum,
                rank_cell,
                tag("span", f"{_recipe(entry.record)}, seed {entry.record.run.config.seed}", class_="recipe"),
            ]
        )
    return rows


def _best(entries: Sequence[Entry], key: str) -> float | None:
    values = [value for value in (entry.value(key) for entry in entries) if value is not None]
    if len(entries) < 2 or not values:
        return None  # nothing to be better than
    return max(values) if entries[0].is_higher_better(key) else min(values)


def _cell(entry: Entry, key: str, *, is_best: bool) -> Html:
    found = entry.evaluation.scores["measurements"].get(key)
    if found is None:
        return tag("span", "not measured", class_="none")
    value = tag("strong", shown(found)) if is_best else tag("span", shown(found))
    return tag("span", value, tag("small", interval(found)))


def _means(group: Sequence[Entry]) -> Html:
    """Mean over the runs of each recipe that has several; lowest and highest beside it."""
    recipes: dict[str, list[Entry]] = {}
    for entry in group:
        recipes.setdefault(_settings(entry.record), []).append(entry)
    several = [entries for entries in recipes.values() if len(entries) > 1]
    if not several:
        return (
            note("No mean: no two of these runs have the same settings, so none could be averaged.")
            if len(group) > 1
            else NONE
        )
    columns = COLUMNS[group[0].evaluation.scores["benchmark"]]
    rows = [
        [
            _recipe(entries[0].record),
            ", ".join(entry.named.letter for entry in entries),
            *(_mean(entries, key) for key in columns),
        ]
        for entries in several
    ]
    return table(
        ["recipe", "runs", *columns.values()], rows, "Means over seeds and concepts (lowest – highest)", "numbers"
    )


def _mean(entries: Sequence[Entry], key: str) -> str:
    values = [value for value in (entry.value(key) for entry in entries) if value is not None]
    if len(values) < len(entries):
        return f"measured in {len(values)} of {len(entries)}"
    return f"{percent(sum(values) / len(values))} ({percent(min(values))} – {percent(max(values))})"


def _settings(record: Record) -> str:
    """Equal for runs that differ in seed and concept alone."""
    return fingerprint(replace(record.run.config, concept="any", seed=0))


def _recipe(record: Record) -> str:
    config = record.run.config
    preset = f" {config.preset}" if config.preset else ""
    return f"{config.method}{preset}, {config.policy.iterations} iterations"


def _spots(entry: Entry, colour: str) -> list[Spot]:
    gone, kept = entry.evaluation.headline or ("", "")
    base = entry.evaluation.base
    found = [(entry.named.letter, entry.evaluation.scores["measurements"], colour, False)]
    if base and gone in base["measurements"] and kept in base["measurements"]:
        found.insert(0, ("base model", base["measurements"], "slate", True))
    return [
        Spot(label, _bounds(rows[gone]), _bounds(rows[kept]), shade, is_base) for label, rows, shade, is_base in found
    ]


def _bounds(found: dict[str, float | str | None]) -> tuple[float, float, float]:
    value = float(found["value"] or 0.0)
    low, high = (value if found[key] is None else float(found[key] or 0.0) for key in ("low", "high"))
    # The plane's axis counts what is gone: a share that should be low is turned round.
    return (value, low, high) if found.get("better") != "lower" else (1 - value, 1 - high, 1 - low)


def _distinct(spots: Sequence[Spot]) -> list[Spot]:
    return list(dict.fromkeys(spots))
