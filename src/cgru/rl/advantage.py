"""Advantages: the weight of each (trajectory, step) pair in the policy gradient, as functions of a Trajectory.

`critic_advantage` is the paper's r - V(x_t, c, t) (Alg. 2); `batch_advantage` and `per_prompt_advantage` are DDPO's
(arXiv 2305.13301); `gae_advantage` applies GAE (arXiv 1506.02438) to V along the denoising chain; `pair_advantage` is
ours, for trajectories with opposite noise. CGRU and DDPO share one loop and differ only in this choice. All results are
(n, t) without gradient. Statistics are computed in float64: when all rewards saturate at one value, float32 rounding
noise would otherwise be divided by 1e-8.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cgru.mdp.trajectory import Trajectory

BATCH_EPSILON = 1e-8  # DDPO, statistics of the whole batch
PROMPT_EPSILON = 1e-6  # DDPO, statistics per prompt


def critic_advantage(trajectory: Trajectory) -> Float[Tensor, "n t"]:
    """Return r - V(x_t, c, t) (paper §4.2, Alg. 2); not normalised, so doubling the reward's scale doubles it."""
    # A_t = r(x_0, c) - V(x_t, c, t)
    return _reward(trajectory)[:, None] - _value(trajectory)


def batch_advantage(trajectory: Trajectory, clamp: float = 5.0) -> Float[Tensor, "n t"]:
    """Return DDPO's (r - mean) / (std + 1e-8) over the batch, clamped to ±clamp; the same at every step."""
    reward = _reward(trajectory).double()
    # A = (r - mean(r)) / (std(r) + 1e-8)
    scaled = (reward - reward.mean()) / (reward.std(correction=0) + BATCH_EPSILON)
    return _at_every_step(scaled, clamp, trajectory)


def per_prompt_advantage(
    trajectory: Trajectory, statistics: "PromptStatistics", clamp: float = 5.0
) -> Float[Tensor, "n t"]:
    """Return DDPO's (r - mean_c) / std_c with the statistics of each sample's own prompt, clamped to ±clamp.

    `statistics.update` must have seen this batch, as in DDPO. This function only reads the statistics, so calling it
    again gives the same result.
    """
    reward = _reward(trajectory).double()
    mean, std = statistics.of(trajectory.cond.prompts, reward)
    # A = (r - mean_c(r)) / (std_c(r) + 1e-6); `of` has added the epsilon
    return _at_every_step((reward - mean) / std, clamp, trajectory)


def pair_advantage(trajectory: Trajectory) -> Float[Tensor, "n t"]:
    """Return half the difference to the reward of the other member of a pair; trajectories 2i and 2i + 1 are a pair.

    They have the same states up to the noisy step and opposite noise there, so with the two terms of the gradient,
    g = 1/2 · (r⁺ - b) · z - 1/2 · (r⁻ - b) · z, any baseline b of the state cancels, a critic's too. What is left,
    1/2 · (r⁺ - r⁻) · z, is unbiased, and free of all that the members have in common.
    """
    reward = _reward(trajectory).double()
    # A⁺ = (r⁺ - r⁻) / 2 = -A⁻
    half = (reward - reward.unflatten(0, (-1, 2)).flip(1).flatten()) / 2
    return half.float()[:, None].expand(-1, trajectory.horizon)


def gae_advantage(trajectory: Trajectory, gae_lambda: float) -> Float[Tensor, "n t"]:
    """Return generalised advantage estimates with gamma 1 and a reward at the end only.

    delta_t = V_{t+1} - V_t, at the last step r - V_t; A_t = Σ_k lambda^k delta_{t+k} (GAE eq. 16). At lambda 1 the sum
    telescopes to r - V_t. At lambda 0 a step is credited only with the change in V that it caused, which has the least
    variance but is biased wherever V is wrong. V_{t+1} may depend on the action, because it estimates the return and is
    not the baseline. If only some steps are trained on, t + 1 is the next of those.
    """
    if not 0 <= gae_lambda <= 1:
        raise ValueError(f"gae lambda is {gae_lambda}; it must lie in 0 (V differences alone) to 1 (r - V)")
    value = _value(trajectory)[:, trajectory.learned]
    # TD error with gamma 1: delta_t = V_{t+1} - V_t, at the last step r - V_t
    delta = torch.cat([value[:, 1:], _reward(trajectory)[:, None]], 1) - value
    # A_t = delta_t + lambda · A_{t+1}, backwards and in place
    for t in reversed(range(delta.shape[1] - 1)):
        delta[:, t] += gae_lambda * delta[:, t + 1]
    advantage = torch.full_like(_value(trajectory), torch.nan)
    advantage[:, trajectory.learned] = delta
    return advantage


def normalised(advantage: Float[Tensor, "n t"], floor: float = 0.0) -> Float[Tensor, "n t"]:
    """Divide by the standard deviation over the batch, without centring; NaN (no advantage at that step) stays NaN.

    Signs and proportions within the batch are kept, so this batch's gradient keeps its direction. It does introduce a
    bias: the divisor is computed from the same rewards, so over batches E[g / std] is not E[g] / E[std]. Batches with a
    wide spread count for less, and when the spread shrinks (reward saturated, critic accurate) the remainder, noise
    included, is scaled up to unit size, so updates do not get smaller on their own. Without centring, a state from
    which every trajectory did better than V keeps a positive advantage.

    Args:
        advantage: not centred.
        floor: the least divisor, in reward units; where it acts, updates do get smaller with the spread.
    """
    found = advantage.double()
    # A / max(std(A) + 1e-8, floor)
    return (found / (found[~found.isnan()].std(correction=0) + BATCH_EPSILON).clamp(min=floor)).float()


def measured_value(trajectory: Trajectory) -> tuple[Float[Tensor, "n t"], Float[Tensor, " t"]]:
    """V as far as it explains the rewards of the other trajectories, and how far that is at each step, 0 to 1.

    Mean, slope and V's mean of trajectory i are those of all others, so the baseline does not depend on i's own actions
    and the gradient stays unbiased. At slope 1 and equal means it is V; at 0 the leave-one-out mean of the rewards.
    """
    reward, value = _reward(trajectory).double()[:, None], _value(trajectory).double()
    others = len(reward) - 1
    if others < 2:
        raise ValueError(
            f"{others + 1} trajectories; critic.trust=measured needs at least 3. Raise policy.trajectories."
        )

    def rest(rows: Tensor) -> Tensor:
        return (rows.sum(0) - rows) / others

    mean, own = rest(reward), rest(value)
    # b = Cov(r, V) / Var(V) over all j ≠ i, within 0..1
    covariance, variance = rest(reward * value) - mean * own, rest(value.square()) - own.square()
    slope = (covariance / variance.clamp(min=BATCH_EPSILON)).clamp(0, 1)
    # V'_i = mean(r) + b · (V_i - mean(V))
    return (mean + slope * (value - own)).float(), slope.mean(0).float()


def alike(advantage: Float[Tensor, "n t"], some: Bool[Tensor, " n"]) -> Float[Tensor, "n t"]:
    """Give some trajectories one positive advantage, their mean absolute one; NaN (no advantage there) stays NaN.

    What is learned from them is then their actions alone, whatever reward and critic say of them.
    """
    theirs = some.to(advantage.device)[:, None] & ~advantage.isnan()
    return torch.where(theirs, advantage[theirs].abs().mean(), advantage)


class PromptStatistics:
    """DDPO's per-prompt tracker: the most recent rewards of each prompt, kept across iterations and checkpointed.

    Args:
        buffer_size: rewards kept per prompt (DDPO: 32).
        min_count: a prompt with fewer rewards than this uses the batch statistics (DDPO: 16). With 80 prompts and 16
            trajectories per iteration, a prompt needs 80 iterations to get there.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        """Start without rewards."""
        if not 1 <= min_count <= buffer_size:
            raise ValueError(f"min_count is {min_count}; it must lie in 1 to buffer_size ({buffer_size})")
        self.buffer_size = buffer_size
        self.min_count = min_count
        self._rewards: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], reward: Float[Tensor, " n"]) -> None:
        """Add the rewards of a batch, in order; each prompt drops its oldest ones."""
        for prompt, value in zip(prompts, reward.tolist(), strict=True):
            self._rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(value)

    def of(
        self, prompts: Sequence[str], reward: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return mean and std + 1e-6 for each sample; prompts with few rewards use `reward`, the current batch."""
        new = sorted(set(prompts) - self._rewards.keys())
        assert not new, f"no reward of {new[0]!r} yet: update the statistics with the batch first"
        batch = reward.double().cpu()
        seen = [torch.tensor(self._rewards[prompt], dtype=torch.float64) for prompt in prompts]
        groups = [rewards if len(rewards) >= self.min_count else batch for rewards in seen]
        mean = torch.stack([group.mean() for group in groups])
        std = torch.stack([group.std(correction=0) for group in groups]) + PROMPT_EPSILON
        return mean.to(reward.device), std.to(reward.device)

    def state_dict(self) -> dict[str, list[float]]:
        """Return prompt -> rewards, oldest first: plain numbers, exact in JSON."""
        return {prompt: list(rewards) for prompt, rewards in self._rewards.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._rewards = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}


def _at_every_step(advantage: Tensor, clamp: float, trajectory: Trajectory) -> Tensor:
    return advantage.clamp(-clamp, clamp).float()[:, None].repeat(1, trajectory.horizon)


def _reward(trajectory: Trajectory) -> Tensor:
    assert trajectory.reward is not None, "the trajectory has no reward yet: score it before taking advantages"
    return trajectory.reward.detach()


def _value(trajectory: Trajectory) -> Tensor:
    assert trajectory.value is not None, "the trajectory has no value yet: run the critic before taking advantages"
    return trajectory.value.detach()
