"""Time of one epoch of `paper-object` at Stable Diffusion 1.5 size, random weights: `python benchmarks/epoch.py`.

Loops with the same maths, one after the other in one process: a reference as DDPO implementations write it (sampling
in fours, one backward pass per timestep on two samples, decoding in fours, eager), ours, ours in the low-memory mode,
and ours compiled; then, with less maths, the options of the preset `fast`, compiled. All are the library's own
functions (benchmarks/loops.py); ours is timed once more as a whole, by `train.iterate`. The reference is timed on the
first `--reference-steps` of the steps, and what grows with their number is scaled up.

TFLOP/s are counted, not estimated: forward passes on the meta device; a policy update counts 2 forward passes (nothing
but LoRA factors has a weight gradient), a critic update 3. The ceiling is a large matrix product in the same dtype in
the same run. A piece that fails is named and left out; `--out` is written after every piece.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import platform
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from loops import FINAL, FIT, PARTS, POLICY, REWARD, SAMPLING, STATES, VALUES, Clock, Loop
from paper_loop import build, fast_settings, settings, shortened
from sd15 import SD15, clip_tflop, forward_tflop, random_clip_b32, random_sd15
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cgru.backbones.base import exact_float32, parse_dtype, pick_device
from cgru.backbones.sd import StableDiffusion
from cgru.backbones.steady import OneShape, compiled_backbone, steady_backbone
from cgru.config import RunConfig
from cgru.critic.views import SHRINKS
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan
from cgru.rl.collect import collect
from cgru.rl.problem import Learner, Problem, Sizes
from cgru.rl.train import iterate
from cgru.rl.update import Update, policy_step

LOOPS = REFERENCE, EAGER, LOW, COMPILED, FAST = "reference", "ours", "low memory", "ours compiled", "fast compiled"
PIECES = {
    "sampling": (SAMPLING,),
    "decoding": (FINAL, STATES),
    "reward": (REWARD,),
    "critic": (VALUES, FIT),
    "policy update": (POLICY,),
}
AGREEMENT_PAIRS = 32
GROWING = (SAMPLING, STATES, VALUES, POLICY)
"""Parts whose work is in proportion to the number of steps."""


@dataclass
class Report:
    """What was found so far; written after every piece, so that a run that is cut off leaves what it had."""

    path: Path | None
    table: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    def attempt(self, name: str, work: Callable[[], dict[str, Any]]) -> bool:
        """Keep what `work` found under its name, or say why there is nothing; whether it went well."""
        self.say(f"{name} ...")
        try:
            self.table[name] = work()
        except Exception as error:  # a benchmark of many pieces: the others are worth having
            traceback.print_exc()
            self.table.setdefault("failures", {})[name] = f"{type(error).__name__}: {error}"[:500]
        self.save()
        return name in self.table

    def say(self, words: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.perf_counter() - self.begun:6.1f} s] {words}", flush=True)

    def save(self) -> None:
        """Write the JSON file, if one is wanted."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.table, indent=1) + "\n")


# ---- one loop


def timed(loop: Loop, *, of_steps: int, whole: bool) -> dict[str, Any]:
    """Seconds and peak memory of each part after a short warm-up; parts that grow are scaled to `of_steps`."""
    steps = loop.problem.config.sampling.steps
    shortened(loop, min(2, steps)).epoch(0, Clock(loop.problem.backbone.device))
    graphs, clock = _graphs(), Clock(loop.problem.backbone.device)
    updates = loop.epoch(1, clock)
    found = {
        "steps_timed": steps,
        "steps": of_steps,
        "sizes": asdict(loop.problem.sizes),
        "seconds": {part: clock.spent[part].seconds * (of_steps / steps if part in GROWING else 1.0) for part in PARTS},
        "peak_gib": {part: clock.spent[part].peak / 2**30 for part in PARTS},
        "graphs_compiled_while_timed": _graphs() - graphs,
        **first_ratio(updates[0]),
    }
    if whole:
        loop.learner.iteration = 1  # the first one checks parity as well
        begun = Clock(loop.problem.backbone.device)
        with begun.part("iterate"):
            iterate(loop.problem, loop.learner, None)
        found["iterate_seconds"] = begun.spent["iterate"].seconds
    return found


def first_ratio(update: Update) -> dict[str, float]:
    """|ratio - 1| in the first update, where the policy is still the one that sampled."""
    off = (update.log_ratio.double().exp() - 1).abs()
    return {"first_ratio_off_max": float(off.max()), "first_ratio_off_mean": float(off.mean())}


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def reference(options: argparse.Namespace) -> dict[str, Any]:
    """The loop as DDPO implementations write it. Critic and reward batches are ours: DDPO has none to go by."""
    loop = build(options, sizes=Sizes(rollout=4, update=2, decode=4, score=256))
    return timed(shortened(loop, min(options.reference_steps, options.steps)), of_steps=options.steps, whole=False)


def eager(options: argparse.Namespace) -> dict[str, Any]:
    """Ours as it comes."""
    return timed(steadied(build(options)), of_steps=options.steps, whole=options.whole)


def low(options: argparse.Namespace) -> dict[str, Any]:
    """Ours with `memory=low`, not compiled."""
    return timed(steadied(build(options, "memory=low")), of_steps=options.steps, whole=False)


def steadied(loop: Loop) -> Loop:
    """In half precision with predictions of one shape, as a run has them."""
    problem, sizes = loop.problem, loop.problem.sizes
    if problem.backbone.dtype == torch.float32:
        return loop
    steady = steady_backbone(problem.backbone, batch=sizes.update, decode_batch=sizes.decode)
    return replace(loop, problem=replace(problem, backbone=steady))


def compiled(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Ours with `compile=true`, or with the whole denoiser compiled."""
    loop = build(options)
    problem, begun = loop.problem, time.perf_counter()
    fast = compiled_backbone(
        problem.backbone,
        batch=problem.sizes.update,
        decode_batch=problem.sizes.decode,
        guidance=problem.config.sampling.guidance,
        shrink=SHRINKS[fast_settings(problem.config).critic.decode] if options.fast else 1,
        regional=options.compile == "blocks",
        backend=options.backend,
    )
    facts = {"what": options.compile, "compile_seconds": time.perf_counter() - begun, "graphs": _graphs()}
    report.say(f"compiled ({options.compile}) in {facts['compile_seconds']:.0f} s, {facts['graphs']} graphs")
    report.table["compilation"] = facts
    report.save()
    if options.only_compile:
        return {}
    if not (isinstance(fast, OneShape) and fast.one_graph):
        raise RuntimeError("nothing was compiled; the warning above says why")
    fast = replace(fast, one_graph=not options.inference_graph)
    loop = replace(loop, problem=replace(problem, backbone=fast))
    if options.fast:
        report.attempt(FAST, lambda: timed(faster(loop), of_steps=options.steps, whole=options.whole))
    return timed(loop, of_steps=options.steps, whole=options.whole) | facts


def faster(loop: Loop) -> Loop:
    """The loop with the options of the preset `fast`."""
    return replace(loop, problem=replace(loop.problem, config=fast_settings(loop.problem.config)))


# ---- is it the same maths, and does the host wait


def agreement(options: argparse.Namespace) -> dict[str, Any]:
    """Relative error between policy gradients on the same pairs: ours, the reference's micro-batches, and float32."""
    loop, usual, found = steadied(build(options)), build(options), {}
    for guidance in (loop.problem.config.sampling.guidance, 1.0):
        free = ("policy.trajectories=2", "policy.clip=10", "policy.gradient_norm=1e9", f"sampling.guidance={guidance}")
        found[f"guidance {guidance:g}"] = _agreement(*(shortened(each, options.steps, *free) for each in (loop, usual)))
    return found


def _agreement(loop: Loop, plain: Loop) -> dict[str, Any]:
    ours = loop.problem
    batch = collect(ours, 0, forget=2)
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, batch.log_prob.shape, generator=draw).to(batch.x) * 2 - 1
    batch, samples, steps = replace(batch, advantage=signs), *batch.policy_pairs()
    some = torch.randperm(len(samples), generator=draw)[:AGREEMENT_PAIRS]
    pairs, small = Plan(samples[some], steps[some]), replace(plain.problem, sizes=replace(ours.sizes, update=2))
    fast, first = gradient(ours, loop.learner.parameters, batch, pairs)
    usual, _ = gradient(small, plain.learner.parameters, batch, pairs)
    exact, _ = gradient(*in_float32(small), batch, pairs)
    return {
        "pairs": len(pairs),
        "ours_to_reference": _relative(fast, usual),
        "ours_to_fp32": _relative(fast, exact),
        "reference_to_fp32": _relative(usual, exact),
        "gradient_norm_fp32": float(exact.norm()),
        **first_ratio(first),
    }


def gradient(
    problem: Problem, parameters: dict[str, nn.Parameter], batch: Trajectory, plan: Plan
) -> tuple[Tensor, Update]:
    """The policy gradient of a plan, which moves nothing."""
    learner = Learner(parameters, torch.optim.SGD(parameters.values(), lr=0.0))
    update = policy_step(problem, learner, batch, plan, None, problem.generator("unused"))
    return torch.cat([p.grad.flatten().double() for p in parameters.values() if p.grad is not None]), update


def in_float32(problem: Problem) -> tuple[Problem, dict[str, nn.Parameter]]:
    """The same problem and LoRA with a denoiser in float32."""
    model = problem.backbone
    assert isinstance(model, StableDiffusion), "the gradients are compared before anything is compiled"
    exact = replace(model, denoiser=copy.deepcopy(model.denoiser).float(), dtype=torch.float32)
    parameters = {name: p for name, p in exact.denoiser.named_parameters() if p.requires_grad}
    return replace(problem, backbone=exact), parameters


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def waits(options: argparse.Namespace) -> dict[str, Any]:
    """How often the host waits for the device: numbers that do not grow are not in the loop."""
    if pick_device(options.device).type != "cuda":
        return {}
    loop, found = steadied(build(options)), {}
    for steps in (2, 4):
        short = shortened(loop, steps)
        problem, n = short.problem, short.problem.config.policy.trajectories
        batch = collect(problem, 0, forget=n)
        batch = replace(batch, advantage=torch.ones_like(batch.log_prob))
        plan = short.plans(batch, 0)[0]
        found[f"sampling, {steps} steps"] = _syncs(lambda p=problem, n=n: collect(p, 0, forget=n))  # type: ignore[misc]
        found[f"update, {len(plan)} pairs"] = _syncs(lambda s=short, b=batch, p=plan: s.step(b, p))  # type: ignore[misc]
    return found


def _syncs(work: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


# ---- arithmetic and its ceiling


def counted(options: argparse.Namespace) -> dict[str, Any]:
    """TFLOP of one sample in each network, and of each piece of the epoch, exact and `fast`."""
    model = random_sd15(pick_device(options.device), parse_dtype(options.dtype), tiny=options.tiny)
    one = {**forward_tflop(model), "clip": clip_tflop(random_clip_b32(0, tiny=options.tiny))}
    config = settings(options)
    return {"of_one": one, "pieces": _pieces(config, one), "pieces_fast": _pieces(fast_settings(config), one)}


def _pieces(config: RunConfig, one: dict[str, float]) -> dict[str, float]:
    n, steps, share = config.policy.trajectories, config.sampling.steps, config.policy.step_fraction
    looked_at = n * steps * (1.0 if config.policy.step_choice == "each" else share)
    sampled = n * steps * (2 if config.sampling.guidance > 1 else 1) * one["denoiser"]
    fitted = config.critic.online_updates * min(config.critic.batch, looked_at)
    return {
        "sampling": sampled,
        "decoding": (n + looked_at / SHRINKS[config.critic.decode] ** 2) * one["decoder"],
        "reward": n * one["clip"],
        "critic": (looked_at + 3 * fitted) * one["clip"],
        "policy update": 2 * sampled * share,
    }


def ceiling(options: argparse.Namespace) -> dict[str, Any]:
    """TFLOP/s of a large matrix product of random numbers, the best of three lots of ten."""
    device, dtype = pick_device(options.device), parse_dtype(options.dtype)
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    clock, lots = Clock(device), ("warm-up", "1", "2", "3")
    for lot in lots:
        with clock.part(lot):
            for _ in range(10):
                a @ b
    best = min(clock.spent[lot].seconds for lot in lots[1:])
    return {"side": side, "dtype": options.dtype, "tflops": 10 * 2 * side**3 / best / 1e12}


# ---- the table


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each loop and piece, and one for each loop's epoch."""
    found = []
    for name in LOOPS:
        if table.get(name):
            found += [_row(table, name, piece, PIECES[piece]) for piece in PIECES]
            found.append(_row(table, name, "epoch", PARTS))
    return found


def _row(table: dict[str, Any], name: str, piece: str, parts: tuple[str, ...]) -> dict[str, Any]:
    loop, base = table[name], table.get(REFERENCE)
    seconds = sum(loop["seconds"][part] for part in parts)
    counts = table.get("flops", {}).get("pieces_fast" if name == FAST else "pieces", {})
    most = table.get("ceiling", {}).get("tflops")
    tflop = sum(counts.values()) if piece == "epoch" else counts.get(piece)
    speed = tflop / seconds if tflop else None
    return {
        "loop": name,
        "piece": piece,
        "seconds": seconds,
        "tflop": tflop,
        "tflops": speed,
        "share": speed / most if speed and most else None,
        "ratio": sum(base["seconds"][part] for part in parts) / seconds if base else None,
        "peak_gib": max(loop["peak_gib"][part] for part in parts),
    }


def show(table: dict[str, Any]) -> None:
    """The table for people."""
    facts, most = table["facts"], table.get("ceiling", {}).get("tflops")
    print(f"\n{facts['model']}, {facts['dtype']}, {facts['trajectories']} trajectories of {facts['steps']} steps")
    ceiling_words = f"{most:.1f} TFLOP/s in a matrix product" if most else "no ceiling measured"
    print(f"{facts['machine']}, torch {facts['torch']}; {ceiling_words}")
    print(f"{'loop':<15}{'piece':<15}{'s':>9}{'TFLOP/s':>9}{'share':>8}{'ratio':>8}{'peak GiB':>10}")
    for row in table["rows"]:
        share = f"{100 * row['share']:.1f} %" if row["share"] else "-"
        speed, ratio = (f"{row[key]:.1f}" if row[key] else "-" for key in ("tflops", "ratio"))
        words = f"{row['seconds']:>9.2f}{speed:>9}{share:>8}{ratio:>8}{row['peak_gib']:>10.1f}"
        print(f"{row['loop']:<15}{row['piece']:<15}{words}{_remark(table[row['loop']], row['piece'])}")


def _remark(loop: dict[str, Any], piece: str) -> str:
    if piece != "epoch":
        return ""
    timed = f"  timed {loop['steps_timed']} of {loop['steps']} steps"
    whole = f"  train.iterate: {loop['iterate_seconds']:.2f} s" if "iterate_seconds" in loop else ""
    ratio = f"  first |ratio - 1| up to {loop['first_ratio_off_max']:.1e}"
    return (timed if loop["steps_timed"] != loop["steps"] else "") + whole + ratio


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What was run, on what."""
    device = pick_device(options.device)
    return {
        "date": date.today().isoformat(),
        "model": f"{SD15}{' (tiny)' if options.tiny else ''}",
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "options": {name: str(value) for name, value in vars(options).items()},
        **{name: getattr(options, name) for name in ("dtype", "steps", "trajectories")},
    }


def pieces(options: argparse.Namespace, report: Report) -> dict[str, Callable[[], dict[str, Any]]]:
    """What the options ask for, in order: what is cheap and sure comes first."""
    chosen = {
        "ceiling": (True, lambda: ceiling(options)),
        "flops": (True, lambda: counted(options)),
        EAGER: (options.eager, lambda: eager(options)),
        LOW: (options.low, lambda: low(options)),
        REFERENCE: (options.reference, lambda: reference(options)),
        "agreement": (options.agreement, lambda: agreement(options)),
        "waits": (options.agreement, lambda: waits(options)),
        COMPILED: (options.compile != "none", lambda: compiled(options, report)),
    }
    return {name: work for name, (is_wanted, work) in chosen.items() if is_wanted}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = argparse.BooleanOptionalAction
    found.add_argument("--tiny", action="store_true", help="few channels, to try the program on a CPU")
    found.add_argument("--device", default="auto")
    found.add_argument("--dtype", default="bf16", choices=("bf16", "fp32", "fp16"))
    found.add_argument("--steps", type=int, default=50, help="denoising steps")
    found.add_argument("--trajectories", type=int, default=16)
    found.add_argument("--update", type=int, default=0, help="our pairs per backward pass; 0: as a run chooses")
    found.add_argument("--decode", type=int, default=0, help="our latents per decode; 0: as a run chooses")
    found.add_argument("--reference", action=switch, default=True, help="time the reference loop")
    found.add_argument("--reference-steps", type=int, default=8, help="steps of it that are timed")
    found.add_argument("--eager", action=switch, default=True, help="time ours without compiling")
    found.add_argument("--low", action=switch, default=True, help="time the low-memory mode, not compiled")
    found.add_argument("--fast", action=switch, default=True, help="time the preset fast, if anything is compiled")
    found.add_argument("--agreement", action=switch, default=True, help="compare gradients, count waits for the device")
    found.add_argument("--whole", action=switch, default=True, help="also time train.iterate")
    found.add_argument("--compile", default="none", choices=("none", "blocks", "whole"), help="of the denoiser")
    found.add_argument("--only-compile", action="store_true", help="compile, time nothing else: for the cache")
    found.add_argument("--inference-graph", action="store_true", help="rollouts through a graph of their own")
    found.add_argument("--backend", default="inductor", help="of torch.compile")
    found.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    found.add_argument("--out", type=Path, help="write JSON here")
    return found


def main() -> None:
    """Measure piece by piece, print the table."""
    options = parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("cgru").setLevel(logging.INFO)
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    report = Report(options.out)
    report.table["facts"] = facts(options)
    with exact_float32():  # as every run
        for name, work in pieces(options, report).items():
            if report.attempt(name, work) and name in LOOPS:
                report.table["rows"] = rows(report.table)
                show(report.table)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    report.table["rows"] = rows(report.table)
    report.save()
    show(report.table)
    for name in ("compilation", "agreement", "waits", "failures"):
        if report.table.get(name):
            print(f"{name}: {json.dumps(report.table[name])}")


if __name__ == "__main__":
    main()
