"""Cells on a Ray cluster: each is a task with its share of a device; a failed cell is retried, possibly elsewhere.

A cell runs as on one machine (`attempt`), so a killed worker loses only the work since the run's last checkpoint: the
next worker opens the same run folder. The sweep's folder must therefore be on storage that all nodes see. Each worker
writes its host to a note in OUT/at-work. Ray is imported only in this file, and only when it is used.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cgru.atomic_io import atomic_write
from cgru.experiments.cells import Cell
from cgru.experiments.local_runner import PLAN, RUNS, Order, Record, attempt, last_line
from cgru.experiments.settings import config_of
from cgru.runs import Run, run_name

AT_WORK = "at-work"
TICK = 1.0
"""Seconds between two looks at the tasks."""
PAUSE = 5.0
"""Seconds before the second try, doubled for the third: a process of a lost node may still hold the run's lock."""
PATIENCE = 3.0
"""Seconds that a port has to open."""
LIMIT = 30.0
"""Seconds to wait for a cluster; a busy machine needs 10 s to import Ray."""
PROBE = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody was asked
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a tip about it is printed where there are GPUs
}
"""What Ray reads when it is imported."""
PRIVATE = {
    "RAY_AUTH_MODE": "token",  # whoever reaches a port of Ray without the token is refused
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's setting for a single machine: it listens only on 127.0.0.1
}
"""Set for every cluster that we start, overriding the environment: a cluster runs any code that a client sends."""
STORE = 100_000_000
"""Bytes of the object store of a cluster that we start; only records of a few kB are sent."""
SMALLEST = 0.001
ADVICE = (
    "allowed: HOST:PORT of a Ray head, given on one of its nodes, or auto. Start one with `ray start --head`, or leave "
    "--address out."
)


class Pool(Protocol):
    """A place where cells run; its handles are hashable."""

    def submit(self, cell: Cell, pause: float) -> Any:  # noqa: ANN401
        """Queue a cell; it starts `pause` seconds after it gets its device."""

    def finished(self, handles: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Those that have ended within some seconds."""

    def result(self, cell: Cell, handle: Any) -> Record:  # noqa: ANN401
        """The record of a finished task, also if its worker was lost."""

    def forget(self, cell: Cell) -> None:
        """Nobody is at work on it any more."""


@dataclass(frozen=True)
class Share:
    """The resources of one cell: part of a GPU, or cores."""

    cpus: float
    gpus: float

    @property
    def device(self) -> str:
        """Where its run computes; which GPU that is Ray says."""
        return "cuda" if self.gpus else "cpu"

    @property
    def threads(self) -> int | None:
        """Of torch; None: its own choice."""
        return None if self.gpus else max(1, int(self.cpus))

    def fits(self, node: Mapping[str, float]) -> bool:
        """Whether an idle node with these resources has room for a cell."""
        return node.get("CPU", 0.0) >= self.cpus and node.get("GPU", 0.0) >= self.gpus


def dispatch(
    cells: Sequence[Cell],
    pool: Pool,
    retries: int,
    again: Callable[[Cell, Record], None],
    tick: Callable[[], None],
) -> Iterator[tuple[Cell, Record]]:
    """Queue all cells, and yield each when it is done or has failed in the first try and all retries.

    Args:
        cells: the cells to run.
        pool: where they run.
        retries: number of tries after the first.
        again: called for each failure that is followed by another try.
        tick: called about every TICK seconds.
    """
    pending = {pool.submit(cell, 0.0): (cell, 1) for cell in cells}
    try:
        while pending:
            for handle in pool.finished(list(pending), TICK):
                cell, tries = pending.pop(handle)
                record = pool.result(cell, handle)
                if "error" in record and tries <= retries:
                    again(cell, record)
                    pending[pool.submit(cell, PAUSE * tries)] = (cell, tries + 1)
                else:
                    yield cell, {**record, "tries": tries}
            tick()
    finally:  # after Ctrl-C, or with the cluster
        for cell, _ in pending.values():
            pool.forget(cell)


def check_share(share: float | None) -> None:
    """A fraction of a device, or whole cores."""
    if share is not None and not (SMALLEST <= share <= 1 or (share > 1 and share.is_integer())):
        raise ValueError(
            f"--share {share:g}; allowed: {SMALLEST:g} to 1, or a whole number of cores. Try 0.25: four runs a device."
        )


def fit_share(nodes: Sequence[Mapping[str, float]], device: str, share: float | None) -> Share:
    """The share of a cell; refused if no node has room for it, since Ray would wait for ever.

    Args:
        nodes: resources of each node, as Ray counts them.
        device: auto, cpu or cuda; auto: GPUs if there are any.
        share: None for one GPU or one core.
    """
    cpus, gpus = (max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in ("CPU", "GPU"))
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda, and no node of the cluster has a GPU; allowed: auto or cpu. Give one of them.")
    if device != "cpu" and gpus:
        if share is not None and share > 1:
            raise ValueError(f"--share {share:g} GPUs; allowed: at most 1, since a run uses one. Leave --share out.")
        return Share(0.0, 1.0 if share is None else share)
    wanted = 1.0 if share is None else share
    if wanted > cpus:
        raise ValueError(
            f"{wanted:g} cores for a run, and no node has more than {cpus:g}; allowed: at most that. Lower --share."
        )
    return Share(wanted, 0.0)


def check_installed() -> None:
    """Say what to do where Ray is not."""
    if find_spec("ray") is None:
        raise ValueError(
            "Ray is not installed, and a sweep runs on it; allowed: --dry-run without it. pip install 'cgru[ray]'"
        )


def connect(address: str | None, limit: float = LIMIT) -> list[Mapping[str, float]]:
    """Start a cluster on this machine (None) or join one within a time limit; returns the resources of its nodes.

    Call `check_installed` first.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if address is None:
        os.environ.update(PRIVATE)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # inherited by Ray's processes, on no disk
    else:
        _check_reachable(address)
        _check_cluster(address, limit)
    import ray

    # "local": else RAY_ADDRESS would be joined unasked.
    own: dict[str, Any] = {"object_store_memory": STORE, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # of many kinds, also those of hooks that the environment names
        raise _no_cluster(address, _first_line(error)) from error
    return live_nodes()


def live_nodes() -> list[Mapping[str, float]]:
    """The resources of each node that answers."""
    import ray

    with _needing_cluster():
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def disconnect() -> None:
    """Disconnect from the cluster, or end the one that was started together with its remaining tasks."""
    import ray

    ray.shutdown()


def _check_reachable(address: str) -> None:
    """Check that something listens at the address; `auto` is resolved by Ray itself."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--address {address!r} is no address; {ADVICE}")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error
    except UnicodeError:  # "10.0.0..5": a name with an empty part
        raise ValueError(f"--address {address!r} is no address; {ADVICE}") from None


def _check_cluster(address: str, limit: float) -> None:
    """Check that Ray answers, in a process that can be ended: if something else listens, Ray itself waits for
    minutes."""
    command = [sys.executable, "-c", PROBE, address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        raise _no_cluster(address, f"no answer of Ray's within {limit:g} s") from None
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise _no_cluster(address, lines[-1])


def _no_cluster(address: str | None, why: str) -> ValueError:
    if address is None:
        advice = "Try again when the machine has less to do, or give --address HOST:PORT of a cluster that is up."
        return ValueError(f"Ray could not be started on this machine ({why}). {advice}")
    where = "on this machine" if address == "auto" else f"at {address!r}"
    return ValueError(f"no Ray cluster {where} ({why}); {ADVICE}")


@contextmanager
def _needing_cluster() -> Iterator[None]:
    """Turn errors that Ray raises here into a ConnectionError: they mean that the cluster is lost, not that a cell
    failed."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        advice = "what is finished is kept. Repeat the command to continue, with another --address if necessary."
        raise ConnectionError(f"the Ray cluster was lost ({_first_line(error)}); {advice}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class RayPool:
    """The cluster that this process is connected to."""

    def __init__(self, order: Order, share: Share) -> None:
        """Needs `connect` before it."""
        import ray

        self._order, self._share = order, share
        # Retries are counted in this file. Each cell gets its own process, so that none inherits GPU memory.
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_retries": 0, "max_calls": 1}
        self._task = ray.remote(**options)(at_node)

    def submit(self, cell: Cell, pause: float) -> Any:  # noqa: ANN401
        """Queue a cell."""
        self.forget(cell)
        with _needing_cluster():
            return self._task.remote(cell, self._order, Path.cwd(), pause)

    def finished(self, handles: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Those that have ended within some seconds."""
        import ray

        with _needing_cluster():
            ready: list[Any] = ray.wait(list(handles), num_returns=len(handles), timeout=seconds)[0]
        return ready

    def result(self, cell: Cell, handle: Any) -> Record:  # noqa: ANN401
        """What became of it."""
        import ray

        try:
            record: Record = ray.get(handle)
        except ray.exceptions.RayError as error:
            record = {"error": explain(error)}
        self.forget(cell)
        return record

    def forget(self, cell: Cell) -> None:
        """Remove its note."""
        note_of(self._order.out, cell).unlink(missing_ok=True)

    def has_room(self) -> bool:
        """Whether any live node could run a cell; if not, all cells wait for a node to join."""
        return any(self._share.fits(node) for node in live_nodes())


def explain(error: Exception) -> str:
    """Why a task has no record: Ray could not start it, or its worker was lost. Errors of the cell itself are
    records."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return f"failed before it began ({last_line(str(error))})"
    return f"its worker was lost ({_first_line(error)})"


def note_of(out: Path, cell: Cell) -> Path:
    """The file with the host of a running cell; it exists once the cell has started."""
    return out / AT_WORK / f"{cell.name}.json"


def at_node(cell: Cell, order: Order, here: Path, pause: float) -> Record:
    """Do a cell in a worker process of some node."""
    import ray

    time.sleep(pause)
    host = socket.gethostname()
    if not (order.out / PLAN).is_file():
        return {"error": f"{host} does not see {str(order.out)!r}; allowed: an --out on storage that all nodes share."}
    if here.is_dir():  # relative paths in settings are relative to the user's folder
        os.chdir(here)
    node = ray.get_runtime_context().get_node_id()
    where = {"host": host, "node": node, "pid": os.getpid(), "from_iteration": reached(cell, order)}
    note_of(order.out, cell).parent.mkdir(exist_ok=True)
    atomic_write(note_of(order.out, cell), json.dumps(where) + "\n")
    return {**attempt(cell, order), **where}


def reached(cell: Cell, order: Order) -> int:
    """The number of iterations in the last checkpoint of the cell's run, which are not repeated."""
    from cgru.rl.callbacks import POLICY_STAGE

    if cell.concept is None:
        return 0
    config = config_of(cell, order.device)
    newest = Run(order.out / RUNS / run_name(config), config).latest(POLICY_STAGE)
    return 0 if newest is None else newest[0]
