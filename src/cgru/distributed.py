"""Several processes on one run, through accelerate: the state is the same in all of them, the work is divided.

Every process holds the whole batch and the same weights. It samples, scores and differentiates its share; the results
are gathered, gradients are summed, and only the main process writes files. The number of processes therefore changes
rounding only. `accelerate launch` or torchrun starts the processes and sets WORLD_SIZE, RANK and LOCAL_RANK. With one
process every function here does nothing, and neither torch nor accelerate is imported.

Collective functions must be called by all processes in the same order: `spread`, `joined`, `add_up`, `any_of`, `alike`,
`failing_alike`, `first_found`, `from_main`. The functions passed to them must not call them in turn.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState
    from torch import Tensor

T = TypeVar("T")
Tensors = TypeVar("Tensors", "Tensor", "dict[str, Tensor]")

GRACE = 3.0
"""Seconds that the main process has to report an error."""
LONGEST_WAIT = timedelta(hours=1)
"""Longest time that a process waits for the others, e.g. while the main process trains reward heads."""


def count() -> int:
    """Number of processes that work on this run."""
    # A launcher sets both variables; WORLD_SIZE alone comes from something else.
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return rank() == 0


def defer_to_main() -> None:
    """Wait, before this process fails, so that the main process can report the error first.

    A launcher ends all processes as soon as one of them has failed. If this function returns, the main process reported
    no error, so this process may print its own.
    """
    if not is_main():
        time.sleep(GRACE)


def signed(text: str) -> str:
    """An error line of this process; processes other than the main one add their number."""
    return f"cgru: {text}" if is_main() else f"cgru, process {rank()}: {text}"


def device() -> torch.device | None:
    """The device of this process: cuda:LOCAL_RANK or the CPU; None if there is only one process."""
    if count() == 1:
        return None
    import torch

    own = _state().device
    return own if own.type == "cuda" else torch.device("cpu")


def share(n: int, of: int | None = None) -> slice:
    """The range of n items for this process (or process `of`): consecutive, and shares differ by at most one item."""
    who, processes = rank() if of is None else of, count()
    return slice(n * who // processes, n * (who + 1) // processes)


def spread(n: int, work: Callable[[slice], Tensors]) -> Tensors:
    """Run `work` on n independent items, divided among the processes; every process gets all rows, in order."""
    if count() == 1:
        return work(slice(0, n))
    from accelerate.utils import slice_tensors

    mine = share(n)
    size = mine.stop - mine.start
    # A process without a share computes the first item to learn the shape of a row, and drops the result.
    found = alike(lambda: work(mine if size else slice(0, 1)))
    return joined(slice_tensors(found, slice(0, size)), n)


def joined(rows: Tensors, n: int) -> Tensors:
    """The rows of all n items, in order, gathered from the processes; `rows` are those of this process."""
    if count() == 1:
        return rows
    import torch
    from accelerate.utils import find_device, gather, pad_across_processes, send_to_device, slice_tensors

    everything = gather(pad_across_processes(send_to_device(rows, _state().device)))
    shares = [share(n, of) for of in range(count())]
    longest = max(some.stop - some.start for some in shares)
    kept = [torch.arange(some.stop - some.start) + who * longest for who, some in enumerate(shares)]
    return send_to_device(slice_tensors(everything, torch.cat(kept)), find_device(rows))


def add_up(parameters: Sequence[Tensor], *numbers: float) -> tuple[float, ...]:
    """Sum gradients into `.grad`, and the given numbers, over all processes, in one message.

    Each process must have divided its loss by the total number of items. A parameter without a gradient in any process
    gets none, so that an optimiser skips it as with one process.
    """
    if count() == 1:
        return numbers
    import torch
    from accelerate.utils import reduce

    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flags = torch.tensor([float(p.grad is not None) for p in parameters])
    facts = torch.cat([flags, torch.tensor(numbers)])
    place = _state().device
    total = reduce(torch.cat([g.detach().flatten().to(place, torch.float32) for g in (*own, facts)]), "sum")
    *sums, found = total.split([*(g.numel() for g in own), len(facts)])
    used, results = found.tolist()[: len(own)], found.tolist()[len(own) :]
    for parameter, gradient, flag in zip(parameters, sums, used, strict=True):
        parameter.grad = gradient.view_as(parameter).to(parameter) if flag else None
    return tuple(results)


def any_of(flag: bool) -> bool:
    """Whether the flag is true in any process."""
    if count() == 1:
        return flag
    import torch
    from accelerate.utils import reduce

    return bool(reduce(torch.tensor(float(flag), device=_state().device), "sum") > 0)


def alike(work: Callable[[], T]) -> T:
    """Run each process's own work; an error in one is raised in all, so that no process waits for another."""
    with failing_alike():
        return work()


@contextmanager
def failing_alike() -> Iterator[None]:
    """`alike` as a `with` block: an error in the block of one process is raised in all at the end of the block."""
    if count() == 1:
        yield
        return
    from accelerate.utils import gather_object

    own: _Failure | None = None
    try:
        yield
    except Exception as error:  # not KeyboardInterrupt: that ends this process, and the launcher ends the others
        own = _Failure(error)
    if any_of(own is not None):
        failures = gather_object([own])
        raise (own or next(failure for failure in failures if failure)).error


def first_found(work: Callable[[], T | None]) -> T | None:
    """The first result, by process number, that is not None; an error in one process is raised in all."""
    found = alike(work)
    if count() == 1:
        return found
    from accelerate.utils import gather_object

    return next((each for each in gather_object([found]) if each is not None), None)


def from_main(work: Callable[[], T]) -> T:
    """Run `work` in the main process only and send its result to all; an error there is raised in all."""
    if count() == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    _state()
    return _checked(broadcast_object_list([_tried(work) if is_main() else None])[0])


class _Failure:
    # An error as it is sent to the other processes; one that cannot be pickled is sent as text.
    def __init__(self, error: Exception) -> None:
        try:
            pickle.loads(pickle.dumps(error))
            self.error = error
        except Exception:  # whatever its own __reduce__ or __init__ raises
            self.error = RuntimeError(f"{type(error).__name__}: {error}")


def _tried(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:  # not KeyboardInterrupt: that ends this process, and the launcher ends the others
        return _Failure(error)


def _checked(found: T | _Failure) -> T:
    if isinstance(found, _Failure):
        raise found.error
    return found


@cache
def _state() -> PartialState:
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    is_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    state = PartialState(cpu=is_cpu, timeout=LONGEST_WAIT)
    assert state.num_processes == count(), f"accelerate knows of {state.num_processes} processes, not of {count()}"
    atexit.register(state.destroy_process_group)
    if not is_main():  # only one process logs: the others would repeat it
        logging.getLogger("cgru").setLevel(logging.CRITICAL)
    return state
