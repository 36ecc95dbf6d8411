"""Read a run folder and its evaluations into plain records; missing parts become holes with a reason.

A hole is one sentence for the reader. Nothing is guessed: a file that is damaged, missing or of another edit leaves no
number on the page.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cgru.atomic_io import parse_json
from cgru.edit_folder import NOTE_FILE, is_run, stored_fingerprint
from cgru.embedded import EMBEDDED, proof_of
from cgru.report.run.families import ATTACKS, Kind, kind_of
from cgru.runs import METRICS, Run, Scalar, read_metrics

SAME_NOT_NEEDED = ("model", "target", "target_images", "targets")
"""Keys of a protocol in which two comparable evaluations may differ: the subject and what it is to forget."""


@dataclass(frozen=True)
class Evaluation:
    """A scores.json that is whole, in its folder."""

    folder: Path
    scores: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Benchmark and version, as canvas@2."""
        return f"{self.scores['benchmark']}@{self.scores['version']}"

    @property
    def protocol(self) -> Mapping[str, Any]:
        """Everything that must be equal to compare."""
        return self.scores["protocol"]

    @property
    def target(self) -> str | None:
        """What was meant to be forgotten; None: no target was named."""
        target = self.protocol.get("target")
        return target["name"] if target else None

    @property
    def kind(self) -> str | None:
        """Kind of the target: class, style or hazard."""
        target = self.protocol.get("target")
        return target["kind"] if target else None

    @property
    def base(self) -> Mapping[str, Any] | None:
        """The base model's part; None: it was not scored."""
        return self.scores.get("base") or None

    @property
    def headline(self) -> tuple[str, str] | None:
        """The measurements of what is forgotten and what is kept; None without a target."""
        kind, found = self.sort, self.scores["measurements"]
        if kind is None or not kind.is_headline or self.target is None:
            return None
        gone, kept = kind.needed
        return (gone, kept) if all(found[name]["value"] is not None for name in (gone, kept)) else None

    @property
    def sort(self) -> Kind | None:
        """What sort of benchmark it is, by its measurements; None: its numbers are only listed."""
        return kind_of(self.scores)

    @property
    def is_attack(self) -> bool:
        """Made by `cgru attack`: prompts with pictures of their own, and no base model beside them."""
        return self.sort == ATTACKS


@dataclass(frozen=True)
class Record:
    """One run as the page tells it."""

    run: Run
    manifest: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Scalar]]
    fit: Mapping[str, Any] | None
    """done.json of 2-critic: errors of V on held-out trajectories, by step."""
    evaluations: tuple[Evaluation, ...]
    """Those of this run's edit, whole; the one of the run's concept first."""
    holes: tuple[str, ...]
    """What is missing or left out of the page."""

    @property
    def concept(self) -> str:
        """What the run was to forget."""
        return self.run.config.concept

    @property
    def iterations(self) -> int:
        """Policy iterations that were logged."""
        return len(self.metrics)

    @property
    def main(self) -> Evaluation | None:
        """The evaluation of the run's own concept."""
        fitting = [found for found in self.evaluations if is_same(found.target, self.concept) and found.headline]
        return fitting[0] if fitting else None


def read_record(path: str | Path) -> Record:
    """Read a run folder; only a path that is not a run, or a run with a changed config, is an error."""
    run = Run.open(path)
    metrics, no_metrics = _metrics(run)
    fit, no_fit = _fit(run)
    evaluations, no_scores = _evaluations(run)
    holes = [*_state(run, len(metrics)), *no_metrics, *no_fit, *no_scores]
    record = Record(run, run.manifest, metrics, fit, tuple(sorted(evaluations, key=partial(_order, run))), tuple(holes))
    is_known = record.main or any(found.sort and not found.sort.has_target for found in evaluations)
    return record if is_known else replace(record, holes=(_unknown(run), *holes))


def _unknown(run: Run) -> str:
    concept = run.config.concept
    if run.config.model != EMBEDDED:
        objects, nudity = "--benchmark unlearncanvas --judges FOLDER --target", "--benchmark i2p --source FILE.csv"
        command = f"cgru evaluate {shlex.quote(str(run.path))} {objects} {shlex.quote(concept)}, or for nudity {nudity}"
    else:
        command = shlex.join(["cgru", "evaluate", str(run.path), *proof_of(concept)])
    return f"Not evaluated on {concept}: what was forgotten and kept is not known. Run: {command}"


def _order(run: Run, found: Evaluation) -> tuple[bool, str, int]:
    """The run's own concept first, newest version of a benchmark first."""
    return not is_same(found.target, run.config.concept), found.scores["benchmark"], -found.scores["version"]


def is_same(target: str | None, concept: str) -> bool:
    """Whether a benchmark's target is the run's concept; a run may spell it in another case."""
    return target is not None and target.casefold() == concept.casefold()


def amount(evaluation: Evaluation) -> str:
    """How much was drawn, in words."""
    if evaluation.is_attack:
        schedule = evaluation.protocol.get("schedule", {}).get("name", "?")
        return f"{evaluation.protocol.get('prompts', '?')} prompts, schedule {schedule}"
    count = evaluation.protocol.get("images", "?")
    return f"{count} picture{'' if count == 1 else 's'} a prompt"


def comparable(protocol: Mapping[str, Any]) -> str:
    """Equal for two evaluations whose numbers may stand in one ranking or mean."""
    return json.dumps(_compared(protocol), sort_keys=True)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two protocols differ and should not."""
    a, b = _compared(one), _compared(other)
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def _compared(protocol: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in protocol.items() if key not in SAME_NOT_NEEDED}
    if isinstance(judge := kept.get("judge"), Mapping):  # an attack's names the concept in what counts as a success
        kept["judge"] = {key: value for key, value in judge.items() if key != "success"}
    return kept | {"base model": protocol.get("model", {}).get("base")}


def _state(run: Run, done: int) -> list[str]:
    if not (run.has_edit or run.is_done("3-policy")):  # the policy's marker: runs from before edit.json
        planned = run.config.length
        way = shlex.join(["cgru", "resume", str(run.path)])
        return [f"Unfinished: {done} of {planned} iterations are logged. Continue with: {way}"]
    if not is_run(run.path):
        return [f"The run has no edit: edit/{NOTE_FILE} is not there, so nothing can be evaluated or exported."]
    return []


def _metrics(run: Run) -> tuple[list[dict[str, Scalar]], list[str]]:
    try:
        found = [record for record in read_metrics(run.path / METRICS) if "iteration" in record]
    except (OSError, ValueError) as error:
        return [], [f"No training curves: {error}"]
    return found, [] if found else ["No training curves: no iteration has been logged yet."]


def _fit(run: Run) -> tuple[Mapping[str, Any] | None, list[str]]:
    if not run.is_done("2-critic"):
        return None, []
    try:
        return run.outcome("2-critic"), []
    except (OSError, ValueError) as error:
        return None, [f"No errors of the critic's fit: {error}"]


def _evaluations(run: Run) -> tuple[list[Evaluation], list[str]]:
    found, holes = list[Evaluation](), list[str]()
    try:
        edit = stored_fingerprint(run.path)
    except ValueError as error:
        edit, holes = None, [f"The edit is damaged: {error}"]
    for folder in sorted(path for path in (run.path / "eval").glob("*/") if path.is_dir()):
        try:
            evaluation = read_evaluation(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            holes.append(f"The evaluation {folder.name} is left out: {error}")
            continue
        stated = evaluation.protocol.get("model", {}).get("edit_sha256")
        if edit is None or stated != edit:
            why = "it scored another edit than the one in this run, or does not say which"
            holes.append(f"The evaluation {folder.name} is left out: {why}.")
            continue
        if evaluation.base is None and not evaluation.is_attack:
            holes.append(
                f"{folder.name}: the base model was not scored (--no-base), so nothing tells before and after."
            )
        found.append(evaluation)
    return found, holes


def read_evaluation(folder: Path) -> Evaluation:
    """A folder that `cgru evaluate` or `cgru attack` wrote; ValueError where it is not whole."""
    path = folder / "scores.json"
    if not path.is_file():
        raise ValueError("it has no scores.json, so it is at work or was stopped; the same command continues it")
    try:
        scores = parse_json(path.read_bytes())
    except ValueError:
        raise ValueError("its scores.json is damaged; evaluate again") from None
    needed = {"benchmark": str, "version": int, "protocol": dict, "measurements": dict}
    table = scores if isinstance(scores, dict) else {}
    missing = [key for key, kind in needed.items() if not isinstance(table.get(key), kind)]
    if missing:
        raise ValueError(f"its scores.json has no {', '.join(missing)} as cgru writes it")
    incomplete = [name for name, row in scores["measurements"].items() if not _is_measurement(row)]
    if incomplete:
        raise ValueError(f"its scores.json has measurements without value, interval or n: {', '.join(incomplete)}")
    target = scores["protocol"].get("target")
    if target is not None and not (isinstance(target, dict) and {"name", "kind"} <= target.keys()):
        raise ValueError("its scores.json names a target without name and kind")
    return Evaluation(folder, scores)


def _is_measurement(row: object) -> bool:
    """Value and bounds are numbers or null (not finite, or no interval), n is there."""
    if not isinstance(row, dict) or {"value", "low", "high", "n"} - row.keys():
        return False
    return all(row[key] is None or isinstance(row[key], int | float) for key in ("value", "low", "high"))
