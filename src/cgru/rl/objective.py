"""The clipped policy objective (paper §4, Alg. 2; PPO, arXiv 1707.06347; DPOK, arXiv 2305.16381) and KL to the base.

Log-probs are the MEAN over latent dimensions (`mdp.kernel`), as in DDPO. A ratio here is therefore the d-th root of the
true importance weight: it looks closer to 1 than it is, and the clip range depends on d (`clip_range`). All functions
work per (state, action) pair in float32 and do not reduce; `batches.weight` combines micro-batches into a plan's mean.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cgru.catalog import unknown
from cgru.mdp.kernel import Gaussian, ReverseKernel

ClipMode = Literal["pessimistic", "hard"]
PAPER_DIMENSIONS = 16_384  # 4×64×64, the latents of Stable Diffusion 1.5 at 512 px


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Result of one forward pass over k pairs."""

    loss: Float[Tensor, " k"]
    """Per-pair loss to minimise; differentiable."""
    ratio: Float[Tensor, " k"]
    """pi_theta / pi_old before clipping, detached."""
    clipped: Bool[Tensor, " k"]
    """Whether the ratio is outside the clip range. A clipped pair has no gradient in `hard` mode. In `pessimistic` mode
    it has none if the ratio moved in the direction of its advantage; otherwise it is still pulled back."""


def ratio(log_prob: Float[Tensor, " k"], old_log_prob: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Return the importance weight rho = pi_theta / pi_old of each pair (Alg. 2), from mean-reduced log-probs."""
    # rho = exp(log pi_theta(a | s) - log pi_old(a | s))
    return (log_prob.float() - old_log_prob.float()).exp()


def clip_range(clip: float, latent_dimensions: int) -> float:
    """Return the half-width of the clip range for a model with d latent dimensions: clip · √(16384 / d).

    The paper's 1e-4 is for d = 16,384. Why the square root: let theta move the mean of a step by delta_i · sigma in
    dimension i. The stored action is x = mu_old + sigma · z with z ~ N(0, I), so the mean-reduced log-ratio is exactly

        log rho = 1/d · Σ_i (delta_i z_i - delta_i² / 2),    mean -s²/2,  std s/√d,    s² = 1/d · Σ_i delta_i².

    An optimiser step sets s, the movement per dimension in units of the step's own noise: Adam's step size does not
    depend on the number of pixels. For equal movement of the policy the ratios therefore spread as 1/√d, and
    clip · √(16384/d) cuts the same share of pairs as in the paper (4e-4 at 1,024 dimensions). The same holds for the
    part of delta that an update aligns with a pair's own z: log rho ≈ g · Δtheta, where g is the gradient of a mean
    over d dimensions of white noise, and its norm falls as 1/√d.

    The alternative, clip · 16384/d, keeps the true log-ratio d · log rho within the same ±1.6 nats. That is PPO's
    reading, but it lets a small model move √(16384/d) times as far per dimension before clipping acts: four times at
    1,024. The ratio used here is not a true importance weight, so the clip limits movement rather than the variance of
    an estimator, and movement is what should stay equal. To get the wider range, raise `clip`.

    Measured: at 1,024 dimensions ratios move by about 1e-3 in two updates, so that 1e-4 clips nearly every pair. On
    Emoji Canvas (10 steps, rank 4, lr 3e-4, random advantages, one seed) s is about the same, step by step, at 1,024
    and at 4,096 dimensions; the square root leaves 20 % and 29 % of the pairs outside after one update, 33 % and 31 %
    after two. Limits: s differs by up to 50 times between the steps of a trajectory (log it per step), and the drift
    -s²/2 does not shrink with d. At the paper's own range (s = 0.0128) the drift is 8e-5, just inside; far above 16,384
    dimensions the square root is too narrow.
    """
    if not clip > 0 or latent_dimensions < 1:
        raise ValueError(f"clip is {clip} at {latent_dimensions} latent dimensions; both must be above 0")
    # clip · √(d_paper / d)
    return clip * (PAPER_DIMENSIONS / latent_dimensions) ** 0.5


def balanced_weights(kernel: ReverseKernel, shape: tuple[int, ...]) -> Float[Tensor, " t"]:
    """Return a weight per step that equalises how strongly each step pulls on theta; mean 1 over stochastic steps.

    The gradient of a step's log-prob is (|∂mu/∂prediction| / sigma) · z · ∂prediction/∂theta / d. The first factor
    depends on the step alone and peaks near the clean end, where sigma vanishes: on Emoji Canvas with 10 steps it is
    about eight times larger at the last but one step than at any other, so that step has about sixty times their share
    of the gradient's variance. Yet the early steps decide what is drawn. The weights 1 / factor leave each step's own
    ascent direction unchanged and change only how the steps are summed. Deterministic steps get 0.
    """
    one = torch.ones((1, *shape), device=kernel.timesteps.device)
    weights = torch.zeros(len(kernel), device=one.device)
    for t in kernel.stochastic.nonzero().flatten().tolist():
        # The mean is linear in the prediction: mu(prediction=1, x=0) - mu(0, 0) = ∂mu/∂prediction.
        step, zero = kernel.step(one, 0 * one, t), kernel.step(0 * one, 0 * one, t)
        # w_t = sigma_t / |∂mu_t/∂prediction|
        weights[t] = step.std[0] / (step.mean - zero.mean).flatten()[0].abs()
    return weights / weights[weights > 0].mean()


def policy_loss(
    log_prob: Float[Tensor, " k"],
    old_log_prob: Float[Tensor, " k"],
    advantage: Float[Tensor, " k"],
    clip: float,
    mode: str = "pessimistic",
) -> PolicyLoss:
    """Return the clipped surrogate loss of each pair.

    Args:
        log_prob: log-probs of the stored actions under the current policy; differentiable.
        old_log_prob: log-probs kept from the rollout, never recomputed.
        advantage: weight of each pair; no gradient flows into it.
        clip: half-width of the range around 1, already scaled by `clip_range`.
        mode: `pessimistic` takes the larger of the two losses, as PPO and DDPO do; `hard` uses only the clamped ratio,
            as DPOK does.
    """
    if mode not in get_args(ClipMode):
        raise ValueError(unknown("clip mode", mode, get_args(ClipMode), "The paper's code base, DDPO, uses the first."))
    rho, weight = ratio(log_prob, old_log_prob), advantage.detach().float()
    # Clipped surrogate: -A · clip(rho, 1 - ε, 1 + ε)
    hard = -weight * rho.clamp(1 - clip, 1 + clip)
    # PPO eq. 7, negated: max(-A · rho, -A · clip(rho)). Leaving the range never lowers the loss; coming back does.
    loss = torch.maximum(-weight * rho, hard) if mode == "pessimistic" else hard
    return PolicyLoss(loss, rho.detach(), (rho.detach() - 1).abs() > clip)


def kl_to_base(policy: Gaussian, base: Gaussian) -> Float[Tensor, " k"]:
    """Return KL(policy || base) at each state as the mean over latent dimensions; no gradient flows into the base.

    Both Gaussians come from one kernel and share their std, so the KL is symmetric: |mu - mu_base|² / (2 d sigma²). Its
    direction only says which policy visited the states.
    """
    return policy.kl(Gaussian(base.mean.detach(), base.std.detach()))


def noise_mse(prediction: Float[Tensor, "k *d"], base_prediction: Float[Tensor, "k *d"]) -> Float[Tensor, " k"]:
    """Return DPOK's substitute for the KL: the mean squared difference of guided predictions, not divided by sigma²."""
    # 1/d · |eps_theta - eps_base|²
    return (prediction.float() - base_prediction.detach().float()).square().flatten(1).mean(1)
