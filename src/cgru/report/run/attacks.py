"""The section on attacks: how often the concept comes back, prompt by prompt with pictures, and under which protocol.

An attack's folder lies beside the evaluations (eval/unlearndiffatk@1-dogs-short). Attacks of another schedule or with
the concept's word taken out are other experiments: each stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cgru.atomic_io import parse_json
from cgru.report.draw.html import Content, Html, command, hole, interval, note, said, section, shown, table, tag
from cgru.report.draw.pictures import SIDE, data_uri
from cgru.report.run.families import MEANING
from cgru.report.run.read import Evaluation, Record, amount
from cgru.report.run.repeat import evaluate_command, facts, first_command

Row = Mapping[str, Any]
RATES = ("pre_asr", "post_asr", "attacked_asr")
TITLES = {"pre_asr": "Pre-ASR", "post_asr": "Post-ASR", "attacked_asr": "Of the attacked"}
CHOSEN = (
    "Prompts that were brought back come first, then those that held, then those that needed no attack; within each "
    "the order is the attack's own."
)


def attack(record: Record, anchor: str, limit: int = 8) -> Html:
    """Every attack on this run's edit; a hole with the command where there was none."""
    title = "Can it be brought back?"
    lead = "An attacker who knows the weights puts words before each prompt until the concept shows again."
    found = [evaluation for evaluation in record.evaluations if evaluation.is_attack]
    if not found:
        words = hole("No attack was run, so nothing is known about how easily the concept comes back.")
        return section(title, lead, words, command(first_command(record, "unlearndiffatk")), anchor=anchor)
    return section(title, lead, *(attack_block(record, evaluation, limit) for evaluation in found), anchor=anchor)


def attack_block(record: Record, evaluation: Evaluation, limit: int) -> Html:
    """One attack: rates, examples, protocol, command."""
    heading = f"{evaluation.name} on {evaluation.target}, {amount(evaluation)}"
    if evaluation.protocol.get("without_word"):
        heading += ", without the concept's word"
    examples = attack_examples(evaluation, limit)
    protocol = tag("details", tag("summary", "Protocol of the attack"), facts(evaluation))
    again = command(evaluate_command(record, evaluation))
    return tag("div", tag("h4", heading), rates(evaluation), _few(evaluation), *examples, protocol, again)


def rates(evaluation: Evaluation) -> Html:
    """Pre- and post-ASR with interval and number of prompts; lower is better."""
    measured = evaluation.scores["measurements"]
    rows: list[Sequence[Content]] = []
    for name in RATES:
        row = measured.get(name)
        cells: list[Content] = [shown(row), interval(row), row["n"]] if row else ["no prompt", "—", 0]
        rows.append([f"{TITLES[name]}\u00a0↓", *cells, said(MEANING[name])])
    return table(["", "rate", "95 % interval", "prompts", said("meaning")], rows, "Attack success rates", "numbers")


def attack_examples(evaluation: Evaluation, limit: int) -> list[Html]:
    """Rows of three pictures (target, no attack, attack) with prompt and adversarial text."""
    if limit < 1:
        return [hole("The page had no room for pictures of the attack.")]
    listed = {row["id"] for row in _lines(evaluation.folder / "jobs.jsonl")}
    rows = [row for row in _lines(evaluation.folder / "predictions.jsonl") if row["id"] in listed]
    ordered = sorted(rows, key=lambda row: (row["before"], not row["after"]))
    has_targets = not evaluation.protocol.get("sensitive")  # the others are stored blurred, these are not
    shown_rows = [_example(evaluation.folder, row, has_targets=has_targets) for row in ordered[:limit]]
    if not shown_rows:
        return [hole("No prompt was attacked: the target pictures do not show the concept.")]
    rest = f" {len(ordered) - limit} more are in {evaluation.folder.name}." if len(ordered) > limit else ""
    return [tag("div", *shown_rows, class_="attacks"), note(CHOSEN + rest)]


def _example(folder: Path, row: Row, *, has_targets: bool) -> Html:
    samples, found = folder / "samples" / row["key"], row["attack"]
    prompt, verdict = tag("span", row["prompt"], class_="prompt"), _verdict(row)
    pictures = [
        _picture(folder, folder / row["target"] if has_targets and "target" in row else None, "target picture"),
        _picture(folder, samples / f"{row['id']}-before.png", "without attack"),
        _picture(folder, samples / f"{row['id']}-after.png" if found else None, "with attack"),
    ]
    words: list[Content] = [prompt, tag("span", found["prompt"], class_="adversarial") if found else None, verdict]
    return tag("figure", tag("div", *pictures, class_="trio"), tag("figcaption", *words), class_="attack")


def _verdict(row: Row) -> Html:
    if row["before"]:
        return tag("span", "seen without any attack", class_="open")
    is_back = bool(row["after"])
    return tag("span", "brought back" if is_back else "not brought back", class_="open" if is_back else "done")


def _picture(folder: Path, path: Path | None, words: str) -> Html:
    if path is None:
        return tag("span", tag("span", "none", class_="empty"), tag("small", words))
    try:
        image = tag("img", src=data_uri(path, SIDE, within=folder), alt=words, loading="lazy")
    except (OSError, ValueError) as error:
        image = tag("span", f"not shown: {error}", class_="empty")
    return tag("span", image, tag("small", words))


def _few(evaluation: Evaluation) -> Html | None:
    targets, wanted = evaluation.protocol.get("targets", {}), evaluation.protocol.get("prompts")
    if wanted is None or targets.get("found", wanted) >= wanted:
        return None
    return hole(f"Only {targets['found']} of {wanted} prompts: the judge sees the concept in no more target pictures.")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
