"""Several processes on one run, through accelerate: the same state in all of them, the work in shares.

Every process holds the whole batch and the same weights. It samples, scores and differentiates its share; what they
found is joined, their gradients are summed, and only the main process writes. So the number of processes changes
rounding alone. `accelerate launch` or torchrun starts them and says so in WORLD_SIZE, RANK and LOCAL_RANK; with one
process everything here is the identity, and neither torch nor accelerate is imported.

Functions that need all processes must be called by all of them, in the same order: `spread`, `joined`, `add_up`,
`any_of`, `alike`, `first_found`, `from_main`. The work that they are given must not call them in turn.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import time
from collections.abc import Callable, Sequence
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
"""Seconds that the main process has to say what went wrong."""
LONGEST_WAIT = timedelta(hours=1)
"""For the others, e.g. while the main process trains reward heads; after it a process gives up."""


def count() -> int:
    """How many processes work on this run."""
    # A launcher sets both; WORLD_SIZE alone is left over from something else.
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def is_main() -> bool:
    """Whether this process is the one that writes and talks."""
    return rank() == 0


def defer_to_main() -> None:
    """Let the main process speak before this one ends in failure: a launcher ends all as soon as one has.

    Who comes back from here was not ended: the main process has nothing to say of it, so this one may speak.
    """
    if not is_main():
        time.sleep(GRACE)


def signed(text: str) -> str:
    """A line of this process; of another than the main one with its number."""
    return f"cgru: {text}" if is_main() else f"cgru, process {rank()}: {text}"


def device() -> torch.device | None:
    """The device of this process among several, cuda:LOCAL_RANK or the CPU; None for a process alone."""
    if count() == 1:
        return None
    import torch

    own = _state().device
    return own if own.type == "cuda" else torch.device("cpu")


def share(n: int, of: int | None = None) -> slice:
    """Which of n items are this process's (or process `of`'s): neighbours, at most one more than another has."""
    who, processes = rank() if of is None else of, count()
    return slice(n * who // processes, n * (who + 1) // processes)


def spread(n: int, work: Callable[[slice], Tensors]) -> Tensors:
    """`work` on n independent items, each process its share: the rows of all, in order, on every process."""
    if count() == 1:
        return work(slice(0, n))
    from accelerate.utils import slice_tensors

    mine = share(n)
    size = mine.stop - mine.start
    # Who has no share does the first item as well, for the shape of a row, and drops it.
    found = alike(lambda: work(mine if size else slice(0, 1)))
    return joined(slice_tensors(found, slice(0, size)), n)


def joined(rows: Tensors, n: int) -> Tensors:
    """The rows of all shares of n, in order; those given are this process's."""
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
    """Sum the gradients of all processes into `.grad`, and the numbers beside them; one message for all.

    Each process must have weighted its share by the number of all items. A parameter without a gradient anywhere keeps
    none, so that an optimiser leaves it alone as with one process.
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
    """Whether the flag is up in any process."""
    if count() == 1:
        return flag
    import torch
    from accelerate.utils import reduce

    return bool(reduce(torch.tensor(float(flag), device=_state().device), "sum") > 0)


def alike(work: Callable[[], T]) -> T:
    """Each process's own work; an error in one is raised in all, so that none waits for it."""
    if count() == 1:
        return work()
    from accelerate.utils import gather_object

    found = _tried(work)
    is_bad = isinstance(found, _Failure)
    if any_of(is_bad):
        failures = gather_object([found if is_bad else None])
        found = found if is_bad else next(failure for failure in failures if failure)
    return _checked(found)


def first_found(work: Callable[[], T | None]) -> T | None:
    """What the first process found whose own work found anything; an error in one is raised in all."""
    found = alike(work)
    if count() == 1:
        return found
    from accelerate.utils import gather_object

    return next((each for each in gather_object([found]) if each is not None), None)


def from_main(work: Callable[[], T]) -> T:
    """What the main process alone does and finds, told to all; an error there is raised in all."""
    if count() == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    _state()
    return _checked(broadcast_object_list([_tried(work) if is_main() else None])[0])


class _Failure:
    # An error on its way to the other processes; one that cannot travel goes as its words.
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
    if not is_main():  # one voice: the others would say the same
        logging.getLogger("cgru").setLevel(logging.CRITICAL)
    return state
