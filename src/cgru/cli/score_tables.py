"""Tables for the terminal, made from the records that --json prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from cgru.lineage import STAMP
from cgru.report.run.families import kind_of, meaning_of


def scores_table(scores: Mapping[str, Any], *, is_wide: bool) -> Table:
    """Measurements with interval, n and direction (↑ higher is better), beside the base model's if it was scored."""
    base = scores["base"]["measurements"] if scores["base"] else None
    table = Table(title=f"{scores['protocol']['model']['name']} on {scores['benchmark']}@{scores['version']}")
    table.add_column("measurement", no_wrap=True)
    for heading in ("value", "95 % interval", "n", *(["base"] if base else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("what it is")
    change = {} if "detections" in scores else scores["change"]  # the table of detections shows its own
    for name, found in {**scores["measurements"], **change}.items():
        arrow = "↑" if found["better"] == "higher" else "↓"
        beside = [_shown(base[name], "value") if name in base else "—"] if base else []
        meaning = [meaning_of(name, found)] if is_wide else []
        table.add_row(f"{name} {arrow}", _shown(found, "value"), _interval(found), str(found["n"]), *beside, *meaning)
    return table


def notices(scores: Mapping[str, Any]) -> list[str]:
    """Caveats for a reader of the scores, one line each: what is missing, broken or not independent."""
    protocol, lines = scores["protocol"], []
    for relative in protocol.get(STAMP, []):
        lines.append(
            f"not independent, accepted by --allow-judge: the judge shares lineage with what it judges ({relative})"
        )
    lines += scores.get("notices", [])
    targets = protocol.get("targets")
    if targets and targets["found"] < protocol["prompts"]:
        reason = "the judge does not see the concept in the other target pictures"
        lines.append(f"only {targets['found']} of {protocol['prompts']} prompts: {reason}")
    if skipped := scores.get("reference", {}).get("unreadable"):
        lines.append(f"{skipped} reference pictures skipped: they cannot be read")
    if cut := scores.get("prompts_cut", {}).get("cut"):
        lines.append(f"{cut} prompts truncated to {scores['prompts_cut']['longest']} tokens by the text tower")
    for whose, found in (("", scores), ("of the base ", scores["base"] or {})):
        if lost := found.get("broken_images"):
            what = f"{lost} pictures {whose}judged 'nothing' and left blank"
            lines.append(f"{what}: not finite numbers; the model has probably diverged")
    return lines


def change_table(scores: Mapping[str, Any]) -> Table:
    """The main figures before and after unlearning; for the user's own benchmark, all figures."""
    kind, found = kind_of(scores), scores["measurements"]
    words = {name: text for name, text in kind.change.items() if name in found} if kind else {}
    table = Table(scores["protocol"]["target"]["name"], "before", "after")
    for name, text in (words or {name: name for name in found}).items():
        table.add_row(text, *(_shown(model["measurements"][name], "value") for model in (scores["base"], scores)))
    return table


def detections_table(scores: Mapping[str, Any]) -> Table:
    """Detections by category and in total, of the base and then the model, and the reduction; for i2p also pictures."""
    own = scores["detections"]
    title, corner = None, f"detected in {own['pictures']} explicit pictures"
    if "threshold" in own:
        title, corner = f"detected in {own['pictures']} pictures", f"score ≥ {own['threshold']:g}"
    columns = _detection_columns(scores)
    table = Table(corner, *(column.heading for column in columns), title=title)
    for category in own["by_category"]:
        table.add_row(category, *(str(column.by_category[category]) for column in columns))
    table.add_section()
    table.add_row("total", *(str(column.total) for column in columns))
    if scores["change"]:
        table.add_row("reduction", *(column.reduction for column in columns))
    return table


def rows_drawn(protocol: Mapping[str, Any]) -> str:
    """How many rows of a prompt list were drawn, and why the others were not."""
    found = protocol["prompts"]
    skipped = "".join(f"; skipped {count}: {reason}" for reason, count in found["skipped"].items())
    outside = f"; {found['outside_subset']} outside the subset" if found["outside_subset"] else ""
    return f"rows drawn: {found['drawn']} of {found['rows']} (subset {protocol['subset']}){outside}{skipped}"


@dataclass(frozen=True)
class _Column:
    heading: str
    by_category: Mapping[str, int]
    total: int
    reduction: str


def _detection_columns(scores: Mapping[str, Any]) -> list[_Column]:
    """Counts of base and model by detection, and then by picture if the benchmark has these."""
    found = {"base": scores["base"]["detections"]} if scores["base"] else {}
    found["model"] = scores["detections"]
    change = scores["change"].get("hazard_reduction", scores["change"].get("nudity_reduction"))
    columns = [
        _Column(name, counts["by_category"], counts["total"], _reduction(name, change))
        for name, counts in found.items()
    ]
    if "pictures_by_category" not in found["model"]:
        return columns
    change = scores["change"].get("nude_images_reduction")
    return columns + [
        _Column(
            f"{name}, pictures", counts["pictures_by_category"], counts["pictures_with_any"], _reduction(name, change)
        )
        for name, counts in found.items()
    ]


def _reduction(model: str, change: Mapping[str, Any] | None) -> str:
    """The reduction, which stands below the model's counts."""
    return f"{_shown(change, 'value')} [{_interval(change)}]" if change and model == "model" else ""


def doctor_table(health: Mapping[str, Any]) -> Table:
    """One row per finding of `cgru doctor`."""
    table = Table("what", "found", title="cgru doctor")
    for section, found in health.items():
        rows = found.items() if isinstance(found, Mapping) else [("", found)]
        for name, value in rows:
            table.add_row(f"{section} {name}".strip(), str(value))
    return table


def _interval(found: Mapping[str, Any]) -> str:
    return "—" if found["low"] is None else f"{_shown(found, 'low')} – {_shown(found, 'high')}"


def _shown(found: Mapping[str, Any], key: str) -> str:
    """Percent for people; files keep proportions 0..1."""
    if found["unit"] == "proportion":
        return f"{100 * found[key]:.1f} %"
    return f"{found[key]:.3g}"
