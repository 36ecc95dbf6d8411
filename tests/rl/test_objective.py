"""The clipped objective in literal numbers; the clip's scaling; ratio 1 right after collection on a real tiny model."""

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.mdp.kernel import Gaussian
from cgru.mdp.rollout import policy, rescore, rollout
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import micro_batches, plans
from cgru.rl.objective import clip_range, kl_to_base, noise_mse, policy_loss, ratio

PROMPTS = ["a dog", "a cat", "a bird", "trees", "fire", "a dog", "a frog", ""]
GUIDANCE = 4.0


def tiny_policy(folder: Path, dtype: str = "fp32") -> StableDiffusion:
    """A tiny model with a LoRA that does something (peft starts B at 0, which would hide A)."""
    backbone = load_stable_diffusion(folder, device="cpu", dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        backbone.denoiser.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    return backbone


def collect(backbone: StableDiffusion) -> Trajectory:
    """Eight trajectories of five steps."""
    kernel = backbone.kernel(5, eta=1.0)
    return rollout(backbone, backbone.encode_text(PROMPTS), list(range(8)), kernel=kernel, guidance=GUIDANCE)


def test_ratio_of_log_probs() -> None:
    log_prob = torch.tensor([0.0, math.log(3.0), -1.0])
    old = torch.tensor([0.0, math.log(2.0), 0.0])
    torch.testing.assert_close(ratio(log_prob, old), torch.tensor([1.0, 1.5, 0.36787944]))


# Range 0.8 to 1.2. rho = 1.5 with A = 2: both losses, -3 and -2.4; the larger is -2.4, and it is flat.
# rho = 1.5 with A = -2: 3 and 2.4; PPO keeps 3, because the pair went where it should not, and its slope is 2 (· rho).
# Gradients are with respect to the log-prob, so d(-A rho) = -A rho.
@pytest.mark.parametrize(
    ("rho", "advantage", "pessimistic", "slope", "hard", "hard_slope"),
    [
        (1.0, 2.0, -2.0, -2.0, -2.0, -2.0),
        (1.1, -2.0, 2.2, 2.2, 2.2, 2.2),
        (1.5, 2.0, -2.4, 0.0, -2.4, 0.0),
        (1.5, -2.0, 3.0, 3.0, 2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0, -1.6, 0.0),
        (0.5, -2.0, 1.6, 0.0, 1.6, 0.0),
    ],
)
def test_policy_loss_and_its_gradient(
    rho: float, advantage: float, pessimistic: float, slope: float, hard: float, hard_slope: float
) -> None:
    for mode, value, gradient in (("pessimistic", pessimistic, slope), ("hard", hard, hard_slope)):
        log_prob = torch.tensor([math.log(rho)], requires_grad=True)
        result = policy_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), 0.2, mode)
        result.loss.sum().backward()
        assert log_prob.grad is not None
        assert result.loss.item() == pytest.approx(value, abs=1e-6)
        assert log_prob.grad.item() == pytest.approx(gradient, abs=1e-6)
        assert result.ratio.item() == pytest.approx(rho) and not result.ratio.requires_grad
        assert result.clipped.tolist() == [abs(rho - 1) > 0.2]


def test_gradient_at_ratio_one_is_the_plain_policy_gradient() -> None:
    """Right after collection no mode may change REINFORCE: d loss / d log_prob = -A."""
    advantage = torch.tensor([3.0, -0.5, 0.0])
    for mode in ("pessimistic", "hard"):
        log_prob = torch.tensor([-1.2, 0.7, 2.0], requires_grad=True)
        policy_loss(log_prob, log_prob.detach(), advantage, 1e-4, mode).loss.sum().backward()
        assert log_prob.grad is not None
        torch.testing.assert_close(log_prob.grad, -advantage)


def test_no_gradient_flows_into_the_advantage() -> None:
    advantage = torch.ones(2, requires_grad=True)
    log_prob = torch.zeros(2, requires_grad=True)
    policy_loss(log_prob, torch.zeros(2), advantage, 1e-4).loss.sum().backward()
    assert advantage.grad is None and log_prob.grad is not None


def test_unknown_clip_mode_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown clip mode 'pesimistic'; allowed: pessimistic, hard. Did you mean"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.1, "pesimistic")


def test_clip_range_in_literal_numbers() -> None:
    assert clip_range(1e-4, 16_384) == pytest.approx(1e-4)  # the paper
    assert clip_range(1e-4, 1_024) == pytest.approx(4e-4)  # Emoji Canvas: √16
    assert clip_range(1e-4, 256) == pytest.approx(8e-4)  # the tiny test model: √64
    for clip, dims in ((0.0, 4), (-1e-4, 4), (math.nan, 4), (1e-4, 0)):
        with pytest.raises(ValueError, match="both must be above 0"):
            clip_range(clip, dims)


@pytest.mark.parametrize("dims", [64, 1_024, 16_384])
def test_same_movement_gives_the_same_share_clipped(dims: int) -> None:
    """The derivation of `clip_range`: one shift per dimension, any number of dimensions, one share outside.

    The shift is 0.008 of the noise: std of the log-ratio is 0.008/√d, so the range is 1e-4 · 128 / 0.008 = 1.6 standard
    deviations at every d; P(|z| > 1.6) = 0.1096. With 16384/d in place of its root it would be 0 at 1,024 dimensions.
    (The drift -0.008²/2 = -3.2e-5 is half a standard deviation at 16,384: P = Φ(-1.6 + .512) + Φ(-1.6 - .512) = 0.156.)
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(800, dims, generator=generator)
    shift = 0.008 * torch.sign(torch.randn(dims, generator=generator))
    old, new = (Gaussian(mean.expand(800, dims), torch.ones(1)) for mean in (torch.zeros(dims), shift))
    result = policy_loss(new.log_prob(noise), old.log_prob(noise), torch.ones(800), clip_range(1e-4, dims))
    expected = {64: 0.1098, 1_024: 0.1129, 16_384: 0.156}[dims]  # drift 0.03 and 0.13 of a standard deviation
    assert result.clipped.float().mean().item() == pytest.approx(expected, abs=0.04)  # three standard errors


def test_kl_to_base_and_noise_mse() -> None:
    # Means 0.3 apart at std 0.1 in one of two dimensions: KL = mean(9, 0) / 2 = 2.25, both ways; MSE 0.09 / 2.
    mean = torch.tensor([[0.3, 1.0]], requires_grad=True)
    base_mean = torch.tensor([[0.0, 1.0]], requires_grad=True)
    now, base = Gaussian(mean, torch.tensor([0.1])), Gaussian(base_mean, torch.tensor([0.1]))
    kl = kl_to_base(now, base)
    assert kl.item() == pytest.approx(2.25, rel=1e-5) == kl_to_base(base, now).item()
    mse = noise_mse(mean, base_mean)
    assert mse.item() == pytest.approx(0.045)
    (kl + mse).sum().backward()
    assert mean.grad is not None and mean.grad[0, 0] > 0 and base_mean.grad is None


# Design test 1. 256 latent dimensions: the scaled clip is 8e-4, a tenth of it 8e-5.
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-5), ("bf16", 8e-5)])
def test_ratio_is_one_right_after_collection(sd_folder: Path, dtype: str, limit: float) -> None:
    """With log-probs kept from the rollout, pairs shuffled, and graphs recorded as in an update."""
    backbone = tiny_policy(sd_folder, dtype)
    trajectory = collect(backbone)
    kernel = backbone.kernel(trajectory.horizon, eta=1.0)
    (plan,) = plans(8, trajectory.stochastic, updates=1, generator=torch.Generator().manual_seed(0))
    ratios = []
    for part in micro_batches(plan, 7):  # not the batch they were collected in
        steps = trajectory.steps(part.sample_ids, part.step_ids)
        ratios.append(ratio(rescore(backbone, steps, kernel=kernel, guidance=GUIDANCE), steps.log_prob))
    assert torch.cat(ratios).requires_grad
    assert (torch.cat(ratios).detach() - 1).abs().max() <= limit


def test_a_step_of_the_optimiser_moves_ratios_with_the_advantage(sd_folder: Path) -> None:
    """The check above can fail, and the loss has the right sign: what paid becomes likelier, what did not, less so."""
    backbone = tiny_policy(sd_folder)
    trajectory = collect(backbone)
    kernel = backbone.kernel(trajectory.horizon, eta=1.0)
    steps = trajectory.steps(*trajectory.policy_pairs())
    advantage = torch.where(steps.sample < 4, 1.0, -1.0)
    trained = [p for p in backbone.denoiser.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=1.0)
    log_prob = rescore(backbone, steps, kernel=kernel, guidance=GUIDANCE)
    policy_loss(log_prob, steps.log_prob, advantage, clip_range(1e-4, 256)).loss.mean().backward()
    optimiser.step()
    with torch.no_grad():
        moved = policy(backbone, steps, kernel=kernel, guidance=GUIDANCE)
    rho = ratio(moved.log_prob(steps.next_x), steps.log_prob)
    assert (rho - 1).abs().max() > 1e-5
    assert (advantage * rho).mean() > 1e-6
