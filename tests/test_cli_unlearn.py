"""`cgru unlearn`, `resume`, `export` and `cgru.unlearn` end to end on Emoji Canvas at tiny settings."""

import contextlib
import json
import os
import pickle
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mishaps import interruptible
from PIL import Image
from rich.console import Console
from tiny_assets import write_assets

import cgru
from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.cli import main
from cgru.cli.parse import gathered
from cgru.cli.progress_run import Progress, duration, following, line
from cgru.cli.training import outcome, tell_plan
from cgru.config import RLConfig, load, override
from cgru.edits import load_edit
from cgru.pipeline import unlearn, unlearning
from cgru.presets import resolve_config
from cgru.rl.estimate import Work, stages
from cgru.runs import Run, read_metrics

TINY = (
    "policy.iterations=2 policy.trajectories=4 critic.trajectories=4 critic.epochs=1 critic.online_updates=1 "
    "sampling.steps=2 prompts.count=4 prompts.retain=4 prompts.critic=4 watch.every=0 "
    "retention.bank=2 retention.batch=4 samples_every=0"
).split()
LOOKS = ["samples_every=2", "watch.every=2", "prompts.validation=2"]


class Broken:
    """A reward that has lost its numbers."""

    low, high = 0.0, 1.0
    lineage: Mapping[str, Any] = {"name": "broken", "weights": [], "started_from": []}

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return torch.full((len(images),), torch.nan)


BROKEN = Broken()


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path) -> Iterator[Path]:
    """Commands write under the current folder by default."""
    (tmp_path / "work").mkdir()
    with contextlib.chdir(tmp_path / "work"):
        yield tmp_path / "work"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run; read only."""
    return unlearn(resolve_config("Dogs", overrides=TINY), tmp_path_factory.mktemp("runs"))


def test_a_run_from_the_command_line_ends_with_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = list[str]()

    def loading(name: str, **settings: Any) -> Backbone:  # noqa: ANN401
        loads.append(name)
        return load_model(name, **settings)

    monkeypatch.setattr(unlearning, "load_model", loading)
    assert main(["unlearn", "dogs", *TINY, "--out", "here", *LOOKS, "--seed", "5"]) == 0
    captured = capsys.readouterr()
    folder = Path(captured.out.splitlines()[-1])
    assert folder.parent == Path("here")
    assert folder.name.startswith("dogs-anchored-s5-")
    load_edit(folder)
    assert loads == ["emoji-canvas"], "a model is loaded once, however large"
    assert load(folder / "config.yaml").policy.iterations == 2
    assert "outside detector: concept in" in captured.out
    # Piped: a line for each of these few iterations, and what the log says.
    assert "parity: max |ratio - 1|" in captured.err
    assert "iteration 1/2, reward" in captured.err
    assert "iteration 2/2, reward" in captured.err
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["0000.png", "0002.png"]


@pytest.mark.parametrize("method", ["ddpo", "dpok"])
def test_json_is_one_document(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unlearn", "Dogs", *TINY, "policy.iterations=1", "--method", method, "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert captured.err == ""
    assert record["method"] == method
    assert Path(record["edit"], "pytorch_lora_weights.safetensors").is_file()
    assert Path(record["run"]).parent == Path("runs")
    assert record["iterations"] == 1


def test_the_same_from_python(run: Run) -> None:
    again = cgru.unlearn("Dogs", out="other", overrides=TINY)
    assert again.path.name == run.path.name
    name = "edit/pytorch_lora_weights.safetensors"
    assert (again.path / name).read_bytes() == (run.path / name).read_bytes()


def test_a_finished_run_has_nothing_left_to_do(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run.path / "metrics.jsonl").read_bytes()
    assert main(["resume", str(run.path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == str(run.path)
    assert "nothing left to do" in captured.err
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_resume_goes_on_to_the_same_weights(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unlearn(resolve_config("Dogs", overrides=[*TINY, "checkpoint_every=1"]), "cut", listeners=(stop,))
    assert main(["resume", f"cut/{run.path.name}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iterations"] == 2
    name = "edit/pytorch_lora_weights.safetensors"
    assert Path("cut", run.path.name, name).read_bytes() == (run.path / name).read_bytes()


def test_ctrl_c_says_how_to_go_on(workdir: Path) -> None:
    command = [sys.executable, "-m", "cgru", "unlearn", "Dogs", *TINY, "policy.iterations=5000", "--out", "cut"]
    process = interruptible(command)
    deadline = time.monotonic() + 90
    while not list(workdir.glob("cut/*/stages/3-policy/checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    folder = next(Path("cut").iterdir())
    assert err.splitlines()[-1] == f"cgru: interrupted. Continue with: cgru resume {folder}"
    found = Run.open(folder).latest("3-policy")
    assert found is not None
    assert found[0] == len(read_metrics(folder / "metrics.jsonl"))  # saved after the iteration it was in


def test_a_reward_that_breaks_its_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    place = "my runs; touch x"
    assert main(["unlearn", "Dogs", *TINY, f"reward.name={__name__}:BROKEN", "--json", "--out", place]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("cgru: reward 'broken' returned NaN")
    command = shlex.split(message.partition("Continue with: ")[2])  # as a shell reads it
    assert command == ["cgru", "resume", str(next(Path(place).iterdir())), "--code", f"{__name__}:BROKEN"]


CODE = """from cgru.config import RunConfig
from cgru.edits import HookEdit
from cgru.method import Method

def run(backbone, task, config, run):
    run.log({record})
    {then}
    return HookEdit("mine:hook", {{}})

METHOD = Method(config=RunConfig, run=run)
"""


@pytest.fixture
def mine(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a user's own method is written."""
    monkeypatch.syspath_prepend(workdir)
    yield workdir / "mine.py"
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"iteration": 0, "loss": "high"}, "cannot show 'loss' = 'high'; allowed: a number"),
        ({"iteration": "first"}, "cannot show 'iteration' = 'first'; allowed: a number"),
        ({"iteration": 0, "watch/keep_share": None}, "cannot show 'watch/keep_share' = None; allowed: a number"),
    ],
)
def test_a_method_that_logs_no_number_is_named_the_key(
    record: dict[str, Any], said: str, options: list[str], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(CODE.format(record=record, then=""), encoding="utf-8")
    assert main(["unlearn", "Dogs", "--method", "mine:METHOD", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"cgru: {said}") and told.count("\n") == 1


def test_a_text_that_was_logged_as_a_loss_does_not_spoil_the_outcome(tmp_path: Path) -> None:
    run = Run.create(tmp_path, RLConfig(concept="Dogs"))
    for loss in ("high", 0.5, 0.25):
        run.log({"iteration": 0, "loss": loss})
    assert outcome(run)["loss"] == [0.5, 0.25]


def test_a_very_long_value_is_cut_in_the_reason_for_a_stop(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine.write_text(CODE.format(record={"loss": 1}, then="raise ValueError(f'seed {10 ** 400} is too high')"))
    assert main(["unlearn", "Dogs", "--method", "mine:METHOD"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"cgru: seed {10**199} ... is too high. Continue with: cgru resume runs/dogs-")


class Touch:
    """What a pickle does that runs code when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_a_stranger_s_optimiser_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record.get("iteration") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unlearn(resolve_config("Dogs", overrides=[*TINY, "checkpoint_every=1"]), "cut", listeners=(stop,))
    (file,) = workdir.glob("cut/*/stages/3-policy/checkpoint-*/optimiser.pt")
    size = file.stat().st_size
    file.write_bytes(pickle.dumps(Touch()).ljust(size, b"\0"))  # of the size that checkpoint.json tells
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # Python would print these on stderr
        assert main(["resume", str(next(Path("cut").iterdir())), "--json"]) == 2
    assert [str(each.message) for each in warned] == []
    told = capsys.readouterr().err
    assert "optimiser.pt' (a pickle with more in it than tensors, which is never loaded)" in told
    assert told.count("\n") == 1 and not Path("ran").exists()


class Ending(Broken):
    """A reward that would end the program, as a script does at its end."""

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        sys.exit(3)


ENDING = Ending()


def test_a_reward_that_ends_the_program_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unlearn", "Dogs", *TINY, f"reward.name={__name__}:ENDING", "--json"]) == 2
    assert capsys.readouterr().err == "cgru: code that you named ended the program (exit code 3); correct it.\n"


def test_dry_run_tells_the_plan_and_writes_nothing(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unlearn", "Dogs", *TINY, "--dry-run", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompts"]["policy"]["count"] == 4
    assert record["config"]["policy"]["iterations"] == 2
    assert record["seconds_in_all"] > 0
    assert list(workdir.iterdir()) == []
    tell_plan(Console(width=100), record)
    told = capsys.readouterr().out
    for words in ("Dogs (class) in emoji-canvas", "8 trajectories and 4 updates", "estimate", "GiB", record["run"]):
        assert words in told


def test_the_work_of_a_run_by_hand() -> None:
    settings = "policy.iterations=3 policy.trajectories=4 critic.trajectories=8 critic.epochs=2 sampling.steps=5 \
        critic.online_updates=2 critic.batch=10 watch.every=0 samples_every=0"
    found = stages(override(RLConfig(concept="Dogs"), settings.split()), 5, 5)
    # 8 trajectories of 5 steps; every x_t decoded, and 8 final ones; 7 of 8 are fitted to, twice.
    assert found["2-critic"] == Work(denoise=40, update=0, decode=48, reward=8, value=40, fit=70)
    # 3 iterations of 4 × 5 pairs; decodes 20 + 4 each; 2 critic updates of 10 pairs.
    assert found["3-policy"] == Work(denoise=60, update=60, decode=72, reward=12, value=60, fit=60)
    assert found["looks"] == Work()


def test_fewer_steps_and_smaller_decodes_are_less_work() -> None:
    settings = "policy.iterations=3 policy.trajectories=4 critic.trajectories=8 critic.epochs=2 sampling.steps=5 \
        critic.online_updates=2 critic.batch=10 watch.every=0 samples_every=0 \
        policy.step_choice=shared policy.step_fraction=0.4 critic.decode=half"
    config = override(RLConfig(concept="Dogs"), settings.split())
    found = stages(config, 5, 5)
    # A view is a quarter of a picture: 40 of the warm start are 10, beside 8 final ones.
    assert found["2-critic"] == Work(denoise=40, update=0, decode=18, reward=8, value=40, fit=70)
    # 2 of 5 steps: 8 pairs an iteration, decoded as 2 pictures beside 4 final ones; a critic update has all 8.
    assert found["3-policy"] == Work(denoise=60, update=24, decode=18, reward=12, value=24, fit=48)
    # Of 3 steps with noise the share is 1; where each trajectory has its own, the critic sees all 5 states.
    assert stages(config, 5, 3)["3-policy"] == Work(denoise=60, update=12, decode=15, reward=12, value=12, fit=24)
    each = stages(override(config, ["policy.step_choice=each"]), 5, 3)["3-policy"]
    assert each == Work(denoise=60, update=12, decode=27, reward=12, value=60, fit=60)


def test_export_and_generate(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.path), "no-dogs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no-dogs"
    assert main(["generate", "a dog", "--model", "no-dogs", "--steps", "1", "--out", "dog.png"]) == 0
    assert Path("dog.png").is_file()
    assert main(["export", str(run.path), "no-dogs"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_evaluating_with_a_target_draws_before_and_after(
    sd_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_assets(tmp_path / "assets", sd_folders["epsilon"])
    command = ["evaluate", str(sd_folders["v_prediction"]), "--target", "cats", "--images", "1", "--out", "out"]
    assert main(command, root=root) == 0
    told = capsys.readouterr().out
    assert "UA, forgotten" in told
    assert told.splitlines()[-1] == "before and after on the same noise: out/before_after.png"
    with Image.open("out/before_after.png") as strip:
        # Cats in both styles and two other classes: 4 columns; 2 rows of 16-pixel pictures enlarged to 96.
        assert strip.width > 4 * 96
        assert 2 * 96 < strip.height < 3 * 96


LONG = "a dog " + "and another dog " * 40
FILES = {"empty.txt": b"", "binary.txt": b"\0\xff", "long.txt": "\n".join(f"{k} {LONG}" for k in range(8)).encode()}
MISTAKES = {
    "concept": (["Dgos"], "'Dgos'", "'Dogs'"),
    "method": (["Dogs", "--method", "ddop"], "'ddop'", "'ddpo'"),
    "preset": (["Dogs", "--preset", "bets"], "'bets'", "'best'"),
    "key": (["Dogs", "policy.iteration=3"], "'policy.iteration'", "'policy.iterations'"),
    "value": (["Dogs", "policy.iterations=many"], "'many'", "whole number"),
    "reward": (["Dogs", "reward.name=concpt"], "'concpt'", "'concept'"),
    "empty prompts": (["Dogs", "prompts.source=../empty.txt"], "empty.txt", "at least one"),
    "binary prompts": (["Dogs", "prompts.source=../binary.txt"], "binary.txt", "UTF-8"),
    "no prompts": (["Dogs", "prompts.source=../no.txt"], "no.txt", ".jsonl"),
    "long prompts": (["Dogs", *TINY, "prompts.critic=2", "prompts.source=../long.txt"], "6 of 12 prompts", "48 tokens"),
    "targets": (["Dogs", "policy.targets=to_x"], "'to_x'", "cross-attention"),
    "tracker": (["Dogs", "tracker=wandb"], "'wandb'", "pip install"),
    "config file": (["Dogs", "--config", "no.yaml"], "'no.yaml'", "YAML"),
    "two starts": (["Dogs", "--config", "no.yaml", "--preset", "demo"], "--preset demo", "Leave one out"),
    "dtype": (["Dogs", "--dtype", "fp8"], "'fp8'", "bf16"),
    "place": (["Dogs", "--out", "/proc/x"], "/proc/x", "--out"),
}


@pytest.mark.usefixtures("no_trackers")
@pytest.mark.parametrize("arguments, given, advice", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments: list[str], given: str, advice: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in FILES.items():
        (workdir.parent / name).write_bytes(data)
    assert main(["unlearn", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("cgru: ")
    assert given in captured.err
    assert advice in captured.err
    assert list(workdir.iterdir()) == []


def test_a_run_that_relabels_under_the_old_name_is_not_continued(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to 4b183d0 cgru, ddpo and dpok could relabel, and their default did."""
    config = resolve_config("Dogs", method="cgru", overrides=[*TINY, "sampling.explore=0.5"])
    run = Run.create(Path("old"), config)
    assert main(["resume", str(run.path)]) == 2
    told = capsys.readouterr().err
    assert "sampling.explore is 0.5 with --method cgru" in told and told.count("\n") == 1
    assert (run.path / "metrics.jsonl").read_bytes() == b"" and not run.has_edit


def test_a_resume_with_a_changed_config_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    made = Run.create(Path("runs"), resolve_config("Dogs"))
    text = (made.path / "config.yaml").read_text()
    (made.path / "config.yaml").write_text(text.replace("iterations:", "iterations: 7 #"))
    assert main(["resume", str(made.path)]) == 2
    assert "policy.iterations:" in capsys.readouterr().err


def test_settings_may_stand_anywhere() -> None:
    words = ["unlearn", "Dogs", "a.b=1", "--out", "x=y", "c=2", "--json", "d=3", "--seed=4"]
    assert gathered(words) == ["unlearn", "Dogs", "a.b=1", "c=2", "d=3", "--out", "x=y", "--json", "--seed=4"]
    words = ["sweep", "--seeds", "0,1", "Dogs", "--json", "a.b=1", "Cats", "--out", "x"]
    assert gathered(words) == ["sweep", "Dogs", "a.b=1", "Cats", "--seeds", "0,1", "--json", "--out", "x"]
    assert gathered(["generate", "a=b", "--seed", "1"]) == ["generate", "a=b", "--seed", "1"]


def test_progress_in_words() -> None:
    progress = Progress(Path("run"), 10)
    progress.heard({"iteration": 0, "reward/mean": 2.0})
    assert progress.left is None
    assert line(progress) == "iteration 1/10, reward 2.00"
    progress.heard({"iteration": 1, "reward/mean": 1.5, "watch/target_share": 0.25, "watch/keep_share": 0.9})
    progress.times = [100.0, 103.0]  # 3 s an iteration, 8 left
    shares = "still shows the concept 25%, keeps what it should 90%"
    assert line(progress) == f"iteration 2/10, reward 1.50, {shares}, 24 s left"
    assert (duration(89), duration(600), duration(7200)) == ("89 s", "10 min", "2.0 h")


def test_a_long_run_says_about_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with following(Path("run"), 100, is_quiet=False) as listener:
        for k in range(100):
            listener({"iteration": k, "reward/mean": 1.0})
    assert len(capsys.readouterr().err.splitlines()) == 21  # the first, and every fifth


def test_an_unfinished_run_has_an_outcome_without_a_reward() -> None:
    assert outcome(Run.create(Path("runs"), RLConfig(concept="Dogs")))["reward"] is None
