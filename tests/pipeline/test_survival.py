"""Runs survive: killed at any moment or stopped by Ctrl-C, then resumed, they end in the same LoRA bytes."""

import multiprocessing
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path

import own_pipeline
import pytest

from cgru.config import RLConfig, override, to_dict
from cgru.lora.file import LORA_FILE
from cgru.pipeline import resume, unlearn
from cgru.runs import Run, read_metrics

TINY = [
    "policy.iterations=3",
    "policy.trajectories=4",
    "critic.kind=latent",
    "critic.trajectories=4",
    "critic.batch=8",
    "sampling.steps=2",
    "checkpoint_every=1",
    "samples_every=2",
    "prompts.count=4",
    "prompts.retain=4",
    "prompts.critic=4",
    "prompts.validation=2",
    "retention.kl=0.1",
    "retention.bank=4",
    "retention.batch=4",
    "policy.average=0.5",
    "reward.name=own_pipeline:brightness",
]
DDPO = ["critic.kind=none", "policy.advantage=batch"]
PER_PROMPT = ["critic.kind=none", "policy.advantage=per-prompt", "retention.kl=0"]
DPOK = ["policy.clip_mode=hard", "policy.window=8", "retention.kl_forget=0.1", "retention.kl_form=noise"]
# Each goes on where the one before was killed. Optimiser steps: 4 warm-start the critic, then 4 + 2 an iteration.
# Renames of a start: a fact in the manifest, the critic and its marker, another fact, the log if lines are cut; each
# picture, checkpoint and marker.
MOMENTS = [
    ("reward", 1),  # in the critic's warm start
    ("rename", 3),  # its weights are there, its marker is not
    ("step", 10),  # between the two updates of iteration 0
    ("log", 1),  # after its log line, before its checkpoint
    ("rename", 5),  # before that checkpoint is put in place
    ("rename", 6),  # the checkpoint is there; before the picture of iteration 1
    ("reward", 2),  # in iteration 2
    ("log", 1),  # after its log line
]


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Children start from a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cgru.pipeline.unlearning"])
    return context


def config_of(folder: Path, *settings: str) -> RLConfig:
    return override(RLConfig(concept="dogs", model=str(folder)), [*TINY, *settings])


def run_child(
    context: ForkServerContext,
    config: RLConfig,
    out: Path,
    kind: str = "",
    left: int = 0,
    number: int = signal.SIGKILL,
) -> int | None:
    process = context.Process(target=own_pipeline.child, args=(to_dict(config), str(out), kind, left, int(number)))
    process.start()
    process.join(120)
    return process.exitcode


def edit(run: Run) -> bytes:
    return (run.path / "edit" / LORA_FILE).read_bytes()


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file's inode, which a rewritten file does not keep, and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.stat().st_ino, path.read_bytes()) for path in files}


def only_run(out: Path) -> Run:
    (path,) = out.iterdir()
    return Run.open(path)


@pytest.fixture(scope="session")
def uninterrupted(sd_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return unlearn(config_of(sd_folder), tmp_path_factory.mktemp("uninterrupted"))


def test_a_run_is_complete(uninterrupted: Run) -> None:
    names = {str(path.relative_to(uninterrupted.path)) for path in uninterrupted.path.rglob("*") if path.is_file()}
    assert {"config.yaml", "manifest.json", "metrics.jsonl", f"edit/{LORA_FILE}", "samples/0000.png"} <= names
    assert {"samples/0002.png", "samples/0003.png", "stages/2-critic/done.json", "stages/3-policy/done.json"} <= names
    records = read_metrics(uninterrupted.path / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1, 2]
    assert 0 <= float(records[0]["policy/parity"] or 0) <= 1e-5 and "policy/parity" not in records[1]
    extra = uninterrupted.manifest["extra"]
    assert extra["critic"] is None and extra["detector"] is None  # known: a critic of latents, no detector
    assert extra["sizes"]["rollout"] == 64 and extra["reward"]["name"] == "brightness" and len(extra["prompts"]) == 64


def test_killed_again_and_again_it_ends_in_the_same_bytes(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, uninterrupted: Run
) -> None:
    config = config_of(sd_folder)
    codes = [run_child(processes, config, tmp_path, kind, left) for kind, left in MOMENTS]
    assert codes == [-signal.SIGKILL] * len(MOMENTS)  # it was never allowed to finish
    assert not (only_run(tmp_path).path / "edit" / LORA_FILE).exists()
    run = resume(only_run(tmp_path).path, code=["own_pipeline"])
    assert edit(run) == edit(uninterrupted)
    assert read_metrics(run.path / "metrics.jsonl") == read_metrics(uninterrupted.path / "metrics.jsonl")
    for name in ("0000", "0002", "0003"):
        path = f"samples/{name}.png"
        assert (run.path / path).read_bytes() == (uninterrupted.path / path).read_bytes()


def test_killed_while_the_result_is_written(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, uninterrupted: Run
) -> None:
    config = config_of(sd_folder)
    assert run_child(processes, config, tmp_path, "log", 3) == -signal.SIGKILL
    run = only_run(tmp_path)
    # two facts, the cut log, a picture, the last checkpoint; killed before the edit
    assert run_child(processes, config, tmp_path, "rename", 6) == -signal.SIGKILL
    found = run.latest("3-policy")
    assert found is not None and found[0] == 3 and not (run.path / "edit" / LORA_FILE).exists()
    # two facts, the stage's marker and the LoRA; killed before edit.json, which says that the run is finished
    assert run_child(processes, config, tmp_path, "rename", 5) == -signal.SIGKILL
    assert (run.path / "edit" / LORA_FILE).exists() and run.is_done("3-policy") and not run.has_edit
    assert edit(resume(run.path, code=["own_pipeline"])) == edit(uninterrupted)


@pytest.mark.parametrize("settings", [DDPO, PER_PROMPT, DPOK], ids=["ddpo", "per-prompt", "dpok"])
def test_ddpo_and_dpok_are_the_same_loop_and_resume(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, settings: list[str]
) -> None:
    config = config_of(sd_folder, *settings)
    whole = unlearn(config, tmp_path / "whole")
    assert run_child(processes, config, tmp_path / "cut", "log", 3) == -signal.SIGKILL
    assert edit(resume(only_run(tmp_path / "cut").path, code=["own_pipeline"])) == edit(whole)
    assert ("critic/value_error" in read_metrics(whole.path / "metrics.jsonl")[0]) == (settings is DPOK)


def test_ctrl_c_saves_after_the_iteration_and_resume_completes(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, uninterrupted: Run
) -> None:
    config = config_of(sd_folder, "checkpoint_every=100")  # so only Ctrl-C can have saved
    # the reward is called in the warm start, in iteration 0 and in iteration 1
    code = run_child(processes, config, tmp_path, "reward", 3, signal.SIGINT)
    assert code == own_pipeline.INTERRUPTED
    run = only_run(tmp_path)
    found = run.latest("3-policy")
    assert found is not None and found[0] == 2
    assert len(read_metrics(run.path / "metrics.jsonl")) == 2
    assert edit(resume(run.path, code=["own_pipeline"])) == edit(uninterrupted)


def test_ctrl_c_in_the_last_iteration_just_finishes(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, uninterrupted: Run
) -> None:
    assert run_child(processes, config_of(sd_folder), tmp_path, "reward", 4, signal.SIGINT) == 0
    assert edit(only_run(tmp_path)) == edit(uninterrupted)


def test_a_reward_that_turns_nan_stops_and_leaves_the_checkpoint(sd_folder: Path, tmp_path: Path) -> None:
    config = config_of(sd_folder, "reward.name=own_pipeline:turns_nan")
    with pytest.raises(ValueError, match="reward 'brightness' returned NaN or infinity for 4 of 4") as caught:
        unlearn(config, tmp_path)
    assert "\n" not in str(caught.value)
    run = only_run(tmp_path)
    found = run.latest("3-policy")
    assert found is not None and found[0] == 1
    assert [record["iteration"] for record in read_metrics(run.path / "metrics.jsonl")] == [0]
    assert not run.is_done("3-policy")


def test_the_same_command_again_does_nothing(sd_folder: Path, uninterrupted: Run) -> None:
    before, seen = contents(uninterrupted.path), list[object]()
    again = unlearn(config_of(sd_folder), uninterrupted.path.parent, listeners=(seen.append,))
    assert again.path == uninterrupted.path and not seen
    assert contents(uninterrupted.path) == before


def test_a_second_process_is_refused(sd_folder: Path, processes: ForkServerContext, uninterrupted: Run) -> None:
    with uninterrupted.locked():
        code = run_child(processes, config_of(sd_folder), uninterrupted.path.parent)
        with pytest.raises(ValueError, match="is in use by process"):
            resume(uninterrupted.path, code=["own_pipeline"])
    assert code == own_pipeline.MISTAKE


def test_a_changed_config_is_refused_with_its_keys(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    assert run_child(processes, config_of(sd_folder), tmp_path, "reward", 1) == -signal.SIGKILL
    path = only_run(tmp_path).path / "config.yaml"
    path.write_text(path.read_text().replace("iterations: 3", "iterations: 5").replace("rank: 4", "rank: 8"))
    with pytest.raises(ValueError, match=r"policy.iterations: 3 -> 5; policy.rank: 4 -> 8") as caught:
        resume(path.parent, code=["own_pipeline"])
    assert "\n" not in str(caught.value)


def test_changed_prompts_are_refused(sd_folder: Path, tmp_path: Path, processes: ForkServerContext) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"dog number {i}\n" for i in range(10)))
    config = config_of(sd_folder, f"prompts.source={file}")
    assert run_child(processes, config, tmp_path / "runs", "reward", 2) == -signal.SIGKILL
    file.write_text("".join(f"dog number {i + 1}\n" for i in range(10)))
    with pytest.raises(ValueError, match="are not those it began with; .* Restore '.*mine.txt'"):
        resume(only_run(tmp_path / "runs").path, code=["own_pipeline"])


def test_the_checkpoint_and_sample_rhythm_change_nothing(sd_folder: Path, tmp_path: Path, uninterrupted: Run) -> None:
    run = unlearn(config_of(sd_folder, "checkpoint_every=7", "samples_every=0"), tmp_path)
    assert edit(run) == edit(uninterrupted) and not (run.path / "samples").exists()
