"""An evaluation and an attack by two processes: the files of one alone, and any number goes on after a stop."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from side_by_side import Raised, side_by_side
from test_edits import write_lora

from cgru import distributed
from cgru.attacks.session import AttackRequest, prepare_attack, run_attack
from cgru.evaluation.request import Request
from cgru.evaluation.session import prepare, run


@pytest.fixture(scope="module")
def lora(asset_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_lora(asset_root / "emoji-canvas", tmp_path_factory.mktemp("lora")))


def evaluated(request: Request, stops_at: int = -1) -> tuple[dict[str, Any], int]:
    """Scores, and how many batches this process drew; process 1 stops after some pictures."""
    calls: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        calls.append(done)
        if distributed.rank() == 1 and len(calls) == stops_at:
            raise OSError("no space left")

    return run(prepare(request), progress), len(calls)


def attacked(request: AttackRequest) -> dict[str, Any]:
    return run_attack(prepare_attack(request))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def is_same(one: Path, other: Path) -> bool:
    """The same files and scores; probabilities may differ by rounding, since batches are of other sizes."""
    assert files(one) == files(other)
    for place in (".", "base"):
        assert (one / place / "jobs.jsonl").read_bytes() == (other / place / "jobs.jsonl").read_bytes()
        for a, b in zip(rows(one / place), rows(other / place), strict=True):
            assert (a["id"], a["key"], a["judged"]) == (b["id"], b["key"], b["judged"])
            assert a["probabilities"]["object"] == pytest.approx(b["probabilities"]["object"], abs=1e-4)
    found, expected = (json.loads((folder / "scores.json").read_text()) for folder in (one, other))
    for name, measured in expected["measurements"].items():
        # frechet_judge is made of the features themselves; the others of counts and probabilities
        assert found["measurements"][name]["value"] == pytest.approx(measured["value"], rel=1e-3, abs=1e-4), name
    return bool(found["confusion"] == expected["confusion"] and found["protocol"] == expected["protocol"])


def test_two_processes_write_what_one_writes(lora: str, asset_root: Path, tmp_path: Path) -> None:
    # 12 jobs in batches of 3: two each.
    request = Request(lora, images=2, out=tmp_path / "pair", root=asset_root, batch_size=3)
    (main, calls), (other, more) = side_by_side(2, evaluated, request)
    assert main == other and calls == more == 2 * (1 + 2)  # base and model: one report at the start, one a batch
    alone = replace(request, out=tmp_path / "alone")
    evaluated(alone)
    assert is_same(tmp_path / "pair", tmp_path / "alone")


def test_stopped_in_one_all_stop_and_one_alone_goes_on(lora: str, asset_root: Path, tmp_path: Path) -> None:
    request = Request(lora, images=2, out=tmp_path / "out", root=asset_root, batch_size=1)
    # Of the base's 12 pictures the main process draws its 6, the other 3 before its disk is full.
    stopped = side_by_side(2, evaluated, request, 4)
    assert all(isinstance(error, Raised) and error.text == "no space left" for error in stopped), stopped
    assert not (tmp_path / "out" / "scores.json").exists()
    parts = sorted(path.name for path in (tmp_path / "out" / "base").glob("predictions.partial*"))
    assert parts == ["predictions.partial-1.jsonl", "predictions.partial.jsonl"]
    seen: list[int] = []
    run(prepare(request), lambda what, done, total: seen.append(done))
    assert seen[0] == 9 and not list((tmp_path / "out" / "base").glob("predictions.partial*"))
    evaluated(replace(request, out=tmp_path / "alone"))
    assert is_same(tmp_path / "out", tmp_path / "alone")


def test_a_mistake_is_told_by_all(asset_root: Path, tmp_path: Path) -> None:
    request = Request("emoji-canvas", target="Dgs", out=tmp_path / "out", root=asset_root)
    for error in side_by_side(2, evaluated, request):
        assert isinstance(error, Raised) and error.kind == "ValueError" and "Dogs" in error.text
    assert not (tmp_path / "out").exists()


def test_an_attack_by_two_is_that_of_one(sd_folder: Path, asset_root: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\nthe cat\n")
    request = AttackRequest(
        str(sd_folder),
        "cat",
        prompts=2,
        tokens=2,
        source=tmp_path / "prompts.txt",
        judge="own_judges:fickle",
        base=str(sd_folder),
        out=tmp_path / "pair",
        batch_size=1,
        root=asset_root,
    )
    main, other = side_by_side(2, attacked, request)
    alone = attacked(replace(request, out=tmp_path / "alone"))
    # Chunks are the same whoever attacks them, so every bit is.
    assert main == other == alone and files(tmp_path / "pair") == files(tmp_path / "alone")
    assert rows(tmp_path / "pair") == rows(tmp_path / "alone") and alone["protocol"]["targets"]["found"] > 0
