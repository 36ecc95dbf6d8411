"""Gradient variance and ratio statistics in literal numbers; per-trajectory gradients on a real tiny model."""

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from cgru.backbones.sd import load_stable_diffusion
from cgru.mdp.rollout import rescore, rollout
from cgru.rl.diagnostics import gradient_variance, per_trajectory_gradients, ratio_statistics


def test_variance_by_hand() -> None:
    # Mean (2, 1). Deviations (-1, 0), (1, 0): trace = 2 / (2 - 1) = 2; |mean|² = 5, corrected 5 - 2/2 = 4.
    variance = gradient_variance(torch.tensor([[1.0, 1.0], [3.0, 1.0]]))
    assert variance.trace == 2 and variance.raw_squared_norm == 5 and variance.mean_squared_norm == 4
    assert variance.normalised == 0.5 and variance.raw_normalised == pytest.approx(0.4)


def test_variance_estimates_are_unbiased() -> None:
    """8 trajectories of N(m, I) in 50 dimensions with |m|² = 4: trace 50; |mean|² looks like 4 + 50/8 = 10.25."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((50,), (4 / 50) ** 0.5)
    found = [gradient_variance(mean + torch.randn(8, 50, generator=generator)) for _ in range(400)]
    rows = torch.tensor([[v.trace, v.raw_squared_norm, v.mean_squared_norm] for v in found])
    averages = rows.mean(0).tolist()
    assert averages == pytest.approx([50, 10.25, 4], abs=0.5)  # standard errors 0.19, 0.12 and 0.12


def test_scale_of_the_advantage_cancels_in_the_quotient_only() -> None:
    gradients = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) + 1
    once, ten_times = gradient_variance(gradients), gradient_variance(10 * gradients)
    assert ten_times.trace == pytest.approx(100 * once.trace, rel=1e-5)
    assert ten_times.normalised == pytest.approx(once.normalised, rel=1e-5)


def test_a_mean_lost_in_noise_is_said_to_be() -> None:
    variance = gradient_variance(torch.tensor([[1.0], [-1.0]]))  # trace 2, mean 0: corrected 0 - 1
    assert variance.mean_squared_norm == -1 and variance.normalised == math.inf
    with pytest.raises(ValueError, match="1 trajectories; a variance needs at least 2"):
        gradient_variance(torch.ones(1, 3))


def test_gradients_of_a_linear_log_prob() -> None:
    """log_prob_t = theta · s_t, so the gradient is Σ_t A_t s_t: by hand for two weightings and two parameters."""
    theta, bias = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    states = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 2.0], [1.0, -1.0]]])  # (n, t, 2)
    weights = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[3.0, -1.0], [0.5, 2.0]]])  # (m, n, t)
    gradients = per_trajectory_gradients([theta, bias], lambda i: states[i] @ theta + bias, weights)
    assert gradients.tolist() == [[[1, 1, 2], [3, 1, 2]], [[3, -1, 2], [3, -1, 2.5]]]
    assert theta.grad is None and not gradients.requires_grad


def test_gradients_on_a_tiny_stable_diffusion(sd_folder: Path) -> None:
    """Their sum is the gradient of the whole batch by an ordinary backward pass; parts of the steps add up."""
    backbone = load_stable_diffusion(sd_folder, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        backbone.denoiser.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    trained = [p for p in backbone.denoiser.parameters() if p.requires_grad]
    kernel = backbone.kernel(4, eta=1.0)
    trajectory = rollout(
        backbone, backbone.encode_text(["a dog", "a cat", "trees"]), [0, 1, 2], kernel=kernel, guidance=3.0
    )
    weights = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))

    def log_prob(i: int, steps: torch.Tensor) -> torch.Tensor:
        return rescore(backbone, trajectory.steps(torch.full_like(steps, i), steps), kernel=kernel, guidance=3.0)

    every, early, late = torch.arange(4), torch.arange(2), torch.arange(2, 4)
    gradients = per_trajectory_gradients(trained, lambda i: log_prob(i, every), weights)
    assert gradients.shape == (2, 3, sum(p.numel() for p in trained))
    for m in range(2):
        whole = rescore(backbone, trajectory.steps(*trajectory.policy_pairs()), kernel=kernel, guidance=3.0)
        expected = torch.autograd.grad((whole.view(3, 4) * weights[m]).sum(), trained)
        flat = torch.cat([g.flatten() for g in expected])
        assert flat.norm() > 1e-3
        torch.testing.assert_close(gradients[m].sum(0), flat, atol=1e-5 * float(flat.abs().max()), rtol=1e-3)
    parts = [per_trajectory_gradients(trained, lambda i, s=s: log_prob(i, s), weights[:, :, s]) for s in (early, late)]
    torch.testing.assert_close(sum(parts), gradients, atol=1e-6 * float(gradients.abs().max()), rtol=1e-3)


def test_ratio_statistics_per_step() -> None:
    # Step 0: ratios 1.5 and 0.5: mean 1, std 0.5, both outside 1 ± 0.2. Step 2: one ratio 1.1, inside. Step 1: none.
    log_ratio = torch.tensor([1.5, 1.1, 0.5]).log()
    table = ratio_statistics(log_ratio, torch.tensor([0, 2, 0]), steps=3, dims=100, clip=0.2)
    at = {name: [round(v, 4) for v in values.tolist()] for name, values in table.items()}
    assert (at["mean"][0], at["std"][0], at["min"][0], at["max"][0], at["clipped"][0]) == (1.0, 0.5, 0.5, 1.5, 1.0)
    assert (at["mean"][2], at["std"][2], at["clipped"][2]) == (1.1, 0.0, 0.0)
    # 100 · log 1.5 = 40.5465 and 100 · log 0.5 = -69.3147: the true ratios are e^40 and e^-69.
    assert at["summed_mean"][0] == pytest.approx(-14.3841) and at["summed_std"][0] == pytest.approx(54.9306)
    assert at["count"] == [2, 0, 1]
    assert all(math.isnan(at[name][1]) for name in at if name != "count")


def test_small_movements_are_not_lost_in_rounding() -> None:
    """A log-ratio of 1e-6 is a few float32 steps from ratio 1; its spread is taken in float64."""
    log_ratio = torch.tensor([1e-6, -1e-6])
    table = ratio_statistics(log_ratio, torch.zeros(2, dtype=torch.long), steps=1, dims=16_384, clip=1e-4)
    assert table["std"].item() == pytest.approx(1e-6, rel=1e-3)
    assert table["summed_std"].item() == pytest.approx(0.016384, rel=1e-3)
