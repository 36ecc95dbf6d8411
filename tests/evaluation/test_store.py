"""Files that are whole or absent, and predictions that survive a kill."""

from pathlib import Path

import numpy as np
import pytest
from mishaps import file_size_limit

from cgru.atomic_io import atomic_write
from cgru.evaluation.store import (
    PredictionFile,
    check_contents,
    check_writable,
    pack,
    scores_pending,
    unpack,
)


def row(name: str, key: str = "k") -> dict[str, str]:
    return {"id": name, "key": key}


def test_features_survive_to_the_bit() -> None:
    features = np.random.default_rng(0).normal(size=7).astype(np.float32)
    np.testing.assert_array_equal(unpack(pack(features)), features)


def test_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a.json", "one")
    atomic_write(tmp_path / "a.json", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "two"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a.json", "one")
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        atomic_write(tmp_path / "a.json", "two" * 10)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "one"


def test_scores_are_absent_while_work_is_under_way_and_after_a_failure(tmp_path: Path) -> None:
    scores, previous = tmp_path / "scores.json", tmp_path / "scores.previous.json"
    scores.write_text("old")
    with pytest.raises(OSError, match="full"), scores_pending(tmp_path):
        assert not scores.exists()
        raise OSError("full")
    assert not scores.exists()
    assert previous.read_text() == "old"
    with scores_pending(tmp_path):
        scores.write_text("new")
    assert scores.read_text() == "new"
    assert not previous.exists()


def test_rows_of_another_key_are_passed_over(tmp_path: Path) -> None:
    PredictionFile(tmp_path, "old").append([row("a", "old")])
    file = PredictionFile(tmp_path, "k")
    file.append([row("b")])
    assert set(file.read()) == {"b"}


def test_a_line_cut_off_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    file = PredictionFile(tmp_path, "k")
    file.append([row("a")])
    with file.partial.open("a") as half:
        half.write('{"id": "b", "ke')
    assert set(file.read()) == {"a"}
    file.append([row("c")])
    assert set(file.read()) == {"a", "c"}


def test_finish_replaces_the_partial_file(tmp_path: Path) -> None:
    file = PredictionFile(tmp_path, "k")
    file.append([row("a")])
    file.finish([row("a")])
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"]
    assert set(file.read()) == {"a"}


@pytest.mark.parametrize("text", ['{"id": 1}\n', "[1]\n", "some notes\n", "\xff"])
def test_a_file_of_someone_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"predictions.jsonl.*not a prediction of cgru; allowed: .* Choose another --out"
    ):
        check_contents(tmp_path)


@pytest.mark.parametrize("name", ["samples", "base", "scores.json", "jobs.jsonl", "predictions.jsonl", "grid.png"])
def test_what_is_in_the_way_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("") if "." not in name else (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}' is a .* Choose another --out"):
        check_contents(tmp_path)


def test_checking_a_folder_makes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["file/below", "/proc/cgru-cannot-write-here"])
def test_unwritable_folders_are_refused(folder: str, tmp_path: Path) -> None:
    # Tests may run as root, whom no permission bit stops: a file in the way and a virtual file system do.
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="Choose another --out"):
        check_writable(tmp_path / folder)
