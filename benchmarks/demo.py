"""Seconds an iteration of the demo's training, this code against an earlier commit: `python benchmarks/demo.py COMMIT`.

Each round trains a few iterations with either code, in processes of their own and in turn, so that a machine that is
slower for a while is slower for both. Looks, strips and checkpoints are left out; the warm start is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("samples_every=0", "watch.every=1000", "checkpoint_every=1000")


def main() -> None:
    """Print medians and their ratio, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="the earlier code; its benchmark is this file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8, help="of a round; the first and the last are not counted")
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.iterations < 3 or options.rounds < 1 or not (options.commit or options.train):
        parser.error("give a commit, at least 3 iterations and 1 round")
    if options.train:
        print(json.dumps(trained(options.iterations)))
        return
    table = compared(options.commit, options.rounds, options.iterations)
    for name in ("before", "now"):
        found = table[name]
        print(f"{name:8}{found['median']:8.2f} s an iteration (n {found['n']}), {found['start']:.0f} s until the first")
    print(f"ratio   {table['ratio']:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


def compared(commit: str, rounds: int, iterations: int) -> dict[str, Any]:
    """Medians over all rounds of both."""
    from cgru.runs import commit_of  # here, since earlier code may not have it

    rows: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-f", str(before), commit], cwd=ROOT, check=True)
        try:
            for _ in range(rounds):
                for name, tree in (("before", before), ("now", ROOT)):
                    rows[name].append(in_tree(tree, iterations))
                    print(f"{name}: {rows[name][-1]}", file=sys.stderr, flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)
    table: dict[str, Any] = {name: summary(found) for name, found in rows.items()}
    commits = {"commit_before": commit, "commit": commit_of(Path(__file__))}
    return {**table, "ratio": table["before"]["median"] / table["now"]["median"], **commits}


def in_tree(tree: Path, iterations: int) -> dict[str, Any]:
    """A training with the code of a folder."""
    command = [sys.executable, __file__, "--train", "--iterations", str(iterations)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree / "src")}, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["code"]).is_relative_to(tree.resolve()), f"another cgru was imported: {found['code']}"
    return found


def trained(iterations: int) -> dict[str, Any]:
    """Seconds until the first iteration is done, and of those after it."""
    import cgru
    from cgru.pipeline import unlearn
    from cgru.presets import resolve_config

    begun, stamps = time.perf_counter(), list[float]()
    config = resolve_config("Dogs", preset_name="demo", overrides=[f"policy.iterations={iterations}", *QUIET])
    with tempfile.TemporaryDirectory() as folder:
        unlearn(config, folder, listeners=(lambda _: stamps.append(time.perf_counter()),))
    # The last iteration is followed by a look and a checkpoint.
    spent = [after - before for before, after in zip(stamps[:-2], stamps[1:-1], strict=True)]
    return {"code": str(Path(cgru.__file__).resolve()), "start": stamps[0] - begun, "iterations": spent}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds together."""
    spent = [seconds for row in rows for seconds in row["iterations"]]
    starts = statistics.median(row["start"] for row in rows)
    return {"median": statistics.median(spent), "n": len(spent), "start": starts, "iterations": spent}


if __name__ == "__main__":
    main()
