"""Doing the cells: what is done is not done again, what fails harms nobody, what is missing is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgru.cli.reproducing import PAGE, write_page
from cgru.experiments.cells import Assault, Cell, Measure
from cgru.experiments.local_runner import Order, attempt, last_line, only_one, read_record, reproduce, reuse

TINY = (
    "critic.trajectories=8",
    "critic.epochs=1",
    "critic.batch=16",
    "prompts.critic=16",
    "sampling.steps=2",
    "sampling.noisy_steps=0",
    "watch.every=0",
)


def critic_cell(kind: str = "film", *more: str) -> Cell:
    return Cell(
        f"critic-{kind}",
        "critic",
        "emoji-canvas",
        "Dogs",
        settings=(*TINY, f"critic.kind={kind}", *more),
        stage="critic",
    )


def fit(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "stages" / "2-critic" / "done.json").read_text())
    return found


def work(out: Path, *cells: Cell, workers: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    told: list[str] = []
    records = reproduce(
        cells, Order(out, "cpu", 1), workers, lambda cell, _: told.append(cell.name), about={"scale": "t"}
    )
    return records, told


def test_a_critic_is_fitted_without_a_policy_and_only_once(tmp_path: Path) -> None:
    cell = critic_cell()
    records, told = work(tmp_path, cell)
    assert told == ["critic-film"]
    run = tmp_path / records[0]["run"]
    assert fit(run)["trajectories"] == 8
    assert not (run / "edit").exists()
    again, told = work(tmp_path, cell)
    assert told == []
    assert again == records


def test_a_failure_is_a_record_and_is_tried_again(tmp_path: Path) -> None:
    bad = replace(critic_cell("plain"), model="no/such/folder-here")
    (failed, good), told = work(tmp_path, bad, critic_cell())
    assert "error" in failed
    assert "error" not in good
    assert told == ["critic-plain", "critic-film"]
    _, told = work(tmp_path, bad, critic_cell())
    assert told == ["critic-plain"]


def speechless(concept: str) -> None:
    """A preset, as a user may pass it, that fails without a word."""
    raise OSError


def test_an_error_without_text_has_a_name(tmp_path: Path) -> None:
    cell = replace(critic_cell(), preset="test_work:speechless")
    assert attempt(cell, Order(tmp_path, "cpu", 1)) == {"error": "OSError"}


@pytest.mark.usefixtures("no_trackers")  # so that asking for it is heard
def test_a_cell_has_the_tracker_of_its_settings(tmp_path: Path) -> None:
    record = attempt(critic_cell("film", "tracker=trackio"), Order(tmp_path, "cpu", 1))
    assert record["error"].startswith("tracker 'trackio' needs the package 'trackio-that-nobody-has'")


@pytest.mark.parametrize("error, last", [("Traceback\n ...\nE: x\n", "E: x"), ("", "an error without text")])
def test_the_last_line_of_any_error(error: str, last: str) -> None:
    assert last_line(error) == last


def test_a_cell_that_lacks_something_is_not_run(tmp_path: Path) -> None:
    (record,), told = work(tmp_path, replace(critic_cell(), missing="a judge"))
    assert record["not_run"] == "a judge"
    assert told == []
    assert not (tmp_path / "runs").exists()


def test_a_second_command_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("cells").mkdir()
    with only_one(tmp_path), pytest.raises(ValueError, match="another cgru command is at work"):
        work(tmp_path, critic_cell())


def test_experiments_of_an_earlier_command_stay_in_the_plan(tmp_path: Path) -> None:
    work(tmp_path, replace(critic_cell(), missing="x"))
    work(tmp_path, replace(critic_cell(), name="ddpo-x", experiment="ddpo", missing="x"))
    rows = json.loads((tmp_path / "plan.json").read_text())["cells"]
    assert [row["experiment"] for row in rows] == ["ddpo", "critic"]


def test_base_pictures_are_reused_only_when_they_are_whole(tmp_path: Path) -> None:
    known, base = tmp_path / "known", tmp_path / "eval" / "base"
    (known / "samples" / "key").mkdir(parents=True)
    (known / "predictions.jsonl").write_text("{}\n")
    reuse(known, base)
    assert not base.exists()  # no scores.json: still at work
    (known / "scores.json").write_text("{}")
    reuse(known, base)
    assert (base / "predictions.jsonl").read_text() == "{}\n"
    assert [path.name for path in base.parent.iterdir()] == ["base"]


def test_a_result_of_another_definition_is_not_taken(tmp_path: Path) -> None:
    cell = critic_cell()
    work(tmp_path, replace(cell, missing="something"))
    assert read_record(tmp_path, cell) is None
    _, told = work(tmp_path, cell)
    assert told == ["critic-film"]


@pytest.mark.slow
def test_two_workers_do_what_one_does(tmp_path: Path) -> None:
    cells = (critic_cell(), critic_cell("plain"))
    alone, _ = work(tmp_path / "one", *cells)
    together, told = work(tmp_path / "two", *cells, workers=2)
    assert sorted(told) == ["critic-film", "critic-plain"]
    for one, two in zip(alone, together, strict=True):
        assert fit(tmp_path / "one" / one["run"]) == fit(tmp_path / "two" / two["run"])


@pytest.mark.slow
def test_a_run_is_trained_measured_beside_the_base_attacked_and_shown(tmp_path: Path) -> None:
    base = Cell("objects-base", "objects", "emoji-canvas", measures=(Measure("canvas", 1),))
    work(tmp_path, base)
    known = tmp_path / "base" / "canvas" / "predictions.jsonl"
    rows = [json.loads(line) | {"mark": True} for line in known.read_text().splitlines()]
    known.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = ("policy.iterations=1", "policy.trajectories=4", "retention.bank=8", "retention.batch=4", *TINY)
    dogs = Cell(
        "objects-dogs-cgru-s0",
        "objects",
        "emoji-canvas",
        "Dogs",
        settings=short,
        measures=(Measure("canvas", 1, "Dogs"),),
        assaults=(Assault("Dogs", 1),),
    )
    (_, record), told = work(tmp_path, base, dogs)
    assert told == ["objects-dogs-cgru-s0"]
    assert "error" not in record, record
    folder = tmp_path / record["evaluations"][0]
    marked = ["mark" in json.loads(line) for line in (folder / "base" / "predictions.jsonl").read_text().splitlines()]
    assert sum(marked) == 160  # the base's pictures are not drawn again; those of the target alone are more
    assert len(marked) == 232
    assert (
        0
        <= json.loads((tmp_path / record["attacks"][0] / "scores.json").read_text())["measurements"]["post_asr"][
            "value"
        ]
        <= 1
    )
    about = {"scale": "t", "model": "emoji-canvas", "command": "cgru reproduce"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | about))
    write_page(tmp_path)
    assert "1 of 1" in (tmp_path / PAGE).read_text()  # the runs behind CGRU's mean
    assert (tmp_path / "figures" / "trade-off.svg").is_file()
