"""The signal of policy-gradient estimators: `python benchmarks/gradient_signal.py --out FILE [KEY=VALUE ...]`.

All estimators of a family see the same trajectories of one policy, at ratio 1 and with the step weights of training, so
they differ in the weight of each (trajectory, step) pair alone. For each:

- tr Cov of the gradient of one trajectory, and the |mean|² of that gradient (unbiased: products of different shards);
- needed n = tr Cov / |mean|²: the trajectories for which the mean's error is as long as the mean; "unresolved" where
  the interval of |mean|² reaches 0;
- the paired ratio of tr Cov to that of the leave-one-out mean (DDPO's batch mean, unbiased and without its division by
  the standard deviation), for estimators with the same mean;
- the cosine of the means of two halves; the squared distance of the mean to that of the leave-one-out mean, as a share
  of |mean|² (0 for unbiased estimators, up to noise);
- denoiser calls and seconds of a trajectory.

Trajectories are summed in shards, and intervals (95 %) come from a bootstrap over shards. Critics are fitted beforehand
(Alg. 1) to other trajectories of the same policy.

    python benchmarks/gradient_signal.py --out signal.json [--concept Dogs] [--trajectories 4096] [--shard 64]
        [--fit 1024] [--run RUN] [--device auto] [--no-bandit] [KEY=VALUE ...]

`--run` takes the policy of a run folder, e.g. one stopped half-way, instead of the base with a fresh LoRA.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from cgru.atomic_io import atomic_write
from cgru.backbones.base import exact_float32
from cgru.config import RLConfig, as_rl, override
from cgru.critic.fit import values
from cgru.lora.train import attach
from cgru.mdp.kernel import DDIMKernel, Gaussian
from cgru.mdp.trajectory import Conditioning, Trajectory
from cgru.presets import resolve_config
from cgru.rewards.base import checked
from cgru.rl.advantage import PromptStatistics, gae_advantage
from cgru.rl.build import Setting, build_setting
from cgru.rl.collect import choose, sampled, scored, viewed
from cgru.rl.critic_stage import build_untrained_critic, fit_critic
from cgru.rl.state import PROMPT_BUFFER, PROMPT_MINIMUM, Problem

Table = dict[str, Any]
CRITICS = {"V noisy": ("film", "noisy"), "V clean": ("film", "clean"), "V latent": ("latent", "noisy")}
"""Name -> kind and view; `V features` is a ridge regression and no network of the package."""
REFERENCE = {"trajectory": "leave-one-out", "one step": "one step, leave-one-out"}
"""Family -> what its other estimators are compared with."""
RIDGE = 0.1
"""Share of a standardised feature's variance that is added to it."""
RESAMPLES = 2000
SHARDS = 8
"""The fewest for an interval."""


@dataclass(eq=False)
class Sums:
    """Mean gradient of each shard, by estimator."""

    shards: dict[str, list[Tensor]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of one trajectory, beside sampling, reward and the backward pass."""
    calls: dict[str, float] = field(default_factory=dict)
    """Denoiser calls of one trajectory, all its draws counted."""
    biased: set[str] = field(default_factory=set)
    """Whose mean is another one."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Append a shard."""
        self.shards.setdefault(name, []).append(gradient)


def main() -> None:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--concept", default="Dogs")
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--shard", type=int, default=64, help="trajectories summed up")
    parser.add_argument("--fit", type=int, default=1024, help="trajectories that critics are fitted to")
    parser.add_argument("--run", type=Path, help="a run folder whose policy is taken; default: the base")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-bandit", action="store_true", help="leave out the family with one noisy step")
    parser.add_argument("set", nargs="*", metavar="KEY=VALUE", help="other settings than the preset on-policy's")
    arguments = parser.parse_args()
    if arguments.trajectories < SHARDS * arguments.shard:
        parser.error(f"--trajectories {arguments.trajectories}; allowed: {SHARDS} shards of {arguments.shard} and more")
    with exact_float32():
        for table in measured(arguments):
            atomic_write(arguments.out, json.dumps(table, indent=1) + "\n")
    show(table)


def measured(arguments: argparse.Namespace) -> Iterator[Table]:
    """Everything that the file holds, every few shards, so that a run that is cut short leaves figures."""
    config = configured(arguments)
    setting = build_setting(config)
    problem = setting.problem
    policy = config.policy
    parameters = attach(
        problem.backbone.denoiser,
        rank=policy.rank,
        alpha=policy.alpha,
        targets=policy.targets,
        seed=problem.seed("lora"),
    )
    if arguments.run is not None:
        restore(parameters, arguments.run)
    sums = Sums()
    critics = fitted(setting, arguments.fit)
    about = {
        "what": "signal of policy-gradient estimators (benchmarks/gradient_signal.py)",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "concept": arguments.concept,
        "policy": "base" if arguments.run is None else arguments.run.name,
        "shard": arguments.shard,
        "fitted_to": arguments.fit,
        "seed": config.seed,
        "steps": config.sampling.steps,
        "noisy_steps": int(problem.kernel.stochastic.sum()),
        "device": torch.cuda.get_device_name() if problem.backbone.device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
    }
    sizes = arguments.trajectories, arguments.shard, sums
    for drawn in whole_trajectories(problem, critics, list(parameters.values()), *sizes):
        yield {**about, **drawn, "estimators": statistics(sums, arguments.shard)}
    if not arguments.no_bandit:
        for _ in one_step_trajectories(problem, list(parameters.values()), *sizes):
            yield {**about, **drawn, "estimators": statistics(sums, arguments.shard)}


def configured(arguments: argparse.Namespace) -> RLConfig:
    """The preset on-policy, with a critic that makes rollouts keep x̂0."""
    ours = [
        f"device={arguments.device}",
        "critic.kind=film",
        "critic.view=clean",
        "watch.stop=false",
        "watch.every=0",
        f"prompts.critic={max(40, arguments.fit // 8)}",
    ]
    config = as_rl(resolve_config(arguments.concept, method="cgru", overrides=arguments.set))
    return override(config, ours)


def restore(parameters: Mapping[str, torch.nn.Parameter], run: Path) -> None:
    """The LoRA of a run's newest checkpoint, whose tensors have the parameters' names."""
    states = sorted(run.glob("stages/3-policy/checkpoint-*/policy.safetensors"))
    if not states:
        raise SystemExit(f"no checkpoint of a policy in {str(run)!r}; allowed: a run that was interrupted or is done")
    known = load_file(states[-1])
    for name, parameter in parameters.items():
        parameter.data.copy_(known[f"last.{name}"].to(parameter.data))


def fitted(setting: Setting, count: int) -> dict[str, Any]:
    """Each critic fitted to the same trajectories, and the regression on the denoiser's features."""
    problem = setting.problem
    prompts = choose(problem, "critic", problem.prompts.critic, count, "fit")
    trajectory = scored(problem, sampled(problem, prompts, "fit"))
    assert trajectory.reward is not None
    found: dict[str, Any] = {}
    for name, (kind, view) in CRITICS.items():
        own = seeing(setting, kind, view)
        critic = build_untrained_critic(own, float(trajectory.reward.mean())).to(problem.backbone.device)
        begun = time.perf_counter()
        fit_critic(own, critic, trajectory)
        found[name] = critic
        print(f"{name}: fitted to {count} trajectories in {time.perf_counter() - begun:.0f} s", flush=True)
    found["V features"] = ridge(features(problem, trajectory), trajectory.reward)
    return found


def seeing(setting: Setting, kind: str, view: str) -> Setting:
    """The same setting with another critic in its config."""
    config = override(setting.problem.config, [f"critic.kind={kind}", f"critic.view={view}"])
    return replace(setting, problem=replace(setting.problem, config=config))


@contextmanager
def listened(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    """What a module returns, averaged over its places, as often as it is called."""
    heard: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, __, output: heard.append(output.flatten(2).mean(2).float()))
    try:
        yield heard
    finally:
        handle.remove()


@torch.no_grad()
def features(problem: Problem, trajectory: Trajectory) -> Tensor:
    """The middle of the denoiser at every state, (n, t, f): what a rollout could keep at no cost."""
    backbone, rows = problem.backbone, []
    middle: Any = backbone.denoiser
    for index in range(trajectory.horizon):
        parts = []
        for part in torch.arange(len(trajectory)).split(problem.sizes.rollout):
            at = trajectory.steps(part, torch.full_like(part, index))
            with listened(middle.mid_block) as heard:
                backbone.predict(at.x, at.time, at.cond, guidance=trajectory.guidance)
            # With guidance the batch holds both halves; the last rows are the prompts'.
            parts.append(heard[-1][-len(part) :])
        rows.append(torch.cat(parts))
    return torch.stack(rows, 1)


def ridge(seen: Tensor, reward: Tensor) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """For each step: mean and scale of the features, weights and mean of the reward."""
    found = []
    for x in seen.unbind(1):
        mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
        z, y = (x - mean) / scale, reward - reward.mean()
        gram = z.T @ z / len(z) + RIDGE * torch.eye(z.shape[1], device=z.device)
        found.append((mean, scale, torch.linalg.solve(gram, z.T @ y / len(z)), float(reward.mean())))
    return found


def by_ridge(fit: list[tuple[Tensor, Tensor, Tensor, float]], seen: Tensor) -> Tensor:
    """V at every state, (n, t)."""
    return torch.stack(
        [
            ((x - mean) / scale) @ weights + prior
            for x, (mean, scale, weights, prior) in zip(seen.unbind(1), fit, strict=True)
        ],
        1,
    )


def whole_trajectories(
    problem: Problem, critics: Mapping[str, Any], parameters: list[Tensor], count: int, size: int, sums: Sums
) -> Iterator[Table]:
    """The family with noise in every noisy step; every few shards, what was drawn so far."""
    prompts = choose(problem, "forget", problem.prompts.policy, count // size * size, "signal")
    rewards: list[Tensor] = []
    explained: dict[str, list[Tensor]] = {name: [] for name in critics}
    sums.biased |= {"gain", "GAE 0.95", "low frequencies"}
    history, begun = PromptStatistics(PROMPT_BUFFER, PROMPT_MINIMUM), time.perf_counter()
    for shard in range(count // size):
        mine = prompts[shard * size : (shard + 1) * size]
        trajectory = scored(problem, sampled(problem, mine, "signal", shard))
        assert trajectory.reward is not None
        rewards.append(trajectory.reward)
        value = {name: valued(problem, name, critic, trajectory, sums) for name, critic in critics.items()}
        for name, found in value.items():
            explained[name].append(found)
        history.update(trajectory.cond.prompts, trajectory.reward)
        weights = weightings(trajectory, value, history)
        gradients = shard_gradients(problem, trajectory, weights, critics["V latent"], value["V latent"], parameters)
        for name, gradient in gradients.items():
            sums.add(name, gradient)
            sums.calls[name] = trajectory.horizon
        print(f"shard {shard + 1} of {count // size}, {time.perf_counter() - begun:.0f} s", flush=True)
        if (shard + 1) % SHARDS and shard + 1 < count // size:
            continue
        reward = torch.cat(rewards)
        yield {
            "trajectories": len(reward),
            "reward_mean": float(reward.mean()),
            "reward_sd": float(reward.std()),
            "explained_variance": {
                name: [float(1 - (reward - v).var() / reward.var()) for v in torch.cat(found).unbind(1)]
                for name, found in explained.items()
            },
        }


@torch.no_grad()
def valued(problem: Problem, name: str, critic: Any, trajectory: Trajectory, sums: Sums) -> Tensor:  # noqa: ANN401
    """V at every state, and the seconds it takes."""
    begun = time.perf_counter()
    if name == "V features":
        seen = features(problem, trajectory)
        begun = time.perf_counter()  # a rollout computes the features anyway
        found = by_ridge(critic, seen)
    else:
        kind, view = CRITICS[name]
        own = replace(problem, config=override(problem.config, [f"critic.kind={kind}", f"critic.view={view}"]))
        found = values(critic, viewed(own, critic, trajectory), trajectory, batch_size=problem.sizes.score)
    if found.device.type == "cuda":
        torch.cuda.synchronize()
    sums.seconds[name] = (time.perf_counter() - begun) / len(trajectory)
    return found


def weightings(trajectory: Trajectory, value: Mapping[str, Tensor], history: PromptStatistics) -> dict[str, Tensor]:
    """Estimator -> weight of each pair, (n, t); DDPO's statistics of prompts include this shard."""
    assert trajectory.reward is not None
    reward, n = trajectory.reward, len(trajectory)
    clean = replace(trajectory, value=value["V clean"])
    alike = {
        "no baseline": reward,
        "batch mean": reward - reward.mean(),
        "per-prompt mean": reward - history.of(trajectory.cond.prompts, reward)[0].float(),
        "leave-one-out": (reward - reward.mean()) * n / (n - 1),
    }
    return {
        **{name: row[:, None].expand(-1, trajectory.horizon) for name, row in alike.items()},
        **{f"r − {name}": reward[:, None] - found for name, found in value.items()},
        "GAE 0.95": gae_advantage(clean, 0.95),
        "gain": gae_advantage(clean, 0.0),
    }


def shard_gradients(
    problem: Problem,
    trajectory: Trajectory,
    weights: Mapping[str, Tensor],
    latent: Any,  # noqa: ANN401
    value: Tensor,
    parameters: list[Tensor],
) -> dict[str, Tensor]:
    """Mean gradient over a shard of Σ_t w_t · A_t · log pi_t, by estimator."""
    samples, steps = trajectory.policy_pairs()
    found: dict[str, Tensor] = {}
    for part in torch.arange(len(samples)).split(problem.sizes.update):
        i, t = samples[part], steps[part]
        at = trajectory.steps(i, t)
        policy = gaussian(problem, at.x, at.time, at.cond, at.index, trajectory.guidance)
        log_prob = policy.log_prob(at.next_x)
        scale = problem.step_weights[at.index] / len(trajectory)
        losses = {name: (scale * table[i, t].detach() * log_prob).sum() for name, table in weights.items()}
        mean = weights["batch mean"][i, t]
        losses["low frequencies"] = (scale * mean * low_frequencies(policy, at.next_x)).sum()
        # A - ∇V(mu) · (a - mu), and the mean of what was taken off: ∇V(mu) · mu / d, as log pi is a mean over d
        slope = slopes(latent, trajectory, policy.mean.detach(), at.cond, t)
        shift = (slope * (at.next_x - policy.mean.detach())).flatten(1).sum(1)
        rest = at.reward - value[i, t] - shift if at.reward is not None else shift
        back = (slope * policy.mean).flatten(1).mean(1)
        losses["first-order V latent"] = (scale * (rest * log_prob + back)).sum()
        for k, (name, loss) in enumerate(losses.items()):
            rows = torch.autograd.grad(loss, parameters, retain_graph=k < len(losses) - 1)
            gradient = torch.cat([row.float().flatten() for row in rows])
            found[name] = found[name] + gradient if name in found else gradient
    return found


def gaussian(
    problem: Problem, x: Tensor, times: Tensor, cond: Conditioning, index: Tensor, guidance: float
) -> Gaussian:
    """pi(. | x_t, c), differentiable."""
    return problem.kernel.step(problem.backbone.predict(x, times, cond, guidance=guidance), x, index)


def low_frequencies(policy: Gaussian, action: Tensor) -> Tensor:
    """The log-prob of the action's means over 2 × 2 cells, as a mean over latent dimensions."""
    off = (action - policy.mean) / policy.std.view(-1, *[1] * (action.ndim - 1))
    coarse = functional.avg_pool2d(off, 2)
    # the projection onto the coarse grid has 4 equal entries a cell: 1/d · Σ = mean over cells
    return -0.5 * coarse.square().flatten(1).mean(1)


def slopes(critic: Any, trajectory: Trajectory, mean: Tensor, cond: Conditioning, t: Tensor) -> Tensor:  # noqa: ANN401
    """∇V at the mean of the action, at the time that the step leads to."""
    following = (t + 1).clamp(max=trajectory.horizon - 1)
    with torch.enable_grad():
        at = mean.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(at, trajectory.time[following.to(at.device)], cond).sum(), at)
    return slope


def one_step_trajectories(
    problem: Problem, parameters: list[Tensor], count: int, size: int, sums: Sums
) -> Iterator[None]:
    """The family with one noisy step: the rest is deterministic, and several actions are tried from the same x_k."""
    kernel = problem.kernel
    if not isinstance(kernel, DDIMKernel):
        raise SystemExit("one noisy step needs a DDIM kernel; give --no-bandit for another model")
    noisy = kernel.stochastic.nonzero().flatten().tolist()
    size = size // len(noisy) * len(noisy)
    prompts = choose(problem, "forget", problem.prompts.policy, count // size * size, "one-step")
    for shard in range(count // size):
        mine = prompts[shard * size : (shard + 1) * size]
        total: dict[str, Tensor] = {}
        for j, k in enumerate(noisy):
            some = mine[j :: len(noisy)]
            for name, gradient in one_step(problem, kernel, k, some, parameters, (shard, j), sums).items():
                share = gradient * len(some) / size
                total[name] = total[name] + share if name in total else share
        for name, gradient in total.items():
            sums.add(name, gradient)
        print(f"one step: shard {shard + 1} of {count // size}", flush=True)
        if (shard + 1) % SHARDS == 0 or shard + 1 == count // size:
            yield


def one_step(
    problem: Problem,
    kernel: DDIMKernel,
    k: int,
    prompts: list[str],
    parameters: list[Tensor],
    names: tuple[int, int],
    sums: Sums,
) -> dict[str, Tensor]:
    """Gradients from actions z, −z, 0 and z′ at step k of the same trajectories."""
    only = kernel.only(k)
    backbone, cond, guidance = problem.backbone, problem.encode(prompts), problem.config.sampling.guidance
    generator = problem.generator("one-step", *names)
    shape = (len(prompts), *backbone.latent_shape)
    x, z, other = (torch.randn(shape, generator=generator).to(backbone.device) for _ in range(3))

    def run(x: Tensor, start: int, end: int) -> Tensor:
        for index in range(start, end):
            times = kernel.timesteps[index].to(backbone.device).expand(len(x))
            x = only.step(backbone.predict(x, times, cond, guidance=guidance), x, index).mean
        return x

    with torch.no_grad():
        x = run(x, 0, k)
        times = kernel.timesteps[k].to(backbone.device).expand(len(x))
        start = only.step(backbone.predict(x, times, cond, guidance=guidance), x, k)
        actions = {name: start.sample(noise) for name, noise in (("+", z), ("-", -z), ("0", 0 * z), ("'", other))}
        reward = {
            name: checked(problem.reward, backbone.decode(run(action, k + 1, len(kernel))), prompts).to(x.device)
            for name, action in actions.items()
        }
    index = torch.full((len(x),), k, device=x.device)
    policy = only.step(backbone.predict(x, times, cond, guidance=guidance), x, index)
    log_prob = {name: policy.log_prob(actions[name]) for name in ("+", "'")}
    ahead, rest = k + 1, len(kernel) - k - 1
    plus, branch = reward["+"], reward["'"]
    losses = {
        "one step, leave-one-out": ((plus - plus.mean()) * log_prob["+"] * len(x) / max(1, len(x) - 1), 1),
        "one step, noise-free continuation": ((plus - reward["0"]) * log_prob["+"], 2),
        "one step, antithetic pair": (0.5 * (plus - reward["-"]) * log_prob["+"], 2),
        "one step, two branches": (0.5 * (plus - branch) * (log_prob["+"] - log_prob["'"]), 2),
    }
    found: dict[str, Tensor] = {}
    for i, (name, (loss, draws)) in enumerate(losses.items()):
        weighted = (problem.step_weights[k] * loss).mean()
        rows = torch.autograd.grad(weighted, parameters, retain_graph=i < len(losses) - 1)
        found[name] = torch.cat([row.float().flatten() for row in rows])
        steps = len(kernel.stochastic.nonzero())
        sums.calls[name] = sums.calls.get(name, 0.0) + (0 if names[0] else (ahead + draws * rest) / steps)
    return found


def statistics(sums: Sums, each: int) -> Table:
    """Figures of every estimator, with intervals over shards of `each` trajectories, resampled alike for all."""
    found: Table = {}
    for family, reference in REFERENCE.items():
        names = [name for name in sums.shards if name.startswith("one step") == (family == "one step")]
        if not names or len(sums.shards[names[0]]) < SHARDS:
            continue
        rows = {name: torch.stack(sums.shards[name]) for name in names}
        grams = {name: (table @ table.T).double().cpu() for name, table in rows.items()}
        size = len(grams[reference])
        counts = resampled(size)
        base = figures(grams[reference], counts)
        for name in names:
            own = figures(grams[name], counts)
            off = rows[name] - rows[reference]
            distance = figures((off @ off.T).double().cpu(), counts)
            found[name] = {
                "family": family,
                "shards": len(sums.shards[name]),
                "same_mean": name not in sums.biased,
                "trace": spread(own["trace"] * each),
                "squared_mean": spread(own["mean"]),
                "needed_n": needed(own, each),
                "trace_ratio": spread(own["trace"] / base["trace"]),
                "cosine_of_halves": cosine(grams[name]),
                "bias": spread(distance["mean"] / base["mean"][0]) if name != reference else None,
                "denoiser_calls": sums.calls[name],
                "seconds_beside": sums.seconds.get(name.removeprefix("r − "), 0.0),
            }
    return found


def resampled(shards: int) -> Tensor:
    """How often each shard comes in each resample, (1 + RESAMPLES, shards); the first row is the sample itself."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(shards, (RESAMPLES, shards), generator=generator)
    counts = functional.one_hot(drawn, shards).sum(1).double()
    return torch.cat([torch.ones(1, shards, dtype=torch.float64), counts])


def figures(gram: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """tr Cov of a shard's mean and the unbiased |mean|², for every resample.

    |mean|² is the mean product of two different shards; tr Cov the mean square of one, less that.
    """
    own = gram.diagonal()
    products = ((counts @ gram) * counts).sum(1) - (counts.square() * own).sum(1)
    pairs = counts.sum(1).square() - counts.square().sum(1)
    mean = products / pairs
    return {"mean": mean, "trace": (counts * own).sum(1) / counts.sum(1) - mean}


def spread(values: Tensor) -> Table:
    """The sample's figure and its interval."""
    low, high = torch.quantile(values[1:], torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": float(values[0]), "low": low, "high": high}


def needed(own: Mapping[str, Tensor], each: int) -> Table:
    """Trajectories for a mean whose error is as long as itself."""
    mean = spread(own["mean"])
    if not mean["low"] > 0:
        return {"value": None, "low": None, "high": None, "why": "unresolved: |mean|² is not above 0"}
    return spread(each * own["trace"] / own["mean"].clamp(min=1e-300))


def cosine(gram: Tensor) -> float:
    """Of the means of even and odd shards."""
    a, b, ab = gram[::2, ::2].sum(), gram[1::2, 1::2].sum(), gram[::2, 1::2].sum()
    return float(ab / (a * b).sqrt())


def show(table: Table) -> None:
    """A line of each estimator."""
    print(f"{table['concept']}, {table['policy']}, n = {table['trajectories']} in shards of {table['shard']}")
    print(f"{'estimator':38}{'needed n':>24}{'tr Cov, to leave-one-out':>26}{'halves':>8}{'bias':>8}{'calls':>7}")
    for name, found in table["estimators"].items():
        need, ratio = found["needed_n"], found["trace_ratio"]
        n = "unresolved" if need["value"] is None else f"{need['value']:.0f} [{need['low']:.0f}, {need['high']:.0f}]"
        told = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if found["same_mean"] else "other mean"
        bias = "" if found["bias"] is None else f"{found['bias']['value']:.2f}"
        print(f"{name:38}{n:>24}{told:>26}{found['cosine_of_halves']:8.2f}{bias:>8}{found['denoiser_calls']:7.1f}")


if __name__ == "__main__":
    main()
