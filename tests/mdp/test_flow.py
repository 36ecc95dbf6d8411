"""The flow kernel against numbers worked out by hand, torch.distributions, diffusers, and the marginals of the ODE."""

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from cgru.mdp.flow import FlowKernel, flow_kernel
from cgru.mdp.kernel import ReverseKernel


def draw(seed: int, shape: tuple[int, ...] = (3, 4, 8, 8)) -> Tensor:
    """Standard normal numbers of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def even(steps: int, eta: float, noisy_steps: int | None = None) -> FlowKernel:
    """Equal steps from 1 to 0, the model receiving s itself."""
    sigmas = torch.linspace(1, 0, steps + 1)
    return flow_kernel(sigmas, sigmas[:-1], eta=eta, noisy_steps=noisy_steps)


def test_it_is_a_reverse_kernel() -> None:
    assert isinstance(even(4, 0.7), ReverseKernel) and len(even(4, 0.7)) == 4


def test_tables_by_hand() -> None:
    # s = 1, 0.6, 0.2, 0; dt = -0.4, -0.4, -0.2; a = 0.5, so std² = 0.25 s / (1 - s):
    # 1 / (1 - 0.6) · 0.25 = 0.625 (second sigma below the line); 0.25 · 0.6 / 0.4 = 0.375; the last step has none.
    kernel = flow_kernel(torch.tensor([1, 0.6, 0.2, 0]), torch.tensor([1000.0, 600, 200]), eta=0.5)
    assert kernel.std.tolist() == pytest.approx([math.sqrt(0.625 * 0.4), math.sqrt(0.375 * 0.4), 0])
    assert kernel.stochastic.tolist() == [True, True, False]
    # x = 1, v = 2. Step 0: (1 - 0.4 · 0.625 / 2) · 1 - 0.4 · 2 = 0.075
    # Step 1: std² / 2s = 0.3125; (1 - 0.125) · 1 - 0.4 · (1 + 0.3125 · 0.4) · 2 = -0.025. Step 2: 1 - 0.2 · 2 = 0.6
    one = torch.ones(1, 1, 1)
    means = [kernel.step(2 * one, one, index).mean.item() for index in range(3)]
    assert means == pytest.approx([0.075, -0.025, 0.6], abs=1e-6)
    # x̂0 = x - s v
    assert [kernel.x0(2 * one, one, i).item() for i in range(3)] == pytest.approx([-1, -0.2, 0.6], abs=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("shape", [(3, 4, 8, 8), (2, 7, 16), (2, 5)])
def test_without_noise_it_is_diffusers_step(shift: float, shape: tuple[int, ...]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(7)
    kernel = flow_kernel(scheduler.sigmas, scheduler.timesteps, eta=0.0)
    assert not kernel.stochastic.any() and torch.equal(kernel.timesteps, scheduler.timesteps)
    x = draw(0, shape)
    for index, time in enumerate(scheduler.timesteps):
        v = draw(index + 1, shape)
        expected = scheduler.step(v, time, x).prev_sample
        torch.testing.assert_close(kernel.step(v, x, index).mean, expected, atol=1e-6, rtol=1e-6)
        x = expected


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_the_noise_keeps_the_marginals(eta: float) -> None:
    # x_0 ~ N(2, 0.5²), for which v is known: x_s ~ N(2 (1 - s), V), V = 0.25 (1 - s)² + s², and
    # v = E[epsilon - x_0 | x_s] = -2 + (s - 0.25 (1 - s)) / V · (x_s - 2 (1 - s)).
    def exact(x: Tensor, s: float) -> Tensor:
        variance = 0.25 * (1 - s) ** 2 + s**2
        return -2 + (s - 0.25 * (1 - s)) / variance * (x - 2 * (1 - s))

    n, steps = 50_000, 100
    means, stds = _marginals(even(steps, eta), exact, n)
    ode_means, ode_stds = _marginals(even(steps, 0.0), exact, n)
    s = torch.linspace(1, 0, steps + 1)[1:]
    torch.testing.assert_close(ode_means, 2 * (1 - s), atol=0.01, rtol=0)
    assert (means - ode_means).abs().max() < 0.015
    # The first steps are the coarsest, as std² is largest there; their error has died away by the middle.
    off = (stds / ode_stds - 1).abs()
    assert off.max() < 0.2 * eta**2 and off[s < 0.5].max() < 0.03


def _marginals(kernel: FlowKernel, velocity: Callable[[Tensor, float], Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation after each step, of n numbers started at x_1 ~ N(0, 1)."""
    x, found = draw(0, (n, 1)), []
    for index in range(len(kernel)):
        x = kernel.step(velocity(x, float(kernel.sigma[index])), x, index).sample(draw(index + 1, (n, 1)))
        found.append((x.mean(), x.std()))
    means, stds = zip(*found, strict=True)
    return torch.stack(means), torch.stack(stds)


@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (3, 7, 16), (3, 5)])
def test_log_prob_and_kl_are_those_of_torch(shape: tuple[int, ...]) -> None:
    kernel, x, index = even(5, 0.7), draw(0, shape), torch.tensor([0, 3, 1])
    first, second = (kernel.step(draw(seed, shape), x, index) for seed in (1, 2))
    std = kernel.std[index].view(-1, *[1] * (len(shape) - 1))
    a, b = Normal(first.mean, std), Normal(second.mean, std)
    taken = first.sample(draw(3, shape))
    torch.testing.assert_close(first.log_prob(taken), a.log_prob(taken).flatten(1).mean(1))
    torch.testing.assert_close(first.kl(second), kl_divergence(a, b).flatten(1).mean(1))
    # Of equal stds: mean (mu_1 - mu_2)² / (2 std²)
    closed = (first.mean - second.mean).square().flatten(1).mean(1) / (2 * kernel.std[index] ** 2)
    torch.testing.assert_close(first.kl(second), closed)


def test_all_is_finite_from_pure_noise_on() -> None:
    kernel, x = even(10, 1.0), draw(0)
    for index in range(10):
        v = draw(index + 1).requires_grad_()
        step = kernel.step(v, x, index)
        assert step.mean.isfinite().all() and step.std.isfinite().all()
        log_prob = step.log_prob(step.sample(draw(20)).detach())
        log_prob.sum().backward()
        assert log_prob.isfinite().all() and v.grad is not None and v.grad.isfinite().all()
    assert kernel.stochastic.tolist() == [True] * 9 + [False]


def test_index_per_sample_is_the_same_as_one_by_one() -> None:
    kernel, x, v = even(6, 0.7), draw(0), draw(1)
    together = kernel.step(v, x, torch.tensor([5, 0, 2]))
    for row, index in enumerate([5, 0, 2]):
        alone = kernel.step(v[row : row + 1], x[row : row + 1], index)
        assert torch.equal(together.mean[row : row + 1], alone.mean)
        assert torch.equal(together.std[row : row + 1], alone.std)


def test_noise_in_the_first_steps_only() -> None:
    noisy, still, mixed = even(5, 0.7), even(5, 0.0), even(5, 0.7, noisy_steps=2)
    assert mixed.stochastic.tolist() == [True, True, False, False, False]
    for index, same in enumerate([noisy, noisy, still, still, still]):
        assert torch.equal(mixed.step(draw(0), draw(1), index).mean, same.step(draw(0), draw(1), index).mean)
    assert even(3, 0.7, noisy_steps=3).stochastic.tolist() == [True, True, False]


def test_half_precision_input_gives_float32() -> None:
    step = even(4, 0.7).step(draw(0).bfloat16(), draw(1).bfloat16(), 1)
    assert step.mean.dtype == step.log_prob(draw(2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eta": 1.5}, "eta is 1.5; it must lie in 0"),
        ({"eta": float("nan")}, "eta is nan"),
        ({"timesteps": torch.tensor([1.0])}, "3 sigmas for 1 times"),
        ({"sigmas": torch.tensor([0.5, 0.7, 0.0])}, "must fall at every step"),
        ({"sigmas": torch.tensor([1000.0, 500, 0])}, "from 1000 to 0; .* within 1 to 0"),
        ({"sigmas": torch.tensor([1.0, 0.5, -0.1])}, "from 1 to -0.1; .* within 1 to 0"),
        ({"sigmas": torch.tensor([1.0, math.nan, 0])}, "must fall at every step"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], message: str) -> None:
    settings = {"sigmas": torch.tensor([1.0, 0.5, 0]), "timesteps": torch.tensor([1.0, 0.5]), "eta": 0.7}
    with pytest.raises(ValueError, match=message):
        flow_kernel(**{**settings, **change})  # type: ignore[arg-type]
