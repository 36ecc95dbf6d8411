"""A learner to files and back: equal in every part, and the next iteration is the same to the bit."""

import contextlib
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from tiny_rl import tiny_learner, tiny_problem

from cgru.critic.latent import LatentCritic
from cgru.mdp.trajectory import Trajectory
from cgru.rl.checkpoint import from_files, to_files
from cgru.rl.oom_retry import Memory
from cgru.rl.state import Learner, Problem, make_learner
from cgru.rl.train import iterate

SETTINGS = [
    "policy.window=6",
    "policy.average=0.5",
    "policy.warmup=3",
    "policy.advantage=per-prompt",
    "critic.kind=latent",
    "critic.view=clean",
    "critic.batch=4",
]


def start(folder: Path) -> tuple[Problem, Learner]:
    problem = tiny_problem(folder, *SETTINGS)
    learner = tiny_learner(problem)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = LatentCritic(problem.backbone.latent_shape, 16, scale=1.0, prior=0.5)
    return problem, make_learner(problem, learner.parameters, critic)


def advance(problem: Problem, learner: Learner, count: int) -> Learner:
    for _ in range(count):
        iterate(Memory(problem), learner, None)
        learner.iteration += 1
    return learner


def restored(folder: Path, files: dict[str, bytes], place: Path) -> tuple[Problem, Learner, dict[str, object]]:
    place.mkdir()
    for name, data in files.items():
        (place / name).write_bytes(data)
    problem, learner = start(folder)
    return problem, learner, from_files(problem, learner, place)


def test_everything_comes_back(sd_folder: Path, tmp_path: Path) -> None:
    problem, learner = start(sd_folder)
    advance(problem, learner, 2)
    learner.best = {name: value + 1 for name, value in learner.exported.items()}
    files = to_files(learner, {"trade_off": {"since_best": 2}})
    _, other, extra = restored(sd_folder, files, tmp_path / "checkpoint")
    assert extra == {"trade_off": {"since_best": 2}} and (other.iteration, other.updates) == (2, 4)
    for name, parameter in learner.parameters.items():
        assert torch.equal(other.parameters[name], parameter)
        assert torch.equal(other.average[name], learner.average[name])
        assert not torch.equal(other.average[name], parameter)
        assert torch.equal(other.best[name], learner.average[name] + 1)
    assert other.statistics.state_dict() == learner.statistics.state_dict() != {}
    assert [len(part) for part in other.window] == [len(part) for part in learner.window]
    same_trajectory(Trajectory.cat(other.window), Trajectory.cat(learner.window))
    assert to_files(other, extra).keys() == files.keys()
    for name in files:
        if name.endswith(".pt"):
            mine, theirs = ((learner, other)[k] for k in (0, 1))
            attribute = "critic_optimiser" if name.startswith("critic") else "optimiser"
            same_state(vars(mine)[attribute].state_dict(), vars(theirs)[attribute].state_dict())
        else:
            assert to_files(other, extra)[name] == files[name], name


class Touch:
    """What a pickle does that runs code when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("optimiser.pt", b"junk"),
        ("optimiser.pt", pickle.dumps(Touch())),
        ("optimiser.pt", saved(Touch())),
        ("optimiser.pt", saved({})),
        ("critic-optimiser.pt", saved([])),
        ("policy.safetensors", b"\xff" * 100),
        ("critic.safetensors", b""),
        ("state.json", b"[" * 100_000),
        ("state.json", b'{"updates": 4, "statistics": {}, "extra": {}}'),
        ("state.json", b'{"iteration": "2", "updates": 4, "statistics": {}, "extra": {}}'),
        ("state.json", b'{"iteration": 2, "updates": 4, "statistics": 3, "extra": {}}'),
        ("state.json", b'{"iteration": 2, "updates": 4, "statistics": {}, "extra": null}'),
        ("window.safetensors", b"junk"),
    ],
)
def test_a_damaged_file_is_named_and_runs_nothing(sd_folder: Path, tmp_path: Path, name: str, data: bytes) -> None:
    files = to_files(advance(*start(sd_folder), 1), {})
    assert name in files
    with contextlib.chdir(tmp_path), pytest.raises(ValueError) as error:
        restored(sd_folder, files | {name: data}, tmp_path / "checkpoint-1")
    assert f"checkpoint-1/{name}'" in str(error.value) and "remove the folder checkpoint-1" in str(error.value)
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def same_trajectory(a: Trajectory, b: Trajectory) -> None:
    assert a.cond.prompts == b.cond.prompts and a.guidance == b.guidance
    for name in ("x", "log_prob", "time", "stochastic", "seeds", "reward", "value", "advantage"):
        assert torch.equal(vars(a)[name], vars(b)[name]), name


def same_state(a: object, b: object) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and torch.equal(a, b)
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys()
        for key in a:
            same_state(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same_state(x, y)
    else:
        assert a == b


def test_going_on_from_a_checkpoint_is_going_on(sd_folder: Path, tmp_path: Path) -> None:
    problem, learner = start(sd_folder)
    advance(problem, learner, 1)
    files = to_files(learner, {})
    advance(problem, learner, 1)
    other_problem, other, _ = restored(sd_folder, files, tmp_path / "checkpoint")
    advance(other_problem, other, 1)
    for name, parameter in learner.parameters.items():
        assert torch.equal(other.parameters[name], parameter)
    assert isinstance(learner.critic, LatentCritic) and isinstance(other.critic, LatentCritic)
    same_state(learner.critic.state_dict(), other.critic.state_dict())


def test_a_learner_without_extras_has_few_files(sd_folder: Path, tmp_path: Path) -> None:
    problem = tiny_problem(sd_folder)
    learner = advance(problem, tiny_learner(problem), 1)
    files = to_files(learner, {})
    assert sorted(files) == ["optimiser.pt", "policy.safetensors", "state.json"]
