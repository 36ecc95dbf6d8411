"""Write and read checkpoints of a learner: everything the next iteration reads, so resuming repeats the run exactly.

Weights and the replay window are safetensors files; optimiser states use torch's own format and are read with
`weights_only=True`; counters and running statistics are JSON.
"""

from __future__ import annotations

import io
import json
import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from cgru.atomic_io import parse_json
from cgru.backbones.base import one_line
from cgru.mdp.trajectory import Trajectory
from cgru.rl.state import Learner, Problem

POLICY, CRITIC, STATE, WINDOW = "policy.safetensors", "critic.safetensors", "state.json", "window.safetensors"
OPTIMISER, CRITIC_OPTIMISER = "optimiser.pt", "critic-optimiser.pt"
KEPT = ("x", "log_prob", "reward", "value", "advantage", "x0_hat", "seeds")


def to_files(learner: Learner, extra: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a checkpoint; `extra` is plain JSON, which `from_files` returns."""
    weights = {f"last.{name}": parameter.data for name, parameter in learner.parameters.items()}
    weights |= {f"average.{name}": value for name, value in learner.average.items()}
    weights |= {f"best.{name}": value for name, value in learner.best.items()}
    # JSON keeps floats exactly: Python writes the shortest text that reads back as the same number.
    state = {
        "iteration": learner.iteration,
        "updates": learner.updates,
        "statistics": learner.statistics.state_dict(),
        "step_errors": list(learner.step_errors.items()),
        "kl_weight": learner.kl_weight,
        "extra": dict(extra),
    }
    files = {POLICY: _tensors(weights), STATE: json.dumps(state).encode()}
    if isinstance(learner.critic, nn.Module):
        files[CRITIC] = _tensors(learner.critic.state_dict())
    for name, optimiser in _optimisers(learner).items():
        files[name] = _torch(optimiser.state_dict())
    if learner.window:
        files[WINDOW] = _window(learner.window)
    return files


def from_files(problem: Problem, learner: Learner, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into a fresh learner of the same config; return the extra state."""
    with reading(folder / POLICY):
        weights = load_file(folder / POLICY)
        for name, parameter in learner.parameters.items():
            parameter.data.copy_(weights[f"last.{name}"])  # in place: compiled code depends on the memory layout
        learner.average, learner.best = (_group(weights, name, learner.parameters) for name in ("average", "best"))
    if isinstance(learner.critic, nn.Module):
        with reading(folder / CRITIC):
            learner.critic.load_state_dict(load_file(folder / CRITIC))
    for file, optimiser in _optimisers(learner).items():
        with reading(folder / file):
            optimiser.load_state_dict(_load(folder / file))
    with reading(folder / STATE):
        state = parse_json((folder / STATE).read_text())
        learner.iteration, learner.updates = operator.index(state["iteration"]), operator.index(state["updates"])
        learner.statistics.load_state_dict(state["statistics"])
        learner.step_errors = dict(state.get("step_errors", []))  # absent in older runs
        learner.kl_weight = state.get("kl_weight")
        extra: dict[str, Any] = dict(state["extra"])
    if (folder / WINDOW).is_file():
        with reading(folder / WINDOW):
            learner.window = _read_window(problem, folder / WINDOW)
    return extra


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes the libraries raise into one line that names it and the way on."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"cannot read {str(path)!r} ({one_line(error)}); allowed: what cgru wrote there. Restore it, or remove the "
            f"folder {path.parent.name}: its stage then starts again."
        ) from error


def _optimisers(learner: Learner) -> dict[str, Optimizer]:
    found = {OPTIMISER: learner.optimiser, CRITIC_OPTIMISER: learner.critic_optimiser}
    return {name: optimiser for name, optimiser in found.items() if optimiser is not None}


def _group(weights: Mapping[str, Tensor], group: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # On the device of the parameters; empty if the checkpoint has no such group.
    return {name: weights[f"{group}.{name}"].to(like[name].device) for name in like if f"{group}.{name}" in weights}


def _tensors(table: Mapping[str, Tensor]) -> bytes:
    return save({key: value.detach().cpu().contiguous().clone() for key, value in table.items()})


def _torch(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _load(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():  # torch warns of a stranger's pickle before it refuses it, and `reading` tells that
        warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _window(window: list[Trajectory]) -> bytes:
    joined = Trajectory.cat(window)
    tensors = {name: value for name in KEPT if (value := getattr(joined, name)) is not None}
    texts = json.dumps({"prompts": joined.cond.prompts, "sizes": [len(part) for part in window]})
    return save({key: value.cpu().contiguous() for key, value in tensors.items()}, metadata={"window": texts})


def _read_window(problem: Problem, path: Path) -> list[Trajectory]:
    with safe_open(path, "pt") as file:
        record = parse_json(file.metadata()["window"])
    tensors = {key: value.to(problem.backbone.device) for key, value in load_file(path).items()}
    kernel, device = problem.kernel, problem.backbone.device
    joined = Trajectory(
        time=kernel.timesteps.to(device),
        stochastic=kernel.stochastic.to(device),
        cond=problem.encode(record["prompts"]),
        guidance=problem.config.sampling.guidance,
        **tensors,
    )
    # Split the joined window back into the batches of each iteration.
    ends = torch.tensor([0, *record["sizes"]]).cumsum(0).tolist()
    return [joined[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
