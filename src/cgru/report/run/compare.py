"""Comparison of several runs: only numbers with the same protocol share a plane, a ranking or a mean.

A family is a set of evaluations with the same benchmark, version and protocol; only the model and its target may
differ. Ranks and bold compare runs with the same target in a family. Means are over runs of one recipe: the same
settings, but other seeds or concepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cgru.config import fingerprint
from cgru.report.draw.charts import COLOURS, Spot, efficient, plane
from cgru.report.draw.html import (
    NONE,
    NOT_RUN,
    Content,
    Html,
    figure,
    hole,
    interval,
    joined,
    note,
    percent,
    said,
    shown,
    table,
    tag,
)
from cgru.report.run.families import Kind
from cgru.report.run.read import Evaluation, Record, amount, comparable, differing, is_same

ALPHABET = [chr(ord("A") + i) for i in range(26)]
LETTERS = [*ALPHABET, *(first + second for first in ALPHABET for second in ALPHABET)]
"""Runs of a comparison: A to Z, AA to ZZ; a page holds fewer."""


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

    @property
    def target(self) -> str:
        """What was to be forgotten."""
        return self.evaluation.target or self.record.concept

    @property
    def kind(self) -> Kind:
        """How its benchmark is shown."""
        kind = self.evaluation.sort
        assert kind is not None, self.evaluation.name
        return kind

    def is_higher_better(self, key: str) -> bool:
        """Which way is better, as scores.json says."""
        return bool(self.evaluation.scores["measurements"][key].get("better") == "higher")


def name_runs(records: Sequence[Record]) -> list[Named]:
    """The runs of a page in order, with letters where there are several."""
    letters = ["this run"] if len(records) == 1 else LETTERS[: len(records)]
    return [
        Named(letter, record.run.path.resolve().name, f"r{i}", record)
        for i, (letter, record) in enumerate(zip(letters, records, strict=True))
    ]


def families(runs: Sequence[Named]) -> list[list[Entry]]:
    """Evaluations of the runs' own concepts, grouped by what makes them comparable."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for named in runs:
        record = named.record
        own = [found for found in record.evaluations if found.sort and _is_own(found, record)]
        for evaluation in own:
            key = (evaluation.name, comparable(evaluation.protocol))
            groups.setdefault(key, []).append(Entry(named, evaluation))
    return list(groups.values())


def _is_own(evaluation: Evaluation, record: Record) -> bool:
    """Of the run's concept, or of a benchmark that was given no target: picture quality, nudity."""
    return evaluation.target is None or is_same(evaluation.target, record.concept)


def comparison(runs: Sequence[Named]) -> Html:
    """The top of a page of several runs: a plane and a table for each family, and what could not be compared."""
    groups = families(runs)
    parts: list[Content] = []
    for sort in _sorted_apart(groups):
        parts += [_warning(sort)] if len(sort) > 1 else []
        parts += [family(group) for group in sort]
        parts.append(_missing(runs, sort))
    if not any(group[0].kind.is_headline for group in groups):
        parts.insert(0, _missing(runs, []))
    return tag("section", tag("h2", "Comparison", id="comparison"), *parts, class_="comparison")


def _sorted_apart(groups: Sequence[list[Entry]]) -> list[list[list[Entry]]]:
    """Families that a reader may want to hold against each other, together: the headlines first."""
    sorts: dict[str, list[list[Entry]]] = {"": []}
    for group in groups:
        kind = group[0].kind
        sorts.setdefault("" if kind.is_headline else kind.name, []).append(group)
    return [sort for sort in sorts.values() if sort]


def _missing(runs: Sequence[Named], sort: Sequence[Sequence[Entry]]) -> Html:
    """The runs that these families do not show, and why."""
    drawn = {entry.named.anchor for group in sort for entry in group}
    missing = [f"{named.letter} ({named.name})" for named in runs if named.anchor not in drawn]
    if not missing:
        return NONE
    if sort and not sort[0][0].kind.is_headline:
        return hole(f"{sort[0][0].evaluation.scores['benchmark']} not run: {', '.join(missing)}.")
    return hole(f"In no table and no plane, because not evaluated on what was to be forgotten: {', '.join(missing)}.")


def own_plane(entries: Sequence[Entry]) -> Html:
    """The plane of a family, with the base models as rings; nothing for a kind without one."""
    spots = plane_spots(entries)
    titles = entries[0].kind.plane
    if titles is None or not spots:
        return NONE
    words = "Crosses are 95 % intervals, rings are base models. Top right is best: the concept gone, the rest intact."
    alt = f"{titles[0]} against {titles[1]}: " + "; ".join(
        f"{spot.label} {percent(spot.forgotten[0])} and {percent(spot.kept[0])}" for spot in spots
    )
    if len({entry.target for entry in entries}) == 1 and len(efficient(spots)) > 1:
        words += " Dashed: the runs that no other beats in both."
    if not any(spot.is_base for spot in spots):
        words += " No base model was scored."
    return figure(plane_drawing(entries), alt, words)


def plane_drawing(entries: Sequence[Entry]) -> str:
    """The SVG of a family's plane; only for a kind that has one."""
    titles = entries[0].kind.plane
    assert titles is not None, entries[0].kind
    has_one_target = len({entry.target for entry in entries}) == 1
    return plane(plane_spots(entries), *titles, has_front=has_one_target)


def plane_spots(entries: Sequence[Entry]) -> list[Spot]:
    """Base models first, each once; then the runs."""
    if entries[0].kind.plane is None:
        return []
    spots = [spot for i, entry in enumerate(entries) for spot in _spots(entry, COLOURS[i % len(COLOURS)])]
    return [*_distinct([spot for spot in spots if spot.is_base]), *(spot for spot in spots if not spot.is_base)]


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
    keys = entry.kind.columns
    values = [entry.value(key) for key in keys]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value if entry.is_higher_better(key) else 1 - value for key, value in zip(keys, known, strict=True))


def order(entries: Sequence[Entry]) -> list[int | None]:
    """Ranks among runs that were to forget the same: by the sum where there is a plane, else by the last column."""
    if len(entries) < 2:
        return [None] * len(entries)
    if entries[0].kind.plane:
        return ranks([total(entry) for entry in entries], is_higher_better=True)
    key = list(entries[0].kind.columns)[-1]
    return ranks([entry.value(key) for entry in entries], is_higher_better=entries[0].is_higher_better(key))


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


def family(group: Sequence[Entry]) -> Html:
    """Evaluations of one protocol: plane, table with bold and ranks, means over seeds and concepts."""
    first, kind = group[0].evaluation, group[0].kind
    targets = list(dict.fromkeys(entry.target for entry in group))
    heading = f"{first.name}, {amount(first)}: {len(group)} run{'s' * (len(group) > 1)}"
    columns = _columns(group)
    rows = [row for target in targets for row in _rows([e for e in group if e.target == target], columns)]
    head: list[Content] = [
        "run",
        "to forget",
        *columns.values(),
        *(["sum"] if kind.plane else []),
        "rank",
        said("recipe"),
    ]
    words = f"{kind.meaning}Small: 95 % intervals. Bold: best of those to forget the same. {_ranking(kind)}"
    tables = [table(head, rows, f"Runs on {first.name}", "numbers"), note(words), _means(group)]
    drawn = own_plane(group) if len(group) > 1 or kind.is_headline else NONE
    return tag("div", tag("h3", heading), drawn, *tables, class_="family")


def _columns(group: Sequence[Entry]) -> dict[str, str]:
    """Measurement -> heading: the kind's own, then those beside them that a run has (older files lack some)."""
    kind = group[0].kind
    known = {key: title for key, title in kind.beside.items() if any(e.value(key) is not None for e in group)}
    return {**kind.columns, **known}


def _ranking(kind: Kind) -> str:
    titles = [title.split(",")[0].rstrip(" ↑↓") for title in kind.columns.values()]
    how = f"The rank follows {titles[-1]}."
    if kind.plane:
        how = f"Sum: {' + '.join(titles)} in points, each turned so that more is better; the rank follows it."
    return f"{how} Where intervals overlap, a rank says little."


def _rows(entries: Sequence[Entry], columns: Iterable[str]) -> list[list[Content]]:
    """The runs that were to forget the same, with bold and ranks among them alone."""
    kind = entries[0].kind
    best = {key: _best(entries, key) for key in columns}
    rows: list[list[Content]] = []
    for entry, rank in zip(entries, order(entries), strict=True):
        link = joined([tag("b", entry.named.letter), " ", tag("a", entry.named.name, href=f"#{entry.named.anchor}")])
        cells = [
            _cell(entry, key, is_best=entry.value(key) is not None and entry.value(key) == best[key]) for key in columns
        ]
        summed = total(entry) if kind.plane else None
        sums = ["—" if summed is None else f"{100 * summed:.1f}"] if kind.plane else []
        recipe = said(f"{_recipe(entry.record)}, seed {entry.record.run.config.seed}")
        rows.append([link, entry.target, *cells, *sums, "—" if rank is None else rank, recipe])
    return rows


def _best(entries: Sequence[Entry], key: str) -> float | None:
    known = [(entry, value) for entry in entries if (value := entry.value(key)) is not None]
    if len(entries) < 2 or not known:
        return None  # nothing to be better than
    values = [value for _, value in known]
    return max(values) if known[0][0].is_higher_better(key) else min(values)


def _cell(entry: Entry, key: str, *, is_best: bool) -> Html:
    found = entry.evaluation.scores["measurements"].get(key)
    if found is None:
        return NOT_RUN
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
    columns = _columns(group)
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
    unit = entries[0].evaluation.scores["measurements"][key].get("unit")
    mean, low, high = (
        shown({"value": value, "unit": unit}) for value in (sum(values) / len(values), min(values), max(values))
    )
    return f"{mean} ({low} – {high})"


def _settings(record: Record) -> str:
    """Equal for runs that differ in seed and concept alone."""
    return fingerprint(replace(record.run.config, concept="any", seed=0))


def _recipe(record: Record) -> str:
    config = record.run.config
    preset = f" {config.preset}" if config.preset else ""
    rounds = f", {config.length} iterations" if config.length > 1 else ""
    return f"{config.method}{preset}{rounds}"


def _spots(entry: Entry, colour: str) -> list[Spot]:
    gone, kept = entry.kind.needed
    if entry.value(gone) is None or entry.value(kept) is None:
        return []
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
