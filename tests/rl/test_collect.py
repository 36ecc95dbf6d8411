"""Collecting: prompts in turn, seeds by name, rewards checked; retain prompts only if they have a reward."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import Brightness, tiny_problem

from cgru.mdp.rollout import rescore
from cgru.prompts import Prompt
from cgru.rewards.base import RewardError
from cgru.rl.collect import choose, collect, counterparts, explored, scored


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

    # Their log-probs are those under the prompt that drew them; under the label they are others.
    others = counterparts(problem, list(batch.cond.prompts[:2]), problem.prompts.retain, 0)
    sample_ids, step_ids = batch[:2].policy_pairs()
    steps = batch.steps(sample_ids, step_ids)
    own = rescore(problem.backbone, steps, kernel=problem.kernel, guidance=batch.guidance)
    drawn = replace(steps, cond=problem.encode([others[i] for i in sample_ids.tolist()]))
    under_others = rescore(problem.backbone, drawn, kernel=problem.kernel, guidance=batch.guidance)
    torch.testing.assert_close(under_others, steps.log_prob, atol=1e-5, rtol=0)
    assert (own - steps.log_prob).abs().max() > 1e-5


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
