"""The protocol of a run's numbers and the commands that reproduce them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from cgru.embedded import EMBEDDED, main_benchmark
from cgru.lineage import ROLES, STAMP
from cgru.report.draw.html import Content, Html, command, hole, note, section, table, tag
from cgru.report.run.families import METRICS
from cgru.report.run.read import Evaluation, Record

"""The model inside the package."""
STARTS = ("unlearn", "resume")


def protocol(record: Record, anchor: str) -> Html:
    """Commands, versions, lineage, settings."""
    title = "How to repeat this"
    lead = "The same commands on the same machine and versions give the same numbers; seeds and prompts are fixed."
    parts: list[Content] = [tag("h4", "The run"), *(command(line) for line in run_commands(record))]
    for evaluation in record.evaluations:
        tables = f"Everything from {evaluation.name}{f' for {evaluation.target}' if evaluation.target else ''}"
        parts += [tag("h4", tables), command(evaluate_command(record, evaluation)), facts(evaluation)]
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
    if evaluation.is_attack:
        return _attack_command(record, evaluation)
    found = evaluation.protocol
    name = str(evaluation.scores["benchmark"]).removesuffix(f"-{found.get('variant')}")  # fid-judge: judge of fid
    words = ["cgru", "evaluate", str(record.run.path), "--benchmark", name]
    # Where a user's files lie is not part of a protocol.
    words += ["--judges", "FOLDER"] if "judge_lineage" in found else []
    words += ["--source", "FILE.csv"] if "subset" in found else []
    options = {key: found.get(key) for key in ("variant", "subset", "threshold", "images", "target", "dtype")}
    words += _options(options | {"target": evaluation.target})
    reference = found.get("reference")
    if isinstance(reference, Mapping) and "sha256" in reference:  # only its name is stored: folders move
        words += ["--reference", str(reference.get("name"))]
    elif name == "clipscore" and found.get("variant") == "clip-l14-336":  # its prompts come from a folder
        words += ["--reference", "FOLDER"]
    words += ["--compile"] if found.get("compiled") else []
    words += _allowed(found)
    return shlex.join([*words, *([] if evaluation.base else ["--no-base"])])


def _allowed(protocol: Mapping[str, Any]) -> list[str]:
    """Related judges that --allow-judge accepted."""
    names = dict.fromkeys(relative.partition(":")[0] for relative in protocol.get(STAMP) or ())
    return ["--allow-judge", ",".join(names)] if names else []


def _attack_command(record: Record, evaluation: Evaluation) -> str:
    found = evaluation.protocol
    options = {"target": evaluation.target, "prompts": found.get("prompts"), "tokens": found.get("tokens")}
    options |= {"schedule": found.get("schedule", {}).get("name"), "seed": found.get("attack_seed")}
    words = ["cgru", "attack", str(record.run.path), *_options(options | {"dtype": found.get("dtype")})]
    # Where a user's files lie is not part of a protocol.
    words += ["--source", "FILE", "--judge", "JUDGE"] if "prompts_sha256" in found else []
    words += ["--pictures", "FOLDER"] if "pictures_sha256" in found else []
    words += _allowed(found)
    return shlex.join([*words, *(["--without-word"] if found.get("without_word") else [])])


def _options(given: Mapping[str, object]) -> list[str]:
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


def first_command(record: Record, benchmark: str) -> str:
    """What would run a benchmark that a run has no scores of."""
    target = ["--target", record.concept]
    if benchmark == "unlearndiffatk":
        return shlex.join(["cgru", "attack", str(record.run.path), *target])
    if benchmark in METRICS:  # of what is kept: hazards and attributes are no part of their prompts
        target = target if main_benchmark(record.concept) == "canvas" else []
        target = target if record.run.config.model == EMBEDDED else ["--reference", "FOLDER"]
    return shlex.join(["cgru", "evaluate", str(record.run.path), "--benchmark", benchmark, *target])


def facts(evaluation: Evaluation) -> Html:
    """The protocol in a few lines; whatever it does not state is left out."""
    found = evaluation.protocol
    rows: list[list[Content]] = [["prompts", str(found["template"])]] if "template" in found else []
    rows += _attack_facts(evaluation) if evaluation.is_attack else []
    rows += [[key, str(found[key])] for key in ("variant", "seeds", "intervals") if found.get(key) is not None]
    if isinstance(features := found.get("features"), Mapping):
        rows.append(["features", "; ".join(str(value) for value in features.values())])
    if isinstance(reference := found.get("reference"), Mapping):
        rows.append(["reference", ", ".join(f"{key} {str(value)[:60]}" for key, value in reference.items())])
    rows.append(["sampler", ", ".join(f"{key} {found[key]}" for key in ("steps", "guidance", "eta") if key in found)])
    judges = ", ".join(f"{name} {str(row.get('weights_sha256', '?'))[:12]}" for name, row in _judges(found).items())
    rows += [["judges", judges]] if judges else []
    rows.append(["device", ", ".join(str(found[key]) for key in ("device", "dtype") if key in found)])
    if missing := found.get("missing_cells"):
        cells = ", ".join("/".join(str(word) for word in cell) for cell in missing)
        rows.append(["no source art", f"{cells}: the base model composes these from what it knows"])
    return table(["", ""], [row for row in rows if row[1]], f"Protocol of {evaluation.name}", "facts")


def _attack_facts(evaluation: Evaluation) -> list[list[Content]]:
    found = evaluation.protocol
    schedule, targets = found.get("schedule", {}), found.get("targets", {})
    steps = ", ".join(f"{key} {value}" for key, value in schedule.items() if key != "name")
    drawn = f"{targets.get('found')} of {found.get('prompts')} wanted, in {targets.get('candidates')} candidates"
    return [
        ["schedule", f"{schedule.get('name')}: {steps}"],
        ["tokens", f"{found.get('tokens')} before each prompt, found by {found.get('optimiser')}"],
        ["the concept's word", "taken out of the prompts" if found.get("without_word") else "left in the prompts"],
        ["target pictures", f"{drawn}; from {targets.get('from')}"],
        ["success", str(found.get("judge", {}).get("success"))],
    ]


def _judges(protocol: Mapping[str, Any]) -> Mapping[str, Any]:
    """By name; an attack has one."""
    one = protocol.get("judge")
    return {str(one.get("id", "judge")): one} if isinstance(one, Mapping) else protocol.get("judges", {})


def lineage(record: Record, evaluation: Evaluation) -> Html:
    """Whether a judge is among the networks that trained the run, by the hashes both files give."""
    if relatives := evaluation.protocol.get(STAMP):
        words = f"Not independent, asked for by name: relatives of what trained the run ({', '.join(relatives)})."
        return tag("p", words, class_="warning")
    extra = record.manifest.get("extra", {})
    if all(role in extra and extra[role] is None for role in ROLES):
        return note("Training went by no network, so no judge is a relative of one.")
    reward = extra.get("reward")
    judges = {name: row.get("weights_sha256") for name, row in _judges(evaluation.protocol).items()}
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
