"""On a Ray cluster of two nodes a worker, then a whole node is killed in mid-run, and nothing is lost (slow).

The proof: what was logged before the kill stands in the finished run byte for byte (each line has its own seconds, so a
run that began anew would have others), and the LoRA is that of a run which nobody disturbed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cgru.backbones.lora import LORA_FILE
from cgru.experiments.sweep import Sweep, plan
from cgru.pipeline import unlearn
from cgru.runs import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")]
HERE = Path(__file__).parent
ITERATIONS = 8
SETTINGS = (
    f"policy.iterations={ITERATIONS} policy.trajectories=4 sampling.steps=2 checkpoint_every=1 prompts.count=4 "
    "prompts.retain=4 watch.every=0 samples_every=0 retention.bank=2 retention.batch=4"
).split()
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
LORA = f"edit/{LORA_FILE}"


@dataclass(frozen=True)
class TwoNodes:
    """A cluster; its second node can be killed."""

    address: str
    second: str
    process: subprocess.Popen[str]

    def kill_second(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """A cluster that ends with this block."""
    command = [sys.executable, str(HERE / "two_nodes.py")]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, **PIPES
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            found = next(line for line in process.stdout if line.startswith("cluster ")).split()
            yield TwoNodes(found[1], found[2], process)
        finally:
            process.stdin.close()
            process.wait(60)


@contextmanager
def sweeping(out: Path, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`cgru sweep Dogs Cats` at work."""
    command = [sys.executable, "-m", "cgru", "sweep", "Dogs", "Cats", "--methods", "ddpo", "--out", str(out), *words]
    process = subprocess.Popen(
        [*command, *SETTINGS], cwd=out.parent, env=environment(), stderr=subprocess.PIPE, **PIPES
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def environment() -> dict[str, str]:
    """Workers must find this folder's own_canvas."""
    known = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *([known] if known else [])])}


def eventually(look: Callable[[], Any], process: subprocess.Popen[str]) -> Any:  # noqa: ANN401
    """What `look` finds, as soon as it is something; not for ever, nor when the sweep has ended."""
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited in vain; the sweep: {process.poll()}")


def logged(out: Path, concept: str, least: int = 3) -> bytes | None:
    """The metrics of a run, once it has some iterations."""
    file = next(out.glob(f"runs/{concept}-*/metrics.jsonl"), None)
    data = file.read_bytes() if file else b""
    return data if data.count(b"\n") >= least else None


def assert_went_on(out: Path, concept: str, before: bytes, record: dict[str, Any], folder: Path) -> None:
    """The run was resumed, not begun anew, and ended as one that nobody disturbed."""
    assert record["tries"] == 2
    assert 0 < record["from_iteration"] < ITERATIONS
    run = out / record["run"]
    # A checkpoint is written after each log line, so at most the last of those that were there is done again.
    kept = b"".join(before.splitlines(keepends=True)[:-1])
    assert kept.count(b"\n") >= 2 and (run / "metrics.jsonl").read_bytes().startswith(kept)
    assert [line["iteration"] for line in read_metrics(run / "metrics.jsonl")] == list(range(ITERATIONS))
    (cell,) = plan(Sweep((concept,), methods=("ddpo",), settings=tuple(SETTINGS)))
    assert (run / LORA).read_bytes() == (unlearn(cell.config("cpu"), folder).path / LORA).read_bytes()


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (out / "cells").iterdir()}


def test_a_worker_killed_in_mid_run_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        two_nodes() as cluster,
        sweeping(out, ["--address", cluster.address, "--benchmarks", "own_canvas:load"]) as sweep,
    ):
        before = eventually(lambda: logged(out, "cats"), sweep)
        os.kill(json.loads((out / "at-work" / "cats-ddpo-s0.json").read_text())["pid"], signal.SIGKILL)
        told, events = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, events
    found = records_of(out)
    assert {name: record["tries"] for name, record in found.items()} == {
        "base": 1,
        "dogs-ddpo-s0": 1,
        "cats-ddpo-s0": 2,
    }
    assert len({record["node"] for record in found.values()}) == 2
    assert "cats-ddpo-s0: again after: its worker was lost" in events
    assert f"going on from iteration {found['cats-ddpo-s0']['from_iteration']}" in events
    assert_went_on(out, "Cats", before, found["cats-ddpo-s0"], tmp_path)
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert "2 runs compared" in page and "Failed" not in page
    assert told.splitlines()[-1].endswith(str(out / "comparison.html"))


def test_a_node_killed_in_mid_run_loses_nothing(tmp_path: Path) -> None:
    """Without a benchmark the two runs are all there is, one a node; both end on the node that is left."""
    out = tmp_path / "out"
    with two_nodes() as cluster, sweeping(out, ["--address", cluster.address, "--benchmarks", ","]) as sweep:
        lost, before = eventually(lambda: _at_work_on(out, cluster.second), sweep)
        cluster.kill_second()
        _, events = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, events
    found = records_of(out)
    assert sorted(record["tries"] for record in found.values()) == [1, 2]
    assert cluster.second not in {record["node"] for record in found.values()}
    assert_went_on(out, lost, before, found[f"{lost}-ddpo-s0"], tmp_path)


def _at_work_on(out: Path, node: str) -> tuple[str, bytes] | None:
    """The concept whose run is on this node and has come some way, and its metrics."""
    for note in out.glob("at-work/*.json"):
        concept = note.stem.partition("-")[0]
        if json.loads(note.read_text())["node"] == node and (data := logged(out, concept)):
            return concept, data
    return None
