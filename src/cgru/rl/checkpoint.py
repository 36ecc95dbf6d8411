"""A learner to bytes and back: everything the next iteration reads, so that a resumed run equals an uninterrupted one.

Weights and kept trajectories are safetensors; optimiser states go through torch's own format, read back with
`weights_only=True`; counters and running statistics are JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from cgru.mdp.trajectory import Trajectory
from cgru.rl.problem import Learner, Problem

POLICY, CRITIC, STATE, WINDOW = "policy.safetensors", "critic.safetensors", "state.json", "window.safetensors"
OPTIMISER, CRITIC_OPTIMISER = "optimiser.pt", "critic-optimiser.pt"
KEPT = ("x", "log_prob", "reward", "value", "advantage", "x0_hat", "seeds")


def to_files(learner: Learner, extra: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of a checkpoint; `extra` is plain JSON that comes back from `from_files`."""
    weights = {f"last.{name}": parameter.data for name, parameter in learner.parameters.items()}
    weights |= {f"average.{name}": value for name, value in learner.average.items()}
    weights |= {f"best.{name}": value for name, value in learner.best.items()}
    state = {
        "iteration": learner.iteration,
        "updates": learner.updates,
        "statistics": learner.statistics.state_dict(),
        "step_errors": list(learner.step_errors.items()),
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
    """Put a checkpoint's contents into a fresh learner of the same config; returns the extra state."""
    weights = load_file(folder / POLICY)
    for name, parameter in learner.parameters.items():
        parameter.data.copy_(weights[f"last.{name}"])  # in place: a compiled network knows the layout it has
    learner.average, learner.best = (_group(weights, name, learner.parameters) for name in ("average", "best"))
    if isinstance(learner.critic, nn.Module):
        learner.critic.load_state_dict(load_file(folder / CRITIC))
    for name, optimiser in _optimisers(learner).items():
        optimiser.load_state_dict(torch.load(folder / name, map_location="cpu", weights_only=True))
    state = json.loads((folder / STATE).read_text())
    learner.iteration, learner.updates = state["iteration"], state["updates"]
    learner.statistics.load_state_dict(state["statistics"])
    learner.step_errors = dict(state.get("step_errors", []))  # none in older runs
    if (folder / WINDOW).is_file():
        learner.window = _read_window(problem, folder / WINDOW)
    extra: dict[str, Any] = state["extra"]
    return extra


def _optimisers(learner: Learner) -> dict[str, Optimizer]:
    found = {OPTIMISER: learner.optimiser, CRITIC_OPTIMISER: learner.critic_optimiser}
    return {name: optimiser for name, optimiser in found.items() if optimiser is not None}


def _group(weights: Mapping[str, Tensor], group: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Kept on the parameters' device; empty where the group was.
    return {name: weights[f"{group}.{name}"].to(like[name].device) for name in like if f"{group}.{name}" in weights}


def _tensors(table: Mapping[str, Tensor]) -> bytes:
    return save({key: value.detach().cpu().contiguous().clone() for key, value in table.items()})


def _torch(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _window(window: list[Trajectory]) -> bytes:
    joined = Trajectory.cat(window)
    tensors = {name: value for name in KEPT if (value := getattr(joined, name)) is not None}
    texts = json.dumps({"prompts": joined.cond.prompts, "sizes": [len(part) for part in window]})
    return save({key: value.cpu().contiguous() for key, value in tensors.items()}, metadata={"window": texts})


def _read_window(problem: Problem, path: Path) -> list[Trajectory]:
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["window"])
    tensors = {key: value.to(problem.backbone.device) for key, value in load_file(path).items()}
    kernel, device = problem.kernel, problem.backbone.device
    joined = Trajectory(
        time=kernel.timesteps.to(device),
        stochastic=kernel.stochastic.to(device),
        cond=problem.encode(record["prompts"]),
        guidance=problem.config.sampling.guidance,
        **tensors,
    )
    ends = torch.tensor([0, *record["sizes"]]).cumsum(0).tolist()
    return [joined[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
