"""Cells on a cluster: failures are isolated and tried again, shares fit, addresses are checked."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cgru.experiments.cells import Cell
from cgru.experiments.cluster import RayPool, Share, check_share, connect, dispatch, explain, fit_share
from cgru.experiments.local_runner import Order, Record, carry_out

NODES = [{"CPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}]


@dataclass
class Scripted:
    """A pool whose workers do as they are told: the records of a cell's tries, in order."""

    script: dict[str, list[Record]]
    pauses: list[tuple[str, float]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def submit(self, cell: Cell, pause: float) -> str:
        self.pauses.append((cell.name, pause))
        return f"{cell.name}/{len(self.pauses)}"

    def finished(self, handles: Sequence[Any], seconds: float) -> Sequence[Any]:
        return handles[-1:]  # the last one first, as no pool promises an order

    def result(self, cell: Cell, handle: object) -> Record:
        return self.script[cell.name].pop(0)

    def forget(self, cell: Cell) -> None:
        self.forgotten.append(cell.name)


def cells(*names: str) -> list[Cell]:
    return [Cell(name, "sweep", "emoji-canvas", "Dogs") for name in names]


def work(pool: Scripted, retries: int, out: Path) -> tuple[list[Record], list[str]]:
    failures: list[str] = []

    def again(cell: Cell, record: Record) -> None:
        failures.append(f"{cell.name}: {record['error']}")

    given = cells(*pool.script)
    records = carry_out(
        given,
        out,
        lambda left: dispatch(left, pool, retries, again, lambda: None),
        lambda cell, record: None,
        about={},
    )
    return records, failures


def test_a_failure_is_tried_again_and_harms_nobody(tmp_path: Path) -> None:
    pool = Scripted({"good": [{"run": "g"}], "shaky": [{"error": "one"}, {"error": "two"}, {"run": "s"}]})
    (good, shaky), failures = work(pool, 2, tmp_path)
    assert (good["run"], good["tries"]) == ("g", 1)
    assert (shaky["run"], shaky["tries"]) == ("s", 3)
    assert failures == ["shaky: one", "shaky: two"]
    # Longer each time: what held the run must have time to end.
    assert pool.pauses == [("good", 0.0), ("shaky", 0.0), ("shaky", 5.0), ("shaky", 10.0)]


def test_what_fails_to_the_end_is_a_record_and_is_tried_by_the_next_command(tmp_path: Path) -> None:
    pool = Scripted({"bad": [{"error": "one"}, {"error": "two"}], "good": [{"run": "g"}]})
    (tmp_path / "g").mkdir()
    (bad, good), failures = work(pool, 1, tmp_path)
    assert (bad["error"], bad["tries"]) == ("two", 2)
    assert failures == ["bad: one"]
    assert good["run"] == "g"
    assert json.loads((tmp_path / "cells" / "bad.json").read_text())["error"] == "two"
    once_more = Scripted({"bad": [{"run": "b"}], "good": []})  # the good one has no script: it must not be asked
    (bad, good), _ = work(once_more, 0, tmp_path)
    assert (bad["run"], good["run"]) == ("b", "g")


def test_a_run_that_was_removed_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    work(Scripted({"good": [{"run": "g"}]}), 0, tmp_path)
    (tmp_path / "g").rmdir()
    (good,), _ = work(Scripted({"good": [{"run": "anew"}]}), 0, tmp_path)
    assert good["run"] == "anew"


def test_after_an_interrupt_nobody_is_said_to_be_at_work() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pool = Scripted({"first": [], "second": [{"run": "s"}]})
    done = dispatch(cells("first", "second"), pool, 0, lambda *_: None, interrupt)
    assert next(done)[0].name == "second"
    with pytest.raises(KeyboardInterrupt):
        next(done)
    assert pool.forgotten == ["first"]


def test_no_retries_means_one_try(tmp_path: Path) -> None:
    pool = Scripted({"bad": [{"error": "one"}]})
    (bad,), failures = work(pool, 0, tmp_path)
    assert (bad["tries"], failures) == (1, [])


@pytest.mark.parametrize(
    "device, share, expected",
    [
        ("auto", None, Share(0.0, 1.0)),
        ("auto", 0.25, Share(0.0, 0.25)),
        ("cuda", 0.5, Share(0.0, 0.5)),
        ("cpu", None, Share(1.0, 0.0)),
        ("cpu", 8.0, Share(8.0, 0.0)),
    ],
)
def test_a_share_is_of_a_gpu_where_there_are_some(device: str, share: float | None, expected: Share) -> None:
    assert fit_share(NODES, device, share) == expected


def test_a_share_says_where_its_run_computes() -> None:
    assert (Share(0.0, 0.25).device, Share(0.0, 0.25).threads) == ("cuda", None)
    assert (Share(0.5, 0.0).device, Share(0.5, 0.0).threads) == ("cpu", 1)
    assert Share(4.0, 0.0).threads == 4


@pytest.mark.parametrize(
    "share, fits",
    [
        (Share(2.0, 0.0), [True, True]),
        (Share(4.0, 0.0), [False, True]),
        (Share(0.0, 0.5), [False, True]),
        (Share(16.0, 0.0), [False, False]),
    ],
)
def test_a_node_with_room(share: Share, fits: list[bool]) -> None:
    assert [share.fits(node) for node in NODES] == fits


@pytest.mark.parametrize(
    "nodes, device, share, told",
    [
        (NODES[:1], "cuda", None, "no node of the cluster has a GPU"),
        (NODES, "auto", 2.0, "--share 2 GPUs; allowed: at most 1"),
        (NODES, "cpu", 16.0, "16 cores for a run, and no node has more than 8"),
    ],
)
def test_a_share_that_fits_nowhere_would_wait_for_ever(
    nodes: list[dict[str, float]], device: str, share: float | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        fit_share(nodes, device, share)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan"), float("inf"), 1e-9])
def test_a_share_is_a_fraction_or_whole(share: float) -> None:
    with pytest.raises(ValueError, match="allowed: 0.001 to 1, or a whole number"):
        check_share(share)


@pytest.mark.parametrize("share", [None, 0.001, 0.25, 1.0, 4.0])
def test_good_shares(share: float | None) -> None:
    check_share(share)


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


@needs_ray
@pytest.mark.parametrize(
    "address", ["nonsense", "ray://10.0.0.1:10001", "10.0.0.1:no", "host:99999", "host:8²", "10.0.0..5:6379"]
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="is no address; allowed: HOST:PORT"):
        connect(address)


@needs_ray
def test_an_unreachable_cluster_is_said_at_once() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can take the port, and nobody answers
        taken.bind(("127.0.0.1", 0))
        begun = time.monotonic()
        with pytest.raises(ValueError, match="no Ray cluster at '127.0.0.1:.*ray start --head"):
            connect(f"127.0.0.1:{taken.getsockname()[1]}")
    assert time.monotonic() - begun < 5


@needs_ray
def test_what_listens_and_is_not_ray_is_not_waited_for() -> None:
    """A server that takes connections and says nothing: Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        begun = time.monotonic()
        with pytest.raises(ValueError, match="no Ray cluster at '127.0.0.1:.*no answer of Ray's within 2 s"):
            connect(f"127.0.0.1:{other.getsockname()[1]}", limit=2.0)
    assert time.monotonic() - begun < 10


@needs_ray
def test_a_cluster_that_cannot_be_started_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "no_such_module.hook")  # for which Ray raises an ImportError
    with pytest.raises(
        ValueError, match=r"^Ray could not be started on this machine \(No module named 'no_such_module'\)\. Try again"
    ) as caught:
        connect(None)
    assert "leave --address out" not in str(caught.value)  # it was left out


@needs_ray
def test_a_task_that_ray_could_not_begin_is_not_called_lost() -> None:
    from ray.exceptions import RayTaskError, WorkerCrashedError

    text = "ray::at_node()\n  ...\nModuleNotFoundError: No module named 'own'\n"
    begun = RayTaskError("at_node", text, ModuleNotFoundError("No module named 'own'"))
    assert explain(begun) == "failed before it began (ModuleNotFoundError: No module named 'own')"
    assert explain(WorkerCrashedError()).startswith("its worker was lost (The worker died unexpectedly")


@needs_ray
def test_a_cluster_that_is_lost_in_mid_sweep_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    def gone(*_: object, **__: object) -> None:
        raise ray.exceptions.RaySystemError("the head node is gone\nmany lines more")

    pool = RayPool(Order(tmp_path, "cpu", None), Share(cpus=1, gpus=0))
    monkeypatch.setattr(ray, "wait", gone)
    with pytest.raises(
        ConnectionError, match=r"^the Ray cluster was lost \(.*the head node is gone\); what is finished"
    ):
        pool.finished([object()], 0.1)
