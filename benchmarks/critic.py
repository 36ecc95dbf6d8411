"""Which critic predicts best: FiLM or not, decoded x_t or x̂0, CLIP or the latent (paper §5 and App. E, FiLM ablation).

All critics of a seed learn from the same trajectories of the base policy on Emoji Canvas, with the same updates in the
same order (Alg. 1), and are scored on held-out trajectories. Every trajectory has a prompt of its own, so held-out
prompts were never fitted to. Three sets: `target` (the concept's prompts, whose rewards are all low at the base), `mix`
(half of them other prompts, also scored with the concept's reward) and `classes` (every label alike, for that head).

    python benchmarks/critic.py [--concept Dogs] [--trajectories 1024] [--held-out 512] [--epochs 4] [--seeds 3]
                                [--device auto] [--json FILE] [critic.learning_rate=3e-4 ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cgru.backbones.base import exact_float32
from cgru.config import RLConfig, as_rl, override, to_dict
from cgru.critic.fit import WarmStart, split, warm_start, warm_start_classes
from cgru.critic.views import Critic
from cgru.mdp.trajectory import Trajectory
from cgru.presets import resolve_config
from cgru.rl.build import Setting, build_setting
from cgru.rl.collect import choose, sampled, scored, viewed
from cgru.rl.critic_stage import build_untrained_critic, class_labels, class_of, warm_start_trajectories

Table = dict[str, Any]

CLIP = {f"{kind}/{view}": (kind, view) for view in ("noisy", "clean") for kind in ("film", "plain")}
"""Name -> kind and view."""
VALUE = {**CLIP, "latent": ("latent", "noisy")}  # looks at the latent whatever the view says


@dataclass(frozen=True, eq=False)
class Data:
    """Trajectories with rewards, and what critics see of them: each view decoded when first asked for, then kept."""

    trajectory: Trajectory
    truth: Tensor | None = None
    """The class of each, for the classes head."""
    views: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rewards(self) -> Tensor:
        """On the CPU."""
        assert self.trajectory.reward is not None
        return self.trajectory.reward.cpu()

    def seen(self, setting: Setting, critic: Critic) -> Tensor:
        """What a critic looks at."""
        if critic.view not in self.views:
            self.views[critic.view] = viewed(setting.problem, critic, self.trajectory)
        return self.views[critic.view]


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concept", default="Dogs", help="what the reward counts against")
    parser.add_argument("--trajectories", type=int, default=1024, help="fitted to, in each set")
    parser.add_argument("--held-out", type=int, default=512, help="scored on, in each set")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training pairs")
    parser.add_argument("--seeds", type=int, default=3, help="of trajectories, split and fresh layers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="also write the tables here, with every seed")
    parser.add_argument("set", nargs="*", metavar="KEY=VALUE", help="other settings than the best preset's")
    arguments = parser.parse_args()
    if min(arguments.trajectories, arguments.held_out, arguments.epochs, arguments.seeds) < 1:
        parser.error("--trajectories, --held-out, --epochs and --seeds must be at least 1")
    config = configured(arguments)
    with exact_float32():
        tables = measure(config, arguments.held_out, arguments.seeds)
    report(tables)
    if arguments.json:
        arguments.json.write_text(json.dumps({"config": to_dict(config), **tables}, indent=1) + "\n")


def configured(arguments: argparse.Namespace) -> RLConfig:
    """The preset `best` with what collecting for all critics needs; `fitted` then says which critic."""
    count = arguments.trajectories + arguments.held_out
    ours = [
        f"device={arguments.device}",
        f"critic.trajectories={count}",
        f"critic.epochs={arguments.epochs}",
        f"prompts.critic={2 * count}",  # a fifth of the retain prompts has no class; still one for each trajectory
        "critic.kind=film",
        "critic.head=classes",  # so that there are retain prompts for the critic
        "critic.view=clean",  # so that rollouts keep x̂0
        "retention.share=0",  # so that retain prompts have the concept's reward too
        "watch.every=0",
    ]
    return override(as_rl(resolve_config(arguments.concept, preset_name="best", overrides=arguments.set)), ours)


def measure(config: RLConfig, held_out: int, seeds: int) -> Table:
    """Every set's table; seed by seed, so that one set of trajectories is held at a time."""
    found: list[Table] = []
    for seed in range(seeds):
        setting = build_setting(replace(config, seed=seed))
        found.append({name: measured(setting, name, held_out) for name in SETS})
    device = str(setting.problem.backbone.device)
    sets = {name: joined([table[name] for table in found]) for name in SETS}
    return {"torch": str(torch.__version__), "device": device, "seeds": seeds, **sets}


def measured(setting: Setting, name: str, held_out: int) -> Table:
    """One seed's results on one set."""
    draw, critics = SETS[name]
    data = draw(setting)
    prompts = data.trajectory.cond.prompts
    assert len(set(prompts)) == len(prompts), f"set {name}: a prompt came twice, so it could be on both sides"
    fits = {}
    for critic, (kind, view) in critics.items():
        print(f"seed {setting.problem.config.seed}, {name}: {critic}", file=sys.stderr, flush=True)
        fits[critic] = fitted(setting, kind, view, data, held_out)
    train, rest = halves(setting, data, held_out)
    rewards, first = data.rewards[rest], next(iter(fits.values()))
    return {
        "n": first.held_out.n,
        "trajectories": len(train),
        "updates": len(first.loss.losses),
        "time": data.trajectory.time.tolist(),
        "reward_mean": float(rewards.mean()),
        "reward_variance": float(rewards.var(correction=0)),
        "critics": {critic: scores(fit) for critic, fit in fits.items()},
    }


def drawn(setting: Setting, share: float) -> Data:
    """Trajectories of the critic's prompts, a share of them not the concept's, all with the concept's reward."""
    problem, sets, count = setting.problem, setting.problem.prompts, setting.problem.config.critic.trajectories
    others = round(share * count)
    prompts = choose(problem, "critic", sets.critic, count - others, "critic")
    prompts += choose(problem, "critic-retain", sets.critic_retain, others, "critic")
    return Data(scored(problem, sampled(problem, prompts, "critic")))


def classes(setting: Setting) -> Data:
    """Prompts of every label alike, as the classes head's warm start draws them, with their labels."""
    trajectory, sets, concept = warm_start_trajectories(setting), setting.problem.prompts, setting.concept
    assert concept is not None
    labels, _ = class_labels(setting.problem, concept)
    asked = {prompt.text: class_of(prompt, concept) for prompt in (*sets.critic, *sets.critic_retain)}
    return Data(trajectory, torch.tensor([labels.index(asked[text] or "") for text in trajectory.cond.prompts]))


SETS: dict[str, tuple[Callable[[Setting], Data], dict[str, tuple[str, str]]]] = {
    "target": (lambda setting: drawn(setting, 0.0), VALUE),
    "mix": (lambda setting: drawn(setting, 0.5), VALUE),
    "classes": (classes, CLIP),
}


def fitted(setting: Setting, kind: str, view: str, data: Data, held_out: int) -> WarmStart:
    """Alg. 1 for one critic; split and order of pairs are the seed's, so the same for every critic of a set."""
    problem, head = setting.problem, "value" if data.truth is None else "classes"
    config = override(problem.config, [f"critic.kind={kind}", f"critic.view={view}", f"critic.head={head}"])
    train, _ = halves(setting, data, held_out)
    prior = float(data.rewards[train].mean())
    critic: Any = build_untrained_critic(replace(setting, problem=replace(problem, config=config)), prior)
    rates: Table = {"lr": config.critic.learning_rate, "weight_decay": config.critic.weight_decay}
    known = critic, torch.optim.AdamW(critic.parameters(), **rates), data.seen(setting, critic), data.trajectory
    sizes: Table = {"epochs": config.critic.epochs, "batch": config.critic.batch, "held_out": held_out}
    if data.truth is None:
        return warm_start(*known, **sizes, generator=shuffler(setting))
    return warm_start_classes(*known, data.truth, **sizes, generator=shuffler(setting))


def halves(setting: Setting, data: Data, held_out: int) -> tuple[Tensor, Tensor]:
    """Ids of training and held-out trajectories, as the warm start splits them."""
    return split(len(data.trajectory), held_out, shuffler(setting))


def shuffler(setting: Setting) -> torch.Generator:
    """The same for every critic of a seed."""
    return setting.problem.generator("critic-warm-start")


def scores(fit: WarmStart) -> Table:
    """What is kept of one fit."""
    held, loss = fit.held_out, {"training_loss": fit.loss.mean}
    if held.accuracy is not None:
        return {**loss, "accuracy": held.accuracy, "macro_precision": held.macro_precision}
    per_step = {"value_error": held.value_error, "explained_variance": held.explained_variance}
    return {**loss, **{name: values.tolist() for name, values in per_step.items()}}


def joined(seeds: Sequence[Table]) -> Table:
    """One table of one for each seed: numbers that may differ become mean, standard deviation and every seed's."""
    same = {key: seeds[0][key] for key in ("n", "trajectories", "updates", "time")}
    rewards = {key: spread([table[key] for table in seeds]) for key in ("reward_mean", "reward_variance")}
    critics = {
        critic: {key: spread([table["critics"][critic][key] for table in seeds]) for key in first}
        for critic, first in seeds[0]["critics"].items()
    }
    return {**same, **rewards, "critics": critics}


def spread(values: Sequence[Any]) -> Table:
    """Mean and standard deviation over seeds, of numbers or of lists of them; one seed has no deviation."""
    stacked = torch.tensor(values, dtype=torch.float64)
    deviation = stacked.std(0).tolist() if len(values) > 1 else None
    return {"mean": stacked.mean(0).tolist(), "sd": deviation, "seeds": list(values)}


def report(tables: Table) -> None:
    """Print everything; ± is the standard deviation over seeds."""
    print(f"torch {tables['torch']}, {tables['device']}, {tables['seeds']} seeds; ± is their standard deviation")
    for name in ("target", "mix"):
        for score in ("value_error", "explained_variance"):
            print_value_table(name, score, tables[name])
    print_class_table(tables["classes"])


def print_value_table(name: str, score: str, table: Table) -> None:
    """One row per timestep, noisiest first, one column per critic."""
    print(f"\n{name}: {score.replace('_', ' ')} on {described(table)}")
    critics: dict[str, Table] = {key: found[score] for key, found in table["critics"].items()}
    # The best constant: its error is the variance of r, and it explains nothing.
    constant = number(table["reward_variance"]) if score == "value_error" else "0"
    print(f"{'t':>6}{'constant':>16}" + "".join(f"{critic:>16}" for critic in critics))
    for step, time in enumerate(table["time"]):
        print(f"{time:6}{constant:>16}" + "".join(f"{number(found, step):>16}" for found in critics.values()))
    averages = [spread([sum(values) / len(values) for values in found["seeds"]]) for found in critics.values()]
    print(f"{'all':>6}{constant:>16}" + "".join(f"{number(average):>16}" for average in averages))


def print_class_table(table: Table) -> None:
    """One row per critic."""
    print(f"\nclasses, every timestep alike: {described(table)} × {len(table['time'])} timesteps")
    print(f"{'critic':14}{'accuracy':>18}{'macro precision':>18}")
    for critic, found in table["critics"].items():
        accuracy, precision = (number(found[name], form=".1%") for name in ("accuracy", "macro_precision"))
        print(f"{critic:14}{accuracy:>18}{precision:>18}")
    print("paper (Stable Diffusion, noisy): film 43.25 % and 58.52 %, plain 29.75 % and 34.47 %")


def described(table: Table) -> str:
    """What a table's numbers come from, without the seeds."""
    fits = f"fitted to {table['trajectories']} in {table['updates']} updates"
    return f"n = {table['n']} held-out trajectories a seed ({fits}; mean reward {number(table['reward_mean'])})"


def number(found: Table, step: int | None = None, *, form: str = ".3f") -> str:
    """Mean ± standard deviation, the latter where there are several seeds; `step` is the place in lists of them."""
    numbers = [value for value in (found["mean"], found["sd"]) if value is not None]
    return " ± ".join(f"{value if step is None else value[step]:{form}}" for value in numbers)


if __name__ == "__main__":
    main()
