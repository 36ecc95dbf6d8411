"""Processes side by side, as `accelerate launch` starts them: gloo on the CPU, a time limit, none left behind.

The rendezvous is torchrun's: a store that this process opens on a port the system gives, so that no port can be taken.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

LIMIT = 120  # seconds; a test takes a few


@dataclass(frozen=True)
class Raised:
    """An error in a child: its type's name and its words."""

    kind: str
    text: str
    where: str


def side_by_side(count: int, target: Callable[..., Any], *args: object) -> list[Any]:
    """What `target(*args)` returned or raised in each of `count` processes, in order of rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cgru.pipeline.unlearning", "accelerate"])  # no effect if it runs already
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends, children = [], []
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, _environment(rank, count, store.port), target, args))
        child.start()
        theirs.close()
        ends.append(ours)
        children.append(child)
    try:
        return _results(ends)
    finally:
        for child in children:
            child.kill()
            child.join()


def _results(ends: list[Connection]) -> list[Any]:
    until, found = time.monotonic() + LIMIT, []
    for rank, end in enumerate(ends):
        assert end.poll(max(0.0, until - time.monotonic())), f"process {rank} is not done after {LIMIT} s"
        found.append(end.recv())
    return found


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _child(end: Connection, environment: dict[str, str], target: Callable[..., Any], args: tuple[object, ...]) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        end.send(target(*args))
    except BaseException as error:  # KeyboardInterrupt, too
        end.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
