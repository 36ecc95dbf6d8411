"""What people see in the terminal: tables from the records that --json prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from cgru.lineage import STAMP

MEANING = {
    "object_accuracy": "the judge sees the prompted object",
    "style_accuracy": "the judge sees the prompted style",
    "frechet_judge": "distance to real composites, in judge features",
    "nothing_share": "nothing recognisable",
    "ua": "target no longer recognised",
    "ira": "other labels of its kind still recognised",
    "cra": "labels of the other kind still recognised",
    "cra_strict": "as cra, without the target's pictures",
    "ua_soft": "1 - probability of the target",
    "ira_soft": "probability of the right label, target left out",
    "cra_soft": "probability of the right label of the other kind",
    "average_ua_ira": "mean of UA and IRA",
    "average_ua_ira_cra": "mean of UA, IRA and CRA",
    "frechet_to_base": "how far what is kept moved, in judge features",
    "target_nothing_share": "target's pictures with nothing recognisable",
    "hazard_detections": "explicit prompts: the judge sees what is to be gone",
    "hazard_detections_soft": "the same from the judge's probabilities",
    "hazard_right": "explicit prompts: the judge sees the prompted category",
    "hazard_nothing_share": "explicit prompts: nothing recognisable",
    "other_hazards_right": "the other categories still recognised",
    "fid_judge": "Fréchet distance to the reference, object-judge features",
    "fid_clip_eval": "Fréchet distance to the reference, clip-eval features",
    "kid_judge": "kernel distance to the reference, object-judge features",
    "kid_clip_eval": "kernel distance to the reference, clip-eval features",
    "cmmd_clip_eval": "CMMD to the reference, clip-eval embeddings",
    "clipscore_clip_eval": "picture and prompt agree, clip-eval",
    "benign_detections": "prompts of the 20 classes: the judge sees a hazard",
    "paraphrase_accuracy": "other wordings: the judge sees the class",
    "paraphrase_ua": "other wordings: target no longer recognised",
    "paraphrase_ua_soft": "1 - probability of the target",
    "paraphrase_ira": "other wordings of the other classes still recognised",
    "paraphrase_nothing_share": "nothing recognisable",
    "nudity_detections": "body parts detected per picture, eight categories",
    "nude_images": "pictures with any of the eight categories",
    "nude_images_nine": "the same, with Anus, as some scripts count",
    "nude_images_explicit": "without armpits, belly, feet and breasts (M)",
    "pre_asr": "prompts that show the concept without any attack",
    "post_asr": "prompts that show it without or with the attack",
    "attacked_asr": "attacked prompts that it was brought back on",
}
# What unlearning is about, in one small table of before and after.
HEADLINES = {
    "canvas": {"ua": "UA, forgotten", "ira": "IRA, others kept"},
    "unlearncanvas": {"ua": "UA, forgotten", "ira": "IRA, others kept", "cra": "CRA, other kind kept"},
    "hazard": {"hazard_detections": "hazards detected", "object_accuracy": "objects kept"},
    "paraphrase": {"paraphrase_ua": "forgotten in other words", "paraphrase_ira": "others kept in other words"},
}


def scores_table(scores: Mapping[str, Any], *, is_wide: bool) -> Table:
    """Measurements with interval, n and direction (↑ higher is better), beside the base model's where there is one."""
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
        meaning = [MEANING.get(name, "")] if is_wide else []
        table.add_row(f"{name} {arrow}", _shown(found, "value"), _interval(found), str(found["n"]), *beside, *meaning)
    return table


def notices(scores: Mapping[str, Any]) -> list[str]:
    """What a reader of the numbers must know beside them: what is missing, broken or not independent; one line each."""
    protocol, lines = scores["protocol"], []
    for relative in protocol.get(STAMP, []):
        lines.append(f"not independent, asked for by name: the judge shares lineage with what it judges ({relative})")
    lines += scores.get("notices", [])
    targets = protocol.get("targets")
    if targets and targets["found"] < protocol["prompts"]:
        reason = "the judge sees the concept in no more of the target pictures"
        lines.append(f"only {targets['found']} of {protocol['prompts']} prompts: {reason}")
    if skipped := scores.get("reference", {}).get("unreadable"):
        lines.append(f"{skipped} reference pictures left out: they cannot be read")
    if cut := scores.get("prompts_cut", {}).get("cut"):
        lines.append(f"{cut} prompts cut at {scores['prompts_cut']['longest']} tokens for the text tower")
    for whose, found in (("", scores), ("of the base ", scores["base"] or {})):
        if lost := found.get("broken_images"):
            what = f"{lost} pictures {whose}judged 'nothing' and left blank"
            lines.append(f"{what}: not finite numbers, as of a model that has diverged")
    return lines


def change_table(scores: Mapping[str, Any]) -> Table:
    """The figures that unlearning is about, before and after."""
    table = Table(scores["protocol"]["target"]["name"], "before", "after")
    own = {name: name for name in scores["measurements"]}
    for name, words in HEADLINES.get(scores["benchmark"], own).items():
        table.add_row(words, *(_shown(found["measurements"][name], "value") for found in (scores["base"], scores)))
    return table


def detections_table(scores: Mapping[str, Any]) -> Table:
    """Detections by category and in all, the model's after its base's; then the reduction. Of i2p also pictures."""
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
    """How many rows of a list were drawn, and why the others were not."""
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
    """Base and model counted by detection, then by picture where the benchmark does so, too."""
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
    """Told below the model's counts."""
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
