"""One epoch of the policy loop part by part, on a clock: what benchmarks/cpu.py and benchmarks/epoch.py have in common.

`Loop.epoch` calls what `cgru.rl.train.iterate` calls, in its order. The plain loop is the same functions with the
batches of published DDPO code and the pairs of an update taken timestep by timestep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cgru.critic.fit import regress
from cgru.mdp.trajectory import Trajectory
from cgru.rewards.base import Reward
from cgru.rl.advantage import critic_advantage
from cgru.rl.batches import Plan, plans
from cgru.rl.collect import collect, scored, valued, viewed
from cgru.rl.state import Learner, Problem
from cgru.rl.step_selection import chosen
from cgru.rl.update import Update, policy_step

SAMPLING, FINAL, REWARD = "sampling", "decode x_0", "reward"
STATES, VALUES, FIT, POLICY = "decode x_t", "values", "critic updates", "policy updates"
PARTS = (SAMPLING, FINAL, REWARD, STATES, VALUES, FIT, POLICY)


@dataclass
class Spent:
    """What a part took, without the parts inside it."""

    seconds: float = 0.0
    peak: int = 0
    """Bytes of the device at most, over all calls; 0 on a CPU."""


@dataclass
class Clock:
    """Times parts, which may lie in one another; the device is waited for at both ends of a part."""

    device: torch.device
    spent: dict[str, Spent] = field(default_factory=dict)
    inside: list[float] = field(default_factory=list)
    """For each part that is open now, the seconds of the parts inside it."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Everything within counts for `name`."""
        spent = self.spent.setdefault(name, Spent())
        self._wait()
        if self.device.type == "cuda" and not self.inside:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.inside.append(0.0)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            taken, within = time.perf_counter() - begun, self.inside.pop()
            spent.seconds += taken - within
            if self.inside:
                self.inside[-1] += taken
            if self.device.type == "cuda":
                spent.peak = max(spent.peak, torch.cuda.max_memory_allocated(self.device))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class ClockedReward:
    """A reward on the clock, so that it can be told from the decoding around it."""

    inner: Reward
    clock: Clock

    @property
    def low(self) -> float:
        """The least score there can be."""
        return self.inner.low

    @property
    def high(self) -> float:
        """The highest score there can be."""
        return self.inner.high

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of the reward itself."""
        return self.inner.lineage

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score pictures."""
        with self.clock.part(REWARD):
            return self.inner(images, prompts)


@dataclass(frozen=True)
class Loop:
    """One way to do an epoch."""

    problem: Problem
    learner: Learner
    by_timestep: bool = False
    """An update takes its pairs timestep by timestep, as DDPO does."""
    redecodes: bool = False
    """The critic's updates decode the states again instead of keeping them."""

    def epoch(self, index: int, clock: Clock) -> list[Update]:
        """Collect, value, learn; `index` names the draws."""
        problem = replace(self.problem, reward=ClockedReward(self.problem.reward, clock))
        critic = self.learner.critic
        assert critic is not None, "the benchmarks compare loops with a critic"
        with clock.part(SAMPLING):
            trajectory = collect(problem, index, forget=problem.config.policy.trajectories)
        with clock.part(FINAL):
            trajectory = chosen(problem, self.learner, scored(problem, trajectory))
        with clock.part(STATES):
            views = viewed(problem, critic, trajectory)
        with clock.part(VALUES):
            trajectory = valued(problem, critic, views, trajectory)
        if self.redecodes:
            with clock.part(STATES):
                views = viewed(problem, critic, trajectory)
        with clock.part(FIT):
            self.fit(trajectory, views, index)
        batch = replace(trajectory, advantage=critic_advantage(trajectory))
        with clock.part(POLICY):
            return [self.step(batch, plan) for plan in self.plans(batch, index)]

    def fit(self, trajectory: Trajectory, views: Tensor, index: int) -> None:
        """Online critic updates."""
        config, learner = self.problem.config.critic, self.learner
        assert learner.critic is not None and learner.critic_optimiser is not None and trajectory.reward is not None
        regress(
            learner.critic,
            learner.critic_optimiser,
            views,
            trajectory.reward,
            trajectory.time[trajectory.learned],
            trajectory.cond,
            updates=config.online_updates,
            batch=config.batch,
            generator=self.problem.generator("critic", index),
        )

    def plans(self, batch: Trajectory, index: int) -> list[Plan]:
        """The same pairs for every loop, in its order."""
        updates, generator = self.problem.config.policy.updates, self.problem.generator("plans", index)
        found = plans(len(batch), batch.trained, updates=updates, generator=generator)
        return [_by_timestep(plan) for plan in found] if self.by_timestep else found

    def step(self, batch: Trajectory, plan: Plan) -> Update:
        """One policy update without retention, which the plain loop has not."""
        return policy_step(self.problem, self.learner, batch, plan, None, self.problem.generator("unused"))


def _by_timestep(plan: Plan) -> Plan:
    order = (plan.step_ids * len(plan) + plan.sample_ids).argsort()
    return Plan(plan.sample_ids[order], plan.step_ids[order])
