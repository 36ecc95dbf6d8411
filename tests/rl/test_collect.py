"""Collecting: prompts in turn, seeds by name, rewards checked; retain prompts only if they have a reward."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import Brightness, tiny_problem
from torch import Tensor

from cgru.mdp.trajectory import Conditioning, Trajectory
from cgru.prompts import Prompt
from cgru.rewards.base import RewardError
from cgru.rl.collect import choose, collect, counterparts, explored, scored, shuffled
from cgru.rl.state import Problem


def test_prompts_are_taken_evenly(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    counts = Counter(choose(problem, "forget", problem.prompts.policy, 8, 0))
    assert sorted(counts.values()) == [2, 3, 3]
    assert choose(problem, "forget", problem.prompts.policy, 8, 0) != choose(
        problem, "forget", problem.prompts.policy, 8, 1
    )
    assert choose(problem, "forget", (), 0) == []
    with pytest.raises(AssertionError, match="3 retain prompts wanted from none"):
        choose(problem, "retain", (), 3)


def test_a_batch_repeats_whatever_was_drawn_before(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    first = collect(problem, 5, forget=3)
    collect(problem, 6, forget=2)
    again = collect(problem, 5, forget=3)
    assert torch.equal(first.x, again.x) and first.cond.prompts == again.cond.prompts
    assert len(set(first.seeds.tolist())) == 3


def test_only_retain_prompts_with_a_reward_are_in_a_batch(sd_folder: Path) -> None:
    problem = replace(tiny_problem(sd_folder), rewarded=frozenset({"trees"}))
    batch = collect(problem, 0, forget=2, retain=3)
    assert batch.cond.prompts[2:] == ("trees",) * 3
    assert set(batch.cond.prompts[:2]) <= {p.text for p in problem.prompts.policy}


def test_rewards_are_those_of_the_decoded_ends_in_order(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    problem = replace(problem, sizes=replace(problem.sizes, decode=2))  # 3 pictures in parts of 2
    batch = scored(problem, collect(problem, 0, forget=3))
    expected = [float(problem.backbone.decode(x[None]).mean()) for x in batch.final]
    assert batch.reward is not None
    torch.testing.assert_close(batch.reward, torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_pair_differs_in_the_sign_of_one_step_s_noise_alone(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.pairs=true", "policy.advantage=pair", "sampling.steps=4")
    full = problem.kernel
    steps = set()
    for iteration in range(6):
        batch = collect(problem, iteration, forget=4)
        (k,) = batch.stochastic.nonzero().flatten().tolist()
        steps.add(k)
        plus, minus = batch.x[0::2], batch.x[1::2]
        assert batch.cond.prompts[0::2] == batch.cond.prompts[1::2]
        assert torch.equal(plus[:, : k + 1], minus[:, : k + 1]) and not torch.equal(plus[:, k + 1], minus[:, k + 1])
        guidance = problem.config.sampling.guidance
        time = full.timesteps[k].expand(2)
        prediction = problem.backbone.predict(plus[:, k], time, batch.cond[0::2], guidance=guidance)
        step = full.step(prediction, plus[:, k], k)  # the Gaussian of the usual kernel: updates need no other
        torch.testing.assert_close((plus[:, k + 1] + minus[:, k + 1]) / 2, step.mean, atol=1e-5, rtol=0)
        torch.testing.assert_close(batch.log_prob[0::2, k], step.log_prob(plus[:, k + 1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(batch.log_prob[0::2], batch.log_prob[1::2], atol=1e-5, rtol=0)
        assert not batch.log_prob[:, [i for i in range(4) if i != k]].any()
    assert len(steps) > 1
    small = replace(problem, sizes=replace(problem.sizes, rollout=3))  # a batch may end within a pair
    torch.testing.assert_close(collect(small, 5, forget=4).x, batch.x, atol=1e-4, rtol=1e-5)


class Lengths(Brightness):
    """Knows prompts by their length: 0.05 a letter."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.tensor([0.05 * len(prompt) for prompt in prompts])


def test_each_picture_is_scored_with_its_own_prompt(sd_folder: Path) -> None:
    problem = replace(tiny_problem(sd_folder), reward=Lengths())
    problem = replace(problem, sizes=replace(problem.sizes, decode=2))  # 6 pictures in parts of 2
    batch = scored(problem, collect(problem, 0, forget=6))
    assert len({len(prompt) for prompt in batch.cond.prompts[::2]}) > 1  # parts are told apart
    assert batch.reward is not None
    assert batch.reward.tolist() == pytest.approx([0.05 * len(prompt) for prompt in batch.cond.prompts])


def test_a_reward_outside_its_range_is_said(sd_folder: Path) -> None:
    problem = replace(tiny_problem(sd_folder), reward=Brightness(high=0.01))
    with pytest.raises(RewardError, match="outside its declared range 0 to 0.01"):
        scored(problem, collect(problem, 0, forget=1))


def test_each_prompt_is_encoded_once(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    cond = problem.encode(["a dog", "trees", "a dog"])
    assert set(problem.text) == {"a dog", "trees"} and cond.prompts == ("a dog", "trees", "a dog")
    assert torch.equal(cond.embeddings[0], cond.embeddings[2])
    torch.testing.assert_close(cond.embeddings, problem.backbone.encode_text(["a dog", "trees", "a dog"]).embeddings)


def test_exploring_trajectories_are_drawn_for_a_retain_prompt_and_relabelled(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.explore=0.5")
    batch, plain = collect(problem, 0, forget=4), collect(tiny_problem(sd_folder), 0, forget=4)
    assert explored(problem, 4) == 2 and explored(problem, 3) == 2  # 1.5, to the even number
    assert batch.cond.prompts == plain.cond.prompts
    torch.testing.assert_close(batch.cond.embeddings, plain.cond.embeddings)
    same = [torch.equal(one, other) for one, other in zip(batch.x, plain.x, strict=True)]
    assert same == [False, False, True, True]
    assert torch.equal(batch.x[:, 0], plain.x[:, 0])  # the same noise at the start

    others = counterparts(problem, list(batch.cond.prompts[:2]), problem.prompts.retain, 0)
    assert batch.sampled_for == (*others, *batch.cond.prompts[2:]) and plain.sampled_for is None
    assert batch.relabelled.tolist() == [True, True, False, False] and not plain.relabelled.any()
    assert batch[torch.tensor([3, 1])].relabelled.tolist() == [False, True]
    assert Trajectory.cat([batch[:1], batch[2:]]).relabelled.tolist() == [True, False, False]


def implied(problem: Problem, batch: Trajectory, cond: Conditioning) -> tuple[Tensor, Tensor]:
    """Log-probs of all actions and x̂0 of all states under prompts that are given, each (n, t, ...)."""
    log_probs, clean = [], []
    for index in range(batch.horizon):
        x, time = batch.x[:, index], batch.time[index].expand(len(batch))
        prediction = problem.backbone.predict(x, time, cond, guidance=batch.guidance)
        log_probs.append(problem.kernel.step(prediction, x, index).log_prob(batch.x[:, index + 1]))
        clean.append(problem.kernel.x0(prediction, x, index))
    return torch.stack(log_probs, 1), torch.stack(clean, 1)


@torch.no_grad()
@pytest.mark.parametrize("ratio", ["sampled", "own"])
def test_a_relabelled_trajectory_tells_its_two_prompts_apart(sd_folder: Path, ratio: str) -> None:
    """Actions are the sampled prompt's, x̂0 the label's, log-probs those that the setting names."""
    looks = ("critic.kind=film", "critic.view=clean")
    problem = tiny_problem(sd_folder, "sampling.explore=0.5", f"sampling.explore_ratio={ratio}", *looks)
    batch = collect(problem, 0, forget=4)
    assert batch.sampled_for is not None and batch.x0_hat is not None
    drawn, _ = implied(problem, batch, problem.encode(list(batch.sampled_for)))
    label, clean = implied(problem, batch, batch.cond)
    assert (drawn - label)[:2].abs().max() > 1e-5  # so that one can tell
    torch.testing.assert_close(batch.log_prob, drawn if ratio == "sampled" else label, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.x0_hat, clean, atol=1e-4, rtol=0)


def test_states_that_no_critic_looks_at_are_not_predicted_again(sd_folder: Path) -> None:
    looks = ("critic.kind=film", "critic.view=clean", "sampling.noisy_steps=1")
    batch = collect(tiny_problem(sd_folder, "sampling.explore=0.5", *looks, "policy.step_choice=shared"), 0, forget=4)
    everything = collect(tiny_problem(sd_folder, "sampling.explore=0.5", *looks), 0, forget=4)
    assert batch.x0_hat is not None and everything.x0_hat is not None
    assert batch.x0_hat[:2, 1:].isnan().all() and not batch.x0_hat[2:].isnan().any()
    torch.testing.assert_close(batch.x0_hat[:, :1], everything.x0_hat[:, :1])
    assert not everything.x0_hat.isnan().any()


def test_shuffling_exchanges_rewards_among_relabelled_trajectories_only(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.explore=0.75")
    batch = replace(collect(problem, 0, forget=8), reward=torch.arange(8.0))
    found = [shuffled(batch, torch.Generator().manual_seed(seed)).reward for seed in range(4)]
    assert all(rewards is not None for rewards in found)
    rewards = [rewards.tolist() for rewards in found if rewards is not None]
    assert all(row[6:] == [6.0, 7.0] and sorted(row) == [*range(8)] for row in rewards)
    assert len({tuple(row) for row in rewards}) > 1


def test_counterparts_share_the_context_where_one_does(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    forget = (Prompt("a flat dog", "dog", "", "flat"), Prompt("an ink dog", "dog", "", "ink"))
    pool = (
        Prompt("a flat cat", "cat", "", "flat"),
        Prompt("a cat", "cat", ""),
        Prompt("a flat tree", "tree", "", "flat"),
    )
    problem = replace(problem, prompts=replace(problem.prompts, policy=forget, retain=pool))
    found = counterparts(problem, ["a flat dog"] * 40 + ["an ink dog"] * 60, pool, 0)
    assert set(found[:40]) == {"a flat cat", "a flat tree"}
    assert set(found[40:]) == {"a flat cat", "a flat tree", "a cat"}  # no ink one, so any
    assert found != counterparts(problem, ["a flat dog"] * 40 + ["an ink dog"] * 60, pool, 1)
