"""Trackers get every record under its iteration, stay off stdout, and never end a run.

TensorBoard is no dependency, so a stand-in for its writer takes what accelerate's real TensorBoardTracker sends and
writes it down as lines of JSON. It must lie on the path before accelerate is imported, hence a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cgru.config import RLConfig
from cgru.pipeline import unlearn
from cgru.pipeline.trackers import check_tracker, tracking
from cgru.presets import resolve_config

WRITER = """
import json
from pathlib import Path

class SummaryWriter:
    def __init__(self, folder, **options):
        self.file = Path(folder) / "lines.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.note("open", options)
        print("welcome")

    def note(self, *values):
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\\n")

    def add_hparams(self, values, metric_dict):
        self.note("config", values)

    def add_scalar(self, key, value, global_step):
        if key == "full":
            raise OSError("no space\\nleft")
        self.note("scalar", key, value, global_step)

    def add_text(self, key, value, global_step):
        self.note("text", key, value, global_step)

    def flush(self):
        pass

    def close(self):
        self.note("close")
"""
CHILD = """
import json, logging, sys
from cgru.pipeline.trackers import tracking
from cgru.config import RLConfig

logging.basicConfig(format="%(message)s")
with tracking(RLConfig("Dogs", tracker="tensorboard"), sys.argv[1]) as listeners:
    for record in json.loads(sys.argv[2]):
        for listener in listeners:
            listener(record)
print("the result")
"""


def track(folder: Path, records: list[dict[str, Any]]) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """What the process said, and what the tracker was sent."""
    package = folder / "path" / "tensorboardX"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(WRITER)
    info = folder / "path" / "tensorboardX-1.0.dist-info"  # accelerate takes no package without
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorboardX\nVersion: 1.0\n")
    path = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder / "runs"), json.dumps(records)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    (lines,) = (folder / "runs").glob("dogs-*/cgru/lines.jsonl")
    return done, [json.loads(line) for line in lines.read_text().splitlines()]


def test_every_number_and_text_arrives_under_its_iteration(tmp_path: Path) -> None:
    records = [{"iteration": 4, "reward/mean": 2.5}, {"iteration": 5, "reward/mean": 3.0, "watch/alarm": "fooled"}]
    done, lines = track(tmp_path, records)
    # a resumed run begins at 4: what was logged of 4 and after by a process that was killed is purged
    assert lines[0] == ["open", {"purge_step": 4}]
    assert lines[1][0] == "config" and lines[1][1]["concept"] == "Dogs" and lines[1][1]["reward.networks"] == "['clip']"
    assert lines[2:] == [
        ["scalar", "reward/mean", 2.5, 4],
        ["scalar", "reward/mean", 3.0, 5],
        ["text", "watch/alarm", "fooled", 5],
        ["close"],
    ]
    assert done.stdout == "the result\n" and "welcome" in done.stderr


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    done, lines = track(tmp_path, [{"iteration": 0, "full": 1.0}, {"iteration": 1, "reward/mean": 3.0}])
    assert [line[0] for line in lines] == ["open", "config", "close"]
    told = "tracker 'tensorboard' failed (OSError: no space left); the run goes on without it"
    assert done.stderr.count(told) == 1 and done.stdout == "the result\n"


def test_no_tracker_no_listener(tmp_path: Path) -> None:
    with tracking(RLConfig("Dogs"), tmp_path) as listeners:
        assert listeners == ()


@pytest.mark.usefixtures("no_trackers")
def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "trackio-that-nobody-has"
    (tmp_path / name).mkdir()  # can be imported, but is no package; accelerate would leave it out without a word
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"tracker 'trackio' needs the package '{name}'.*`pip install {name}`"):
        check_tracker("trackio")


@pytest.mark.usefixtures("no_trackers")
def test_it_stops_a_run_before_it_has_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tracker 'wandb' needs the package"):
        unlearn(resolve_config("Dogs", method="sld", overrides=["tracker=wandb"]), tmp_path)
    assert not list(tmp_path.iterdir())
