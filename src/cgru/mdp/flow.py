"""The reverse kernel of rectified-flow models, x_s = (1 - s) x_0 + s epsilon with velocity v = epsilon - x_0.

Such a model samples an ODE, which has no density. Flow-GRPO (arXiv 2505.05470, github.com/yifan123/flow_grpo) turns it
into an SDE with the same marginals, whose Euler-Maruyama step is a Gaussian. What differs: the last step is
deterministic, as noise added there would stay in the picture. Marginals are kept as far as steps are small: the first
ones, of the largest std, spread x too far by up to a fifth of a², which the later ones take back.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from cgru.mdp.kernel import Gaussian, at_step


@dataclass(frozen=True, eq=False)
class FlowKernel:
    """Flow matching as a policy. Build it with `flow_kernel`; the tables hold one float32 number per step."""

    timesteps: Num[Tensor, " t"]
    sigma: Float[Tensor, " t"]
    """s, the share of noise in x at the step's own time."""
    keep: Float[Tensor, " t"]
    """Weight of x in the mean."""
    move: Float[Tensor, " t"]
    """Weight of v in the mean."""
    std: Float[Tensor, " t"]
    """Of the step: a · √(s / (1 - s)) · √(s - s_next)."""

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.timesteps)

    @property
    def stochastic(self) -> Bool[Tensor, " t"]:
        """Return which steps have noise; the others have no density."""
        return self.std > 0

    def to(self, device: torch.device) -> "FlowKernel":
        """Return a copy of the kernel with its tables on `device`."""
        tables = {name: getattr(self, name).to(device) for name in ("timesteps", "sigma", "keep", "move", "std")}
        return replace(self, **tables)

    def step(
        self, prediction: Float[Tensor, "n *d"], x: Float[Tensor, "n *d"], index: int | Int[Tensor, " n"]
    ) -> Gaussian:
        """Return p(x_{s_next} | x_s, c) from the velocity at x_s."""
        # mu = (1 + std² / (2s) · dt) · x + (1 + std² (1 - s) / (2s)) · dt · v
        mean = at_step(self.keep, index, x) * x.float() + at_step(self.move, index, x) * prediction.float()
        return Gaussian(mean, at_step(self.std, index, x).flatten())

    def x0(
        self, prediction: Float[Tensor, "n *d"], x: Float[Tensor, "n *d"], index: int | Int[Tensor, " n"]
    ) -> Float[Tensor, "n *d"]:
        """Return the clean latent that the velocity implies (float32)."""
        # x̂0 = x - s · v
        return x.float() - at_step(self.sigma, index, x) * prediction.float()


def flow_kernel(
    sigmas: Float[Tensor, " t_plus_1"], timesteps: Num[Tensor, " t"], *, eta: float, noisy_steps: int | None = None
) -> FlowKernel:
    """Build the kernel of a schedule.

    Args:
        sigmas: s at each step, falling from 1 or less, and where the last step leads, 0: what diffusers'
            FlowMatchEulerDiscreteScheduler calls `sigmas`.
        timesteps: what the denoiser receives at each step: s itself, 1000 s, or any other numbers.
        eta: the SDE's noise level a itself, 0 (the ODE) to 1; Flow-GRPO uses 0.7.
        noisy_steps: give noise only to this many steps from the start and make the rest deterministic; None means all
            but the last, which never has any.
    """
    _check(sigmas, timesteps, eta)
    s, dt = sigmas[:-1].double(), sigmas.double().diff()
    # std = a · √(s / (1 - s)); at s = 1 the second sigma stands in the denominator, which would be 0 (Flow-GRPO)
    room = 1 - torch.where(s == 1, sigmas[1].double(), s)
    variance = eta**2 * s / room
    variance[-1 if noisy_steps is None else min(noisy_steps, len(s) - 1) :] = 0
    # drift = v + std² / (2s) · (x + (1 - s) v), from the score -(x + (1 - s) v) / s
    pull = variance / (2 * s)
    return FlowKernel(
        timesteps=timesteps,
        sigma=s.float(),
        keep=(1 + pull * dt).float(),
        move=((1 + pull * (1 - s)) * dt).float(),
        std=(variance * -dt).sqrt().float(),
    )


def _check(sigmas: Tensor, timesteps: Tensor, eta: float) -> None:
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is {eta}; it must lie in 0 (deterministic) to 1; Flow-GRPO's noise level is 0.7")
    if len(timesteps) < 1 or len(sigmas) != len(timesteps) + 1:
        raise ValueError(
            f"{len(sigmas)} sigmas for {len(timesteps)} times; allowed: one time or more, and one sigma more than times"
        )
    inside = bool((sigmas[0] <= 1) & (sigmas[-1] >= 0))
    if not inside or not bool((sigmas.diff() < 0).all()):  # NaN is neither
        raise ValueError(
            f"sigmas go from {float(sigmas[0]):g} to {float(sigmas[-1]):g}; they must fall at every step, within 1 to 0"
        )
