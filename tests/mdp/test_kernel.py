"""The kernel against numbers worked out by hand, torch.distributions, and diffusers' DDIMScheduler."""

import math

import pytest
import torch
from diffusers import DDIMScheduler

from cgru.mdp.kernel import DDIMKernel, Gaussian, ddim_kernel

SHAPE = (3, 4, 8, 8)


def draw(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Standard normal numbers of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kernel_of(scheduler: DDIMScheduler, steps: int, eta: float) -> DDIMKernel:
    """Our kernel over the same schedule."""
    scheduler.set_timesteps(steps)
    return ddim_kernel(
        scheduler.alphas_cumprod,
        scheduler.timesteps,
        final_alpha=float(scheduler.final_alpha_cumprod),
        eta=eta,
        prediction_type=scheduler.config.prediction_type,
    )


def test_log_prob_by_hand() -> None:
    # -(2/2)²/2 - ln 2 - ln √(2π) = -0.5 - 0.693147 - 0.918939
    gaussian = Gaussian(torch.zeros(1, 2, 1, 1), torch.tensor([2.0]))
    assert gaussian.log_prob(torch.full((1, 2, 1, 1), 2.0)).tolist() == pytest.approx([-2.112086])


def test_kl_by_hand() -> None:
    # N(1, 1) against N(0, 2²): ln 2 + (1 + 1) / 8 - 1/2, the same in each dimension, so the mean is the same
    first = Gaussian(torch.ones(1, 3, 2, 2), torch.tensor([1.0]))
    second = Gaussian(torch.zeros(1, 3, 2, 2), torch.tensor([2.0]))
    assert first.kl(second).tolist() == pytest.approx([math.log(2) - 0.25])


def test_gaussian_agrees_with_torch_distributions() -> None:
    std, other_std = torch.tensor([0.3, 1.0, 2.0]), torch.tensor([0.5, 0.9, 1.0])
    first, second = Gaussian(draw(0), std), Gaussian(draw(1), other_std)
    a = torch.distributions.Normal(first.mean, std.view(-1, 1, 1, 1))
    b = torch.distributions.Normal(second.mean, other_std.view(-1, 1, 1, 1))
    x = first.sample(draw(2))
    torch.testing.assert_close(first.log_prob(x), a.log_prob(x).mean((1, 2, 3)))
    torch.testing.assert_close(first.kl(second), torch.distributions.kl_divergence(a, b).mean((1, 2, 3)))


def test_half_precision_input_gives_float32_results() -> None:
    gaussian = Gaussian(draw(0).bfloat16(), torch.tensor([0.5]))
    assert gaussian.log_prob(draw(1).bfloat16()).dtype == torch.float32


def test_deterministic_samples_have_zero_log_prob_and_finite_gradient() -> None:
    mean = draw(0).requires_grad_()
    gaussian = Gaussian(mean, torch.tensor([0.0, 1.0, 0.0]))
    log_prob = gaussian.log_prob(draw(1))
    kl = gaussian.kl(Gaussian(draw(2), torch.tensor([0.0, 1.0, 0.0])))
    (log_prob.sum() + kl.sum()).backward()
    assert log_prob[[0, 2]].tolist() == [0, 0] and kl[[0, 2]].tolist() == [0, 0]
    assert log_prob[1] != 0 and kl[1] > 0
    assert mean.grad is not None and mean.grad.isfinite().all()
    assert mean.grad[[0, 2]].abs().max() == 0 and mean.grad[1].abs().max() > 0


def test_tables_by_hand() -> None:
    # Two steps over four training times: 3 -> 1 -> the clean end (ᾱ = 1).
    # Step 0: variance (0.3 / 0.8) · (1 - 0.2 / 0.7) = 0.267857. Step 1 leads to ᾱ = 1: variance 0.
    kernel = ddim_kernel(
        torch.tensor([0.9, 0.7, 0.5, 0.2]), torch.tensor([3, 1]), final_alpha=1.0, eta=1.0, prediction_type="epsilon"
    )
    assert kernel.std.tolist() == pytest.approx([math.sqrt(0.267857), 0.0], abs=1e-6)
    assert kernel.stochastic.tolist() == [True, False]
    # x = 1, e = 1: x̂0 = (1 - √0.8) / √0.2 = 0.236068; mean = √0.7 · x̂0 + √(0.3 - 0.267857) · 1
    one = torch.ones(1, 1, 1, 1)
    assert kernel.x0(one, one, 0).item() == pytest.approx(0.236068, abs=1e-5)
    assert kernel.step(one, one, 0).mean.item() == pytest.approx(0.376794, abs=1e-5)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("set_alpha_to_one", [True, False])
@pytest.mark.parametrize("steps_offset", [0, 1])
def test_agrees_with_diffusers(
    prediction_type: str, eta: float, spacing: str, set_alpha_to_one: bool, steps_offset: int
) -> None:
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type=prediction_type,
        timestep_spacing=spacing,
        set_alpha_to_one=set_alpha_to_one,
        steps_offset=steps_offset,
    )
    kernel = kernel_of(scheduler, 7, eta)
    x, prediction, noise = draw(0), draw(1), draw(2)
    for index, time in enumerate(scheduler.timesteps.tolist()):
        expected = scheduler.step(prediction, time, x, eta=eta, variance_noise=noise if eta else None)
        step = kernel.step(prediction, x, index)
        torch.testing.assert_close(step.sample(noise), expected.prev_sample, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(kernel.x0(prediction, x, index), expected.pred_original_sample, atol=2e-5, rtol=2e-5)
        assert step.log_prob(step.sample(noise)).isfinite().all()
    assert kernel.stochastic.any() == (eta > 0)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_index_per_sample_is_the_same_as_one_by_one(prediction_type: str) -> None:
    kernel = kernel_of(DDIMScheduler(clip_sample=False, prediction_type=prediction_type), 10, 1.0)
    x, prediction = draw(0), draw(1)
    together = kernel.step(prediction, x, torch.tensor([9, 0, 4]))
    for row, index in enumerate([9, 0, 4]):
        alone = kernel.step(prediction[row : row + 1], x[row : row + 1], index)
        assert torch.equal(together.mean[row : row + 1], alone.mean)
        assert torch.equal(together.std[row : row + 1], alone.std)


def test_zero_terminal_snr_works_for_v_and_is_refused_for_epsilon() -> None:
    settings = {"clip_sample": False, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    kernel = kernel_of(DDIMScheduler(prediction_type="v_prediction", **settings), 5, 1.0)
    assert kernel.step(draw(0), draw(1), 0).mean.isfinite().all()
    with pytest.raises(ValueError, match="v_prediction"):
        kernel_of(DDIMScheduler(prediction_type="epsilon", **settings), 5, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eta": 1.5}, "eta is 1.5; it must lie in 0"),
        ({"eta": float("nan")}, "eta is nan"),
        ({"prediction_type": "score"}, "'score' is not one of epsilon, v_prediction, sample"),
        ({"timesteps": torch.tensor([4, 2])}, "reach time 4, but the model knows times 0 to 3"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], message: str) -> None:
    settings = {"timesteps": torch.tensor([3, 1]), "final_alpha": 1.0, "eta": 1.0, "prediction_type": "epsilon"}
    with pytest.raises(ValueError, match=message):
        ddim_kernel(torch.tensor([0.9, 0.7, 0.5, 0.2]), **{**settings, **change})


def test_noise_in_the_first_steps_only() -> None:
    """The later steps are those of eta 0, so they leave the policy loss; the first are untouched."""
    scheduler = DDIMScheduler(beta_schedule="scaled_linear")
    noisy, still = kernel_of(scheduler, 5, 1.0), kernel_of(scheduler, 5, 0.0)
    mixed = ddim_kernel(
        scheduler.alphas_cumprod,
        noisy.timesteps,
        final_alpha=float(scheduler.final_alpha_cumprod),
        eta=1.0,
        prediction_type="epsilon",
        noisy_steps=2,
    )
    assert mixed.stochastic.tolist() == [True, True, False, False, False]
    for index, same in enumerate([noisy, noisy, still, still, still]):
        torch.testing.assert_close(mixed.step(draw(0), draw(1), index).mean, same.step(draw(0), draw(1), index).mean)


@pytest.mark.parametrize("index", [0, 3])
def test_noise_in_one_step_alone_leaves_its_gaussian(index: int) -> None:
    kernel = kernel_of(DDIMScheduler(clip_sample=False), 6, 1.0)
    only, x, prediction = kernel.only(index), draw(0), draw(1)
    assert only.stochastic.tolist() == [i == index for i in range(6)]
    one, other = kernel.step(prediction, x, index), only.step(prediction, x, index)
    assert torch.equal(one.mean, other.mean) and torch.equal(one.std, other.std)
    still = kernel_of(DDIMScheduler(clip_sample=False), 6, 0.0)
    torch.testing.assert_close(only.step(prediction, x, 1).mean, still.step(prediction, x, 1).mean)
