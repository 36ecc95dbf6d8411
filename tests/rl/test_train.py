"""The loop: parity, what an iteration records, the window, averaging, and the advantages by name."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import nudge, tiny_learner, tiny_problem

from cgru.critic.latent import LatentCritic
from cgru.mdp.rollout import rescore
from cgru.mdp.trajectory import Trajectory
from cgru.rl.collect import collect, scored
from cgru.rl.oom_retry import Memory
from cgru.rl.state import Learner, Problem, Sizes, make_learner
from cgru.rl.train import Iteration, advantage, check_parity, describe, iterate, measure_variance, train, windowed
from cgru.rl.update import TrainingError


def with_critic(folder: Path, *settings: str) -> tuple[Problem, Learner]:
    problem = tiny_problem(folder, "critic.kind=latent", "policy.advantage=critic", "critic.batch=4", *settings)
    critic = LatentCritic(problem.backbone.latent_shape, 16, scale=1.0, prior=0.4)
    return problem, make_learner(problem, tiny_learner(problem).parameters, critic)


def test_parity_holds_after_collection_and_not_after_tampering(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    nudge(tiny_learner(problem))
    batch = collect(problem, 0, forget=3)
    assert check_parity(problem, batch) <= 1e-5
    tampered = batch.log_prob.clone()
    tampered[1, 1] -= 2e-5
    with pytest.raises(TrainingError, match=r"max \|ratio - 1\| is [\d.]+e-05: .*; allowed: 1e-05 in fp32") as caught:
        check_parity(problem, replace(batch, log_prob=tampered))
    assert "\n" not in str(caught.value)
    with pytest.raises(TrainingError, match="on a device of the kind it began on"):
        check_parity(problem, replace(batch, log_prob=tampered), is_first=False)
    tampered[1, 1] = torch.nan
    with pytest.raises(TrainingError):
        check_parity(problem, replace(batch, log_prob=tampered))


@pytest.mark.parametrize(("update", "advice"), [(3, "Set policy.micro_batch to a power of two"), (4, "run in fp32")])
def test_in_half_precision_a_failed_check_says_which_batches_are_safe(
    sd_folder: Path, update: int, advice: str
) -> None:
    """A tenth of the clip is allowed: at 256 latent dimensions 1e-4 · √(16384 / 256) / 10 = 8e-5."""
    problem = tiny_problem(sd_folder, "dtype=bf16", sizes=Sizes(rollout=4, update=update, decode=8, score=64))
    nudge(tiny_learner(problem))
    batch = collect(problem, 0, forget=3)
    assert check_parity(problem, replace(batch, log_prob=batch.log_prob - 7e-5)) == pytest.approx(7e-5, abs=5e-6)
    with pytest.raises(TrainingError, match=f"allowed: 8e-05 in bf16.*{advice}"):
        check_parity(problem, replace(batch, log_prob=batch.log_prob - 9e-5))


def test_an_iteration_records_what_the_issue_asks(sd_folder: Path) -> None:
    problem, learner = with_critic(sd_folder, "diagnostics.every=2")
    record = iterate(Memory(problem), learner, None).record
    per_step = [f"{name}/t{t}" for t in range(3) for name in ("critic/value_error", "critic/explained_variance")]
    per_step += [f"ratio/{name}/t{t}" for t in range(3) for name in ("mean", "std", "summed_std", "clipped")]
    single = ["reward/mean", "critic/loss", "policy/parity", "policy/clipped", "policy/kl", "policy/gradient_norm"]
    variance = [f"variance/{name}" for name in ("mean", "ddpo", "critic")]
    assert not {*per_step, *single, *variance, "variance/critic_normalised"} - record.keys()
    learner.iteration = 1
    later = iterate(Memory(problem), learner, None).record
    assert not {"policy/parity", "variance/mean"} & later.keys() and later["iteration"] == 1


def test_a_critic_that_stays_is_still_measured(sd_folder: Path) -> None:
    problem, learner = with_critic(sd_folder, "critic.online_updates=0")
    assert isinstance(learner.critic, LatentCritic)
    before = {name: value.clone() for name, value in learner.critic.state_dict().items()}
    record = iterate(Memory(problem), learner, None).record
    assert "critic/loss" not in record and float(record["critic/value_error"]) > 0
    assert all(torch.equal(value, before[name]) for name, value in learner.critic.state_dict().items())


def test_values_are_the_critic_s_before_it_moves(sd_folder: Path) -> None:
    """A fresh critic says its prior, 0.4, everywhere; were it asked after its updates, it would not."""
    problem, learner = with_critic(sd_folder, "critic.online_learning_rate=0.1")
    done = iterate(Memory(problem), learner, None)
    value, reward, weight = done.trajectory.value, done.trajectory.reward, done.trajectory.advantage
    assert value is not None and reward is not None and weight is not None
    torch.testing.assert_close(value, torch.full_like(value, 0.4))
    torch.testing.assert_close(weight, (reward - 0.4)[:, None].expand_as(weight))


def test_retain_prompts_are_told_apart(sd_folder: Path) -> None:
    problem = replace(tiny_problem(sd_folder), rewarded=frozenset({"a cat", "trees"}))
    batch = collect(problem, 0, forget=2, retain=2)
    batch = replace(batch, reward=torch.tensor([1.0, 3.0, 10.0, 20.0]), advantage=torch.zeros(4, batch.horizon))
    record = describe(problem, batch, None)
    assert record["reward/mean"] == 2.0 and record["reward/retain_mean"] == 15.0


def test_a_share_of_the_batch_is_retain_prompts(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "retention.share=0.5")
    problem = replace(problem, rewarded=frozenset({"a cat", "trees"}))
    done = iterate(Memory(problem), tiny_learner(problem), None)
    assert sorted(p in problem.rewarded for p in done.trajectory.cond.prompts) == [False, False, True, True]


def test_the_window_keeps_the_newest(sd_folder: Path) -> None:
    """4 trajectories an iteration, a window of 6: two whole batches are kept, the update sees the last 6."""
    problem = tiny_problem(sd_folder, "policy.window=6")
    learner = tiny_learner(problem)
    seeds, kept = [], []
    for _ in range(3):
        done = iterate(Memory(problem), learner, None)
        learner.iteration += 1
        seeds += done.trajectory.seeds.tolist()
        kept.append([len(part) for part in learner.window])
    assert kept == [[4], [4, 4], [4, 4]]
    assert torch.equal(learner.window[-1].x, done.trajectory.x)
    batch = done.trajectory[torch.tensor([3, 1, 0, 2])]
    assert windowed(learner, batch, 6).seeds.tolist() == [*seeds[-2:], *batch.seeds.tolist()]
    assert windowed(learner, batch, 0) is batch


def test_every_start_sees_that_its_log_probs_are_those_of_the_updates(
    sd_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first iteration of a resumed run on one trajectory of 3 steps, and without a record of it."""
    problem = tiny_problem(sd_folder, "policy.iterations=4")
    learner, seen = tiny_learner(problem), list[Iteration]()
    learner.iteration = 2
    with caplog.at_level(logging.INFO):
        train(problem, learner, None, after=lambda done: bool(seen.append(done)))
    assert [record.getMessage().partition("over ")[2] for record in caplog.records] == ["3 pairs (allowed 1e-05)"]
    assert len(seen) == 2 and not any("policy/parity" in done.record for done in seen)


def test_trajectories_are_indexed_with_every_field(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    batch = scored(problem, collect(problem, 0, forget=4))
    values = torch.arange(4.0)[:, None].expand(-1, batch.horizon)
    batch = replace(batch, value=values, advantage=-values, x0_hat=batch.x[:, 1:])
    for ids, order in ((slice(1, 3), [1, 2]), (torch.tensor([3, 0, 3]), [3, 0, 3])):
        some = batch[ids]
        assert some.cond.prompts == tuple(batch.cond.prompts[i] for i in order)
        for name in ("x", "log_prob", "seeds", "reward", "value", "advantage", "x0_hat"):
            assert torch.equal(vars(some)[name], vars(batch)[name][order]), name
    assert torch.equal(Trajectory.cat([batch[:1], batch[1:]]).x, batch.x)


def test_training_goes_on_until_told_to_stop(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "policy.iterations=5")
    learner, seen = tiny_learner(problem), list[Iteration]()

    def after(done: Iteration) -> bool:
        seen.append(done)
        return learner.iteration == 2

    train(problem, learner, None, after=after)
    assert [done.record["iteration"] for done in seen] == [0, 1] and learner.iteration == 2


def test_the_average_lags_behind(sd_folder: Path) -> None:
    """Decay 0.75: it starts at the first update's weights, then moves a quarter of the way each time."""
    problem = tiny_problem(sd_folder)
    learner = tiny_learner(problem)
    name, parameter = next(iter(learner.parameters.items()))
    assert torch.equal(learner.exported[name], parameter)
    for value in (4.0, 8.0, 0.0):
        parameter.data.fill_(value)
        learner.averaged(0.75)
    # 4; 4 + (8 - 4) / 4 = 5; 5 + (0 - 5) / 4 = 3.75
    torch.testing.assert_close(learner.exported[name], torch.full_like(parameter, 3.75))
    learner.average.clear()
    learner.averaged(0.0)
    assert not learner.average


def test_advantages_by_name(sd_folder: Path) -> None:
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0])
    expected = {
        "critic": rewards - 1,
        "batch": (rewards - 2) / 3.5**0.5,  # squares 4, 1, 0, 9: variance 3.5
        "per-prompt": (rewards - 2) / 3.5**0.5,  # too few of each prompt: judged by the batch
    }
    for name, row in expected.items():
        problem = tiny_problem(sd_folder, f"policy.advantage={name}", "critic.kind=latent")
        batch = collect(problem, 0, forget=4)
        batch = replace(batch, reward=rewards, value=torch.ones(4, batch.horizon))
        found = advantage(problem, tiny_learner(problem), batch)
        torch.testing.assert_close(found, row[:, None].expand(-1, batch.horizon), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 64])  # parts of the steps
def test_gradient_variance_is_that_of_each_weighting_by_hand(sd_folder: Path, size: int) -> None:
    problem, learner = with_critic(sd_folder)
    nudge(learner)
    problem = replace(problem, sizes=replace(problem.sizes, update=size))
    reward = torch.tensor([1.0, 2.0, 4.0, 9.0])
    value = torch.tensor([[3.0, 2.0, 1.0]]) + torch.arange(4.0)[:, None]
    batch = replace(collect(problem, 0, forget=4), reward=reward, value=value)
    # mean 4; squares 9, 4, 0, 25 have the mean 9.5
    by_hand = {
        "mean": torch.tensor([-3.0, -2.0, 0.0, 5.0])[:, None].expand(4, 3),
        "ddpo": torch.tensor([-3.0, -2.0, 0.0, 5.0])[:, None].expand(4, 3) / 9.5**0.5,
        "critic": reward[:, None] - value,
    }
    weights, steps = list(learner.parameters.values()), batch.steps(*batch.policy_pairs())
    log_prob = rescore(problem.backbone, steps, kernel=problem.kernel, guidance=batch.guidance).view(4, 3)
    found = measure_variance(problem, learner, batch)
    assert len(found) == 9  # three figures of each
    for name, weighting in by_hand.items():
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(row, weights, retain_graph=True)])
            for row in (weighting * log_prob).sum(1)
        ]
        assert found[f"variance/{name}"] == pytest.approx(float(torch.stack(rows).var(0).sum()), rel=1e-3), name
    assert all(parameter.grad is None for parameter in weights)


def test_an_iteration_of_pairs_learns_from_one_step(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.pairs=true", "policy.advantage=pair", "policy.normalise=true")
    learner = tiny_learner(problem)
    done = iterate(Memory(problem), learner, None)
    assert float(done.record["policy/parity"]) <= 1e-5 and float(done.record["policy/gradient_norm"]) > 0
    advantage = done.trajectory.advantage
    assert advantage is not None and torch.equal(advantage[0::2], -advantage[1::2])
    assert advantage.std(correction=0).item() == pytest.approx(1.0, abs=1e-2)
    problem, learner = with_critic(sd_folder, "sampling.pairs=true", "diagnostics.every=1")
    record = iterate(Memory(problem), learner, None).record
    assert {"critic/loss", "variance/critic", "policy/parity"} <= record.keys()


def test_exploration_is_told_apart_and_parity_is_of_the_policy_s_own(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.explore=0.5")
    done = iterate(Memory(problem), tiny_learner(problem), None)
    reward = done.trajectory.reward
    assert reward is not None
    assert done.record["reward/explored_mean"] == pytest.approx(float(reward[:2].mean()))
    assert done.record["reward/mean"] == pytest.approx(float(reward[2:].mean()))
    assert float(done.record["policy/parity"]) <= 1e-5
    with pytest.raises(TrainingError, match="before the update"):
        check_parity(problem, done.trajectory)


def test_ratios_are_those_of_the_policy_s_own_trajectories(sd_folder: Path) -> None:
    """In one update, before theta has moved, they are 1; a relabelled one's ratio is between two prompts."""
    settings = ("policy.updates=1", "sampling.explore=0.5")
    records = [
        iterate(Memory(problem), tiny_learner(problem), None).record
        for ratio in ("sampled", "own")
        for problem in [tiny_problem(sd_folder, *settings, f"sampling.explore_ratio={ratio}")]
    ]
    assert [float(record["policy/ratio_max"]) for record in records] == pytest.approx([0, 0], abs=1e-5)
    between = [abs(float(record["policy/ratio_relabelled_mean"]) - 1) for record in records]
    assert between[0] > 1e-5 > between[1]
    plain = tiny_problem(sd_folder, "policy.updates=1")
    assert "policy/ratio_relabelled_mean" not in iterate(Memory(plain), tiny_learner(plain), None).record


def test_the_constant_control_gives_relabelled_trajectories_one_advantage(sd_folder: Path) -> None:
    told, control = (
        iterate(Memory(problem), tiny_learner(problem), None).trajectory.advantage
        for credit in ("reward", "constant")
        for problem in [tiny_problem(sd_folder, "sampling.explore=0.5", f"sampling.explore_credit={credit}")]
    )
    assert told is not None and control is not None
    assert told[:2].std() > 0
    torch.testing.assert_close(control[:2], told[:2].abs().mean().expand(2, 3))
    torch.testing.assert_close(control[2:], told[2:])


def test_the_shuffled_control_keeps_rewards_and_exchanges_their_owners(sd_folder: Path) -> None:
    told, control = (
        iterate(Memory(problem), tiny_learner(problem), None).trajectory.reward
        for credit in ("reward", "shuffled")
        for problem in [
            tiny_problem(
                sd_folder, "policy.trajectories=8", "sampling.explore=0.75", f"sampling.explore_credit={credit}"
            )
        ]
    )
    assert told is not None and control is not None
    assert not torch.equal(told[:6], control[:6])
    assert torch.equal(told[:6].sort().values, control[:6].sort().values) and torch.equal(told[6:], control[6:])
