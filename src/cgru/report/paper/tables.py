"""The paper's tables of safety, attack and critics, from the cells of a reproduction; missing results are marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cgru.report.draw.html import NOT_RUN, Content, Html, hole, interval, note, section, shown, table, tag
from cgru.report.paper.objects import label_of
from cgru.report.paper.read import Done, Reproduction
from cgru.report.run.attacks import attack_examples
from cgru.report.run.read import Evaluation

SAFETY = ("hazard", "i2p")
COUNTED = {"hazard": "Pictures in which a category is seen", "i2p": "Detections by category"}
EXAMPLES = 4
"""Attacked prompts that are shown of each model."""


def safety(found: Reproduction) -> Html:
    """The nudity table, or its twin of hazards: detections by category and in all, and CLIPScore."""
    title, lead = "Safety", "How often explicit prompts still show what was to be forgotten, before and after."
    base, runs = found.of("safety", is_base=True), found.of("safety")
    hits = [(_who(done), hit, done) for done in [*base, *runs] if (hit := _first(done, SAFETY))]
    if not hits:
        return section(title, lead, hole("Not run: no model without the concept was measured."), anchor="safety")
    if words := next(filter(None, (found.mixed("safety", name) for name in (*SAFETY, "clipscore"))), ""):
        return section(title, lead, hole(words), anchor="safety")
    names = list(hits[0][1].scores["detections"]["by_category"])
    body = [[who, *_counts(hit, names), _clipscore(done)] for who, hit, done in hits]
    pictures = hits[0][1].scores["detections"]["pictures"]
    head = ["", *names, "total ↓", "of pictures", "CLIPScore ↑"]
    reductions = [_reduction(who, hit) for who, hit, _ in hits]
    words = f"{pictures} pictures. {_clipscore_of(hits)}Small: 95 % interval."
    caption = COUNTED[hits[0][1].scores["benchmark"]]
    parts = [table(head, body, caption, "numbers"), *reductions, note(words)]
    return section(title, lead, *parts, anchor="safety")


def _counts(hit: Evaluation, names: Sequence[str]) -> list[Content]:
    counted = hit.scores["detections"]["by_category"]
    row = [counted.get(name, 0) for name in names]
    found = hit.scores["measurements"]
    rate = found.get("hazard_detections") or found.get("nude_images")
    share = tag("span", shown(rate), tag("small", interval(rate))) if rate else "—"
    return [*row, tag("strong", sum(row)), share]


def _clipscore_of(hits: Sequence[tuple[str, Evaluation, Done]]) -> str:
    variants = {str(hit.protocol.get("variant")) for _, _, done in hits if (hit := done.find("clipscore"))}
    return f"CLIPScore of {', '.join(sorted(variants))} (docs/evaluation.md). " if variants else ""


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
    if words := found.mixed("safety", "unlearndiffatk"):
        return section(title, lead, hole(words), anchor="attack")
    body: list[list[Content]] = [
        [_attacked(who, hit), *(_share(hit, key) for key in ("pre_asr", "post_asr")), _effort(hit)]
        for who, hit, _ in hits
    ]
    head = ["", "pre-ASR ↓", "post-ASR ↓", "prompts and schedule"]
    parts: list[Content] = [table(head, body, "Attack success rates", "numbers")]
    if any(hit.protocol.get("without_word") for _, hit, _ in hits):
        parts.append(note("The base's prompts are without the concept's word: a working attack brings it back."))
    for who, hit, _ in hits:
        parts += [tag("h4", _attacked(who, hit)), *_examples(hit)]
    return section(title, lead, *parts, anchor="attack")


def _examples(hit: Evaluation) -> list[Html]:
    try:
        return attack_examples(hit, EXAMPLES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [hole(f"The examples of {hit.folder.name} cannot be read: {error}")]


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
    return f"{label_of(done.cell.method)}, seed {done.cell.seed}"


def _first(done: Done, names: Iterable[str]) -> Evaluation | None:
    return next((hit for name in names if (hit := done.find(name))), None)
