"""Slow tiers: the embedded model under its judges, learning and kill -9 on it, the commands from an installed wheel."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cgru.backbones import load_model
from cgru.config import RLConfig, dump, override
from cgru.edits import load_edit
from cgru.evaluation.drawing import draw
from cgru.pipeline import unlearn
from cgru.tasks import Sampling

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def cgru(*words: str, site: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line; with `site`, the package comes from there and not from the checkout."""
    # One thread, as for other tests: there is one of them on every core.
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(site)} if site else {})
    command = [sys.executable, "-m", "cgru", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_judges_recognise_what_emoji_canvas_draws(tmp_path: Path) -> None:
    done = cgru("evaluate", "emoji-canvas", "--images", "1", "--out", "eval", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # No progress bars when piped, not even the libraries' own; on a slow machine a line of progress now and then.
    assert all(re.fullmatch(r"model: \d+ of 160", line) for line in done.stderr.splitlines()), done.stderr
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
    """Dark pictures pay: DDPO's advantage, 3 steps, 40 iterations of 12. Then pictures of the same noise are darker.

    As measured by 0.19 on average, and each of 24; with rewards that belong to other pictures by 0.02.
    """
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "pipeline"))
    settings = ["policy.iterations=40", "policy.trajectories=12", "critic.kind=none", "policy.advantage=batch",
                "sampling.steps=3", "prompts.count=8", "prompts.retain=0", "watch.every=0", "samples_every=0",
                "policy.learning_rate=3e-3", "policy.clip=1e-2", "policy.step_weights=balanced",
                "reward.name=own_pipeline:darkness"]  # fmt: skip
    run = unlearn(override(RLConfig(concept="dogs"), settings), tmp_path)
    backbone = load_model("emoji-canvas", device="cpu")
    asked = [["a dog", "two dogs", "a puppy", "a poodle"] * 6, list(range(24)), Sampling(3, 3.0, 1.0)]
    before = draw(backbone, *asked)
    with load_edit(run.path).applied(backbone) as edited:
        darker = (before - draw(edited, *asked)).mean((1, 2, 3))
    assert float(darker.mean()) > 0.1 and int((darker > 0).sum()) >= 22


def test_a_concept_is_trained_away_until_the_judges_miss_it(tmp_path: Path) -> None:
    """ESD in 150 steps of Adam: horses are hardly found any more, and nearly all of the rest still is.

    As measured UA 0.95 and IRA 0.95, in 75 seconds of one core for the training and as many for the pictures.
    """
    settings = ["negative_guidance=3", "learning_rate=1e-4", "iterations=150"]
    done = cgru("unlearn", "Horses", "--method", "esd", "--device", "cpu", "--out", "runs", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = done.stdout.splitlines()[-1]
    options = ["--target", "Horses", "--images", "1", "--no-base", "--device", "cpu", "--json"]
    done = cgru("evaluate", run, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measurements"]
    assert found["ua"]["n"] == 80 and found["ua"]["value"] >= 0.9
    assert found["ira"]["n"] == 152 and found["ira"]["value"] >= 0.8
    assert found["target_nothing_share"]["value"] <= 0.1  # something else is drawn


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
    file.write_text(dump(override(RLConfig(concept="dogs"), settings)))
    whole = start(file, tmp_path / "whole", 99, signal.SIGKILL, 0)
    killed = [start(file, tmp_path / "cut", line, signal.SIGKILL, wait) for line, wait in ((0, 0), (1, 0.7))]
    stopped = start(file, tmp_path / "cut", 2, signal.SIGINT, 0.5)
    assert (whole, killed, stopped) == (0, [-signal.SIGKILL] * 2, 0)  # Ctrl-C in the last iteration lets it finish
    edits = [next((tmp_path / name).glob("*/edit/*.safetensors")).read_bytes() for name in ("whole", "cut")]
    assert edits[0] == edits[1]
