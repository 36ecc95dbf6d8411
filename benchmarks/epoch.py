"""Time of one epoch of `paper-object` at Stable Diffusion 1.5 size, random weights: `python benchmarks/epoch.py`.

Loops with the same maths, one after the other in one process: a reference as DDPO implementations write it (sampling in
fours, one backward pass per timestep on two samples, decoding in fours, eager, the LoRA as peft makes it), ours, ours
in the low-memory mode, where torch may have no more memory than on a card of 12 GB, and both compiled; and, with less
maths, the options of the preset `fast`, compiled. All are the library's own functions (benchmarks/loops.py); ours is
timed once more as a whole, by `train.iterate`. The reference is timed on the first `--reference-steps` of the steps,
and what grows with their number is scaled up.

TFLOP/s are counted, not estimated: forward passes of diffusers' networks on the meta device, also where ours reach the
same with less (the compiled decoder: `subpixel`); a policy update counts 2 forward passes (nothing but LoRA factors has
a weight gradient), a critic update 3. The ceiling is a large matrix product in the same dtype in the same run. A piece
that fails is named and left out; `--out` is written after every piece.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from arithmetic import ceiling, counted
from loops import FINAL, FIT, PARTS, POLICY, REWARD, SAMPLING, STATES, VALUES, Clock, Loop
from paper_loop import build, fast_settings, peft_lora, settings, shortened, steadied
from same_maths import agreement, compiled_agreement, first_ratio, waits
from sd15 import SD15
from torch._dynamo.utils import counters

from cgru.backbones.base import exact_float32, pick_device
from cgru.critic.views import SHRINKS
from cgru.fast.fixed_batch import OneShape, compiled_backbone, no_recompiles
from cgru.rl.batch_size import LOW_TOTAL
from cgru.rl.oom_retry import Memory
from cgru.rl.state import Sizes
from cgru.rl.train import iterate
from cgru.runs import commit_of

REFERENCE, EAGER, LOW = "reference", "ours", "low memory"
COMPILED, FAST, LOW_COMPILED = "ours compiled", "fast compiled", "low memory compiled"
LOOPS = REFERENCE, EAGER, LOW, COMPILED, FAST, LOW_COMPILED
PIECES = {
    "sampling": (SAMPLING,),
    "decoding": (FINAL, STATES),
    "reward": (REWARD,),
    "critic": (VALUES, FIT),
    "policy update": (POLICY,),
}
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

    def tell(self, name: str, facts: dict[str, Any]) -> None:
        """Keep what compiling took, and say it."""
        self.say(f"{name} in {facts['compile_seconds']:.0f} s, {facts['graphs']} graphs")
        self.table[name] = dict(facts)
        self.save()

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
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
        "graphs_compiled_while_timed": _graphs() - graphs,
        **first_ratio(updates[0]),
    }
    if whole:
        loop.learner.iteration = 1  # the first one checks parity as well
        begun = Clock(loop.problem.backbone.device)
        with begun.part("iterate"):
            iterate(Memory(loop.problem), loop.learner, None)
        found["iterate_seconds"] = begun.spent["iterate"].seconds
    return found


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def reference(options: argparse.Namespace) -> dict[str, Any]:
    """The loop as DDPO implementations write it. Critic and reward batches are ours: DDPO has none to go by."""
    loop = build(options, sizes=Sizes(rollout=4, update=2, decode=4, score=256), lora=peft_lora)
    return timed(shortened(loop, min(options.reference_steps, options.steps)), of_steps=options.steps, whole=False)


def eager(options: argparse.Namespace) -> dict[str, Any]:
    """Ours as it comes."""
    return timed(steadied(build(options)), of_steps=options.steps, whole=options.whole)


def low(options: argparse.Namespace) -> dict[str, Any]:
    """Ours with `memory=low`, not compiled."""
    with capped(options):
        return timed(steadied(build(options, "memory=low")), of_steps=options.steps, whole=False)


def low_compiled(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Ours with `memory=low`, compiled."""
    with capped(options):
        loop, facts = compiled_loop(options, "compile=true", "memory=low")
        report.tell("compilation memory=low", facts)
        return timed(loop, of_steps=options.steps, whole=options.whole) | facts


@contextmanager
def capped(options: argparse.Namespace) -> Iterator[None]:
    """No more memory than torch would have on a card of 12 GB; more is an error."""
    device = pick_device(options.device)
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(LOW_TOTAL / torch.cuda.get_device_properties(device).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def compiled(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Ours with `compile=true`, or with the whole denoiser compiled; `fast` first, with the graphs that it has."""
    shrink = SHRINKS[fast_settings(settings(options)).critic.decode] if options.fast else 1
    loop, facts = compiled_loop(options, "compile=true", shrink=shrink)
    if options.fast:
        facts["fast_compile_seconds"] = facts["compile_seconds"]
        if not options.only_compile:
            report.attempt(FAST, lambda: compiled_fast(options, loop))
        facts["decoder_seconds"] = first_decode(loop)
        facts["compile_seconds"] = facts["denoiser_seconds"] + facts["decoder_seconds"]
    report.tell("compilation", facts)
    if options.only_compile:
        return {}
    if options.agreement:
        with no_recompiles():
            report.attempt("agreement compiled", lambda: compiled_agreement(options, loop))
        gc.collect()
    return timed(loop, of_steps=options.steps, whole=options.whole) | facts


def compiled_loop(options: argparse.Namespace, *changes: str, shrink: int = 1) -> tuple[Loop, dict[str, Any]]:
    """A loop as runs compile it, and what that took."""
    loop, before = build(options, *changes), _graphs()
    problem = loop.problem
    backbone = compiled_backbone(
        problem.backbone,
        batch=problem.sizes.update,
        decode_batch=problem.sizes.decode,
        guidance=problem.config.sampling.guidance,
        shrink=shrink,
        regional=options.compile == "blocks",
        backend=options.backend,
    )
    if not (isinstance(backbone, OneShape) and backbone.one_graph):
        raise RuntimeError("nothing was compiled; the warning above says why")
    spent = backbone.compile_seconds
    facts = {"what": options.compile, "compile_seconds": sum(spent.values()), "graphs": _graphs() - before}
    backbone = replace(backbone, one_graph=not options.inference_graph)
    facts |= {f"{network}_seconds": seconds for network, seconds in spent.items()}
    return replace(loop, problem=replace(problem, backbone=backbone)), facts


def first_decode(loop: Loop) -> float:
    """Seconds until whole pictures are decoded by a graph of their own, which a run of `fast` does without."""
    model, begun = loop.problem.backbone, time.perf_counter()
    with torch.no_grad():
        model.decode(torch.zeros((1, *model.latent_shape), device=model.device))
    return time.perf_counter() - begun


def compiled_fast(options: argparse.Namespace, loop: Loop) -> dict[str, Any]:
    """The preset `fast`, where whole pictures are decoded as they are."""
    with no_recompiles():
        return timed(faster(loop), of_steps=options.steps, whole=options.whole)


def faster(loop: Loop) -> Loop:
    """The loop with the options of the preset `fast`."""
    return replace(loop, problem=replace(loop.problem, config=fast_settings(loop.problem.config)))


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
    print(f"{'loop':<21}{'piece':<15}{'s':>9}{'TFLOP/s':>9}{'share':>8}{'ratio':>8}{'peak GiB':>10}")
    for row in table["rows"]:
        share = f"{100 * row['share']:.1f} %" if row["share"] else "-"
        speed, ratio = (f"{row[key]:.1f}" if row[key] else "-" for key in ("tflops", "ratio"))
        words = f"{row['seconds']:>9.2f}{speed:>9}{share:>8}{ratio:>8}{row['peak_gib']:>10.1f}"
        print(f"{row['loop']:<21}{row['piece']:<15}{words}{_remark(table[row['loop']], row['piece'])}")


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
        "commit": commit_of(Path(__file__)),
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
        LOW_COMPILED: (options.low_compiled, lambda: low_compiled(options, report)),
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
    found.add_argument("--low-compiled", action="store_true", help="time the low-memory mode compiled, too")
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
    if options.low_compiled and options.compile == "none":
        parser().error("--low-compiled needs --compile blocks or whole")
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
    for name in ("compilation", "compilation memory=low", "agreement", "agreement compiled", "waits", "failures"):
        if report.table.get(name):
            print(f"{name}: {json.dumps(report.table[name])}")


if __name__ == "__main__":
    main()
