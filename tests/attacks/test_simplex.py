"""Rows on the simplex: projection against the definition, Adam against torch's, sampling by chances."""

import pytest
import torch
from torch import Tensor

from cgru.attacks.simplex import Relaxed, draw, project


def bisected(row: Tensor) -> Tensor:
    """The official definition: clip(a - mu, 0, 1) with mu such that the sum is 1, found by bisection."""
    low, high = float(row.min()) - 1, float(row.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (row - middle).clamp(0, 1).sum() > 1 else (low, middle)
    return (row - low).clamp(0, 1)


def test_projection_by_hand() -> None:
    # 0.5 + 0.7 is 0.2 too much, shared evenly; a third far below stays out.
    torch.testing.assert_close(project(torch.tensor([0.5, 0.7, -3.0])), torch.tensor([0.4, 0.6, 0.0]))
    torch.testing.assert_close(project(torch.tensor([5.0, 0.0])), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("seed", range(5))
def test_projection_is_that_of_the_definition(seed: int) -> None:
    points = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = project(points)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 2, dtype=torch.float64))
    torch.testing.assert_close(found[1, 1], bisected(points[1, 1]))
    torch.testing.assert_close(project(found), found)


def test_descent_is_torch_s_adam_and_a_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    state = Relaxed.uniform((2, 3, 10), torch.device("cpu"))
    parameter = torch.nn.Parameter(state.rows.clone())
    adam = torch.optim.Adam([parameter], lr=0.01, weight_decay=0.1)
    for _ in range(5):
        gradient = torch.randn(2, 3, 10, generator=generator)
        state = state.descend(gradient, rate=0.01, decay=0.1)
        parameter.grad = gradient
        adam.step()
        with torch.no_grad():
            parameter.copy_(project(parameter))
    torch.testing.assert_close(state.rows, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_letting_rows_go_changes_no_other() -> None:
    gradient = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(0))
    whole = Relaxed.uniform((3, 2, 10), torch.device("cpu")).descend(gradient, rate=0.05, decay=0.0)
    part = whole.keep(torch.tensor([True, False, True]))
    again, apart = whole.descend(gradient, rate=0.05, decay=0.0), part.descend(gradient[[0, 2]], rate=0.05, decay=0.0)
    torch.testing.assert_close(again.rows[[0, 2]], apart.rows)
    assert apart.best().tolist() == again.best()[[0, 2]].tolist()


def test_tokens_are_drawn_by_their_chances_and_never_without_one() -> None:
    rows = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).expand(1, 4000, 5)
    drawn = draw(rows, [torch.Generator().manual_seed(0)])
    assert set(drawn.unique().tolist()) == {1, 3}
    assert (drawn == 3).float().mean().item() == pytest.approx(0.75, abs=0.03)  # four standard errors: 0.027


def test_each_prompt_draws_from_its_own_numbers() -> None:
    rows = torch.full((2, 6, 50), 1 / 50)
    both = draw(rows, [torch.Generator().manual_seed(seed) for seed in (1, 2)])
    alone = draw(rows[:1], [torch.Generator().manual_seed(2)])
    assert both[1].tolist() == alone[0].tolist() != both[0].tolist()
