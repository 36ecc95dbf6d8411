"""Which steps an iteration learns from: what is drawn, what is decoded, and that `shared` with all steps is `each`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import tiny_film, tiny_learner, tiny_problem
from torch import nn

from cgru.critic.fit import regress
from cgru.critic.frozen import FrozenCritic
from cgru.critic.views import resized
from cgru.mdp.trajectory import Trajectory
from cgru.rl.advantage import gae_advantage, normalised
from cgru.rl.checkpoint import from_files, to_files
from cgru.rl.collect import collect
from cgru.rl.oom_retry import Memory
from cgru.rl.state import Learner, Problem, make_learner
from cgru.rl.step_selection import FLOOR, draw, probabilities
from cgru.rl.train import iterate

CRITIC = ("critic.kind=film", "policy.advantage=critic", "critic.batch=4", "critic.online_learning_rate=0.01")
HALF = ("sampling.steps=6", "policy.step_fraction=0.5", "policy.step_choice=shared")


def start(folder: Path, *settings: str) -> tuple[Problem, Learner]:
    problem = tiny_problem(folder, *CRITIC, *settings)
    return problem, make_learner(problem, tiny_learner(problem).parameters, tiny_film(problem))


@contextmanager
def decoded(problem: Problem) -> Iterator[list[tuple[int, int]]]:
    """(latents, side of each) of every call of the decoder; the hook goes, since models share their decoder."""
    seen: list[tuple[int, int]] = []
    hook = problem.backbone.decoder.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[::3]))
    try:
        yield seen
    finally:
        hook.remove()


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    assert isinstance(learner.critic, nn.Module)
    return {**{name: p.data for name, p in learner.parameters.items()}, **learner.critic.state_dict()}


@pytest.mark.parametrize("advantage", ["critic", "gae"])
def test_sharing_all_steps_changes_nothing(sd_folder: Path, advantage: str) -> None:
    found = []
    for choice in ("each", "shared"):
        problem, learner = start(sd_folder, f"policy.step_choice={choice}", f"policy.advantage={advantage}")
        found.append((iterate(Memory(problem), learner, None).record, weights(learner)))
    (record, before), (other, after) = found
    assert record == other and all(torch.equal(value, after[name]) for name, value in before.items())


def test_only_chosen_states_are_decoded_valued_and_recorded(sd_folder: Path) -> None:
    problem, learner = start(sd_folder, *HALF, "diagnostics.every=1", "policy.normalise=true")
    with decoded(problem) as seen:
        done = iterate(Memory(problem), learner, None)
    # 4 trajectories: x_0 of each for the reward, and 3 of 6 states for the critic
    assert sum(count for count, _ in seen) == 4 + 4 * 3
    steps, value = done.trajectory.chosen, done.trajectory.value
    assert steps is not None and len(steps) == 3 and value is not None and done.trajectory.advantage is not None
    for table in (value, done.trajectory.advantage):
        assert table.isfinite().all(0).nonzero().flatten().tolist() == list(steps)
    assert [t for t in range(6) if f"critic/value_error/t{t}" in done.record] == list(steps)
    ratios = {t for t in range(6) if not torch.tensor(done.record[f"ratio/mean/t{t}"]).isnan()}
    assert ratios == set(steps)
    named = ("advantage/std", "critic/value_error", "critic/loss", "policy/loss", "variance/critic")
    assert all(torch.tensor(done.record[name]).isfinite() for name in named)


def test_the_critic_learns_from_the_chosen_states_at_their_own_times(sd_folder: Path) -> None:
    """Its weights after an iteration are those of an update by hand on the states x_t and times of the chosen t."""
    problem, learner = start(sd_folder, *HALF, "critic.online_updates=3")
    batch = iterate(Memory(problem), learner, None).trajectory
    assert batch.chosen is not None and batch.chosen != (0, 1, 2) and batch.reward is not None
    steps = list(batch.chosen)
    critic = tiny_film(problem)
    views = torch.stack([problem.backbone.decode(batch.x[:, t]) for t in steps], 1)
    small = resized(views.flatten(0, 1), 8).unflatten(0, views.shape[:2])
    regress(
        critic,
        make_learner(problem, learner.parameters, critic).critic_optimiser,
        (small * 255).round().to(torch.uint8),
        batch.reward,
        problem.kernel.timesteps[steps],
        batch.cond,
        updates=3,
        batch=4,
        generator=problem.generator("critic", 0),
    )
    found = weights(learner)
    for name, value in critic.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)
    assert not torch.equal(found["head.linear.weight"], tiny_film(problem).state_dict()["head.linear.weight"])


def test_each_iteration_draws_its_own_steps(sd_folder: Path) -> None:
    problem, learner = start(sd_folder, *HALF)
    drawn = set()
    for learner.iteration in range(4):
        drawn.add(iterate(Memory(problem), learner, None).trajectory.chosen)
    assert len(drawn) > 1


def test_a_smaller_decode_is_decoded_smaller(sd_folder: Path) -> None:
    """Latents are 8 × 8: pictures for the reward stay whole, the critic's are drawn from 4 × 4."""
    problem, learner = start(sd_folder, "critic.decode=half")
    with decoded(problem) as seen:
        iterate(Memory(problem), learner, None)
    assert seen[0] == (4, 8) and {side for _, side in seen[1:]} == {4}


def test_a_frozen_tower_sees_each_state_once(sd_folder: Path) -> None:
    problem, learner = start(sd_folder, "critic.tower=frozen", "critic.online_updates=4")
    assert isinstance(learner.critic, FrozenCritic)
    seen: list[int] = []
    tower = learner.critic.inner.tower
    tower.embeddings.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    before = {name: value.clone() for name, value in learner.critic.state_dict().items()}
    record = iterate(Memory(problem), learner, None).record
    assert sum(seen) == 4 * 3  # trajectories × steps, although values and 4 updates read them
    changed = {name.split(".")[1] for name, value in before.items() if not torch.equal(value, weights(learner)[name])}
    assert changed == {"film", "head"} and float(record["critic/gradient_norm"]) > 0


def test_only_steps_with_noise_are_drawn() -> None:
    stochastic = torch.tensor([True, True, False, True, False])
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        found = draw(stochastic, 0.7, {}, generator)  # 0.7 of 3 steps is 2
        assert len(found) == 2 and set(found) <= {0, 1, 3} and list(found) == sorted(found)
    assert len(draw(stochastic, 0.01, {}, generator)) == 1
    assert draw(stochastic, 1.0, {}, generator) == (0, 1, 3)


def test_a_step_s_chance_follows_its_error() -> None:
    assert probabilities([0, 1, 3], {}).tolist() == pytest.approx([1 / 3] * 3)
    # Step 3 was not seen, so it counts as the mean of 3 and 1, 2: 3, 1, 2 of 6, and a tenth is spread evenly.
    assert probabilities([0, 1, 3], {0: 3.0, 1: 1.0, 2: 99.0}).tolist() == pytest.approx(
        [0.9 * 3 / 6 + 0.1 / 3, 0.9 / 6 + 0.1 / 3, 0.9 * 2 / 6 + 0.1 / 3]
    )
    assert float(probabilities([0, 1], {0: 0.0, 1: 5.0})[0]) == FLOOR / 2
    assert probabilities([0, 1], {0: 0.0, 1: 0.0}).tolist() == [0.5, 0.5]


def test_the_worst_step_is_drawn_most() -> None:
    generator, errors = torch.Generator().manual_seed(0), {0: 1.0, 1: 1.0, 2: 8.0}
    found = [draw(torch.ones(3, dtype=torch.bool), 0.3, errors, generator) for _ in range(200)]
    # p = 0.9 × 8/10 + 0.1/3 = 0.753, with a standard deviation of 0.03 over 200 draws
    assert 0.66 < found.count((2,)) / 200 < 0.85


def test_choosing_by_variance_resumes_exactly(sd_folder: Path, tmp_path: Path) -> None:
    settings = (*HALF, "policy.step_choice=variance", "policy.step_fraction=0.3")
    problem, learner = start(sd_folder, *settings)
    for learner.iteration in range(2):
        first = iterate(Memory(problem), learner, None).trajectory
    assert first.chosen is not None and set(first.chosen) <= learner.step_errors.keys()
    learner.iteration = 2
    for name, data in to_files(learner, {}).items():
        (tmp_path / name).write_bytes(data)
    chosen = iterate(Memory(problem), learner, None).trajectory.chosen
    other_problem, other = start(sd_folder, *settings)
    from_files(other_problem, other, tmp_path)
    assert iterate(Memory(other_problem), other, None).trajectory.chosen == chosen
    assert other.step_errors == learner.step_errors
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(learner).items())


def test_gae_goes_along_the_chosen_steps(sd_folder: Path) -> None:
    batch = collect(tiny_problem(sd_folder), 0, forget=1)
    value = torch.tensor([[1.0, torch.nan, 3.0]])
    batch = replace(batch, reward=torch.tensor([5.0]), value=value, chosen=(0, 2))
    # delta: 3 - 1 = 2 from step 0 to step 2, then 5 - 3 = 2; A_0 = 2 + 0.5 · 2
    found = gae_advantage(batch, 0.5)
    assert found[0, [0, 2]].tolist() == [3.0, 2.0] and bool(found[0, 1].isnan())
    # the standard deviation of 3 and 2 is 0.5
    assert normalised(found)[0, [0, 2]].tolist() == pytest.approx([6.0, 4.0])


def test_batches_of_other_steps_are_not_joined(sd_folder: Path) -> None:
    batch = collect(tiny_problem(sd_folder), 0, forget=1)
    with pytest.raises(AssertionError, match="learned from at other steps"):
        Trajectory.cat([replace(batch, chosen=(0,)), replace(batch, chosen=(1,))])
    samples, steps = replace(batch, chosen=(1, 2)).policy_pairs()
    assert (samples.tolist(), steps.tolist()) == ([0, 0], [1, 2])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["policy.step_choice=variance"], "critic.kind 'none'; allowed without a critic: each, shared"),
        (["policy.step_choice=shared", "policy.window=8"], "policy.window 8; allowed with a window: each"),
    ],
)
def test_combinations_that_cannot_work_are_refused(sd_folder: Path, settings: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny_problem(sd_folder, *settings)
