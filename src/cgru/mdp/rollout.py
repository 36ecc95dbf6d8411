"""Rollouts: sample x_T..x_0 with log-probs (Alg. 2, generate), and re-score stored steps under the current policy.

Each sample draws from its own CPU generator, so the noise of a seed is bit-identical for any batch or device, and equal
to what plain diffusers draws for `generator=torch.Generator().manual_seed(seed)` in float32. Latents stay in float32
even if the denoiser is in half precision (only its input is cast), so kernel maths and stored states lose no precision.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cgru.mdp.kernel import Gaussian, ReverseKernel
from cgru.mdp.trajectory import Conditioning, Steps, Trajectory


@runtime_checkable
class Predictor(Protocol):
    """The part of a backbone that a rollout uses."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch."""

    @property
    def device(self) -> torch.device:
        """Return the denoiser's device."""

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, *, guidance: float) -> Tensor:
        """Return the denoiser's output with guidance applied, float32."""


@dataclass(frozen=True, eq=False)
class _Transition:
    x: Tensor
    next_x: Tensor
    prediction: Tensor
    policy: Gaussian


def noise_for(seed: int, shape: tuple[int, ...], steps: int) -> Float[Tensor, "steps_plus_1 *d"]:
    """Return a seed's initial noise, followed by one noise per step: standard normal, float32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    # One draw per step: torch fills a long draw differently from its parts, and x_T must not depend on the step count.
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(steps + 1)])


@torch.no_grad()
def rollout(
    backbone: Predictor,
    cond: Conditioning,
    seeds: Sequence[int],
    *,
    kernel: ReverseKernel,
    guidance: float,
    batch_size: int | None = None,
    mirrored: Sequence[bool] = (),
    keep_x0: bool = False,
) -> Trajectory:
    """Sample one trajectory per (prompt, seed) and keep all states with their log-probs.

    Args:
        backbone: the policy.
        cond: n prompts.
        seeds: n seeds, one per prompt.
        kernel: the sampler, on the backbone's device.
        guidance: scale of classifier-free guidance; none if at most 1.
        batch_size: samples denoised at once; None means all.
        mirrored: for each sample whether the noise of its steps changes sign; x_T does not. Empty: of none.
        keep_x0: also store the clean latent that each step's prediction implies.
    """
    signs = [-1 if is_mirrored else 1 for is_mirrored in mirrored or [False] * len(seeds)]
    parts, start = [], 0
    for c, s in _batches(cond, seeds, batch_size):
        parts.append(_collect(backbone, c, s, kernel, guidance, keep_x0, signs[start : start + len(s)]))
        start += len(s)
    return Trajectory.cat(parts)


@torch.no_grad()
def sample(
    backbone: Predictor,
    cond: Conditioning,
    seeds: Sequence[int],
    *,
    kernel: ReverseKernel,
    guidance: float,
    batch_size: int | None = None,
) -> Float[Tensor, "n *d"]:
    """Return only the clean latents of `rollout` with the same arguments; keeps one state at a time."""
    batches = _batches(cond, seeds, batch_size)
    return torch.cat([_last(_denoise(backbone, c, s, kernel, guidance)).next_x for c, s in batches])


def policy(backbone: Predictor, steps: Steps, *, kernel: ReverseKernel, guidance: float) -> Gaussian:
    """Return pi(. | x_t, c) at stored states under the backbone's current weights; differentiable."""
    prediction = backbone.predict(steps.x, steps.time, steps.cond, guidance=guidance)
    return kernel.step(prediction, steps.x, steps.index)


def rescore(backbone: Predictor, steps: Steps, *, kernel: ReverseKernel, guidance: float) -> Float[Tensor, " k"]:
    """Return the log-prob of the stored actions under the current policy; differentiable, 0 at deterministic steps."""
    return policy(backbone, steps, kernel=kernel, guidance=guidance).log_prob(steps.next_x)


def _denoise(
    backbone: Predictor,
    cond: Conditioning,
    seeds: Sequence[int],
    kernel: ReverseKernel,
    guidance: float,
    signs: Sequence[int] = (),
) -> Iterator[_Transition]:
    # A kernel without noise (eta 0) uses only x_T.
    has_noise = bool(kernel.stochastic.any())
    drawn = torch.stack([noise_for(seed, backbone.latent_shape, len(kernel) * has_noise) for seed in seeds])
    if -1 in signs:
        drawn[:, 1:] *= torch.tensor(signs).view(-1, *[1] * (drawn.ndim - 1))
    # Moved in one copy: a copy in each step would make the host wait for the step before.
    noise = drawn.to(backbone.device)
    x = noise[:, 0]
    for index in range(len(kernel)):
        time = kernel.timesteps[index].to(backbone.device).expand(len(x))
        prediction = backbone.predict(x, time, cond, guidance=guidance)
        step = kernel.step(prediction, x, index)
        # x_{t-1} = mu + sigma · z
        next_x = step.sample(noise[:, index + 1]) if has_noise else step.mean
        yield _Transition(x, next_x, prediction, step)
        x = next_x


def _collect(
    backbone: Predictor,
    cond: Conditioning,
    seeds: Sequence[int],
    kernel: ReverseKernel,
    guidance: float,
    keep_x0: bool,
    signs: Sequence[int],
) -> Trajectory:
    states, log_probs, clean = [], [], []
    for index, step in enumerate(_denoise(backbone, cond, seeds, kernel, guidance, signs)):
        states += [step.x, step.next_x] if index == 0 else [step.next_x]
        log_probs.append(step.policy.log_prob(step.next_x))
        if keep_x0:
            clean.append(kernel.x0(step.prediction, step.x, index))
    return Trajectory(
        x=torch.stack(states, 1),
        log_prob=torch.stack(log_probs, 1),
        time=kernel.timesteps.to(backbone.device),
        stochastic=kernel.stochastic.to(backbone.device),
        seeds=torch.tensor(list(seeds), device=backbone.device),
        cond=cond,
        guidance=guidance,
        x0_hat=torch.stack(clean, 1) if keep_x0 else None,
    )


def _batches(
    cond: Conditioning, seeds: Sequence[int], batch_size: int | None
) -> Iterator[tuple[Conditioning, Sequence[int]]]:
    # Batch boundaries do not change a sample: its noise depends on its own seed only.
    if len(cond) != len(seeds) or not seeds:
        raise ValueError(f"{len(cond)} prompts and {len(seeds)} seeds; give at least one prompt and one seed for each")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    size = batch_size or len(seeds)
    for start in range(0, len(seeds), size):
        yield cond[start : start + size], seeds[start : start + size]


def _last(transitions: Iterator[_Transition]) -> _Transition:
    for transition in transitions:
        last = transition
    return last
