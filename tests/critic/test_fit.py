"""Fitting critics: learning on a problem where relevance depends on time, reproducibility, measures by hand."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_critic import TEXT_WIDTH, conditioning, tiny_tower, trajectory
from torch import Tensor

from cgru.critic import build_critic
from cgru.critic.film import FilmCritic
from cgru.critic.fit import regress, split, values, warm_start, warm_start_classes
from cgru.critic.latent import LatentCritic
from cgru.critic.measures import accuracy_and_macro_precision, calibration, explained_variance, value_error
from cgru.mdp.trajectory import Trajectory

TIMES = [900, 100]


def made(kind: str = "film", head: str = "value", target: str = "bright") -> FilmCritic | LatentCritic:
    return build_critic(
        kind,
        head,
        "noisy",
        tower=tiny_tower(),
        labels=("dark", "bright"),
        target=target,
        scale=10.0,
        prior=5.0,
        latent_shape=(4, 4, 4),
        text_width=TEXT_WIDTH,
    )


def problem(n: int) -> tuple[Tensor, Trajectory, Tensor]:
    """Pictures are bright or dark. At time 100 dark means reward 10, bright 0; at time 900 it means nothing."""
    generator = torch.Generator().manual_seed(11)
    bright = torch.randint(2, (n, 2), generator=generator)
    shade = (64 + 128 * bright)[:, :, None, None, None].expand(n, 2, 3, 8, 8).to(torch.uint8)
    label = bright[:, 1]
    return shade, trajectory(n, TIMES, reward=10.0 * (1 - label)), label


def adam(critic: torch.nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(critic.parameters(), lr=rate, weight_decay=0.01)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_film_learns_when_the_picture_counts_and_plain_cannot() -> None:
    views, states, _ = problem(96)
    result = {}
    for kind in ("film", "plain"):
        critic = made(kind)
        start = warm_start(critic, adam(critic), views, states, epochs=20, batch=32, held_out=32, generator=seeded())
        result[kind] = start.held_out
    assert result["film"].n == 32
    early, late = result["film"].explained_variance.tolist()
    assert late > 0.95 and abs(early) < 0.25
    # Without time the best answer to a shade is half-way, 2.5 or 7.5: it leaves a quarter of the variance late on,
    # and adds as much early on.
    assert result["plain"].explained_variance[1] < 0.85
    assert result["film"].value_error.sum() < result["plain"].value_error.sum()


def test_the_latent_critic_learns_too() -> None:
    states = trajectory(192, TIMES)
    states = replace(states, reward=5 + 20 * states.x[:, 1].mean((1, 2, 3)))  # only the second state tells
    critic, views = made("latent"), states.x[:, :-1]
    result = warm_start(critic, adam(critic, 1e-3), views, states, epochs=10, batch=32, held_out=48, generator=seeded())
    early, late = result.held_out.explained_variance.tolist()
    assert late > 0.6 and early < 0.1


def test_classes_learn_by_cross_entropy_and_then_serve_another_target() -> None:
    views, states, label = problem(96)
    critic = made(head="classes")
    assert isinstance(critic, FilmCritic)
    result = warm_start_classes(
        critic, adam(critic), views, states, label, epochs=20, batch=32, held_out=32, generator=seeded()
    )
    assert result.held_out.explained_variance[1] > 0.95  # V = 10 (1 - p_bright) is the reward at the late step
    assert result.held_out.accuracy is not None and 0.6 < result.held_out.accuracy < 0.95  # half the states tell
    with torch.no_grad():
        late = critic.logits(views[:, 1], states.time[1].expand(len(states)), states.cond)
    assert accuracy_and_macro_precision(late, label) == (1.0, 1.0)
    other = made(head="classes", target="dark")
    other.load_state_dict(critic.state_dict())
    both = values(critic, views, states, batch_size=64) + values(other, views, states, batch_size=64)
    torch.testing.assert_close(both, torch.full((96, 2), 10.0))


def test_values_are_the_critics_answers_in_place() -> None:
    views, states, _ = problem(5)
    critic = made("prompt")
    regress_once(critic, views, states)
    found = values(critic, views, states, batch_size=3)  # 10 states: batches of 3 cross trajectories
    assert found.shape == (5, 2) and not found.requires_grad
    for t in range(2):
        expected = critic(views[:, t], states.time[t].expand(5), states.cond).detach()
        torch.testing.assert_close(found[:, t], expected)
    assert len(found.unique()) > 5


def test_values_at_chosen_steps_go_by_the_times_of_these_steps() -> None:
    states = replace(trajectory(3, [900, 700, 500, 300, 100]), chosen=(1, 4))
    critic = made()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded())
    views = torch.randint(256, (3, 2, 3, 8, 8), generator=seeded()).to(torch.uint8)  # of the chosen steps alone
    found = values(critic, views, states, batch_size=4)
    assert found.isfinite().all(0).tolist() == [False, True, False, False, True]
    for place, (t, time) in enumerate([(1, 700), (4, 100)]):
        expected = critic(views[:, place], torch.full((3,), time), states.cond).detach()
        torch.testing.assert_close(found[:, t], expected)
        other = critic(views[:, place], torch.full((3,), time + 200), states.cond).detach()
        assert float((other - expected).abs().min()) > 1e-3  # time does count


def regress_once(critic: torch.nn.Module, views: Tensor, states: Trajectory, seed: int = 0, updates: int = 6) -> tuple:
    assert states.reward is not None
    args = (views, states.reward, states.time, states.cond)
    return regress(critic, adam(critic), *args, updates=updates, batch=4, generator=seeded(seed)).losses


def test_regress_is_reproducible_by_seed() -> None:
    views, states, _ = problem(8)
    runs = []
    for seed in (0, 0, 1):
        critic = made()
        runs.append((regress_once(critic, views, states, seed), critic.state_dict()))
    same, again, other = runs
    assert same[0] == again[0] and all(torch.equal(same[1][key], again[1][key]) for key in same[1])
    assert same[0] != other[0]


def test_optimiser_and_generator_state_continue_a_run_exactly() -> None:
    views, states, _ = problem(8)
    assert states.reward is not None
    args = (views, states.reward, states.time, states.cond)
    critic, generator = made(), seeded()
    optimiser = adam(critic)
    # 4 updates of 4 pairs are one whole pass over 16 pairs, so the next call starts a new one
    regress(critic, optimiser, *args, updates=4, batch=4, generator=generator)
    kept = copy.deepcopy((critic.state_dict(), optimiser.state_dict(), generator.get_state()))
    straight = regress(critic, optimiser, *args, updates=4, batch=4, generator=generator)
    resumed_critic, resumed_generator = made(), torch.Generator()
    resumed_optimiser = adam(resumed_critic)
    resumed_critic.load_state_dict(kept[0])
    resumed_optimiser.load_state_dict(kept[1])
    resumed_generator.set_state(kept[2])
    resumed = regress(resumed_critic, resumed_optimiser, *args, updates=4, batch=4, generator=resumed_generator)
    assert resumed == straight
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), resumed_critic.parameters(), strict=True))


def test_a_pass_sees_every_pair_once() -> None:
    # With rewards 0..7 and a critic stuck at its prior 5 (learning rate 0), a pass has a known mean loss:
    # the mean of (5 - r)² over r = 0..7 is (25 + 16 + 9 + 4 + 1 + 0 + 1 + 4) / 8 = 7.5.
    views, states, _ = problem(8)
    critic = made()
    args = (views, torch.arange(8.0), states.time, states.cond)
    loss = regress(critic, adam(critic, 0.0), *args, updates=4, batch=4, generator=seeded())
    assert loss.mean == pytest.approx(7.5, abs=1e-5)
    assert loss.gradient_norm > 0 and len(loss.losses) == 4


def test_nan_stops_before_it_reaches_the_weights() -> None:
    views, states, _ = problem(4)
    critic = made()
    before = copy.deepcopy(critic.state_dict())
    rewards = torch.tensor([1.0, 2.0, float("nan"), 3.0])
    with pytest.raises(ValueError, match="1 of 4 rewards are NaN or infinite, first at trajectory 2"):
        regress(critic, adam(critic), views, rewards, states.time, states.cond, updates=1, batch=4, generator=seeded())
    # finite rewards whose square is not
    with pytest.raises(ValueError, match="critic update 0: loss inf"):
        regress(
            critic, adam(critic), views, rewards.nan_to_num(1e30), states.time, states.cond,
            updates=1, batch=8, generator=seeded(),
        )  # fmt: skip
    assert all(torch.equal(before[key], value) for key, value in critic.state_dict().items())


def test_mistakes() -> None:
    views, states, _ = problem(4)
    critic = made()
    with pytest.raises(ValueError, match="no reward"):
        warm_start(
            critic, adam(critic), views, replace(states, reward=None),
            epochs=1, batch=4, held_out=1, generator=seeded(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="0 critic updates"):
        regress_once(critic, views, states, updates=0)
    for held_out in (0, 4):
        with pytest.raises(ValueError, match=f"{held_out} held-out of 4"):
            split(4, held_out, seeded())


def test_split_is_whole_disjoint_and_seeded() -> None:
    train, rest = split(10, 3, seeded())
    assert len(rest) == 3 and sorted([*train.tolist(), *rest.tolist()]) == list(range(10))
    assert torch.equal(split(10, 3, seeded())[1], rest) and not torch.equal(split(10, 3, seeded(1))[1], rest)


def test_explained_variance_and_value_error_by_hand() -> None:
    rewards = torch.tensor([0.0, 0.0, 10.0, 10.0])  # variance 25
    value = torch.tensor([[0.0, 5.0, 2.0, 10.0], [0.0, 5.0, 2.0, 10.0], [10.0, 5.0, 8.0, 0.0], [10.0, 5.0, 8.0, 0.0]])
    # perfect; constant; errors ∓2: variance 4, so 1 - 4/25; the wrong way round: errors ∓10, variance 100, 1 - 4
    torch.testing.assert_close(explained_variance(value, rewards), torch.tensor([1.0, 0.0, 0.84, -3.0]))
    torch.testing.assert_close(value_error(value, rewards), torch.tensor([0.0, 25.0, 4.0, 100.0]))
    # an offset is an error, yet it explains all the variance
    torch.testing.assert_close(explained_variance(value + 1, rewards)[0], torch.tensor(1.0))
    assert bool(explained_variance(value, torch.full((4,), 0.1)).isnan().all())


def test_accuracy_and_macro_precision_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2])
    predicted = torch.tensor([0, 1, 1, 1, 0])
    accuracy, precision = accuracy_and_macro_precision(torch.eye(4)[predicted], labels)
    # right: 3 of 5. Precision: class 0 1/2, class 1 2/3, class 2 never predicted: 0; class 3 does not occur.
    assert accuracy == pytest.approx(0.6)
    assert precision == pytest.approx((1 / 2 + 2 / 3) / 3)


def test_prompts_travel_with_their_pairs() -> None:
    """Same picture and time, reward by prompt: only pairs that keep their own prompt can be learned."""
    n = 16
    views = torch.full((n, 2, 3, 8, 8), 128, dtype=torch.uint8)
    cond = conditioning(n)
    rewards = 10 * (cond.embeddings.mean((1, 2)) > 0).float()
    critic = made("prompt")
    loss = regress(
        critic, adam(critic, 1e-2), views, rewards, torch.tensor(TIMES), cond,
        updates=80, batch=16, generator=seeded(),
    )  # fmt: skip
    assert loss.losses[-1] < 0.1 * rewards.var()


def test_calibration_holds_the_foretold_reward_against_the_one_that_came() -> None:
    # Eight trajectories of 3 steps; V is the reward at the last step, 5 at the others.
    rewards = torch.arange(8.0)
    value = torch.full((8, 3), 5.0)
    value[:, 2] = rewards
    early, late = calibration(value, rewards, windows=2, parts=2)
    assert (early.first, early.last, late.first, late.last) == (0, 1, 2, 2)
    assert early.counts == (8, 8) and early.predicted == (5.0, 5.0)
    assert late.predicted == late.achieved == (1.5, 5.5)  # means of 0..3 and of 4..7
    assert late.spread == pytest.approx((1.25**0.5, 1.25**0.5))
    # Four states at least in a part: eight make two, three make one.
    assert len(calibration(value[:, 2:], rewards, parts=5)[0].counts) == 2
    assert calibration(value[:3, 2:], rewards[:3])[0].counts == (3,)
