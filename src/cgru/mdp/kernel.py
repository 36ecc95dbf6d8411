"""Reverse kernels p(x_{t-1} | x_t, c) as Gaussians: the policy of the denoising MDP (paper §3.3, App. A).

`DDIMKernel` is DDIM with eta (arXiv 2010.02502, eq. 12 and 16) for epsilon, v and sample prediction; eta 1 is DDPO's.
Log-prob and KL are the MEAN over latent dimensions, in float32 for any dtype: the clip range 1e-4 depends on it. A step
with sigma 0 is deterministic: its log-prob and KL are defined as 0, and `stochastic` marks the remaining steps. Step
indices count from 0 (at x_T) to len(kernel) - 1 (the step that yields x_0). This file does not depend on diffusers.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

PredictionType = Literal["epsilon", "v_prediction", "sample"]
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """A batch of isotropic normal distributions over latents; `std` is one number per sample or one for all."""

    mean: Float[Tensor, "n *d"]
    std: Float[Tensor, "#n"]

    def sample(self, noise: Float[Tensor, "n *d"]) -> Float[Tensor, "n *d"]:
        """Return mean + std * noise; the caller supplies standard normal noise."""
        return self.mean + _per_sample(self.std, self.mean) * noise.to(self.mean)

    def log_prob(self, x: Float[Tensor, "n *d"]) -> Float[Tensor, " n"]:
        """Return log N(x; mean, std²) as the mean over latent dimensions; 0 where std is 0."""
        std, is_random = _safe(self.std)
        # log N(x; mean, std²) / d = -1/2 · mean_d(z²) - log std - 1/2 · log(2π),  z = (x - mean) / std
        z = (x.float() - self.mean.float()) / _per_sample(std, x)
        log_prob = -0.5 * _mean(z.square()) - std.log() - LOG_SQRT_2PI
        return torch.where(is_random, log_prob, 0.0)

    def kl(self, other: "Gaussian") -> Float[Tensor, " n"]:
        """Return KL(self || other) as the mean over latent dimensions; defined as 0 where either std is 0."""
        std, is_random = _safe(self.std)
        other_std, other_is_random = _safe(other.std)
        # KL / d = 1/2 · (mean_d((mu_1 - mu_2)² / std_2²) + std_1²/std_2² - 1) - log(std_1/std_2)
        shift = (self.mean.float() - other.mean.float()) / _per_sample(other_std, self.mean)
        ratio = std / other_std
        kl = 0.5 * (_mean(shift.square()) + ratio.square() - 1) - ratio.log()
        return torch.where(is_random & other_is_random, kl, 0.0)


@runtime_checkable
class ReverseKernel(Protocol):
    """The interface of a sampler for rollouts, objectives and critics: one distribution per step."""

    @property
    def timesteps(self) -> Num[Tensor, " t"]:
        """The time the denoiser receives at each step, falling; whole numbers or not."""

    @property
    def stochastic(self) -> Bool[Tensor, " t"]:
        """Return which steps have noise, hence a density and a place in the policy loss."""

    def __len__(self) -> int:
        """Return the number of steps."""

    def step(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Gaussian:
        """Return p(x_{t-1} | x_t, c) at step `index`: one for the batch, or one per sample."""

    def x0(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Tensor:
        """Return the clean latent that the prediction implies."""


@dataclass(frozen=True, eq=False)
class DDIMKernel:
    """DDIM as a policy. Build it with `ddim_kernel`; the tables hold one float32 number per step."""

    timesteps: Int[Tensor, " t"]
    alpha: Float[Tensor, " t"]
    """Cumulative signal share ᾱ at the step's own time."""
    alpha_prev: Float[Tensor, " t"]
    """ᾱ at the time that the step leads to."""
    std: Float[Tensor, " t"]
    """sigma_t(eta), DDIM eq. 16."""
    direction: Float[Tensor, " t"]
    """√(1 - ᾱ_prev - sigma²), the weight of "direction pointing to x_t" in DDIM eq. 12."""
    prediction_type: PredictionType

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.timesteps)

    @property
    def stochastic(self) -> Bool[Tensor, " t"]:
        """Return which steps have noise; the others have no density."""
        return self.std > 0

    def to(self, device: torch.device) -> "DDIMKernel":
        """Return a copy of the kernel with its tables on `device`."""
        return DDIMKernel(
            timesteps=self.timesteps.to(device),
            alpha=self.alpha.to(device),
            alpha_prev=self.alpha_prev.to(device),
            std=self.std.to(device),
            direction=self.direction.to(device),
            prediction_type=self.prediction_type,
        )

    def only(self, index: int) -> "DDIMKernel":
        """Return the kernel with noise at one step, whose Gaussian stays; the other steps become deterministic."""
        std = torch.zeros_like(self.std)
        std[index] = self.std[index]
        direction = torch.where(std > 0, self.direction, (1 - self.alpha_prev).sqrt())
        return replace(self, std=std, direction=direction)

    def step(
        self, prediction: Float[Tensor, "n *d"], x: Float[Tensor, "n *d"], index: int | Int[Tensor, " n"]
    ) -> Gaussian:
        """Return p(x_{t-1} | x_t, c), DDIM eq. 12, from the denoiser's output at x_t."""
        x0, epsilon = self._split(prediction.float(), x.float(), index)
        # mu = √ᾱ_prev · x̂0 + √(1 - ᾱ_prev - sigma²) · epsilon
        mean = at_step(self.alpha_prev, index, x).sqrt() * x0 + at_step(self.direction, index, x) * epsilon
        return Gaussian(mean, at_step(self.std, index, x).flatten())

    def x0(
        self, prediction: Float[Tensor, "n *d"], x: Float[Tensor, "n *d"], index: int | Int[Tensor, " n"]
    ) -> Float[Tensor, "n *d"]:
        """Return the clean latent x̂0 that the prediction implies (float32)."""
        return self._split(prediction.float(), x.float(), index)[0]

    def _split(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> tuple[Tensor, Tensor]:
        # x_t = √ᾱ x0 + √(1-ᾱ) ε and v = √ᾱ ε - √(1-ᾱ) x0, solved for x0 and ε.
        alpha = at_step(self.alpha, index, x)
        signal, noise = alpha.sqrt(), (1 - alpha).sqrt()
        if self.prediction_type == "epsilon":
            return (x - noise * prediction) / signal, prediction
        if self.prediction_type == "v_prediction":
            return signal * x - noise * prediction, signal * prediction + noise * x
        return prediction, (x - signal * prediction) / noise


def ddim_kernel(
    alphas_cumprod: Float[Tensor, " train_times"],
    timesteps: Int[Tensor, " t"],
    *,
    final_alpha: float,
    eta: float,
    prediction_type: str,
    noisy_steps: int | None = None,
) -> DDIMKernel:
    """Build the kernel of a noise schedule.

    Args:
        alphas_cumprod: ᾱ for every training time.
        timesteps: the times to visit, decreasing.
        final_alpha: ᾱ of the clean end, for a step that leads below time 0 (1, or ᾱ_0 without `set_alpha_to_one`).
        eta: noise of the kernel, 0 (deterministic) to 1 (ancestral, DDPO).
        prediction_type: what the denoiser predicts: epsilon, v_prediction or sample.
        noisy_steps: give noise only to this many steps from the start and make the rest deterministic; None means all.
    """
    alpha, alpha_prev = _alphas(alphas_cumprod.double(), timesteps, final_alpha)
    _check(alpha, eta, prediction_type)
    # DDIM eq. 16: sigma² = eta² · (1 - ᾱ_prev) / (1 - ᾱ_t) · (1 - ᾱ_t/ᾱ_prev). In float64, because 1 - ᾱ_t/ᾱ_prev
    # cancels near the clean end.
    variance = eta**2 * (1 - alpha_prev) / (1 - alpha) * (1 - alpha / alpha_prev)
    if noisy_steps is not None:
        variance[noisy_steps:] = 0
    # DDIM eq. 12, weight of the direction to x_t. The clamp only removes rounding: with eta ≤ 1 the term is ≥ 0.
    direction = (1 - alpha_prev - variance).clamp(min=0).sqrt()
    return DDIMKernel(
        timesteps=timesteps,
        alpha=alpha.float(),
        alpha_prev=alpha_prev.float(),
        std=variance.clamp(min=0).sqrt().float(),
        direction=direction.float(),
        prediction_type=cast(PredictionType, prediction_type),
    )


def _alphas(alphas_cumprod: Tensor, timesteps: Tensor, final_alpha: float) -> tuple[Tensor, Tensor]:
    if int(timesteps.max()) >= len(alphas_cumprod) or int(timesteps.min()) < 0:
        raise ValueError(
            f"{len(timesteps)} steps reach time {int(timesteps.max())}, but the model knows times 0 to "
            f"{len(alphas_cumprod) - 1}; use fewer steps"
        )
    # diffusers' rule for the time a step leads to, for every spacing: one stride below, not the next list entry.
    previous = timesteps - len(alphas_cumprod) // len(timesteps)
    end = torch.tensor(final_alpha, dtype=torch.float64)
    return alphas_cumprod[timesteps], torch.where(previous >= 0, alphas_cumprod[previous.clamp(min=0)], end)


def _check(alpha: Tensor, eta: float, prediction_type: str) -> None:
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is {eta}; it must lie in 0 (deterministic) to 1 (ancestral sampling)")
    if prediction_type not in get_args(PredictionType):
        raise ValueError(f"prediction type {prediction_type!r} is not one of {', '.join(get_args(PredictionType))}")
    if prediction_type == "epsilon" and bool((alpha == 0).any()):
        raise ValueError(
            "this schedule has no signal at its first step (zero terminal SNR), where a predicted epsilon says nothing "
            "about x0; use a model with v_prediction"
        )


def at_step(table: Tensor, index: int | Tensor, x: Tensor) -> Tensor:
    """Return what a table has for a step index: one number for the batch or one per sample, shaped to multiply x."""
    chosen = table[index].reshape(1) if isinstance(index, int) else table[index.to(table.device)]
    return _per_sample(chosen, x)


def _per_sample(values: Tensor, x: Tensor) -> Tensor:
    # (n,) or (1,) against (n, *d)
    return values.to(x.device).view(-1, *[1] * (x.ndim - 1))


def _mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def _safe(std: Tensor) -> tuple[Tensor, Tensor]:
    # 1 in place of 0 keeps both branches of a later `where` finite, and so its gradient.
    is_random = std > 0
    return torch.where(is_random, std.float(), 1.0), is_random
