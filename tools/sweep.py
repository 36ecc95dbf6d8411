"""Many runs side by side on one machine: `python -m tools.sweep JOBS.json --out FOLDER [--workers 14] [--device cuda]`.

JOBS.json is a list of {"name", "concept", "seed", "preset", "set": ["key=value", ...]}. Each job is one `unlearn` and
one `canvas` evaluation; a finished job is a line of FOLDER/results.jsonl, so a sweep that was cut short goes on where
it stopped. Used for tuning (docs/lab.md); the figures people see come from `cgru evaluate` on finished runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def run_job(job: dict[str, Any], folder: Path, device: str, images: int) -> dict[str, Any]:
    """One training and its evaluation; returns the line for results.jsonl."""
    from cgru.config import RunConfig, override
    from cgru.evaluation.session import evaluate
    from cgru.pipeline import unlearn
    from cgru.presets import preset
    from cgru.runs import read_metrics

    begun = time.time()
    base = preset(job["preset"], job["concept"]) if job.get("preset") else RunConfig(concept=job["concept"])
    config = override(base, [*job.get("set", []), f"seed={job.get('seed', 0)}", f"device={device}"])
    run = unlearn(config, folder / job["name"])
    trained = time.time()
    scores = evaluate(str(run.path), "canvas", target=config.concept, images=images, device=device, with_base=False)
    metrics = read_metrics(run.path / "metrics.jsonl")
    looks = [_look(record) for record in metrics if "watch/gap" in record]
    return {
        "name": job["name"],
        "concept": config.concept,
        "seed": config.seed,
        "measured": {
            k: [round(v[x], 4) if v[x] is not None else None for x in ("value", "low", "high")] + [v["n"]]
            for k, v in scores["measurements"].items()
        },
        "looks": looks,
        "rewards": [round(float(m["reward/mean"] or 0), 2) for m in metrics[:: max(1, len(metrics) // 10)]],
        "seconds": [round(trained - begun), round(time.time() - trained)],
        "run": str(run.path),
    }


def _look(record: Mapping[str, Any]) -> list[float]:
    shares = (record[f"watch/{name}"] for name in ("target_share", "keep_share", "nothing_share"))
    return [record["iteration"] + 1, *(round(float(share), 3) for share in shares)]


def work(jobs: list[dict[str, Any]], out: Path, part: int, parts: int, arguments: argparse.Namespace) -> None:
    """Every parts-th job, one after the other."""
    results = out / "results.jsonl"
    done = {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
    for job in jobs[part::parts]:
        if job["name"] in done or (arguments.until and time.time() > arguments.until):
            continue
        try:
            row = run_job(job, out, arguments.device, arguments.images)
        except Exception:
            row = {"name": job["name"], "error": traceback.format_exc()}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        log.info("%s", json.dumps({k: row.get(k) for k in ("name", "seconds", "error")}))


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=2, help="pictures per cell of the benchmark")
    parser.add_argument("--until", type=float, help="start no job after this time (seconds since 1970)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part is not None:
        work(json.loads(arguments.jobs.read_text()), arguments.out, arguments.part, arguments.workers, arguments)
        return
    command = [sys.executable, "-m", "tools.sweep", *sys.argv[1:]]
    workers = [subprocess.Popen([*command, "--part", str(part)]) for part in range(arguments.workers)]
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    main()
