"""Records: one indexing call takes every field at the same place."""

from dataclasses import replace

import pytest
import torch

from cgru.mdp.trajectory import Conditioning, Trajectory


def conditioning(n: int, m: int) -> Conditioning:
    """Prompt i has the embedding full of i, its unconditional one full of -i."""
    embeddings = torch.arange(n).float().view(n, 1, 1).expand(n, 2, 3)
    tensors = {"embeddings": embeddings, "label": torch.arange(n)}
    return Conditioning(tuple(f"prompt {i}" for i in range(n)), tensors, {"embeddings": -embeddings[:m]})


def trajectory(n: int = 3, t: int = 4, first: int = 0) -> Trajectory:
    """Every number says where it is: 100 · sample + step."""
    samples = torch.arange(first, first + n).float()
    place = 100 * samples[:, None] + torch.arange(t)
    states = 100 * samples[:, None] + torch.arange(t + 1)
    return Trajectory(
        x=states.view(n, t + 1, 1, 1, 1).expand(n, t + 1, 2, 1, 1),
        log_prob=place,
        time=torch.arange(t).flip(0) * 10,
        stochastic=torch.tensor([True] * (t - 1) + [False]),
        seeds=torch.arange(first, first + n),
        cond=conditioning(n, 1),
        guidance=5.0,
        x0_hat=place.view(n, t, 1, 1, 1).expand(n, t, 2, 1, 1),
        reward=samples,
        value=place + 0.5,
        advantage=-place,
    )


def test_steps_take_every_field_at_the_same_place() -> None:
    steps = trajectory().steps(torch.tensor([2, 0, 2]), torch.tensor([3, 1, 0]))
    places = [203, 1, 200]
    assert steps.x[:, 0, 0, 0].tolist() == places
    assert steps.next_x[:, 0, 0, 0].tolist() == [204, 2, 201]
    assert steps.log_prob.tolist() == places
    assert steps.sample.tolist() == [2, 0, 2] and steps.index.tolist() == [3, 1, 0]
    assert steps.time.tolist() == [0, 20, 30]
    assert steps.cond.prompts == ("prompt 2", "prompt 0", "prompt 2")
    assert steps.x0_hat is not None and steps.x0_hat[:, 0, 0, 0].tolist() == places
    assert steps.reward is not None and steps.reward.tolist() == [2, 0, 2]
    assert steps.value is not None and steps.value.tolist() == [203.5, 1.5, 200.5]
    assert steps.advantage is not None and steps.advantage.tolist() == [-203, -1, -200]
    assert len(steps) == 3


def test_optional_fields_stay_out() -> None:
    bare = replace(trajectory(), x0_hat=None, reward=None, value=None, advantage=None)
    steps = bare.steps(torch.tensor([0]), torch.tensor([0]))
    assert (steps.x0_hat, steps.reward, steps.value, steps.advantage) == (None, None, None, None)


def test_policy_pairs_leave_out_deterministic_steps() -> None:
    samples, steps = trajectory(n=2, t=3).policy_pairs()
    assert list(zip(samples.tolist(), steps.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_cat_joins_in_order() -> None:
    joined = Trajectory.cat([trajectory(2), trajectory(3, first=2)])
    assert len(joined) == 5 and joined.horizon == 4
    assert joined.seeds.tolist() == [0, 1, 2, 3, 4]
    assert joined.final[:, 0, 0, 0].tolist() == [4, 104, 204, 304, 404]
    assert joined.reward is not None and joined.reward.tolist() == [0, 1, 2, 3, 4]


def test_cat_refuses_what_does_not_belong_together() -> None:
    with pytest.raises(AssertionError, match="different samplers"):
        Trajectory.cat([trajectory(), replace(trajectory(), guidance=1.0)])
    with pytest.raises(AssertionError, match="set in 1 of 2"):
        Trajectory.cat([trajectory(), replace(trajectory(), reward=None)])


def test_a_record_refuses_mismatched_lengths() -> None:
    with pytest.raises(AssertionError, match="states"):
        replace(trajectory(), x=trajectory().x[:, 1:])
    with pytest.raises(AssertionError, match="2 prompts for 3 trajectories"):
        replace(trajectory(), cond=conditioning(2, 1))


@pytest.mark.parametrize("m", [1, 3])
def test_conditioning_is_indexed_by_ids_or_slice(m: int) -> None:
    cond = conditioning(3, m)
    by_ids, by_slice = cond[torch.tensor([2, 2, 0])], cond[1:]
    assert by_ids.prompts == ("prompt 2", "prompt 2", "prompt 0")
    assert by_ids.embeddings[:, 0, 0].tolist() == [2, 2, 0]
    assert by_slice.prompts == ("prompt 1", "prompt 2") and by_slice.embeddings[:, 0, 0].tolist() == [1, 2]
    assert by_ids.tensors["label"].tolist() == [2, 2, 0] and by_slice.tensors["label"].tolist() == [1, 2]
    if m == 3:
        assert by_ids.unconditional["embeddings"][:, 0, 0].tolist() == [-2, -2, 0]
    else:
        assert len(by_ids.unconditional["embeddings"]) == len(by_slice.unconditional["embeddings"]) == 1


def test_conditioning_cat_keeps_a_shared_unconditional_row_single() -> None:
    shared = Conditioning.cat([conditioning(2, 1), conditioning(3, 1)])
    assert len(shared) == 5 and len(shared.unconditional["embeddings"]) == 1
    assert shared.tensors["label"].tolist() == [0, 1, 0, 1, 2]
    own = Conditioning.cat([conditioning(2, 2), conditioning(3, 1)])
    assert own.unconditional["embeddings"][:, 0, 0].tolist() == [0, -1, 0, 0, 0]


def test_conditioning_names_belong_together() -> None:
    with pytest.raises(AssertionError, match="2 prompts for 3 label"):
        Conditioning(("a", "b"), {"label": torch.arange(3)})
    with pytest.raises(AssertionError, match="2 unconditional label for 3 prompts"):
        Conditioning(("a", "b", "c"), {"label": torch.arange(3)}, {"label": torch.arange(2)})
    with pytest.raises(AssertionError, match="unconditional 'size' beside label"):
        Conditioning(("a",), {"label": torch.arange(1)}, {"size": torch.arange(1)})
    with pytest.raises(AssertionError, match="different names"):
        Conditioning.cat([conditioning(1, 1), Conditioning(("a",), {"label": torch.arange(1)})])


def test_states_of_any_shape_and_times_that_are_no_integers() -> None:
    """A latent of 5 numbers at times of 0 to 1."""
    x = torch.arange(2 * 4 * 5.0).view(2, 4, 5)
    runs = Trajectory(
        x=x,
        log_prob=torch.zeros(2, 3),
        time=torch.tensor([1.0, 0.6, 0.25]),
        stochastic=torch.tensor([True, True, False]),
        seeds=torch.arange(2),
        cond=conditioning(2, 1),
        guidance=1.0,
    )
    steps = runs.steps(torch.tensor([1, 0]), torch.tensor([2, 1]))
    assert torch.equal(steps.x, x[[1, 0], [2, 1]]) and torch.equal(steps.next_x, x[[1, 0], [3, 2]])
    torch.testing.assert_close(steps.time, torch.tensor([0.25, 0.6]))


def test_to_moves_nested_records() -> None:
    moved = trajectory().to("meta")
    assert moved.x.device.type == moved.cond.embeddings.device.type == "meta"
    assert moved.cond.tensors["label"].device.type == moved.cond.unconditional["embeddings"].device.type == "meta"
    assert moved.cond.prompts == trajectory().cond.prompts
