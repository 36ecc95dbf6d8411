"""Rollouts: noise per seed, ratio 1 after collection, re-batching, and the same pictures as plain diffusers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.mdp.rollout import noise_for, policy, rescore, rollout, sample
from cgru.mdp.trajectory import Trajectory

PROMPTS = ["a dog", "a cat", "a bird", "a frog", "a dog", "trees", "fire", ""]
SEEDS = [0, 1, 2, 3, 4, 5, 2**40, 7]
GUIDANCE = 4.0


def collect(backbone: StableDiffusion, *, eta: float = 1.0, batch_size: int | None = None) -> Trajectory:
    """Eight trajectories."""
    return rollout(
        backbone,
        backbone.encode_text(PROMPTS),
        SEEDS,
        kernel=backbone.kernel(5, eta=eta),
        guidance=GUIDANCE,
        batch_size=batch_size,
        keep_x0=True,
    )


def shuffled_pairs(trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """All policy pairs in random order, so samples and timesteps mix within a batch."""
    samples, steps = trajectory.policy_pairs()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    return samples[order], steps[order]


def log_ratios(backbone: StableDiffusion, trajectory: Trajectory, batch_size: int) -> torch.Tensor:
    """Log pi_theta - log pi_old of every policy pair, in shuffled batches."""
    kernel = backbone.kernel(trajectory.horizon, eta=1.0)
    ratios = []
    with torch.no_grad():
        for ids in zip(*(part.split(batch_size) for part in shuffled_pairs(trajectory)), strict=True):
            steps = trajectory.steps(*ids)
            ratios.append(rescore(backbone, steps, kernel=kernel, guidance=trajectory.guidance) - steps.log_prob)
    return torch.cat(ratios)


def test_noise_depends_on_the_seed_only() -> None:
    shape = (4, 3, 5)  # 60 numbers: no multiple of 16, where one long draw would differ from its parts
    noise = noise_for(3, shape, steps=6)
    assert noise.shape == (7, *shape) and noise.dtype == torch.float32
    assert torch.equal(noise_for(3, shape, steps=0)[0], noise[0])
    assert torch.equal(noise_for(3, shape, steps=2), noise[:3])
    assert torch.equal(torch.randn(shape, generator=torch.Generator().manual_seed(3)), noise[0])
    assert not torch.equal(noise_for(4, shape, steps=0)[0], noise[0])


def test_noise_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    noise_for(3, (4, 8, 8), steps=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_ratio_is_one_right_after_collection(backbone: StableDiffusion) -> None:
    trajectory = collect(backbone)
    assert trajectory.log_prob.isfinite().all() and trajectory.log_prob.dtype == torch.float32
    assert (log_ratios(backbone, trajectory, batch_size=7).exp() - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ratio_in_half_precision(sd_folder: Path, dtype: str) -> None:
    backbone = load_stable_diffusion(sd_folder, device="cpu", dtype=dtype)
    trajectory = collect(backbone)
    kernel = backbone.kernel(trajectory.horizon, eta=1.0)
    assert trajectory.x.dtype == torch.float32  # only the denoiser's input is rounded
    for index in range(trajectory.horizon):  # batches as collected: nothing but the stored state decides the log-prob
        steps = trajectory.steps(torch.arange(len(trajectory)), torch.full((len(trajectory),), index))
        with torch.no_grad():
            log_ratio = rescore(backbone, steps, kernel=kernel, guidance=GUIDANCE) - steps.log_prob
        assert log_ratio.abs().max() <= 1e-5  # a tenth of the paper's clip


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_rebatching_changes_nothing_beyond_rounding(backbone: StableDiffusion, eta: float) -> None:
    together = collect(backbone, eta=eta)
    apart = collect(backbone, eta=eta, batch_size=1)
    assert torch.equal(together.x[:, 0], apart.x[:, 0])
    torch.testing.assert_close(together.x, apart.x, atol=1e-4, rtol=0)
    torch.testing.assert_close(together.log_prob, apart.log_prob, atol=1e-4, rtol=0)
    assert together.cond.prompts == apart.cond.prompts and together.seeds.tolist() == SEEDS


def test_rebatching_an_update_gives_the_same_gradient(sd_folder: Path) -> None:
    backbone = load_stable_diffusion(sd_folder, device="cpu")
    trajectory = collect(backbone)
    kernel = backbone.kernel(trajectory.horizon, eta=1.0)
    samples, steps = (ids[:8] for ids in shuffled_pairs(trajectory))
    backbone.denoiser.requires_grad_(True)

    def gradient(batch_size: int) -> torch.Tensor:
        backbone.denoiser.zero_grad()
        for ids in zip(samples.split(batch_size), steps.split(batch_size), strict=True):
            log_prob = rescore(backbone, trajectory.steps(*ids), kernel=kernel, guidance=GUIDANCE)
            (log_prob.sum() / len(samples)).backward()
        return torch.cat([p.grad.flatten() for p in backbone.denoiser.parameters() if p.grad is not None])

    once, eight_times = gradient(8), gradient(1)
    assert once.norm() > 1e-3
    assert (once - eight_times).abs().max() <= 1e-5


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_sample_is_the_end_of_a_rollout(backbone: StableDiffusion, eta: float) -> None:
    trajectory = collect(backbone, eta=eta, batch_size=3)
    latents = sample(
        backbone,
        backbone.encode_text(PROMPTS),
        SEEDS,
        kernel=backbone.kernel(5, eta=eta),
        guidance=GUIDANCE,
        batch_size=3,
    )
    assert torch.equal(latents, trajectory.final)
    assert not latents.requires_grad


def test_kept_x0_is_what_the_policy_implies(backbone: StableDiffusion) -> None:
    trajectory = collect(backbone)
    kernel = backbone.kernel(5, eta=1.0)
    x = trajectory.x[:, 2]
    prediction = backbone.predict(x, trajectory.time[2].expand(len(x)), trajectory.cond, guidance=GUIDANCE)
    assert trajectory.x0_hat is not None
    torch.testing.assert_close(trajectory.x0_hat[:, 2], kernel.x0(prediction, x, 2))


def test_policy_has_no_kl_to_itself_and_some_to_another(backbone: StableDiffusion) -> None:
    trajectory = collect(backbone)
    kernel = backbone.kernel(5, eta=1.0)
    steps = trajectory.steps(*shuffled_pairs(trajectory))
    now = policy(backbone, steps, kernel=kernel, guidance=GUIDANCE)
    other = policy(backbone, steps, kernel=kernel, guidance=1.0)
    assert now.kl(now).abs().max() <= 1e-6
    has_text = steps.sample != PROMPTS.index("")  # guidance does nothing to the empty prompt
    assert (now.kl(other)[has_text] > 0).all()


def test_a_deterministic_last_step_is_left_out(backbone: StableDiffusion) -> None:
    scheduler = DDIMScheduler.from_config(backbone.scheduler.config, set_alpha_to_one=True)
    trajectory = collect(replace(backbone, scheduler=scheduler))
    assert trajectory.stochastic.tolist() == [True] * 4 + [False]
    assert trajectory.log_prob.isfinite().all() and (trajectory.log_prob[:, -1] == 0).all()
    assert set(trajectory.policy_pairs()[1].tolist()) == {0, 1, 2, 3}


def test_without_noise_no_step_is_left(backbone: StableDiffusion) -> None:
    trajectory = collect(backbone, eta=0.0)
    assert len(trajectory.policy_pairs()[0]) == 0 and (trajectory.log_prob == 0).all()


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(("eta", "guidance"), [(0.0, 4.0), (1.0, 4.0), (0.0, 1.0)])
def test_same_pictures_as_plain_diffusers(
    sd_folders: dict[str, Path], prediction_type: str, eta: float, guidance: float
) -> None:
    """Not only the kernel: tokens, embeddings, guidance, times, noise and decoding are those of the pipeline."""
    folder = sd_folders[prediction_type]
    pipeline = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS[:3]]
    expected = pipeline(
        PROMPTS[:3], num_inference_steps=6, guidance_scale=guidance, eta=eta, generator=generators, output_type="np"
    ).images

    backbone = load_stable_diffusion(folder, device="cpu")
    latents = sample(
        backbone,
        backbone.encode_text(PROMPTS[:3]),
        SEEDS[:3],
        kernel=backbone.kernel(6, eta=eta),
        guidance=guidance,
    )
    with torch.no_grad():
        images = backbone.decode(latents)
    np.testing.assert_allclose(images.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("seeds", "batch_size", "message"),
    [([1, 2], None, "1 prompts and 2 seeds"), ([], None, "1 prompts and 0 seeds"), ([1], 0, "batch size is 0")],
)
def test_bad_requests_are_named(
    backbone: StableDiffusion, seeds: list[int], batch_size: int | None, message: str
) -> None:
    cond, kernel = backbone.encode_text(["a dog"]), backbone.kernel(2, eta=1.0)
    with pytest.raises(ValueError, match=message):
        rollout(backbone, cond, seeds, kernel=kernel, guidance=1.0, batch_size=batch_size)
    with pytest.raises(ValueError, match=message):
        sample(backbone, cond, seeds, kernel=kernel, guidance=1.0, batch_size=batch_size)
