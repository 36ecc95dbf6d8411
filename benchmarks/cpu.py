"""Time of one epoch of `demo` against a plain DDPO-style loop that does the same maths: `python benchmarks/cpu.py`.

Both collect the same trajectories and take the same critic and policy updates on the same pairs. The plain loop works
as the published ones do: sampling in batches of 4, one backward pass per timestep and pair of samples, and a decode
each time a critic looks at a state. Ours samples and updates in large micro-batches and decodes each state once. They
run in turn in one process, so that the ratio is fair on a machine that is not idle; `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from loops import PARTS, Clock, Loop
from torch import nn

from cgru.config import RLConfig, as_rl, override
from cgru.lora.train import attach
from cgru.presets import preset
from cgru.rl.build import build_setting
from cgru.rl.critic_stage import build_untrained_critic
from cgru.rl.state import Sizes, make_learner

PLAIN = Sizes(rollout=4, update=2, decode=2, score=2)
"""DDPO's and the paper's batches: 4 samples at a time, 2 per backward pass."""


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.add_argument("--epochs", type=int, default=2, help="measured epochs of each loop, after one to warm up")
    parser.add_argument("set", nargs="*", metavar="KEY=VALUE", help="other settings than the demo's")
    arguments = parser.parse_args()
    table = measure(override(as_rl(preset("demo", "Dogs")), arguments.set), arguments.epochs)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {table['trajectories']} trajectories an epoch"
    )
    print(f"{'part':16}{'plain s':>9}{'ours s':>9}{'ratio':>8}")
    for part, row in table["parts"].items():  # type: ignore[attr-defined]
        print(f"{part:16}{row['plain']:9.2f}{row['ours']:9.2f}{row['speedup']:8.2f}")
    print(f"{'epoch':16}{table['plain']:9.2f}{table['ours']:9.2f}{table['speedup']:8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


def measure(config: RLConfig, epochs: int) -> dict[str, object]:
    """Seconds per epoch, part by part, mean over epochs that alternate between the loops."""
    loops = {name: build(config, name == "plain") for name in ("plain", "ours")}
    totals = {name: dict.fromkeys(PARTS, 0.0) for name in loops}
    for index in range(epochs + 1):
        for name, loop in loops.items():
            clock = Clock(loop.problem.backbone.device)
            loop.epoch(index, clock)
            for part, spent in clock.spent.items():
                totals[name][part] += spent.seconds / epochs if index else 0.0  # the first epoch only warms up
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


def build(config: RLConfig, plain: bool) -> Loop:
    """A loop with a model, LoRA and critic of its own."""
    setting = build_setting(config, sizes=PLAIN if plain else None)
    problem = setting.problem
    policy = config.policy
    critic: nn.Module | None = build_untrained_critic(setting, 5.0)
    parameters = attach(problem.backbone.denoiser, rank=policy.rank, alpha=policy.alpha, targets=policy.targets, seed=0)
    assert critic is not None, "the benchmark compares loops with a critic"
    return Loop(problem, make_learner(problem, parameters, critic), by_timestep=plain, redecodes=plain)


if __name__ == "__main__":
    main()
