"""Numbers from the paper's tables, in a separate block: data files with their source, never beside measured numbers.

A file in literature/ holds a table as it was printed. Sums, means, ranks and bold are computed here, exactly (decimals,
not floats); where the paper prints another total or another bold, both are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from cgru.report.draw.charts import COLOURS, Spot, plane
from cgru.report.draw.html import NONE, Content, Html, figure, note, table, tag

FOLDER = Path(__file__).with_name("literature")
PAPER = "Critic-Guided Reinforcement Unlearning in Text-to-Image Diffusion"
TABLES = ("objects", "classes", "nudity", "attack", "critic")
TOTAL = "total"
"""The key of the computed column."""


@dataclass(frozen=True)
class Column:
    """One quantity."""

    key: str
    title: str
    unit: str
    better: str
    """higher or lower."""
    digits: int

    def written(self, value: Decimal) -> str:
        """With as many digits as the paper prints; a mean with one more."""
        return f"{value:.{self.digits}f}"

    @property
    def heading(self) -> str:
        """With unit and direction."""
        return f"{self.title}{f', {self.unit}' if self.unit else ''} {'↑' if self.better == 'higher' else '↓'}"


@dataclass(frozen=True)
class Printed:
    """A table as the paper prints it."""

    name: str
    title: str
    setting: str
    label: str
    """The table's label in the paper's source."""
    columns: tuple[Column, ...]
    rows: Mapping[str, Mapping[str, Decimal]]
    """Row -> column -> number."""
    bases: frozenset[str]
    """Rows of models that forgot nothing: neither ranked nor bold."""
    total: Column | None
    """What is computed from some columns."""
    parts: tuple[str, ...]
    is_mean: bool
    printed: Mapping[str, Decimal]
    """Row -> the paper's own total."""
    means: Mapping[str, Decimal]
    """Column -> the mean over rows that another table prints."""
    means_from: str
    rank_by: str | None
    bold: Mapping[str, tuple[str, ...]]
    """Column -> rows that the paper prints in bold."""
    notes: tuple[str, ...]

    def value(self, row: str, key: str) -> Decimal:
        """A number of the table; under "total" the computed one."""
        if key != TOTAL:
            return self.rows[row][key]
        summed = sum((self.rows[row][part] for part in self.parts), Decimal(0))
        return summed / len(self.parts) if self.is_mean else summed

    def all_columns(self) -> list[Column]:
        """Those printed; the computed one stands behind its parts, as in the paper."""
        if self.total is None:
            return list(self.columns)
        place = 1 + max(i for i, column in enumerate(self.columns) if column.key in self.parts)
        return [*self.columns[:place], self.total, *self.columns[place:]]

    def best(self, column: Column) -> list[str]:
        """The rows with the best number, computed; base models stand outside."""
        rows = [row for row in self.rows if row not in self.bases]
        choose = max if column.better == "higher" else min
        top = choose(self.value(row, column.key) for row in rows)
        return [row for row in rows if self.value(row, column.key) == top]

    def rank(self, row: str) -> int | None:
        """1 is best by `rank_by`; equals share a rank; None for base models."""
        if self.rank_by is None or row in self.bases:
            return None
        column = next(column for column in self.all_columns() if column.key == self.rank_by)
        sign = -1 if column.better == "higher" else 1
        own = sign * self.value(row, column.key)
        others = (other for other in self.rows if other not in self.bases)
        return 1 + sum(sign * self.value(other, column.key) < own for other in others)

    def differs(self, row: str) -> bool:
        """Whether the paper's total is not the computed one, rounded either way."""
        if row not in self.printed:
            return False
        printed = self.printed[row]
        half = Decimal("0.005") if self.is_mean else Decimal(0)
        return abs(self.value(row, TOTAL) - printed) > half


def read_printed(name: str) -> Printed:
    """One data file."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    columns = tuple(Column(**column) for column in found["columns"])
    computed = found.get("computed")
    total = {key: computed[key] for key in ("title", "unit", "better", "digits")} if computed else {}
    means = found.get("means", {})
    return Printed(
        name=name,
        title=found["title"],
        setting=found["setting"],
        label=found["table"],
        columns=columns,
        rows={row["name"]: {column.key: _exact(row[column.key]) for column in columns} for row in found["rows"]},
        bases=frozenset(row["name"] for row in found["rows"] if row.get("is_base")),
        total=Column(key=TOTAL, **total) if total else None,
        parts=tuple(computed["of"]) if computed else (),
        is_mean=computed is not None and computed["how"] == "mean",
        printed={row["name"]: _exact(row["printed"]) for row in found["rows"] if "printed" in row},
        means={key: _exact(value) for key, value in means.get("printed", {}).items()},
        means_from=str(means.get("from", "")),
        rank_by=found.get("rank_by"),
        bold={key: tuple(rows) for key, rows in found.get("bold", {}).items()},
        notes=tuple(found["notes"]),
    )


def block(anchor: str, names: Sequence[str] = TABLES) -> Html:
    """The block of literature numbers; nothing in it was measured by this package."""
    lead = (
        "Numbers that others printed, as they printed them. Nothing here was measured by this page's runs, and other "
        "models, prompts and judges were used: do not read them beside the figures above."
    )
    printed = [read_printed(name) for name in names]
    tables = [literature_table(found) for found in printed]
    planes = [printed_plane(found) for found in printed if {"ua", "ira"} <= {column.key for column in found.columns}]
    heading = tag("h2", "From the literature", id=anchor)
    return tag("section", heading, tag("p", lead, class_="lead"), *tables, *planes[:1], class_="literature")


def printed_plane(printed: Printed) -> Html:
    """UA against IRA of a printed table: the paper's Pareto figure. It prints no intervals."""
    spots = [
        Spot(row, (gone, gone, gone), (kept, kept, kept), COLOURS[i % len(COLOURS)])
        for i, row in enumerate(printed.rows)
        for gone, kept in [(float(printed.value(row, "ua")) / 100, float(printed.value(row, "ira")) / 100)]
    ]
    title = f"{printed.title}: trade-off of published methods"
    drawing = plane(spots, "forgotten (UA)", "kept (IRA)", has_front=True)
    inside = tag("div", figure(drawing, title), class_="chart")
    return tag("details", tag("summary", title), inside, note("Dashed: those that no other beats in both, computed."))


def literature_table(printed: Printed) -> Html:
    """One table, folded, with source, notes, and where computing gives something else than the paper prints."""
    columns = printed.all_columns()
    rows = [_row(printed, row, columns) for row in printed.rows]
    rows += [_mean_row(printed)] if printed.means else []
    head = ["", *(column.heading for column in columns), *(["rank"] if printed.rank_by else [])]
    source = f"Source: {PAPER}, {printed.label}. {printed.setting[0].upper()}{printed.setting[1:]}."
    points = [tag("li", words) for words in (*_disagreements(printed), *printed.notes)]
    return tag(
        "details",
        tag("summary", printed.title),
        note(source),
        table(head, rows, f"{printed.title}. {_what_is_computed(printed)}", "numbers"),
        tag("ul", *points, class_="notes"),
    )


def _what_is_computed(printed: Printed) -> str:
    ranked = ["bold", "rank"] if printed.rank_by else []
    names = [*ranked, *([printed.total.title.lower()] if printed.total else []), *(["means"] if printed.means else [])]
    beside = ", with the paper's own in brackets where it differs" if printed.total or printed.means else ""
    return f"Computed here: {', '.join(names)}{beside}"


def _row(printed: Printed, row: str, columns: Sequence[Column]) -> list[Content]:
    cells: list[Content] = []
    for column in columns:
        text = column.written(printed.value(row, column.key))
        cell = tag("strong", text) if row in printed.best(column) and printed.rank_by else tag("span", text)
        if column.key == TOTAL and printed.differs(row):
            cell = tag("span", cell, tag("small", f"[printed {printed.printed[row]}]", class_="none"))
        cells.append(cell)
    rank = printed.rank(row)
    return [row, *cells, *(["—" if rank is None else rank] if printed.rank_by else [])]


def _mean_row(printed: Printed) -> list[Content]:
    cells: list[Content] = []
    for column in printed.columns:
        mean = sum((row[column.key] for row in printed.rows.values()), Decimal(0)) / len(printed.rows)
        told = printed.means[column.key]
        differs = abs(mean - told) > Decimal("0.005")
        beside = tag("small", f"[printed {told}]", class_="none") if differs else NONE
        cells.append(tag("span", tag("strong", f"{mean:.3f}"), beside))
    return [tag("strong", "mean, computed"), *cells]


def _disagreements(printed: Printed) -> list[str]:
    """What the paper sums or prints in bold otherwise than its own numbers say."""
    found = [
        f"{row}: printed {printed.printed[row]}, its own numbers give {printed.value(row, TOTAL)}."
        for row in printed.rows
        if printed.differs(row)
    ]
    for column in printed.all_columns():
        bold, best = printed.bold.get(column.key, ()), printed.best(column)
        if bold and set(bold) != set(best):
            found.append(f"{column.title}: bold in the paper {', '.join(bold)}; best by its numbers {', '.join(best)}.")
    return found


def _exact(value: float) -> Decimal:
    """The decimal that was typed, not the nearest binary number."""
    return Decimal(str(value))
