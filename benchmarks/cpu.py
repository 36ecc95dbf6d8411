"""Time of one epoch of `demo` against a plain DDPO-style loop that does the same maths: `python benchmarks/cpu.py`.

Both collect the same trajectories and take the same critic and policy updates on the same pairs. The plain loop works
as the published ones do: sampling in batches of 4, one backward pass per timestep and pair of samples, and a decode
each time a critic looks at a state. Ours samples and updates in large micro-batches and decodes each state once. They
run in turn in one process, so that the ratio is fair on a machine that is not idle; `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from cgru.backbones.adapter import attach
from cgru.config import RunConfig, override
from cgru.critic.fit import regress, values
from cgru.critic.views import decoded_views
from cgru.mdp.trajectory import Trajectory
from cgru.pipeline.critic import build_untrained_critic
from cgru.pipeline.setting import build_setting
from cgru.presets import preset
from cgru.rl.advantage import critic_advantage
from cgru.rl.batches import Plan, plans
from cgru.rl.collect import collect, scored
from cgru.rl.problem import Learner, Problem, Sizes, make_learner
from cgru.rl.update import policy_step

PLAIN = Sizes(rollout=4, update=2, decode=2, score=2)
"""DDPO's and the paper's batches: 4 samples at a time, 2 per backward pass."""
Result = TypeVar("Result")
PARTS = ("rollout", "reward", "values", "critic updates", "policy updates")


@dataclass(frozen=True)
class Loop:
    """One way to do an epoch; `redecodes` is whether a critic's view is decoded at each use."""

    problem: Problem
    learner: Learner
    redecodes: bool

    def epoch(self, index: int) -> dict[str, float]:
        """Seconds of each part."""
        seconds: dict[str, float] = {}
        policy = self.problem.config.policy

        def timed(part: str, work: Callable[[], Result]) -> Result:
            begun = time.perf_counter()
            result = work()
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begun
            return result

        trajectory = timed("rollout", lambda: collect(self.problem, index, forget=policy.trajectories))
        trajectory = timed("reward", lambda: scored(self.problem, trajectory))
        value, views = timed("values", lambda: self.valued(trajectory))
        timed("critic updates", lambda: self.learn_values(trajectory, views, index))
        batch = replace(trajectory, value=value)
        batch = replace(batch, advantage=critic_advantage(batch))
        for plan in self.plans(batch, index):
            timed("policy updates", lambda plan=plan: policy_step(*self.step(batch, plan)))  # type: ignore[misc]
        return seconds

    def views(self, trajectory: Trajectory) -> Tensor:
        """What the critic looks at, decoded now."""
        critic = self.learner.critic
        assert critic is not None
        return decoded_views(
            self.problem.backbone, trajectory, critic.view, batch_size=self.problem.sizes.decode, size=None
        )

    def valued(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """V at every state, and the views for whoever keeps them."""
        views = self.views(trajectory)
        assert self.learner.critic is not None
        return values(self.learner.critic, views, trajectory, batch_size=self.problem.sizes.score), views

    def learn_values(self, trajectory: Trajectory, views: Tensor, index: int) -> None:
        """Online critic updates; the plain loop decodes the states again."""
        config, learner = self.problem.config.critic, self.learner
        assert learner.critic is not None and learner.critic_optimiser is not None and trajectory.reward is not None
        seen = self.views(trajectory) if self.redecodes else views
        regress(
            learner.critic,
            learner.critic_optimiser,
            seen,
            trajectory.reward,
            trajectory.time,
            trajectory.cond,
            updates=config.online_updates,
            batch=config.batch,
            generator=self.problem.generator("critic", index),
        )

    def plans(self, batch: Trajectory, index: int) -> list[Plan]:
        """The same pairs for both loops; the plain one takes them timestep by timestep, two samples at a time."""
        policy = self.problem.config.policy
        found = plans(
            len(batch), batch.stochastic, updates=policy.updates, generator=self.problem.generator("plans", index)
        )
        return [_by_timestep(plan) for plan in found] if self.redecodes else found

    def step(self, batch: Trajectory, plan: Plan) -> tuple[Problem, Learner, Trajectory, Plan, None, torch.Generator]:
        """Arguments of one policy update, without retention, which the plain loop has not."""
        return self.problem, self.learner, batch, plan, None, self.problem.generator("unused")


def _by_timestep(plan: Plan) -> Plan:
    order = (plan.step_ids * len(plan) + plan.sample_ids).argsort()
    return Plan(plan.sample_ids[order], plan.step_ids[order])


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.add_argument("--epochs", type=int, default=2, help="measured epochs of each loop, after one to warm up")
    parser.add_argument("set", nargs="*", metavar="KEY=VALUE", help="other settings than the demo's")
    arguments = parser.parse_args()
    table = measure(override(preset("demo", "Dogs"), arguments.set), arguments.epochs)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {table['trajectories']} trajectories an epoch"
    )
    print(f"{'part':16}{'plain s':>9}{'ours s':>9}{'ratio':>8}")
    for part, row in table["parts"].items():  # type: ignore[attr-defined]
        print(f"{part:16}{row['plain']:9.2f}{row['ours']:9.2f}{row['speedup']:8.2f}")
    print(f"{'epoch':16}{table['plain']:9.2f}{table['ours']:9.2f}{table['speedup']:8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


def measure(config: RunConfig, epochs: int) -> dict[str, object]:
    """Seconds per epoch, part by part, mean over epochs that alternate between the loops."""
    loops = {name: build(config, name == "plain") for name in ("plain", "ours")}
    totals = {name: dict.fromkeys(PARTS, 0.0) for name in loops}
    for index in range(epochs + 1):
        for name, loop in loops.items():
            for part, seconds in loop.epoch(index).items():
                totals[name][part] += seconds / epochs if index else 0.0  # the first epoch only warms up
    parts = {
        part: {
            "plain": totals["plain"][part],
            "ours": totals["ours"][part],
            "speedup": totals["plain"][part] / totals["ours"][part],
        }
        for part in PARTS
    }
    plain, ours = (sum(totals[name].values()) for name in ("plain", "ours"))
    return {
        "speedup": plain / ours,
        "plain": plain,
        "ours": ours,
        "epochs": epochs,
        "trajectories": config.policy.trajectories,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "parts": parts,
    }


def build(config: RunConfig, plain: bool) -> Loop:
    """A loop with a model, LoRA and critic of its own."""
    setting = build_setting(config, sizes=PLAIN if plain else None)
    problem = setting.problem
    policy = config.policy
    critic: nn.Module | None = build_untrained_critic(setting, 5.0)
    parameters = attach(problem.backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets=policy.targets, seed=0)
    assert critic is not None, "the benchmark compares loops with a critic"
    return Loop(problem, make_learner(problem, parameters, critic), redecodes=plain)


if __name__ == "__main__":
    main()
