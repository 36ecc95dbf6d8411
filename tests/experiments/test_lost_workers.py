"""On Ray a worker and a whole node are killed in mid-run, or the sweep itself is stopped, and nothing is lost (slow).

The proof: what was logged before the kill stands in the finished run byte for byte (each line has its own seconds, so a
run that began anew would have others), and the LoRA is that of a run which nobody disturbed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mishaps import interruptible

from cgru.experiments.settings import config_of
from cgru.experiments.sweep import Sweep, plan
from cgru.lora.file import LORA_FILE
from cgru.pipeline import unlearn
from cgru.runs import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.xdist_group("ray"),  # one cluster at a time: each takes all cores
]
HERE = Path(__file__).parent
ITERATIONS = 5
SETTINGS = (
    f"policy.iterations={ITERATIONS} policy.trajectories=2 policy.updates=1 sampling.steps=2 checkpoint_every=1 "
    "prompts.count=4 prompts.retain=4 watch.every=0 samples_every=0 reward.networks=[clip] retention.kl=0"
).split()
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
LORA = f"edit/{LORA_FILE}"


@dataclass(frozen=True)
class TwoNodes:
    """A cluster; its second node can be killed, for which it gets another."""

    address: str
    second: str
    process: subprocess.Popen[str]

    def kill_second(self) -> None:
        """Returns when it is gone."""
        assert self.process.stdin is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        hear(self.process, "killed")


def hear(process: subprocess.Popen[str], word: str) -> list[str]:
    """The line of this first word, once it is said."""
    assert process.stdout is not None
    return next(words for line in process.stdout if (words := line.split())[:1] == [word])


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """A cluster that ends with this block."""
    command = [sys.executable, str(HERE / "two_nodes.py")]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, **PIPES
    ) as process:
        assert process.stdin is not None
        try:
            _, address, second = hear(process, "cluster")
            yield TwoNodes(address, second, process)
        finally:
            process.stdin.close()
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Wait for its end, though not for ever."""
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@contextmanager
def sweeping(out: Path, words: list[str], *settings: str) -> Iterator[subprocess.Popen[str]]:
    """`cgru sweep Dogs Cats` at work; `settings` come last, so they count."""
    command = [sys.executable, "-m", "cgru", "sweep", "Dogs", "Cats", "--methods", "ddpo", "--out", str(out), *words]
    process = interruptible([*command, *SETTINGS, *settings], cwd=out.parent, env=environment())
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
    end = time.monotonic() + 180
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
    assert (run / LORA).read_bytes() == (unlearn(config_of(cell, "cpu"), folder).path / LORA).read_bytes()


def records_of(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (out / "cells").iterdir()}


def test_a_worker_and_a_node_killed_in_mid_run_lose_nothing(tmp_path: Path) -> None:
    """Dogs and Cats, a node each: one loses its worker, the other its node, and both end on nodes that are left."""
    out = tmp_path / "out"
    with two_nodes() as cluster, sweeping(out, ["--address", cluster.address, "--benchmarks", ","]) as sweep:
        stopped: dict[str, dict[str, Any]] = {}
        while len(stopped) < 2:
            concept, note = eventually(lambda: _on_its_way(out, stopped), sweep)
            os.kill(note["pid"], signal.SIGSTOP)  # so that it cannot end before its turn
            stopped[concept] = note
        before = {concept: logged(out, concept) for concept in stopped}
        assert [note["node"] == cluster.second for note in stopped.values()].count(True) == 1
        for note in stopped.values():
            if note["node"] == cluster.second:
                cluster.kill_second()
            os.kill(note["pid"], signal.SIGKILL)
        told, events = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, events
    found = records_of(out)
    assert sorted(found) == ["cats-ddpo-s0", "dogs-ddpo-s0"]
    assert cluster.second not in {record["node"] for record in found.values()}
    for concept, data in before.items():
        record = found[f"{concept}-ddpo-s0"]
        assert f"{concept}-ddpo-s0: will be retried after: its worker was lost" in events
        assert f"continuing from iteration {record['from_iteration']}" in events
        assert data is not None
        assert_went_on(out, concept, data, record, tmp_path)
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert "2 runs compared" in page and "Failed" not in page
    assert told.count("\n") == 1 and told.endswith(f"{out / 'comparison.html'}\n")


def _on_its_way(out: Path, known: Collection[str]) -> tuple[str, dict[str, Any]] | None:
    """A concept whose run has come some way, and where it is."""
    for file in out.glob("at-work/*.json"):
        concept = file.stem.partition("-")[0]
        if concept not in known and logged(out, concept):
            return concept, json.loads(file.read_text())
    return None


def test_ctrl_c_ends_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """On the cluster that comes with the command, with a benchmark, hence with a cell of the base."""
    out, words = tmp_path / "out", ["--benchmarks", "own_canvas:load"]
    longer = "policy.iterations=20"  # so that neither run is done before the base, however slow the machine
    with sweeping(out, words, longer) as sweep:
        # Two lines, since the checkpoint of the first is there for certain only when the second is.
        eventually(lambda: (out / "cells" / "base.json").is_file() and logged(out, "dogs", 2), sweep)
        sweep.send_signal(signal.SIGINT)
        told, events = sweep.communicate(timeout=120)
    assert (sweep.returncode, told) == (130, "")
    assert events.splitlines()[-1] == f"cgru: interrupted; the same command continues {str(out)!r}."
    before = (out / "cells" / "base.json").read_bytes()
    with sweeping(out, [*words, "--json"], longer) as sweep:
        told, events = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, events  # Ray itself may have something to say there
    assert (out / "cells" / "base.json").read_bytes() == before  # not done again
    found = {record["name"]: record for record in json.loads(told)["cells"]}
    assert sorted(found) == ["base", "cats-ddpo-s0", "dogs-ddpo-s0"]
    assert found["dogs-ddpo-s0"]["from_iteration"] >= 1
    scores = json.loads((out / found["dogs-ddpo-s0"]["evaluations"][0] / "scores.json").read_text())
    assert scores["measurements"]["object_accuracy"]["n"] == 4  # 2 classes, 2 styles
    assert scores["base"]["measurements"]["object_accuracy"]["n"] == 4
    assert "2 runs compared" in (out / "comparison.html").read_text(encoding="utf-8")
