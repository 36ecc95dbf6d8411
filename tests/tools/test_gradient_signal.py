"""The bench for gradients: unbiased figures, kernels with one noisy step, and a control variate that keeps the mean."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gradient_signal import cosine, figures, low_frequencies, resampled, shard_gradients, slopes
from cgru.lora.train import attach
from cgru.mdp.kernel import Gaussian, ddim_kernel
from cgru.mdp.trajectory import Conditioning
from cgru.rl.collect import collect
from tests.rl.tiny_rl import tiny_problem

SHARDS, WIDTH = 12, 40


def grams(draws: int, mean: Tensor, sd: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = mean + sd * torch.randn(draws, SHARDS, WIDTH, generator=generator, dtype=torch.float64)
    return [table @ table.T for table in rows]


def test_squared_mean_and_trace_are_unbiased() -> None:
    mean = torch.linspace(-0.1, 0.1, WIDTH, dtype=torch.float64)
    once = torch.ones(1, SHARDS, dtype=torch.float64)
    found = [figures(gram, once) for gram in grams(4000, mean, 0.5)]
    squared = torch.stack([one["mean"] for one in found]).mean()
    trace = torch.stack([one["trace"] for one in found]).mean()
    assert float(squared) == pytest.approx(float(mean.square().sum()), abs=0.02)
    assert float(trace) == pytest.approx(WIDTH * 0.25, rel=0.01)


def test_a_resample_without_a_mean_stays_around_0() -> None:
    """A shard that comes twice is no pair with itself, or noise would look like a signal."""
    counts = resampled(SHARDS)
    assert torch.equal(counts.sum(1), torch.full((len(counts),), float(SHARDS), dtype=torch.float64))
    means = torch.stack([figures(gram, counts[1:])["mean"].mean() for gram in grams(400, torch.zeros(WIDTH), 0.5)])
    assert abs(float(means.mean())) < 3 * float(means.std()) / len(means) ** 0.5


def test_halves_with_the_same_mean_agree() -> None:
    (gram,) = grams(1, torch.full((WIDTH,), 1.0, dtype=torch.float64), 1e-3)
    assert cosine(gram) == pytest.approx(1, abs=1e-4)
    odd = torch.tensor([1.0, -1.0] * (SHARDS // 2), dtype=torch.float64)[:, None].expand(-1, WIDTH)
    assert cosine(odd @ odd.T) == pytest.approx(-1)


def test_a_kernel_with_one_noisy_step() -> None:
    tables = {"final_alpha": 1.0, "eta": 1.0, "prediction_type": "epsilon"}
    alphas, times = torch.linspace(0.999, 0.01, 100), torch.tensor([80, 60, 40, 20])
    whole, first = ddim_kernel(alphas, times, **tables), ddim_kernel(alphas, times, **tables, noisy_steps=1)  # type: ignore[arg-type]
    found = whole.only(0)
    torch.testing.assert_close(found.std, first.std)
    torch.testing.assert_close(found.direction, first.direction)
    assert whole.only(2).stochastic.tolist() == [False, False, True, False]


def test_low_frequencies_are_the_log_prob_of_a_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, action = torch.randn(2, 3, 4, 8, 8, generator=generator)
    policy = Gaussian(mean, torch.tensor([0.5, 1.0, 2.0]))
    off = (action - mean) / policy.std.view(-1, 1, 1, 1)
    coarse = functional.interpolate(functional.avg_pool2d(off, 2), scale_factor=2)  # the orthogonal projection
    torch.testing.assert_close(low_frequencies(policy, action), -0.5 * coarse.square().flatten(1).mean(1))


class Linear(nn.Module):
    """V(x) = c · x."""

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor, time: Tensor, cond: Conditioning) -> Tensor:
        return (self.slope * x).flatten(1).sum(1)


def test_the_control_variate_keeps_the_mean(sd_folder: Path) -> None:
    """Of A = c · (a - mu) it leaves no noise at all: both sides are then the gradient of c · mu, divided by d."""
    problem = tiny_problem(sd_folder, "policy.step_weights=equal")
    parameters = list(attach(problem.backbone.denoiser, rank=2, alpha=2.0, targets="attention", seed=0).values())
    batch = collect(problem, 0, forget=4)
    critic = Linear(torch.randn(problem.backbone.latent_shape, generator=torch.Generator().manual_seed(1)))
    samples, steps = batch.policy_pairs()
    at = batch.steps(samples, steps)
    prediction = problem.backbone.predict(at.x, at.time, at.cond, guidance=batch.guidance)
    mean = problem.kernel.step(prediction, at.x, at.index).mean
    by_hand = torch.autograd.grad((critic.slope * mean).flatten(1).mean(1).sum() / len(batch), parameters)
    shift = (critic.slope * (at.next_x - mean.detach())).flatten(1).sum(1)
    # r - V(x_t) = c · (a - mu), pair by pair
    value = torch.zeros(len(batch), batch.horizon)
    value[samples, steps] = -shift
    batch = replace(batch, reward=torch.zeros(len(batch)))
    weights = {"batch mean": torch.zeros(len(batch), batch.horizon)}
    found = shard_gradients(problem, batch, weights, critic, value, parameters)
    expected = torch.cat([row.flatten() for row in by_hand])
    torch.testing.assert_close(found["first-order V latent"], expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(slopes(critic, batch, mean.detach(), at.cond, steps), critic.slope.expand_as(mean))
