"""Slow tiers: the embedded model under its judges, learning and kill -9 on it, the commands from an installed wheel."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cgru.config import RunConfig, dump, override
from cgru.pipeline import unlearn
from cgru.runs import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def cgru(*words: str, site: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line; with `site`, the package comes from there and not from the checkout."""
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    command = [sys.executable, "-m", "cgru", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_judges_recognise_what_emoji_canvas_draws(tmp_path: Path) -> None:
    done = cgru("evaluate", "emoji-canvas", "--images", "1", "--out", "eval", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # quiet when piped: no progress bars, not even the libraries' own
    found = json.loads(done.stdout)["measurements"]
    assert found["object_accuracy"]["value"] >= 0.96
    assert found["style_accuracy"]["value"] >= 0.85
    assert found["nothing_share"]["value"] <= 0.02
    assert found["object_accuracy"]["n"] == 160


def test_a_target_gets_eighty_pictures_and_the_base_forgets_nothing(tmp_path: Path) -> None:
    """UA of the untouched model is the benchmark's floor: its own error on Dogs."""
    done = cgru(
        "evaluate", "emoji-canvas", "--images", "1", "--target", "dogs", "--out", "eval", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measurements"]
    assert found["ua"]["n"] == 80
    assert found["ua"]["value"] <= 0.1 and found["ira"]["value"] >= 0.95
    assert found["target_nothing_share"]["value"] <= 0.02


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a user gets it: built into a wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    wheel = next(folder.glob("cgru-*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_every_command_works_from_a_wheel(site: Path, tmp_path: Path) -> None:
    where = subprocess.run([sys.executable, "-c", "import cgru; print(cgru.__file__)"], capture_output=True, text=True,
                           env=os.environ | {"PYTHONPATH": str(site)}, cwd=tmp_path)  # fmt: skip
    assert where.stdout.startswith(str(site)), where.stdout
    health = cgru("doctor", "--json", site=site, cwd=tmp_path)
    assert health.returncode == 0 and json.loads(health.stdout)["assets"]["state"] == "ok", health.stdout
    assert "Dogs" in cgru("list", "classes", site=site, cwd=tmp_path).stdout.splitlines()
    drawn = cgru("generate", "a frog", "--steps", "2", "--out", "frog.png", site=site, cwd=tmp_path)
    assert drawn.returncode == 0 and (tmp_path / "frog.png").stat().st_size > 1000, drawn.stderr
    wrong = cgru("evaluate", "emoji-canvs", site=site, cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def test_an_easy_reward_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dark pictures pay: DDPO's advantage, 3 steps, 14 iterations of 12. As measured 0.23 at first, 0.29 at the end."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "pipeline"))
    settings = ["policy.iterations=14", "policy.trajectories=12", "critic.kind=none", "policy.advantage=batch",
                "sampling.steps=3", "prompts.count=8", "prompts.retain=0", "watch.every=0", "samples_every=0",
                "policy.learning_rate=3e-3", "policy.clip=1e-2", "policy.step_weights=balanced",
                "reward.name=own_pipeline:darkness"]  # fmt: skip
    run = unlearn(override(RunConfig(concept="dogs"), settings), tmp_path)
    rewards = [float(record["reward/mean"] or 0) for record in read_metrics(run.path / "metrics.jsonl")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.03, rewards


KILLED = """
import sys, torch
from cgru.config import load
from cgru.pipeline import Interrupted, unlearn
torch.set_num_threads(1)
try:
    unlearn(load(sys.argv[1]), sys.argv[2], listeners=(lambda r: print("iteration", r["iteration"], flush=True),))
except Interrupted:
    sys.exit(3)
"""


def start(config: Path, out: Path, line: int, number: int, wait: float) -> int:
    """Run in a process of its own; `wait` seconds after its log line, send it a signal. Returns the exit code."""
    command = [sys.executable, "-c", KILLED, str(config), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.split() == ["iteration", str(line)]:
                time.sleep(wait)
                process.send_signal(number)
                break
        return process.wait(120)


def test_kill_9_and_ctrl_c_on_emoji_canvas_end_in_the_same_bytes(tmp_path: Path) -> None:
    settings = ["policy.iterations=4", "policy.trajectories=4", "critic.trajectories=4", "sampling.steps=2",
                "checkpoint_every=1", "prompts.count=4", "prompts.retain=4", "prompts.critic=4", "watch.every=1",
                "prompts.validation=2", "retention.kl=0.1", "retention.bank=4", "retention.batch=4"]  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(dump(override(RunConfig(concept="dogs"), settings)))
    whole = start(file, tmp_path / "whole", 99, signal.SIGKILL, 0)
    killed = [start(file, tmp_path / "cut", line, signal.SIGKILL, wait) for line, wait in ((0, 0), (1, 0.7))]
    stopped = start(file, tmp_path / "cut", 2, signal.SIGINT, 0.5)
    assert (whole, killed, stopped) == (0, [-signal.SIGKILL] * 2, 0)  # Ctrl-C in the last iteration lets it finish
    edits = [next((tmp_path / name).glob("*/edit/*.safetensors")).read_bytes() for name in ("whole", "cut")]
    assert edits[0] == edits[1]
