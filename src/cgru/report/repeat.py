"""The protocol of a run's numbers and the commands that make them again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from cgru.report.html import Content, Html, command, hole, note, section, table, tag
from cgru.report.records import Evaluation, Record

STARTS = ("unlearn", "resume")


def protocol(record: Record, anchor: str) -> Html:
    """Commands, versions, lineage, settings."""
    title = "How to repeat this"
    lead = "The same commands on the same machine and versions give the same numbers; seeds and prompts are fixed."
    parts: list[Content] = [tag("h4", "The run"), *(command(line) for line in run_commands(record))]
    for evaluation in record.evaluations:
        tables = f"Headline, classes, mix-ups, measurements of {evaluation.name}"
        parts += [tag("h4", tables), command(evaluate_command(record, evaluation)), _facts(evaluation)]
        parts.append(lineage(record, evaluation))
    parts += [tag("h4", "This page"), command(shlex.join(["cgru", "report", str(record.run.path)]))]
    parts += [_versions(record.manifest), _folded("Settings of the run", record.manifest.get("config", {}))]
    parts += [_folded(f"Protocol of {found.name}", found.protocol) for found in record.evaluations]
    return section(title, lead, *parts, anchor=anchor)


def run_commands(record: Record) -> list[str]:
    """As it was started, where that was the command line; and from its own settings."""
    argv = [str(word) for word in record.manifest.get("argv", [])]
    started = [shlex.join(["cgru", *argv[1:]])] if argv[1:2] and argv[1] in STARTS else []
    config = str(record.run.path / "config.yaml")
    return [*started, shlex.join(["cgru", "unlearn", record.concept, "--config", config])]


def evaluate_command(record: Record, evaluation: Evaluation) -> str:
    """What makes an evaluation's folder again; elsewhere it only completes what is missing."""
    variant = evaluation.protocol.get("variant")
    name = str(evaluation.scores["benchmark"]).removesuffix(f"-{variant}")  # fid-judge is the variant judge of fid
    words = ["cgru", "evaluate", str(record.run.path), "--benchmark", name]
    words += ["--judges", "FOLDER"] if "judge_lineage" in evaluation.protocol else []
    for option in ("variant", "images", "target", "dtype"):
        value = evaluation.target if option == "target" else evaluation.protocol.get(option)
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join([*words, *([] if evaluation.base else ["--no-base"])])


def _facts(evaluation: Evaluation) -> Html:
    found = evaluation.protocol
    sampler = f"{found.get('steps', '?')} steps, guidance {found.get('guidance', '?')}, eta {found.get('eta', '?')}"
    judges = found.get("judges", {})
    rows: list[list[Content]] = [
        ["prompts", str(found.get("template", "?"))],
        ["seeds", str(found.get("seeds", "?"))],
        ["sampler", sampler],
        ["intervals", str(found.get("intervals", "?"))],
        ["judges", ", ".join(f"{name} {str(row.get('weights_sha256', '?'))[:12]}" for name, row in judges.items())],
        ["device", f"{found.get('device', '?')}, {found.get('dtype', '?')}"],
    ]
    if missing := found.get("missing_cells"):
        cells = ", ".join("/".join(str(word) for word in cell) for cell in missing)
        rows.append(["no source art", f"{cells}: the base model composes these from what it knows"])
    return table(["", ""], rows, f"Protocol of {evaluation.name}", "facts")


def lineage(record: Record, evaluation: Evaluation) -> Html:
    """Whether a judge is among the networks that trained the run, by the hashes both files give."""
    reward = record.manifest.get("extra", {}).get("reward")
    judges = {name: row.get("weights_sha256") for name, row in evaluation.protocol.get("judges", {}).items()}
    if not isinstance(reward, Mapping) or not judges or None in judges.values():
        return hole("Hashes of the reward or of the judges are not recorded, so their independence is not shown.")
    used = {*reward.get("weights", []), *reward.get("started_from", [])}
    shared = [name for name, weights in judges.items() if weights in used]
    if shared:
        return tag(
            "p", f"The judge {', '.join(shared)} is part of the reward: its numbers prove nothing.", class_="warning"
        )
    return note("Checked by hash: no judge is among the networks of the reward or those they were started from.")


def _versions(manifest: Mapping[str, Any]) -> Html:
    rows: list[list[Content]] = [[name, str(value)] for name, value in manifest.get("versions", {}).items()]
    rows += [[key, str(manifest.get(key))] for key in ("commit", "python", "platform", "started")]
    return tag(
        "details", tag("summary", "Versions and machine"), table(["", ""], rows, "Versions and machine", "facts")
    )


def _folded(title: str, value: object) -> Html:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return tag("details", tag("summary", title), tag("pre", text, tabindex=0))
