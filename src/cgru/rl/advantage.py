"""Advantages: what each (trajectory, step) pair of the policy gradient is weighted with, as functions of a Trajectory.

`critic_advantage` is the paper's r - V(x_t, c, t) (Alg. 2); `batch_advantage` and `per_prompt_advantage` are DDPO's
(arXiv 2305.13301); `gae_advantage` runs GAE (arXiv 1506.02438) over V along the denoising chain. CGRU and DDPO are one
loop with another of these. All are (n, t) without gradient; statistics are in float64, since rewards that all saturate
at one value would otherwise become rounding noise divided by 1e-8.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgru.mdp.trajectory import Trajectory

Advantage = Callable[[Trajectory], Tensor]

BATCH_EPSILON = 1e-8  # DDPO without its tracker
PROMPT_EPSILON = 1e-6  # DDPO's tracker


def critic_advantage(trajectory: Trajectory) -> Float[Tensor, "n t"]:
    """Return r - V(x_t, c, t) (paper §4.2, Alg. 2): unscaled, so a reward of 0..10 weighs ten times one of 0..1."""
    return _reward(trajectory)[:, None] - _value(trajectory)


def batch_advantage(trajectory: Trajectory, clamp: float = 5.0) -> Float[Tensor, "n t"]:
    """Return DDPO's (r - mean) / (std + 1e-8) over the batch, clamped to ±clamp; the same at every step."""
    reward = _reward(trajectory).double()
    scaled = (reward - reward.mean()) / (reward.std(correction=0) + BATCH_EPSILON)
    return _at_every_step(scaled, clamp, trajectory)


def per_prompt_advantage(
    trajectory: Trajectory, statistics: "PromptStatistics", clamp: float = 5.0
) -> Float[Tensor, "n t"]:
    """Return DDPO's (r - mean_c) / std_c with the statistics of each sample's own prompt, clamped to ±clamp.

    `statistics.update` must have seen this batch, as in DDPO. This call only reads them, so it may be repeated.
    """
    reward = _reward(trajectory).double()
    mean, std = statistics.of(trajectory.cond.prompts, reward)
    return _at_every_step((reward - mean) / std, clamp, trajectory)


def gae_advantage(trajectory: Trajectory, gae_lambda: float) -> Float[Tensor, "n t"]:
    """Return generalised advantages with gamma 1 and the reward at the end only.

    delta_t = V_{t+1} - V_t, at the last step r - V_t; A_t = Σ_k lambda^k delta_{t+k} (GAE eq. 16). At lambda 1 the sum
    telescopes to r - V_t; at lambda 0 a step is credited with what it changed in V alone: least noise, but biased
    wherever V is wrong. V_{t+1} depends on the action, and may: it estimates the return, it is not the baseline.
    Where only some steps are learned from, t + 1 is the next of these.
    """
    if not 0 <= gae_lambda <= 1:
        raise ValueError(f"gae lambda is {gae_lambda}; it must lie in 0 (V differences alone) to 1 (r - V)")
    value = _value(trajectory)[:, trajectory.learned]
    delta = torch.cat([value[:, 1:], _reward(trajectory)[:, None]], 1) - value
    for t in reversed(range(delta.shape[1] - 1)):
        delta[:, t] += gae_lambda * delta[:, t + 1]
    advantage = torch.full_like(_value(trajectory), torch.nan)
    advantage[:, trajectory.learned] = delta
    return advantage


def normalised(advantage: Float[Tensor, "n t"]) -> Float[Tensor, "n t"]:
    """Divide by the standard deviation over the batch, without centring; NaN stands for no advantage and stays.

    Signs and proportions within the batch stay, so this batch's gradient keeps its direction. What it biases: the
    divisor is made of the same rewards, so over batches E[g / std] is not E[g] / E[std]; batches with a wide spread
    count for less, and when the spread shrinks (reward saturated, critic good) what is left, noise included, is blown
    up to unit size, so that training never calms down by itself. Not centring keeps a state where all did better than V
    a good one.
    """
    found = advantage.double()
    return (found / (found[~found.isnan()].std(correction=0) + BATCH_EPSILON)).float()


class PromptStatistics:
    """DDPO's tracker: the last rewards of each prompt, kept over iterations; part of a checkpoint.

    Args:
        buffer_size: rewards kept per prompt (DDPO: 32).
        min_count: with fewer rewards than this a prompt is judged by the batch (DDPO: 16). With 80 prompts and 16
            trajectories an iteration, a prompt needs 80 iterations to get there.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        """Start empty."""
        if not 1 <= min_count <= buffer_size:
            raise ValueError(f"min_count is {min_count}; it must lie in 1 to buffer_size ({buffer_size})")
        self.buffer_size = buffer_size
        self.min_count = min_count
        self._rewards: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], reward: Float[Tensor, " n"]) -> None:
        """Add the rewards of a batch, in order; each prompt forgets its oldest ones."""
        for prompt, value in zip(prompts, reward.tolist(), strict=True):
            self._rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(value)

    def of(
        self, prompts: Sequence[str], reward: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return mean and std + 1e-6 for each sample; `reward` is the batch that stands in for a rare prompt."""
        new = sorted(set(prompts) - self._rewards.keys())
        assert not new, f"no reward of {new[0]!r} yet: update the statistics with the batch first"
        batch = reward.double().cpu()
        seen = [torch.tensor(self._rewards[prompt], dtype=torch.float64) for prompt in prompts]
        groups = [rewards if len(rewards) >= self.min_count else batch for rewards in seen]
        mean = torch.stack([group.mean() for group in groups])
        std = torch.stack([group.std(correction=0) for group in groups]) + PROMPT_EPSILON
        return mean.to(reward.device), std.to(reward.device)

    def state_dict(self) -> dict[str, list[float]]:
        """Return prompt -> its rewards, oldest first: plain numbers, exact in JSON."""
        return {prompt: list(rewards) for prompt, rewards in self._rewards.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rewards = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}


def _at_every_step(advantage: Tensor, clamp: float, trajectory: Trajectory) -> Tensor:
    return advantage.clamp(-clamp, clamp).float()[:, None].repeat(1, trajectory.horizon)


def _reward(trajectory: Trajectory) -> Tensor:
    assert trajectory.reward is not None, "the trajectory has no reward yet: score it before taking advantages"
    return trajectory.reward.detach()


def _value(trajectory: Trajectory) -> Tensor:
    assert trajectory.value is not None, "the trajectory has no value yet: run the critic before taking advantages"
    return trajectory.value.detach()
