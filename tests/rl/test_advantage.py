"""Advantages in literal numbers, on records with two trajectories of three steps."""

import json
from dataclasses import replace

import pytest
import torch

from cgru.mdp.trajectory import Conditioning, Trajectory
from cgru.rl.advantage import (
    PromptStatistics,
    batch_advantage,
    critic_advantage,
    gae_advantage,
    measured_value,
    normalised,
    pair_advantage,
    per_prompt_advantage,
)


def record(reward: list[float], value: list[list[float]] | None = None, prompts: list[str] | None = None) -> Trajectory:
    """Trajectories with nothing but prompts, rewards and values; three steps unless the values say otherwise."""
    n, t = len(reward), len(value[0]) if value else 3
    return Trajectory(
        x=torch.zeros(n, t + 1, 1, 1, 1),
        log_prob=torch.zeros(n, t),
        time=torch.arange(t),
        stochastic=torch.ones(t, dtype=torch.bool),
        seeds=torch.arange(n),
        cond=Conditioning(tuple(prompts or ["a dog"] * n), {"embeddings": torch.zeros(n, 1, 1)}),
        guidance=1.0,
        reward=torch.tensor(reward),
        value=None if value is None else torch.tensor(value),
    )


VALUED = record([8.0, 2.0], [[5.0, 6.0, 7.0], [5.0, 1.0, 3.0]])


def test_critic_advantage_is_reward_minus_value() -> None:
    assert critic_advantage(VALUED).tolist() == [[3.0, 2.0, 1.0], [-3.0, 1.0, -1.0]]


def test_no_gradient_leaves_the_critic() -> None:
    value = torch.zeros(2, 3, requires_grad=True)
    trajectory = replace(VALUED, value=value)
    assert not critic_advantage(trajectory).requires_grad and not gae_advantage(trajectory, 0.5).requires_grad


def test_batch_advantage_is_ddpos() -> None:
    # mean 4, deviations 4, -2, -2; population variance (16 + 4 + 4) / 3 = 8: 4/√8 = 1.41421, -2/√8 = -0.70711
    advantage = batch_advantage(record([8.0, 2.0, 2.0]))
    expected = torch.tensor([1.4142135, -0.7071068, -0.7071068])
    torch.testing.assert_close(advantage, expected[:, None].expand(3, 3))


def test_batch_advantage_is_clamped() -> None:
    # One 1 among 99 zeros: (1 - 0.01) / √(0.01 · 0.99) = 9.95
    reward = [1.0] + [0.0] * 98 + [0.0]
    assert batch_advantage(record(reward))[0].tolist() == [5.0] * 3
    assert batch_advantage(record(reward), clamp=2.0)[0].tolist() == [2.0] * 3
    assert batch_advantage(record(reward), clamp=20.0)[0, 0].item() == pytest.approx(9.9499, abs=1e-3)


def test_equal_rewards_have_no_advantage() -> None:
    """In float32 the mean of seven times 0.1 is not 0.1; divided by 1e-8 that would be a gradient out of nothing."""
    assert batch_advantage(record([0.1] * 7)).abs().max() < 1e-6


def test_members_of_a_pair_are_each_other_s_baseline() -> None:
    found = pair_advantage(record([8.0, 2.0, 1.0, 4.0]))
    assert found.tolist() == [[3.0] * 3, [-3.0] * 3, [-1.5] * 3, [1.5] * 3]


def test_pairs_estimate_the_same_gradient_with_less_noise_and_cancel_any_baseline() -> None:
    # a ~ N(theta, 1), r = a² + 5 c with c ~ N(0, 1) of the state: the gradient of E[r] is 2 theta. log pi' = z.
    theta, generator = 0.7, torch.Generator().manual_seed(0)
    z, state = (torch.randn(100_000, generator=generator, dtype=torch.float64) for _ in range(2))
    noise = torch.stack([z, -z], 1)
    reward = (theta + noise).square() + 5 * state[:, None]
    advantage = pair_advantage(record(reward.flatten().tolist()))[:, 0].double().unflatten(0, (-1, 2))
    paired = (advantage * noise).mean(1)
    assert paired.mean().item() == pytest.approx(2 * theta, abs=0.02)
    with_baseline = ((reward - 3.3 * state[:, None]) * noise).mean(1)  # a critic's, whatever it is
    torch.testing.assert_close(paired, with_baseline, atol=1e-5, rtol=1e-5)
    alone = ((reward[:, 0] - reward[:, 0].mean()) * z).var()  # r - mean of single trajectories
    assert paired.var() < 0.15 * alone


def test_gae_by_hand() -> None:
    # V = 5, 6, 7 and r = 8: deltas 1, 1, 1. lambda 0.5: 1, 1 + 0.5, 1 + 0.75.
    # V = 5, 1, 3 and r = 2: deltas -4, 2, -1. lambda 0.5: -1, 2 - 0.5, -4 + 0.75.
    assert gae_advantage(VALUED, 0.5).tolist() == [[1.75, 1.5, 1.0], [-3.25, 1.5, -1.0]]
    assert gae_advantage(VALUED, 0.0).tolist() == [[1.0, 1.0, 1.0], [-4.0, 2.0, -1.0]]


def test_gae_with_lambda_one_is_reward_minus_value() -> None:
    generator = torch.Generator().manual_seed(0)
    trajectory = replace(VALUED, value=torch.randn(2, 3, generator=generator))
    torch.testing.assert_close(gae_advantage(trajectory, 1.0), critic_advantage(trajectory))


@pytest.mark.parametrize("gae_lambda", [-0.1, 1.01])
def test_gae_lambda_has_a_range(gae_lambda: float) -> None:
    with pytest.raises(ValueError, match=f"gae lambda is {gae_lambda}; it must lie in 0"):
        gae_advantage(VALUED, gae_lambda)


def test_normalised_scales_but_does_not_centre() -> None:
    # 3, 3, 5, 5: mean 4, population std 1: unchanged but for the scale, and all still positive.
    advantage = torch.tensor([[3.0, 3.0], [5.0, 5.0]])
    torch.testing.assert_close(normalised(advantage), advantage)
    torch.testing.assert_close(normalised(advantage * 40), advantage)
    assert normalised(torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_below_the_floor_advantages_shrink_with_the_spread() -> None:
    advantage = torch.tensor([[0.2], [-0.2], [0.2], [-0.2]])  # a standard deviation of 0.2
    torch.testing.assert_close(normalised(advantage, 0.1), advantage / 0.2)
    torch.testing.assert_close(normalised(advantage, 0.5), advantage / 0.5)
    torch.testing.assert_close(normalised(advantage / 10, 0.5), advantage / 5)


def test_a_critic_is_trusted_as_far_as_it_explains_the_others() -> None:
    """By hand for the first of four: mean and slope are those of the other three."""
    reward, value = [5.0, 1.0, 2.0, 6.0], [[9.0], [2.0], [3.0], [10.0]]
    found, trust = measured_value(record(reward, value))
    others_r, others_v = torch.tensor(reward[1:]), torch.tensor([row[0] for row in value[1:]])
    slope = ((others_r - 3) * (others_v - 5)).mean() / (others_v - 5).square().mean()
    assert 0 < float(slope) < 1
    assert float(found[0, 0]) == pytest.approx(3 + float(slope) * (9 - 5), rel=1e-5)
    assert 0 < float(trust[0]) < 1


def test_a_critic_that_explains_nothing_leaves_the_mean_of_the_others() -> None:
    reward = [1.0, 2.0, 3.0, 4.0]
    for value in ([[4.0], [3.0], [2.0], [1.0]], [[7.0]] * 4):  # wrong way round, and the same everywhere
        found, trust = measured_value(record(reward, value))
        torch.testing.assert_close(found[:, 0], torch.tensor([3.0, 8 / 3, 7 / 3, 2.0]))
        assert float(trust[0]) == pytest.approx(0, abs=1e-6)
    perfect, trust = measured_value(record(reward, [[r + 5] for r in reward]))  # off by a constant alone
    torch.testing.assert_close(perfect[:, 0], torch.tensor(reward))
    assert float(trust[0]) == pytest.approx(1)
    with pytest.raises(ValueError, match="2 trajectories; critic.trust=measured needs at least 3"):
        measured_value(record([1.0, 2.0], [[1.0], [2.0]]))


def test_a_missing_reward_or_value_is_named() -> None:
    with pytest.raises(AssertionError, match="no value yet"):
        critic_advantage(record([1.0, 2.0]))
    with pytest.raises(AssertionError, match="no reward yet"):
        batch_advantage(replace(VALUED, reward=None))


def test_per_prompt_advantage_uses_each_prompts_own_statistics() -> None:
    """Dogs got 1 and 3 (mean 2, std 1), cats 10 and 30 (mean 20, std 10): each pair is -1 and 1."""
    trajectory = record([1.0, 10.0, 3.0, 30.0], prompts=["dog", "cat", "dog", "cat"])
    statistics = PromptStatistics(buffer_size=8, min_count=2)
    assert trajectory.reward is not None
    statistics.update(trajectory.cond.prompts, trajectory.reward)
    advantage = per_prompt_advantage(trajectory, statistics)
    expected = torch.tensor([-1.0, -1.0, 1.0, 1.0])[:, None].expand(4, 3)
    torch.testing.assert_close(advantage, expected, atol=1e-5, rtol=0)
    assert torch.equal(per_prompt_advantage(trajectory, statistics), advantage)  # reading changes nothing
    assert per_prompt_advantage(trajectory, statistics, clamp=0.5).tolist()[0] == [-0.5] * 3


def test_rare_prompts_are_judged_by_the_batch() -> None:
    # Batch 0, 4, 8: mean 4, std √(32/3) = 3.26599. Dogs come twice, below min_count 3, as do cats.
    trajectory = record([0.0, 4.0, 8.0], prompts=["dog", "dog", "cat"])
    statistics = PromptStatistics(buffer_size=8, min_count=3)
    assert trajectory.reward is not None
    statistics.update(trajectory.cond.prompts, trajectory.reward)
    expected = torch.tensor([-1.2247446, 0.0, 1.2247446])[:, None].expand(3, 3)
    torch.testing.assert_close(per_prompt_advantage(trajectory, statistics), expected, atol=1e-5, rtol=0)


def test_rewards_are_kept_over_iterations_and_the_oldest_forgotten() -> None:
    statistics = PromptStatistics(buffer_size=3, min_count=2)
    statistics.update(["dog", "dog", "cat"], torch.tensor([100.0, 1.0, 7.0]))
    statistics.update(["dog", "dog"], torch.tensor([2.0, 3.0]))
    assert statistics.state_dict() == {"dog": [1.0, 2.0, 3.0], "cat": [7.0]}
    mean, std = statistics.of(["dog"], torch.tensor([3.0]))
    assert mean.item() == 2.0 and std.item() == pytest.approx((2 / 3) ** 0.5 + 1e-6)


def test_a_checkpoint_restores_the_statistics_exactly() -> None:
    """Through JSON, with numbers that have no short decimal form, and going on the same afterwards."""
    statistics, restored = (PromptStatistics(buffer_size=3, min_count=2) for _ in range(2))
    reward = torch.rand(6, generator=torch.Generator().manual_seed(0))
    statistics.update(["dog", "cat"] * 3, reward)
    restored.load_state_dict(json.loads(json.dumps(statistics.state_dict())))
    for tracker in (statistics, restored):
        tracker.update(["dog", "bird"], torch.tensor([0.3, 0.7]))
    assert restored.state_dict() == statistics.state_dict()
    first, second = (tracker.of(["dog", "cat", "bird"], reward[:3]) for tracker in (statistics, restored))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_statistics_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="min_count is 5; it must lie in 1 to buffer_size"):
        PromptStatistics(buffer_size=4, min_count=5)
    with pytest.raises(AssertionError, match="no reward of 'cat' yet"):
        PromptStatistics(buffer_size=4, min_count=2).of(["cat"], torch.zeros(1))
