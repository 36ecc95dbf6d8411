"""Many runs side by side on one machine: `python -m tools.sweep JOBS.json --out FOLDER [--workers 14] [--device cuda]`.

JOBS.json is a list of {"name", "concept", "seed", "method", "preset", "set": ["key=value", ...], "benchmarks",
"images", "table"}; all but name and concept may be left out (then as in `cgru unlearn`; benchmarks: canvas). A job is
one `unlearn` and its evaluations; {"name", "model", "concept"?, "benchmarks"} only evaluates, and with "of" says which
job's run it measured once more. Workers claim jobs in the file's order, so long ones belong first. A finished job is a
line of FOLDER/results.jsonl; the same command again goes on where it stopped and tries again what failed.
tools/results.py makes tables of the lines, grouped by "table".
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Table = dict[str, Any]
"""A job or a row, as in JSON."""

log = logging.getLogger(__name__)

# What a benchmark takes as a target; any other benchmark takes every kind.
KINDS = {"canvas": ("class", "style"), "hazard": ("hazard",)}
SHARES = ("target_share", "keep_share", "nothing_share")
OURS = ("seed", "device")
"""Keys that every job has of its own, so they say nothing about its settings."""


def run_job(job: Table, folder: Path, device: str, images: int) -> Table:
    """One training, unless the job names a model, and its evaluations; the line for results.jsonl."""
    begun = time.time()
    found: Table = {} if "model" in job else _train(job, folder / job["name"], device)
    trained = time.time()
    found |= _measure({**job, **found}, folder / job["name"], device, job.get("images", images))
    seconds = [round(trained - begun), round(time.time() - trained)]
    own = {key: job.get(key) for key in ("name", "table", "of")}
    return {**own, **found, "seconds": seconds, **_provenance(device)}


def _train(job: Table, folder: Path, device: str) -> Table:
    from cgru.config import as_rl, diff
    from cgru.pipeline import unlearn
    from cgru.presets import preset, resolve_config
    from cgru.runs import read_metrics

    settings = [*job.get("set", []), f"seed={job.get('seed', 0)}", f"device={device}"]
    names: Table = {"method": job.get("method"), "preset_name": job.get("preset")}
    config = as_rl(resolve_config(job["concept"], **names, overrides=settings))
    run = unlearn(config, folder)
    changed = diff(preset(config.preset, config.concept, config.model), config)
    return {
        **{key: getattr(config, key) for key in ("concept", "seed", "method", "preset")},
        "changed": [line for line in changed if line.partition(":")[0] not in OURS],
        "iterations": config.policy.iterations,
        "trajectories": config.policy.trajectories,
        "warm_start": config.critic.trajectories if config.critic.kind != "none" else 0,
        "diagnosed": config.diagnostics.trajectories,
        **history(read_metrics(run.path / "metrics.jsonl")),
        "run": str(run.path),
    }


def history(metrics: Sequence[Mapping[str, Any]]) -> Table:
    """What the tables need of metrics.jsonl: every reward, the looks of the outside detector, gradient variances."""
    return {
        "rewards": [_rounded(m["reward/mean"], 3) for m in metrics],
        "looks": [
            [m["iteration"] + 1, *(_rounded(m[f"watch/{name}"], 3) for name in SHARES)]
            for m in metrics
            if "watch/gap" in m
        ],
        "variance": [
            {"iteration": m["iteration"]}
            | {key.removeprefix("variance/"): m[key] for key in m if key.startswith("variance/")}
            for m in metrics
            if "variance/mean" in m
        ],
    }


def _measure(job: Table, folder: Path, device: str, images: int) -> Table:
    from cgru.evaluation.session import evaluate

    measured: Table = {}
    protocol: Table = {}
    for benchmark in job.get("benchmarks", ["canvas"]):
        scores = evaluate(
            job.get("run") or job["model"],
            benchmark,
            target=target_of(benchmark, job.get("concept")),
            images=images,
            out=None if "run" in job else folder / benchmark,
            device=device,
            with_base=False,  # the base is a job of its own
        )
        measured[benchmark] = {name: _numbers(found) for name, found in scores["measurements"].items()}
        protocol[benchmark] = {"version": scores["version"], "images": images}
    who: Table = {key: job[key] for key in ("model", "concept") if key in job}
    return {**who, "measured": measured, "protocol": protocol}


def target_of(benchmark: str, concept: str | None) -> str | None:
    """The concept where it is of a kind that the benchmark has a place for: `canvas` has none for hazards."""
    from cgru.embedded import load_lexicon
    from cgru.tasks import find_concept

    if concept is None:
        return None
    lexicon = load_lexicon()
    kind = find_concept(concept, lexicon.vocabulary, lexicon.aliases).kind
    return concept if kind in KINDS.get(benchmark, (kind,)) else None


def _numbers(found: Mapping[str, Any]) -> list[float | None]:
    return [*(_rounded(found[key], 4) for key in ("value", "low", "high")), found["n"]]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)  # None: no interval, or not finite in metrics.jsonl


def _provenance(device: str) -> Table:
    from importlib.metadata import version

    import torch

    import cgru.runs
    from cgru.backbones.base import pick_device
    from cgru.evaluation.session import LIBRARIES

    picked = pick_device(device)
    name = torch.cuda.get_device_name(picked) if picked.type == "cuda" else f"{picked.type}, {platform.machine()}"
    commit = cgru.runs.commit_of(Path(cgru.runs.__file__))
    return {"commit": commit, "device": name, "libraries": {name: version(name) for name in LIBRARIES}}


def read_rows(path: Path) -> list[Table]:
    """The lines of a results.jsonl, none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def open_claims(out: Path, jobs: Iterable[Table]) -> Path:
    """The folder of claims, in which exactly the jobs with a result are claimed; before any worker starts."""
    names = [job["name"] for job in jobs]
    if wrong := [name for name in names if names.count(name) > 1 or Path(name).name != name]:
        raise ValueError(f"job name {wrong[0]!r}; allowed: names of folders, each once. Rename that job.")
    claims = out / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for stale in claims.iterdir():
        stale.unlink()
    for row in read_rows(out / "results.jsonl"):
        if "error" not in row:
            (claims / row["name"]).touch()
    return claims


def claimed(jobs: Iterable[Table], claims: Path) -> Iterator[Table]:
    """The jobs that this process is the first to claim, each claimed when it is asked for."""
    for job in jobs:
        try:
            (claims / job["name"]).touch(exist_ok=False)  # O_EXCL: of several workers one succeeds
        except FileExistsError:
            continue
        yield job


def work(jobs: Sequence[Table], arguments: argparse.Namespace, command: str) -> None:
    """One job after the other, as long as there are any and there is time."""
    for job in claimed(jobs, arguments.out / "claims"):
        if arguments.until and time.time() > arguments.until:
            return
        try:
            row = run_job(job, arguments.out, arguments.device, arguments.images)
        except Exception:
            row = {"name": job["name"], "error": traceback.format_exc()}
        line = json.dumps({**row, "command": command}) + "\n"
        with (arguments.out / "results.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())  # one write, so that lines of several workers do not mix
        log.info("%s", json.dumps({k: row.get(k) for k in ("name", "seconds", "error")}))


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=2, help="pictures per cell of a benchmark; a job's own wins")
    parser.add_argument("--until", type=float, help="start no job after this time (seconds since 1970)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    jobs = json.loads(arguments.jobs.read_text())
    given = [text for text in sys.argv[1:] if text != "--worker"]
    if arguments.worker:
        work(jobs, arguments, shlex.join(["python", "-m", "tools.sweep", *given]))
        return
    open_claims(arguments.out, jobs)
    command = [sys.executable, "-m", "tools.sweep", *given, "--worker"]
    workers = [subprocess.Popen(command) for _ in range(arguments.workers)]
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    main()
