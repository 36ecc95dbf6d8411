"""One run by two processes: one folder, the same edit as one alone makes, stopped and resumed together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import own_pipeline
import pytest
import torch
from safetensors.torch import load
from side_by_side import Raised, side_by_side
from test_survival import config_of, edit, only_run, uninterrupted  # noqa: F401 - a fixture

from cgru import distributed
from cgru.backbones.base import Backbone
from cgru.config import RLConfig, from_dict, to_dict
from cgru.pipeline import resume, unlearn
from cgru.rl import batch_size as sizes_module
from cgru.rl import build
from cgru.rl.state import Sizes
from cgru.runs import Run, read_metrics

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
# --multi_gpu is accelerate's word for torchrun, also without a GPU; its --cpu starts one process only.
LAUNCH += ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]

EMBEDDED = (
    "policy.iterations=2 policy.trajectories=4 critic.trajectories=4 critic.epochs=1 "
    "critic.online_updates=1 sampling.steps=2 prompts.count=4 prompts.retain=4 prompts.critic=4 prompts.validation=2 "
    "watch.every=2 retention.bank=2 retention.batch=4 samples_every=2"
).split()


def run_pair(config: RLConfig, out: Path, *, interrupted: int = -1, reward_calls: int = 0) -> list[object]:
    return side_by_side(2, one_of_a_pair, to_dict(config), str(out), interrupted, reward_calls)


def one_of_a_pair(table: dict[str, object], out: str, interrupted: int, reward_calls: int) -> int:
    """Records that this process heard of; process `interrupted` hears Ctrl-C at its n-th reward."""
    if distributed.rank() == interrupted:
        assert threading.current_thread() is threading.main_thread()
        own_pipeline.COUNTDOWN.kind, own_pipeline.COUNTDOWN.left = "reward", reward_calls
        own_pipeline.COUNTDOWN.signal = signal.SIGINT
    heard = list[object]()
    unlearn(from_dict(table), out, listeners=(heard.append,))
    return len(heard)


def resumed(path: str) -> str:
    return str(resume(path, code=["own_pipeline"]).path)


def is_same_edit(one: Run, other: Run) -> bool:
    """What was learned (B starts at 0) differs by 1 % at most.

    AdamW makes steps of one size even of tiny gradients, so rounding shows where there is hardly any.
    tests/rl/test_sharded.py compares the gradients themselves, to 1e-5.
    """
    found, expected = (
        torch.cat([value.flatten() for name, value in sorted(load(edit(run)).items()) if "lora_B" in name])
        for run in (one, other)
    )
    return float((found - expected).norm() / expected.norm()) < 0.01


@pytest.fixture(scope="module")
def pair(sd_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("pair")
    assert run_pair(config_of(sd_folder), out) == [3, 0], "the main process tells of 3 iterations, the other of none"
    return only_run(out)


def test_two_processes_make_one_run(pair: Run, uninterrupted: Run) -> None:  # noqa: F811
    assert pair.path.name == uninterrupted.path.name, "the number of processes is no part of the config"
    files = [{str(path.relative_to(run.path)) for path in run.path.rglob("*")} for run in (pair, uninterrupted)]
    assert files[0] == files[1]
    assert [record["iteration"] for record in read_metrics(pair.path / "metrics.jsonl")] == [0, 1, 2]
    there, here = (run.manifest["extra"] for run in (pair, uninterrupted))
    assert (there.pop("sized_for"), here.pop("sized_for")) == (
        {"device": "cpu", "processes": 2},
        {"device": "cpu", "processes": 1},
    )
    assert there == here
    assert is_same_edit(pair, uninterrupted)


def test_the_same_pair_again_does_nothing(sd_folder: Path, pair: Run) -> None:
    before = edit(pair)
    assert run_pair(config_of(sd_folder), pair.path.parent) == [0, 0]
    assert edit(pair) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_in_one_stops_both_and_any_number_goes_on(sd_folder: Path, tmp_path: Path, pair: Run, rank: int) -> None:
    # Rewards: one in the warm start, then one an iteration; so this is in iteration 1, the second.
    found = run_pair(config_of(sd_folder), tmp_path, interrupted=rank, reward_calls=3)
    assert all(isinstance(error, Raised) and error.kind == "Interrupted" for error in found), found
    run = only_run(tmp_path)
    latest = run.latest("3-policy")
    assert latest is not None and latest[0] == 2
    if rank == 0:
        assert side_by_side(2, resumed, str(run.path)) == [str(run.path)] * 2
        assert edit(run) == edit(pair), "as many processes as before end in the same bytes"
    else:
        resume(run.path, code=["own_pipeline"])  # one alone
        assert is_same_edit(run, pair)
    assert len(read_metrics(run.path / "metrics.jsonl")) == 3


def test_what_one_began_two_go_on_with(sd_folder: Path, tmp_path: Path, pair: Run) -> None:
    (found,) = side_by_side(1, one_of_a_pair, to_dict(config_of(sd_folder)), str(tmp_path), 0, 3)
    assert isinstance(found, Raised) and found.kind == "Interrupted", found
    run = only_run(tmp_path)
    assert side_by_side(2, resumed, str(run.path)) == [str(run.path)] * 2
    assert is_same_edit(run, pair) and len(read_metrics(run.path / "metrics.jsonl")) == 3
    assert run.manifest["extra"]["sized_for"] == {"device": "cpu", "processes": 2}


def of_other_sizes(table: dict[str, object], out: str) -> Sizes:
    """The second process finds fewer pairs, as on a device with less memory; what it then computes with."""
    found = list[Sizes]()

    def sized(config: RLConfig, backbone: Backbone, sizes: Sizes | None = None) -> tuple[Backbone, Sizes]:
        fewer = Sizes(64, 2, 64, 256) if distributed.rank() and sizes is None else sizes
        backbone, now = sizes_module.sized(config, backbone, fewer)
        found.append(now)
        return backbone, now

    build.sized = sized  # in a process of its own
    unlearn(from_dict(table), out)
    return found[-1]


def test_all_take_the_sizes_of_the_main_process(sd_folder: Path, tmp_path: Path, pair: Run) -> None:
    config = config_of(sd_folder)
    assert side_by_side(2, of_other_sizes, to_dict(config), str(tmp_path)) == [Sizes(64, 64, 64, 256)] * 2
    assert edit(only_run(tmp_path)) == edit(pair)


def test_a_held_run_refuses_both(sd_folder: Path, pair: Run) -> None:
    with pair.locked():
        found = run_pair(config_of(sd_folder), pair.path.parent)
    assert all(isinstance(error, Raised) and "is in use by process" in error.text for error in found), found


def test_more_processes_than_trajectories_are_refused(sd_folder: Path, tmp_path: Path) -> None:
    config = config_of(sd_folder, "policy.updates=1", "policy.trajectories=1")
    for error in run_pair(config, tmp_path / "runs"):
        assert isinstance(error, Raised) and error.kind == "ValueError", error
        assert error.text.startswith("2 processes for 1 trajectories an iteration; allowed: at most 1")
        assert "\n" not in error.text
    assert not (tmp_path / "runs").exists()


def launched(count: int, out: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch -m cgru unlearn Dogs` with processes on the CPU."""
    command = [
        *LAUNCH,
        "--num_processes",
        str(count),
        "-m",
        "cgru",
        "unlearn",
        "Dogs",
        "--out",
        str(out),
        *EMBEDDED,
        *settings,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        told, said = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun's agent then ends its children, which are in groups of their own
            process.wait(60)
    return subprocess.CompletedProcess(command, process.returncode, told, said)


@pytest.mark.slow
def test_accelerate_launches_the_command(tmp_path: Path) -> None:
    done = launched(2, tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    assert done.stdout.splitlines()[-1] == str(run.path) and done.stdout.count("Dogs: reward") == 1
    assert done.stderr.count("iteration 2/2") == 1 and done.stderr.count("parity:") == 1, done.stderr
    alone = unlearn(run.config, tmp_path / "alone")
    rows = [read_metrics(folder.path / "metrics.jsonl") for folder in (run, alone)]
    for key in ("reward/mean", "critic/loss", "policy/gradient_norm", "policy/kl"):
        assert rows[0][0][key] == pytest.approx(rows[1][0][key], rel=1e-4), key
    assert {key for key in rows[0][1] if key.startswith("watch/")} == {key for key in rows[1][1] if "watch/" in key}
    assert "watch/gap" in rows[0][1]


@pytest.mark.slow
def test_the_launched_command_refuses_idle_processes(tmp_path: Path) -> None:
    done = launched(3, tmp_path / "runs", "policy.trajectories=2")
    assert done.stderr.count("cgru: 3 processes for 2 trajectories an iteration") == 1, done.stderr
    assert "exitcode  : 2" in done.stderr and not (tmp_path / "runs").exists()
