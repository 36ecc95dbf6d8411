"""Shares, sums and errors over processes; alone, everything is the identity."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from side_by_side import Raised, side_by_side

from cgru import distributed
from cgru.cli import fail


def pieces() -> dict[str, Any]:
    """What each of three processes gets of everything here."""
    rank = distributed.rank()
    table = torch.arange(14.0).view(7, 2)
    rows = distributed.spread(7, lambda some: {"double": 2 * table[some], "bytes": table[some].to(torch.uint8)})
    few = distributed.spread(2, lambda some: table[some])  # the process without a share has none to add
    used, idle, here = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    used.grad = torch.full((2,), 10.0**rank)
    if rank == 1:
        here.grad = torch.ones(2)
    total = distributed.add_up([used, idle, here], rank, 0.5)
    return {
        "share": distributed.share(7),
        "rows": {name: value.tolist() for name, value in rows.items()},
        "few": few.tolist(),
        "grads": [None if p.grad is None else p.grad.tolist() for p in (used, idle, here)],
        "total": total,
        "any": [distributed.any_of(rank == 2), distributed.any_of(False)],
        "main": distributed.from_main(lambda: f"from {distributed.rank()}"),
        "device": str(distributed.device()),
    }


def test_every_process_has_everything() -> None:
    first, *others = side_by_side(3, pieces)
    assert isinstance(first, dict), first
    # 7 = 2 + 2 + 3; sums: 1 + 10 + 100, nobody's, one process's; 0 + 1 + 2 and three halves
    assert [found["share"] for found in (first, *others)] == [slice(0, 2), slice(2, 4), slice(4, 7)]
    assert first["rows"] == {
        "double": [[4.0 * i, 4.0 * i + 2] for i in range(7)],
        "bytes": [[2 * i, 2 * i + 1] for i in range(7)],
    }
    assert first["few"] == [[0, 1], [2, 3]]
    assert first["grads"] == [[111, 111], None, [1, 1]] and first["total"] == (3, 1.5)
    assert first["any"] == [True, False] and first["main"] == "from 0" and first["device"] == "cpu"
    assert all({**found, "share": None} == {**first, "share": None} for found in others)


class Stubborn(Exception):
    """Cannot be unpickled: its __init__ wants two arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def fails(error: Exception) -> None:
    raise error


def one_fails(kind: str) -> None:
    if kind == "own":
        distributed.alike(lambda: fails(ValueError("a NaN here")) if distributed.rank() == 1 else None)
    elif kind == "main":
        distributed.from_main(lambda: fails(FileNotFoundError("no such run")))
    else:
        distributed.from_main(lambda: fails(Stubborn("it", "won't")))


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("own", "ValueError", "a NaN here"),
        ("main", "FileNotFoundError", "no such run"),
        ("odd", "RuntimeError", "Stubborn: it: won't"),
    ],
)
def test_an_error_in_one_is_raised_in_all(kind: str, name: str, text: str) -> None:
    found = side_by_side(2, one_fails, kind)
    assert all(isinstance(error, Raised) and (error.kind, error.text) == (name, text) for error in found), found


def test_alone_everything_is_the_identity() -> None:
    table, parameter = torch.rand(3, 2), torch.nn.Parameter(torch.zeros(2))
    assert (distributed.count(), distributed.rank(), distributed.is_main(), distributed.device()) == (1, 0, True, None)
    assert distributed.share(7) == slice(0, 7) and distributed.joined(table, 3) is table
    assert distributed.spread(3, lambda some: table if some == slice(0, 3) else table[:0]) is table
    assert distributed.add_up([parameter], 1.25) == (1.25,) and parameter.grad is None
    assert distributed.any_of(True) and not distributed.any_of(False)
    assert distributed.alike(lambda: 1) == distributed.from_main(lambda: 1) == 1
    with pytest.raises(ValueError, match="mine"):
        distributed.alike(lambda: fails(ValueError("mine")))


def test_alone_nothing_is_imported() -> None:
    code = "import sys; from cgru import distributed as p; p.from_main(int); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("n", [0, 1, 5, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_everything_once(monkeypatch: pytest.MonkeyPatch, n: int, count: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(count))
    assert distributed.count() == 1, "left over, without a launcher"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    parts = [list(range(n))[distributed.share(n, of)] for of in range(count)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_another_process_than_the_main_one_speaks_if_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher ends all processes as soon as one has failed: who is still there was the only one."""
    waited = list[float]()
    monkeypatch.setattr(distributed.time, "sleep", waited.append)
    assert fail("no room") == 2
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert fail("no room\nhere") == 2
    assert capsys.readouterr().err == "cgru: no room\ncgru, process 1: no room here\n" and waited == [distributed.GRACE]
