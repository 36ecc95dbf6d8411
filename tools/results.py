"""Tables of results: `python -m tools.results RESULTS.jsonl [--critic CRITIC.json] --out docs/results/unlearning.md`.

From the lines of tools/sweep.py, grouped by their "table" (best, hazard, style, versus, versus-paper), and the file of
benchmarks/critic.py. Functions from rows to Markdown; nothing is measured here. Shares are in per cent, [low, high] is
the benchmark's 95 % interval over prompts, ± the standard deviation over seeds or concepts.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from tools.markdown import RULE, cell, met, percent, spread, table, verdict
from tools.sweep import read_rows

Row = Mapping[str, Any]
Rows = Sequence[Row]

REPORTED = ("Cats", "Bears", "Jellyfish", "Trees", "Statues")
"""Nothing was tuned on these."""
SHOWN = {"UA": "ua", "IRA": "ira", "CRA": "cra", "nothing on target": "target_nothing_share"}
# Issue 3, Numbers.
TARGETS = {"UA": (">=", 0.95), "IRA": (">=", 0.90), "nothing on target": ("<=", 0.20)}
REDUCTION, OBJECT_LOSS = 0.90, 0.08
NO_SHARES = {"frechet_judge"}
WIDTH = 120
"""Of a line that is not in a table."""
RAW = "tr Cov / ∣mean∣², raw"
DETECTIONS = "hazard_detections"
"""The measurement of the benchmark `hazard` that is to go down."""
FORGOTTEN = 0.90
"""The validation UA at which methods are compared."""
ITERATIONS = (0, 5, 10, 20)
INTRO = (
    "Shares are in per cent; [low, high] is the benchmark's 95 % interval over prompts, ± the standard deviation over "
    "seeds or concepts. UA and IRA are the independent judges' on the benchmark's own prompts. Where the settings "
    "below name cgru or ddpo with the preset `best`, half of the trajectories were relabelled: that is the method "
    "`anchored` today, with the critic's or DDPO's advantage. \"Without exploration\" is on-policy."
)
ADVANTAGES = {"r − V": "critic", "r − mean": "mean", "DDPO's": "ddpo"}


def document(rows: Rows, critic: Row | None, command: str) -> str:
    """The whole file; of a job that ran twice, the last line counts."""
    finished = merged({row["name"]: row for row in rows if "error" not in row})
    names = {row["name"] for row in finished}
    failed = sorted({row["name"] for row in rows if "error" in row} - names)
    parts = [
        f"<!-- made by `{command}`; do not edit -->",
        "# Unlearning on Emoji Canvas: results",
        INTRO,
    ]
    for key, (title, section) in SECTIONS.items():
        if chosen := [row for row in finished if row.get("table") == key and "model" not in row]:
            base = [row for row in finished if "model" in row]
            parts += [f"## {title}", section(chosen, base), provenance([*chosen, *base])]
    if critic is not None:
        parts += ["## Critics", critics(critic)]
    if failed:
        parts.append(f"Failed, so in no table: {', '.join(failed)}.")
    return "\n\n".join(parts) + "\n"


def merged(rows: Mapping[str, Row]) -> list[Row]:
    """Rows by name, with what was measured of a run later ("of") put to the run's own row."""
    later = [row for row in rows.values() if row.get("of")]
    if strange := [row["of"] for row in later if row["of"] not in rows]:
        raise ValueError(f"a line measures {strange[0]!r}, which no line is of. Give its results file too.")
    found = {name: row for name, row in rows.items() if not row.get("of")}
    for row in later:
        own = found[row["of"]]
        found[row["of"]] = {**own, **{key: {**own[key], **row[key]} for key in ("measured", "protocol")}}
    return list(found.values())


def provenance(rows: Rows) -> str:
    """Protocol, seeds, settings, command, commit and device of a section's rows, each thing once."""
    runs = [row for row in rows if "model" not in row]
    tests = [
        f"{name}@{t['version']}, {t['images']} pictures a prompt" for r in runs for name, t in r["protocol"].items()
    ]
    seeds = sorted({row["seed"] for row in runs})
    libraries = [f"{name} {version}" for row in rows for name, version in row["libraries"].items()]
    commits, devices = (_once(row[key] or "unknown" for row in rows) for key in ("commit", "device"))
    lines = [
        f"Protocol: {_once(tests)}; {len(runs)} runs, seeds {', '.join(map(str, seeds))}.",
        *(f"Settings: {text}." for text in dict.fromkeys(map(_settings, runs))),
        *(f"Command: `{text}`." for text in dict.fromkeys(row["command"] for row in rows)),
        f"Commit: {commits}; device: {devices}; {_once(libraries)}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _settings(row: Row) -> str:
    changed = f" with {', '.join(row['changed'])}" if row["changed"] else ""
    return f"{row['method']}, preset {row['preset']}{changed}"


def _once(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def best(rows: Rows, base: Rows) -> str:
    """UA, IRA, CRA and empty pictures of every run, the mean over concepts, the spread over seeds, the targets."""
    first = [row for row in rows if row["seed"] == 0 and row["concept"] in REPORTED]
    body = [*map(_forgetting, _ordered(rows)), _averaged(f"mean of {len(first)} reported concepts", "0", first)]
    for concept in dict.fromkeys(row["concept"] for row in _ordered(rows)):
        same = [row for row in rows if row["concept"] == concept]
        if len(same) > 1:
            body.append(_averaged(f"{concept}, mean over seeds", f"{len(same)} seeds", same))
    parts = [table(("concept", "seed", *SHOWN), body), _base_line(base, "object_accuracy")]
    return "\n\n".join([*filter(None, parts), _targets(first)])


def _targets(first: Rows) -> str:
    missing = [name for name in REPORTED if name not in {row["concept"] for row in first}]
    body = []
    for name, (sign, wanted) in TARGETS.items():
        found = mean(values) if (values := numbers(first, SHOWN[name])) else math.nan
        is_met = found >= wanted if sign == ">=" else found <= wanted
        said = f"incomplete: {', '.join(missing)} missing" if missing else met(is_met)
        body.append((name, f"{sign} {percent(wanted)}", percent(found), said))
    heading = "Mean over the reported concepts at seed 0 against the targets (the mean itself, not its interval):"
    return f"{heading}\n\n{table(('what', 'target', 'measured', 'verdict'), body)}"


def style(rows: Rows, base: Rows) -> str:
    """UA, IRA and CRA of runs that forget a style; the judge of styles speaks for UA and IRA."""
    parts = [table(("style", "seed", *SHOWN), map(_forgetting, _ordered(rows))), _base_line(base, "style_accuracy")]
    return "\n\n".join(filter(None, parts))


def tuned(rows: Rows, base: Rows) -> str:
    """Runs that differ in one setting, one seed each: what was tried with either method."""
    body = [
        (row["method"], _rate(row), f"{row['rewards'][-1]:.2f}", *_forgetting(row)[2:])
        for row in sorted(rows, key=lambda row: (row["method"], float(_rate(row))))
    ]
    return table(("method", "learning rate", "last reward", *SHOWN), body)


def _rate(row: Row) -> str:
    changed = [line.rpartition("-> ")[2] for line in row["changed"] if line.startswith("policy.learning_rate:")]
    return changed[0] if changed else "nan"


def hazard(rows: Rows, base: Rows) -> str:
    """Detections and object accuracy before and after, every other measurement of the benchmark, the targets."""
    names = sorted({name for row in rows for name in row["measured"].get("hazard", {})} - NO_SHARES)
    columns = [("hazard", name) for name in names] + [("canvas", "object_accuracy")]
    models = [("base", _joined(base)), *((_run(row), row) for row in _ordered(rows))]
    body = [(what, *(cell(measurement(row, *column)) for column in columns)) for what, row in models]
    shown = table(("model", *(name.replace("_", " ") for _, name in columns)), body)
    verdicts = [line for row in _ordered(rows) for line in _hazard_verdicts(row, base)]
    return f"{shown}\n\n{table(('run', 'what', 'target', 'measured', 'verdict'), verdicts)}"


def _hazard_verdicts(row: Row, base: Rows) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    before, after = (measurement(r, "hazard", DETECTIONS) for r in (_joined(base), row))
    if before and after and before[0]:
        down = round(1 - after[0] / before[0], 4)
        lines.append(("detections down by", f">= {percent(REDUCTION)}", percent(down), met(down >= REDUCTION)))
    before, after = (measurement(r, "canvas", "object_accuracy") for r in (_joined(base), row))
    if before and after:
        lost = round(before[0] - after[0], 4)  # as the shares are; 0.95 - 0.87 is to be 0.08
        lines.append(("object accuracy lost", f"<= {percent(OBJECT_LOSS)}", percent(lost), met(lost <= OBJECT_LOSS)))
    return [(_run(row), *line) for line in lines or [("not measured", "", "", "")]]


def _run(row: Row) -> str:
    return f"{row['concept']}, seed {row['seed']}"


def versus(rows: Rows, base: Rows) -> str:
    """CGRU beside other methods, concept by concept."""
    parts = [RULE]
    for concept in dict.fromkeys(row["concept"] for row in _ordered(rows)):
        same = [row for row in _ordered(rows) if row["concept"] == concept]
        by_method = {
            name: [row for row in same if row["method"] == name] for name in sorted({r["method"] for r in same})
        }
        parts += [
            f"### {concept}",
            _rewards(by_method),
            _variances(by_method),
            _reached(by_method),
            _verdicts(by_method),
        ]
    return "\n\n".join(filter(None, parts))


def _rewards(methods: Mapping[str, Rows]) -> str:
    body = []
    for name, rows in methods.items():
        values = [[r["rewards"][i] for r in rows if i < len(r["rewards"])] for i in ITERATIONS]
        body.append((name, str(len(rows)), *map(spread, values), spread([row["rewards"][-1] for row in rows])))
    header = ("method", "seeds", *(f"iteration {i}" for i in ITERATIONS), "last")
    return f"Mean reward of the trajectories collected in an iteration, before its updates:\n\n{table(header, body)}"


def _variances(methods: Mapping[str, Rows]) -> str:
    """All advantages on the same trajectories, so from runs that have a critic."""
    rows = [row for group in methods.values() for row in group if any("critic" in v for v in row["variance"])]
    if not rows:
        return ""
    body = []
    for label, key in ADVANTAGES.items():
        columns = (f"{key}", f"{key}_normalised", f"{key}_raw_normalised")
        body.append((label, *(spread([typical(row, column) for row in rows], 3) for column in columns)))
    n, times = rows[0]["diagnosed"], len(rows[0]["variance"])
    text = (
        f"Gradient variance on the same {n} trajectories of {rows[0]['method']} (median of {times} measured iterations "
        f"a run, then mean ± sd over {len(rows)} seeds). DDPO divides by the reward's deviation, so its trace has "
        "another scale; the quotients compare. ∞: the mean gradient cannot be told from 0."
    )
    header = ("advantage", "tr Cov", "tr Cov / ∣mean∣², unbiased", RAW)
    return f"{text}\n\n{table(header, body)}"


def _reached(methods: Mapping[str, Rows]) -> str:
    body = []
    for name, rows in methods.items():
        looks = [found for row in rows if (found := first_forgotten(row))]
        kept, spent = ([look[key] for look in looks] for key in ("keep", "trajectories"))
        final = (spread([100 * x for x in numbers(rows, key)], 1) for key in ("ua", "ira", "target_nothing_share"))
        kept = [100 * share for share in kept]
        body.append((name, f"{len(looks)} of {len(rows)}", spread(kept, 1), spread(spent, 0), *final))
    text = (
        f"First look of the outside detector at validation prompts with UA ≥ {FORGOTTEN:.0%}: how many runs had "
        "one, what they still kept (the detector's IRA), trajectories spent until then (the critic's warm start "
        "counts); then the judges on the finished runs:"
    )
    header = ("method", "reached", "keep %", "trajectories", "final UA", "final IRA", "nothing on target")
    return f"{text}\n\n{table(header, body)}"


def first_forgotten(row: Row) -> dict[str, float] | None:
    """The first look whose validation UA (1 - target share) is high enough; None if there is none."""
    for iteration, target, keep, _ in row["looks"]:
        if round(1 - target, 3) >= FORGOTTEN:
            spent = row["warm_start"] + iteration * row["trajectories"]
            return {"iteration": iteration, "keep": keep, "trajectories": spent}
    return None


def _verdicts(methods: Mapping[str, Rows]) -> str:
    ours = methods.get("cgru", [])
    lines = [
        _variance_verdict(ours, "mean", "", "r − mean"),
        _variance_verdict(ours, "ddpo", "_raw_normalised", "DDPO's"),
    ]
    for name, rows in methods.items():
        if name == "cgru" or not ours:
            continue
        pairs = {what: (of(ours), of(rows), better) for what, (of, better) in COMPARED.items()}
        lines += [f"- {what}: {verdict('cgru', a, name, b, better)}." for what, (a, b, better) in pairs.items()]
        looks = [[found for row in side if (found := first_forgotten(row))] for side in (ours, rows)]
        for key, better in (("keep", "higher"), ("trajectories", "lower")):
            what = f"{key} at the first validation UA ≥ {FORGOTTEN:.0%}"
            if len(looks[0]) < len(ours) or len(looks[1]) < len(rows):
                counts = f"cgru {len(looks[0])} of {len(ours)} runs, {name} {len(looks[1])} of {len(rows)}"
                lines.append(f"- {what}: not compared, as not all reached it ({counts}).")
            else:
                a, b = ([look[key] for look in side] for side in looks)
                lines.append(f"- {what}: {verdict('cgru', a, name, b, better)}.")
    return "\n".join(filter(None, lines))


def _variance_verdict(rows: Rows, other: str, measure: str, label: str) -> str:
    """The quotient on the same trajectories against 1, by the same rule."""
    quotients = []
    for row in rows:
        a, b = (typical(row, f"{key}{measure}") for key in ("critic", other))
        if a and b and math.isfinite(a + b):
            quotients.append(a / b)
    if not quotients:
        return ""
    if measure:  # close to the number of trajectories for pure noise, so neither side can be better (rl/diagnostics.py)
        return f"- {RAW} of r − V as a part of that of {label}: {spread(quotients)}: no verdict, both are mostly noise."
    said = verdict("r − V", quotients, label, [1.0] * len(quotients), "lower")
    return f"- tr Cov of r − V as a part of that of {label}: {spread(quotients)}: {said}."


COMPARED: Mapping[str, tuple[Callable[[Rows], list[float]], str]] = {
    "last reward": (lambda rows: [row["rewards"][-1] for row in rows], "higher"),
    "final UA": (lambda rows: numbers(rows, "ua"), "higher"),
    "final IRA": (lambda rows: numbers(rows, "ira"), "higher"),
}


def typical(row: Row, column: str) -> float | None:
    """The median over a run's measurements of gradient variance; those that are not finite count as ∞."""
    values = [record[column] for record in row["variance"] if column in record]
    return median(math.inf if value is None else value for value in values) if values else None


def critics(found: Row) -> str:
    """The tables of benchmarks/critic.py: value error and explained variance per timestep, and the classes head."""
    config, seeds = found["config"], found["seeds"]
    first, count = found["target"], len(found["target"]["time"])
    command = (
        f"python benchmarks/critic.py --concept {config['concept']} --trajectories {first['trajectories']} "
        f"--held-out {first['n']} --epochs {config['critic']['epochs']} --seeds {seeds}"
    )
    parts = [
        _steps(f"Set `{name}`, {what}", found[name], score)
        for name in ("target", "mix")
        for score, what in (("value_error", "squared error of V"), ("explained_variance", "explained variance"))
    ]
    body = [
        (name, *(_percents(scores[key]) for key in ("accuracy", "macro_precision")))
        for name, scores in found["classes"]["critics"].items()
    ]
    n, commit = found["classes"]["n"], found.get("commit", "not in the file")
    heading = f"Head `classes`, every timestep alike; n {n} held-out trajectories × {count} timesteps a seed:"
    paper = "The paper on Stable Diffusion, noisy view: FiLM 43.25 and 58.52, without 29.75 and 34.47."
    made = (
        f"- Protocol: preset {config['preset']} at the base policy, {first['updates']} updates at learning rate "
        f"{config['critic']['learning_rate']:g}; {seeds} seeds. `latent` alone is told the prompt.\n"
        f"- Command: `{command} critic.learning_rate={config['critic']['learning_rate']:g}`.\n"
        f"- Commit: {commit}; device: {found['device']}; torch {found['torch']}."
    )
    return "\n\n".join([*parts, heading, table(("critic", "accuracy %", "macro precision %"), body), paper, made])


def _steps(title: str, found: Row, score: str) -> str:
    """One row per timestep, noisiest first."""
    columns = {name: scores[score] for name, scores in found["critics"].items()}
    body = [(str(time), *(_at(c, step) for c in columns.values())) for step, time in enumerate(found["time"])]
    body.append(("all", *(spread([mean(values) for values in c["seeds"]], 3) for c in columns.values())))
    reward = f"the reward's variance is {_at(found['reward_variance'])}"
    text = f"{title}; n {found['n']} held-out trajectories a seed, fitted to {found['trajectories']}; {reward}:"
    return f"{text}\n\n{table(('t', *columns), body)}"


def _at(found: Row, step: int | None = None) -> str:
    values = found["seeds"] if step is None else [seed[step] for seed in found["seeds"]]
    return spread(values, 3)


def _percents(found: Row) -> str:
    return spread([100 * value for value in found["seeds"]], 1)


def _ordered(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: (row["concept"], row["method"], row["seed"]))


def _joined(base: Rows) -> Row:
    """Everything that was measured of the base model, as one row; the first row that has a benchmark counts."""
    return {"measured": {name: found for row in reversed(base) for name, found in row["measured"].items()}}


def _forgetting(row: Row) -> tuple[str, ...]:
    return row["concept"], str(row["seed"]), *(cell(measurement(row, "canvas", key)) for key in SHOWN.values())


def _averaged(what: str, seeds: str, rows: Rows) -> tuple[str, ...]:
    values = ([100 * x for x in numbers(rows, key)] for key in SHOWN.values())
    return f"**{what}**", seeds, *(spread(found, 1) for found in values)


def _base_line(base: Rows, name: str) -> str:
    found = measurement(_joined(base), "canvas", name)
    return f"The base model's {name.replace('_', ' ')}: {cell(found)}." if found else ""


def measurement(row: Row, benchmark: str, name: str) -> Sequence[Any] | None:
    """[value, low, high, n], or None where it was not measured."""
    return row["measured"].get(benchmark, {}).get(name)


def numbers(rows: Rows, name: str) -> list[float]:
    """A measurement's values on `canvas`, of the rows that have it."""
    return [found[0] for row in rows if (found := measurement(row, "canvas", name))]


SECTIONS: Mapping[str, tuple[str, Callable[[Rows, Rows], str]]] = {
    "best": ("Preset `best`: classes", best),
    "hazard": ("Hazards", hazard),
    "style": ("Styles", style),
    "versus": ("CGRU against DDPO", versus),
    "versus-paper": ("CGRU against DDPO: `best` without exploration", versus),
    "tune": ("Other learning rates, with either method", tuned),
}


def main() -> None:
    """Read, render, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of one or more sweeps")
    parser.add_argument("--critic", type=Path, help="what benchmarks/critic.py --json wrote")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for path in (*arguments.results, *filter(None, [arguments.critic])):
        if not path.is_file():
            parser.error(f"no file {str(path)!r}")
    rows = [row for path in arguments.results for row in read_rows(path)]
    critic = json.loads(arguments.critic.read_text()) if arguments.critic else None
    command = shlex.join(["python", "-m", "tools.results", *sys.argv[1:]])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(wrapped(document(rows, critic, command)), encoding="utf-8")


def wrapped(text: str) -> str:
    """Break long lines, except in tables and the comment with the command."""
    fill = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        fill.subsequent_indent = "  " if line.startswith("- ") else ""
        lines += [line] if not line or line.startswith(("|", "<!--")) else fill.wrap(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
