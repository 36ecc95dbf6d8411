"""Two processes against one on the same global batch: the same trajectories, gradients, critic and record."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.linalg import norm
from side_by_side import Raised, side_by_side
from tiny_rl import Brightness, nudge, tiny_learner, tiny_problem
from torch import Tensor
from torch.optim import Optimizer
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from cgru import distributed
from cgru.critic import build_critic
from cgru.critic.tower import Tower
from cgru.rl.oom_retry import Memory
from cgru.rl.retention import make_bank
from cgru.rl.state import Sizes, make_learner
from cgru.rl.train import iterate

# 5 trajectories in 2 updates, critic minibatches of 4 of 15 pairs, 3 in the bank: nothing divides evenly.
SETTINGS = [
    "policy.trajectories=5",
    "policy.updates=2",
    "policy.clip=0.1",
    "policy.advantage=critic",
    "critic.batch=4",
    "critic.online_updates=4",
    "retention.kl=0.1",
    "retention.bank=3",
    "retention.batch=5",
    "retention.kl_forget=0.05",
    "diagnostics.every=1",
]
CRITICS = {
    "latent": ["critic.kind=latent"],
    "film on x̂0": ["critic.kind=film", "critic.view=clean"],
}


def tiny_tower() -> Tower:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=8)
        return Tower(CLIPVisionModelWithProjection(config).eval(), (0.5, 0.4, 0.3), (0.2, 0.3, 0.5))


SIZES = Sizes(rollout=2, update=4, decode=3, score=4)


def two_iterations(folder: str, settings: list[str], sizes: Sizes = SIZES) -> dict[str, Any]:
    """The gradient of every update of two iterations, as its optimiser got it; SGD, which cannot blow up rounding."""
    problem = tiny_problem(Path(folder), *SETTINGS, *settings, sizes=sizes)
    bank = make_bank(problem)
    critic = build_critic(
        problem.config.critic.kind,
        "value",
        problem.config.critic.view,
        tower=tiny_tower(),
        scale=1.0,
        prior=0.4,
        latent_shape=problem.backbone.latent_shape,
        text_width=16,
    )
    learner = make_learner(problem, tiny_learner(problem).parameters, critic)
    nudge(learner)
    learner.optimiser = torch.optim.SGD(learner.parameters.values(), lr=1e-2)
    learner.critic_optimiser = torch.optim.SGD(critic.parameters(), lr=1e-2)
    found: dict[str, Any] = {"policy": _watched(learner.optimiser), "critic": _watched(learner.critic_optimiser)}
    found |= {"x": [], "records": []}
    for learner.iteration in range(2):
        done = iterate(Memory(problem), learner, bank)
        found["x"].append(done.trajectory.x.flatten().numpy())
        found["records"].append(done.record)
    return found


def _watched(optimiser: Optimizer) -> list[Any]:
    """Fills with the gradients at each step."""
    seen = list[Any]()

    def look(*_: object) -> None:
        (group,) = optimiser.param_groups
        seen.append(torch.cat([p.grad.flatten() for p in group["params"] if p.grad is not None]).numpy())

    optimiser.register_step_pre_hook(look)
    return seen


def error(found: list[Any], expected: list[Any]) -> float:
    """The largest relative error, by norm, of arrays that are not nothing."""
    assert len(found) == len(expected) and all(norm(value) > 1e-4 for value in expected)
    return max(norm(mine - theirs) / norm(theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("critic", CRITICS)
def test_two_processes_are_one(sd_folder: Path, critic: str) -> None:
    alone = two_iterations(str(sd_folder), CRITICS[critic])
    pair = side_by_side(2, two_iterations, str(sd_folder), CRITICS[critic])
    assert all(isinstance(found, dict) for found in pair), pair
    assert (len(alone["policy"]), len(alone["critic"])) == (4, 8)
    for name in ("x", "policy", "critic"):
        assert error(pair[0][name], pair[1][name]) == 0, f"{name} differs between the processes"
        half = len(alone[name]) // 2  # in the second iteration the weights have other last bits already
        assert error(pair[0][name][:half], alone[name][:half]) <= 1e-5, name
        assert error(pair[0][name][half:], alone[name][half:]) <= 1e-4, name
    for mine, theirs, single in zip(pair[0]["records"], pair[1]["records"], alone["records"], strict=True):
        assert mine == pytest.approx(theirs, abs=0, rel=0, nan_ok=True)
        # Parity and ratios are rounding around 1, normalised variances and what V explains differences of like numbers.
        keys = [key for key in single if not re.search("ratio|parity|normalised|explained", key)]
        assert len(keys) > 15 and {key: mine[key] for key in keys} == pytest.approx(
            {key: single[key] for key in keys}, rel=1e-4, abs=1e-7
        )


def test_more_processes_than_pairs_change_nothing(sd_folder: Path) -> None:
    """5 processes, minibatches and updates of fewer pairs than that; each passes one at a time, so one alone must, too.

    (Rollouts of one and of two round differently, by 1e-6, which the first gradients show as 2e-5.)
    """
    settings = ["critic.kind=latent", "critic.batch=3", "policy.trajectories=2", "sampling.steps=2", "retention.bank=2"]
    alone = two_iterations(str(sd_folder), settings, Sizes(rollout=1, update=1, decode=1, score=1))
    many = side_by_side(5, two_iterations, str(sd_folder), settings)
    assert all(isinstance(found, dict) for found in many), many
    for found in many:
        for name, first in (("x", 1), ("policy", 2), ("critic", 4)):  # the first iteration, as above
            assert error(found[name][:first], alone[name][:first]) <= 1e-5, name


def one_bad_reward(folder: str) -> None:
    problem = tiny_problem(Path(folder))
    reward = Brightness() if distributed.rank() == 0 else BadReward()
    iterate(Memory(replace(problem, reward=reward)), tiny_learner(problem), None)


class BadReward(Brightness):
    """NaN for every picture."""

    def __call__(self, images: Tensor, prompts: Any) -> Tensor:  # noqa: ANN401 - as Brightness
        return images.mean((1, 2, 3)) * torch.nan


def test_a_nan_in_one_process_stops_both(sd_folder: Path) -> None:
    found = side_by_side(2, one_bad_reward, str(sd_folder))
    assert all(isinstance(error, Raised) and error.kind == "RewardError" for error in found), found
    assert {error.text for error in found} == {found[0].text} and "NaN or infinity for 2 of 2" in found[0].text
