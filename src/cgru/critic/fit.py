"""Fit the critic: warm start (Alg. 1), online updates (Alg. 2), and evaluation per timestep.

Monte-Carlo regression to the terminal reward. (sample, step) pairs are shuffled over all trajectories and steps, which
breaks their temporal order, and each minibatch minimises the mean squared error (the paper's equation sums over t;
Alg. 1 and 2 take the mean, as here). The caller collects the warm-start trajectories once, not once per epoch. With the
classes head the warm start minimises the cross-entropy to class labels, as in the paper's ablation. With several
processes, all draw the same minibatches, each computes its share, and gradients are summed.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Float, Int, Num, Shaped
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from cgru import distributed
from cgru.critic.measures import (
    Calibration,
    accuracy_and_macro_precision,
    calibration,
    explained_variance,
    value_error,
)
from cgru.critic.views import ClassCritic, Critic
from cgru.mdp.trajectory import Conditioning, Trajectory

Views = Shaped[Tensor, "n t *state"]

REPORT_BATCH = 256
"""States per forward pass when evaluating held-out trajectories."""


@dataclass(frozen=True)
class CriticLoss:
    """Result of some optimiser steps: each step's loss, measured before the step, and the mean gradient norm."""

    losses: tuple[float, ...]
    gradient_norm: float

    @property
    def mean(self) -> float:
        """Mean loss over the steps."""
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Accuracy of a critic on trajectories it was not fitted to."""

    n: int
    value_error: Float[Tensor, " t"]
    explained_variance: Float[Tensor, " t"]
    calibration: tuple[Calibration, ...]
    """Predicted and achieved reward, for ranges of timesteps."""
    accuracy: float | None = None
    """Accuracy of the classes head over all timesteps, 0 to 1."""
    macro_precision: float | None = None


@dataclass(frozen=True, eq=False)
class WarmStart:
    """Result of Alg. 1."""

    loss: CriticLoss
    held_out: HeldOut


@dataclass(frozen=True, eq=False)
class _States:
    # All states of n trajectories. Pair (i, t) has the number i · horizon + t; pair and sample ids are on the CPU.
    views: Views
    times: Num[Tensor, " t"]
    cond: Conditioning

    def pairs(self, samples: Tensor) -> Tensor:
        horizon = len(self.times)
        return (samples[:, None] * horizon + torch.arange(horizon)).flatten()

    def sample(self, pairs: Tensor) -> Tensor:
        return pairs // len(self.times)

    def at(self, pairs: Tensor) -> tuple[Tensor, Tensor, Conditioning]:
        i, t = self.sample(pairs), pairs % len(self.times)
        return self.views[i, t], self.times[t], self.cond[i]


@torch.no_grad()
def values(critic: Critic, views: Views, trajectory: Trajectory, *, batch_size: int) -> Float[Tensor, "n horizon"]:
    """Return V(x_t, c, t) at every state that is trained on and NaN elsewhere, on the trajectory's device."""
    states = _States(views, trajectory.time[trajectory.learned], trajectory.cond)
    found = _values(critic, states, torch.arange(len(views)), batch_size).to(trajectory.x.device)
    if trajectory.chosen is None:
        return found
    # NaN at skipped steps, so that using such a value by mistake shows.
    everywhere = found.new_full((len(trajectory), trajectory.horizon), math.nan)
    everywhere[:, trajectory.learned] = found
    return everywhere


def regress(
    critic: Critic,
    optimiser: Optimizer,
    views: Views,
    rewards: Float[Tensor, " n"],
    times: Num[Tensor, " t"],
    cond: Conditioning,
    *,
    updates: int,
    batch: int,
    generator: torch.Generator,
) -> CriticLoss:
    """Take `updates` optimiser steps on the squared error to the terminal reward (Alg. 2, online critic updates).

    Args:
        critic: trained in place.
        optimiser: optimises the critic's parameters.
        views: the critic's inputs, from `decoded_views`.
        rewards: terminal reward of each trajectory.
        times: the time the denoiser receives at each step.
        cond: n prompts.
        updates: at least 1. Pairs come in shuffled passes: none is repeated before all have been seen.
        batch: pairs per optimiser step; the last step of a pass may have fewer.
        generator: on the CPU, the only source of randomness.
    """
    states = _States(views, times, cond)
    _check_rewards(rewards, len(views))
    pairs = states.pairs(torch.arange(len(views)))
    loss_of = _squared_error(critic, states, rewards)
    return _descend(loss_of, optimiser, _minibatches(pairs, batch, updates, generator))


def warm_start(
    critic: Critic,
    optimiser: Optimizer,
    views: Views,
    trajectory: Trajectory,
    *,
    epochs: int,
    batch: int,
    held_out: int,
    generator: torch.Generator,
) -> WarmStart:
    """Fit the critic to scored trajectories (Alg. 1), holding out `held_out` of them for evaluation."""
    states, rewards = _States(views, trajectory.time, trajectory.cond), _rewards(trajectory)
    train, rest = split(len(trajectory), held_out, generator)
    loss_of = _squared_error(critic, states, rewards)
    loss = _epochs(loss_of, optimiser, states.pairs(train), epochs, batch, generator)
    return WarmStart(loss, _held_out(critic, states, rewards, rest))


def warm_start_classes(
    critic: ClassCritic,
    optimiser: Optimizer,
    views: Views,
    trajectory: Trajectory,
    labels: Int[Tensor, " n"],
    *,
    epochs: int,
    batch: int,
    held_out: int,
    generator: torch.Generator,
) -> WarmStart:
    """Fit a classes head by cross-entropy to each trajectory's class; the result serves any target class."""
    states, rewards = _States(views, trajectory.time, trajectory.cond), _rewards(trajectory)
    train, rest = split(len(trajectory), held_out, generator)

    def cross_entropy(pairs: Tensor) -> Tensor:
        # -log softmax(logits(x_t, c, t))[class of x_0]
        logits = critic.logits(*states.at(pairs))
        return functional.cross_entropy(logits, labels[states.sample(pairs)].to(logits.device))

    loss = _epochs(cross_entropy, optimiser, states.pairs(train), epochs, batch, generator)
    return WarmStart(loss, _held_out_classes(critic, states, rewards, labels, rest))


def split(n: int, held_out: int, generator: torch.Generator) -> tuple[Int[Tensor, " train"], Int[Tensor, " held_out"]]:
    """Return shuffled (training, held-out) trajectory ids; whole trajectories, whose states all share one reward."""
    if not 1 <= held_out < n:
        raise ValueError(f"{held_out} held-out of {n} trajectories; hold out at least 1 and leave at least 1 to fit.")
    order = torch.randperm(n, generator=generator)
    return order[held_out:], order[:held_out]


def _values(critic: Critic, states: _States, samples: Tensor, batch_size: int) -> Tensor:
    parts = states.pairs(samples).split(batch_size)
    return torch.cat([critic(*states.at(part)) for part in parts]).view(len(samples), -1)


@torch.no_grad()
def _held_out(critic: Critic, states: _States, rewards: Tensor, samples: Tensor) -> HeldOut:
    value = _values(critic, states, samples, REPORT_BATCH).cpu()
    chosen = rewards.cpu()[samples]
    measured = value_error(value, chosen), explained_variance(value, chosen)
    return HeldOut(len(samples), *measured, tuple(calibration(value, chosen)))


@torch.no_grad()
def _held_out_classes(
    critic: ClassCritic, states: _States, rewards: Tensor, labels: Tensor, samples: Tensor
) -> HeldOut:
    scores = _held_out(critic, states, rewards, samples)
    pairs = states.pairs(samples)
    logits = torch.cat([critic.logits(*states.at(part)) for part in pairs.split(REPORT_BATCH)]).cpu()
    accuracy, precision = accuracy_and_macro_precision(logits, labels.cpu()[states.sample(pairs)])
    return replace(scores, accuracy=accuracy, macro_precision=precision)


def _squared_error(critic: Critic, states: _States, rewards: Tensor) -> Callable[[Tensor], Tensor]:
    def loss_of(pairs: Tensor) -> Tensor:
        # (V(x_t, c, t) - r(x_0, c))², mean over the minibatch
        value = critic(*states.at(pairs))
        return functional.mse_loss(value, rewards[states.sample(pairs)].to(value))

    return loss_of


def _epochs(
    loss_of: Callable[[Tensor], Tensor],
    optimiser: Optimizer,
    pairs: Tensor,
    epochs: int,
    batch: int,
    generator: torch.Generator,
) -> CriticLoss:
    # One epoch is one pass over all pairs: ceil(pairs / batch) updates.
    updates = epochs * math.ceil(len(pairs) / max(batch, 1))
    return _descend(loss_of, optimiser, _minibatches(pairs, batch, updates, generator))


def _minibatches(pairs: Tensor, batch: int, updates: int, generator: torch.Generator) -> Iterator[Tensor]:
    if updates < 1 or batch < 1:
        raise ValueError(f"{updates} critic updates of {batch} states; both must be at least 1.")
    return islice(_passes(pairs, batch, generator), updates)


def _passes(pairs: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    # Endless: `_minibatches` takes as many updates as it needs, and randomness is drawn only for passes that start.
    while True:
        yield from pairs[torch.randperm(len(pairs), generator=generator)].split(batch)


def _descend(loss_of: Callable[[Tensor], Tensor], optimiser: Optimizer, batches: Iterable[Tensor]) -> CriticLoss:
    losses, norms = [], []
    for update, pairs in enumerate(batches):
        optimiser.zero_grad()
        losses.append(_backward(loss_of, optimiser, pairs))
        gradients = [parameter.grad for parameter in _parameters(optimiser) if parameter.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        if not math.isfinite(losses[-1]) or not math.isfinite(norms[-1]):
            # Raised before the step, so the weights are still those of the last valid update.
            raise ValueError(
                f"critic update {update}: loss {losses[-1]}, gradient norm {norms[-1]}; both must be finite. "
                "Lower the critic's learning rate, or check its rewards."
            )
        optimiser.step()
    optimiser.zero_grad()
    return CriticLoss(tuple(losses), sum(norms) / len(norms))


def _backward(loss_of: Callable[[Tensor], Tensor], optimiser: Optimizer, pairs: Tensor) -> float:
    """Compute the gradient of the mean loss over the pairs, each process doing its share; return that loss."""
    mine = pairs[distributed.share(len(pairs))]

    def own() -> float:
        if not len(mine):
            return 0.0
        # Shares add up to the mean over all pairs: (n_mine / n) · mean over mine.
        loss = loss_of(mine) * (len(mine) / len(pairs))
        loss.backward()
        return loss.item()

    (loss,) = distributed.add_up(_parameters(optimiser), distributed.alike(own))
    return loss


def _parameters(optimiser: Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _rewards(trajectory: Trajectory) -> Tensor:
    if trajectory.reward is None:
        raise ValueError("these trajectories have no reward to fit a critic to; score them first.")
    _check_rewards(trajectory.reward, len(trajectory))
    return trajectory.reward


def _check_rewards(rewards: Tensor, n: int) -> None:
    assert len(rewards) == n, f"{len(rewards)} rewards for {n} trajectories"
    wrong = (~rewards.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {n} rewards are NaN or infinite, first at trajectory {wrong[0]}; "
            "a critic needs finite rewards. Check the reward."
        )
