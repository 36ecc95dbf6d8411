"""Plans: the paper's grouping, what is left out, reproducible draws, parts and their weights."""

from itertools import chain

import pytest
import torch

from cgru.rl.batches import Plan, micro_batches, plans, weight

ALL = torch.ones(50, dtype=torch.bool)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pairs(plan: Plan) -> list[tuple[int, int]]:
    return list(zip(plan.sample_ids.tolist(), plan.step_ids.tolist(), strict=True))


def test_the_papers_epoch() -> None:
    """16 trajectories, 2 updates: disjoint halves of 8 trajectories × 50 steps, every pair once."""
    first, second = plans(16, ALL, updates=2, generator=seeded())
    assert len(first) == len(second) == 8 * 50
    assert not set(first.sample_ids.tolist()) & set(second.sample_ids.tolist())
    assert sorted(pairs(first) + pairs(second)) == [(i, t) for i in range(16) for t in range(50)]


def test_every_pass_shuffles_anew() -> None:
    found = plans(4, ALL, updates=2, passes=3, generator=seeded())
    assert len(found) == 6
    for one_pass in (found[:2], found[2:4], found[4:]):
        assert len(set(chain.from_iterable(map(pairs, one_pass)))) == 4 * 50
    assert len({tuple(pairs(plan)) for plan in found}) == 6


def test_steps_are_permuted_for_each_sample_on_its_own() -> None:
    (plan,) = plans(3, ALL, updates=1, generator=seeded())
    orders = {tuple(t for i, t in pairs(plan) if i == sample) for sample in range(3)}
    assert len(orders) == 3 and tuple(range(50)) not in orders


def test_a_micro_batch_mixes_trajectories_and_times() -> None:
    (plan,) = plans(8, ALL, updates=1, generator=seeded())
    part = next(micro_batches(plan, 8))
    assert sorted(part.sample_ids.tolist()) == list(range(8))
    assert len(set(part.step_ids.tolist())) > 1


def test_deterministic_steps_are_left_out() -> None:
    stochastic = torch.tensor([True, False, True, False])
    (plan,) = plans(2, stochastic, updates=1, generator=seeded())
    assert sorted(pairs(plan)) == [(0, 0), (0, 2), (1, 0), (1, 2)]


@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 50), (0.5, 25), (0.33, 16), (0.001, 1)])
def test_step_fraction_draws_without_replacement(fraction: float, kept: int) -> None:
    found = plans(4, ALL, updates=2, passes=2, step_fraction=fraction, generator=seeded())
    assert [len(plan) for plan in found] == [2 * kept] * 4
    assert all(len(set(pairs(plan))) == len(plan) for plan in found)
    if fraction < 1:
        assert set(pairs(found[0]) + pairs(found[1])) != set(pairs(found[2]) + pairs(found[3]))


def test_every_step_is_as_likely_as_another() -> None:
    """2 of 10 steps, 5,000 draws: each step 1,000 times, give or take four standard deviations of 28."""
    (plan,) = plans(5000, ALL[:10], updates=1, step_fraction=0.2, generator=seeded())
    counts = plan.step_ids.bincount(minlength=10)
    assert len(plan) == 10_000 and (counts - 1000).abs().max() < 4 * 28.3


def test_uneven_groups_differ_by_one_sample() -> None:
    found = plans(7, ALL[:3], updates=3, generator=seeded())
    assert [len(plan) for plan in found] == [9, 6, 6]


def test_the_generator_decides_and_the_global_one_is_left_alone() -> None:
    before = torch.get_rng_state()
    same = [plans(6, ALL, updates=2, step_fraction=0.3, generator=seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    first, again, other = ([pairs(plan) for plan in found] for found in same)
    assert first == again != other


def test_micro_batches_keep_order_and_weights_sum_to_one() -> None:
    plan = Plan(torch.arange(10), torch.arange(10).flip(0))
    parts = list(micro_batches(plan, 4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert list(chain.from_iterable(map(pairs, parts))) == pairs(plan)
    assert [weight(part, plan) for part in parts] == [0.4, 0.4, 0.2]


def test_weights_make_the_mean_of_the_plan() -> None:
    """Parts of unequal size: the plain mean of part means would be (1.5 + 6) / 2 = 3.75, the plan's mean is 3."""
    plan, values = Plan(torch.arange(3), torch.zeros(3, dtype=torch.long)), torch.tensor([1.0, 2.0, 6.0])
    total = sum(weight(part, plan) * values[part.sample_ids].mean() for part in micro_batches(plan, 2))
    assert float(total) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("n", "changes", "message"),
    [
        (3, {"updates": 4}, "4 updates for 3 trajectories; use at most 3 updates or collect more trajectories"),
        (3, {"updates": 0}, "0 updates in 1 passes; both must be at least 1"),
        (3, {"passes": 0}, "1 updates in 0 passes"),
        (3, {"step_fraction": 0.0}, "step fraction is 0.0; it must be above 0 and at most 1"),
        (3, {"step_fraction": 1.5}, "step fraction is 1.5"),
    ],
)
def test_impossible_plans_are_named(n: int, changes: dict[str, float], message: str) -> None:
    settings = {"updates": 1, "passes": 1, "step_fraction": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        plans(n, ALL, generator=seeded(), **settings)  # type: ignore[arg-type]


def test_a_sampler_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="use eta above 0"):
        plans(2, torch.zeros(4, dtype=torch.bool), updates=1, generator=seeded())
    with pytest.raises(ValueError, match="micro-batch is 0 pairs"):
        next(micro_batches(Plan(torch.arange(1), torch.arange(1)), 0))
