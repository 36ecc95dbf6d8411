"""Throughput of `cgru evaluate` against diffusers' pipeline called prompt by prompt: `python benchmarks/evaluation.py`.

Ours is the whole of `predict`, judges, JSON rows and PNG files included; theirs is the pipeline's call alone, to a PIL
picture, in default settings. Both have the same weights (each its own copy), prompts, seeds, DDIM steps, guidance, eta
and dtype, and take turns block by block in one process, so that noise of the machine hits both; the ratio is taken
within each block. In float32 the first pictures of both are compared and must agree within 1e-4.

`--model sd15-random` is Stable Diffusion 1.5's architecture with random weights, for a GPU. What can be had there,
counted before it was built: UNet 0.803 TFLOP a sample × 2 (guidance) × 50 steps + 2.5 for the decoder = 82.8 TFLOP a
picture. An H200 multiplies bf16 matrices at 784 TFLOP/s: 9.5 pictures/s at the very most. Measured earlier: 288 TFLOP/s
eager at UNet batch 64 and 307 compiled at 32, so 3.4 to 3.7 pictures/s. Five times diffusers is therefore in reach if
its step takes 27 ms or more (0.7 pictures/s): at batch 2 launches bind it, and batch 8 took 37 to 39 ms.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from sd15 import SD15, forward_tflop, random_sd15

from cgru.backbones.base import parse_dtype, pick_device
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.evaluation.base import Job
from cgru.evaluation.benchmarks.canvas import load_benchmark
from cgru.evaluation.drawing import default_batch, draw
from cgru.evaluation.judges.classifiers import load_judge
from cgru.evaluation.runner import JudgePanel, predict
from cgru.fast.compile import compile_denoiser
from cgru.tasks import Sampling

EMBEDDED = "emoji-canvas"
OFFICIAL = Sampling(steps=50, guidance=7.5, eta=0.0)
THEIRS, EAGER, COMPILED = "diffusers", "ours", "ours compiled"
AGREEMENT = 1e-4

Contestant = Callable[[], int]
"""Draws its share of a block and returns how many pictures that was."""


@dataclass(frozen=True)
class Row:
    """One contestant: pictures per second and the ratio to diffusers, by block."""

    name: str
    pictures: int
    rates: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Pictures per second, median over blocks."""
        return statistics.median(self.rates)

    @property
    def ratio(self) -> float:
        """Times diffusers, median over blocks."""
        return statistics.median(self.ratios)


def pipeline_of(model: StableDiffusion) -> StableDiffusionPipeline:
    """Plain diffusers over a copy of the same weights, which nothing of ours touches."""
    pipeline = StableDiffusionPipeline(
        vae=copy.deepcopy(model.vae),
        text_encoder=copy.deepcopy(model.text_encoder),
        tokenizer=model.tokenizer,
        unet=copy.deepcopy(model.denoiser),
        scheduler=copy.deepcopy(model.scheduler),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def theirs(pipeline: StableDiffusionPipeline, jobs: Sequence[Job], sampling: Sampling, kind: str = "pil") -> list[Any]:
    """One call for each job."""
    return [
        pipeline(
            job.prompt,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            eta=sampling.eta,
            generator=torch.Generator().manual_seed(job.seed),
            output_type=kind,
        ).images[0]
        for job in jobs
    ]


def ours(
    model: StableDiffusion, jobs: Sequence[Job], sampling: Sampling, panel: JudgePanel, batch_size: int, *, padded: bool
) -> None:
    """What `cgru evaluate` does with jobs, into a folder of its own: nothing is found drawn already."""
    with tempfile.TemporaryDirectory(prefix="cgru-throughput-") as folder:
        predict(
            model,
            jobs,
            panel,
            sampling,
            folder=Path(folder),
            key="benchmark",
            batch_size=batch_size,
            progress=lambda done, total: None,
            padded=padded,
        )


def difference(
    model: StableDiffusion, pipeline: StableDiffusionPipeline, jobs: Sequence[Job], sampling: Sampling
) -> float:
    """The largest over the pixels [0, 1] of some pictures; too large a one ends the benchmark."""
    expected = np.stack(theirs(pipeline, jobs, sampling, "np"))
    drawn = draw(model, [job.prompt for job in jobs], [job.seed for job in jobs], sampling)
    found = float(np.abs(drawn.permute(0, 2, 3, 1).cpu().numpy() - expected).max())
    if found > AGREEMENT:
        raise SystemExit(f"the two draw different pictures: {found:.1e} in a pixel, allowed {AGREEMENT:.0e}")
    return found


def tflop_per_picture(model: StableDiffusion, sampling: Sampling) -> float:
    """Text and judges left out."""
    one = forward_tflop(model)
    return one["denoiser"] * sampling.steps * (2 if sampling.guidance > 1 else 1) + one["decoder"]


def take_turns(contestants: dict[str, Contestant], blocks: int) -> list[Row]:
    """Every contestant once a block, in turn; a first, uncounted block warms up."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    pictures = dict.fromkeys(contestants, 0)
    for block in range(blocks):
        for name, work in contestants.items():
            begun = time.perf_counter()
            count = work()
            rates[name].append(count / (time.perf_counter() - begun))
            pictures[name] += count
            print(f"block {block + 1}/{blocks} {name:<14}{rates[name][-1]:8.3f} pictures/s", flush=True)
    base = rates[THEIRS]
    return [
        Row(name, pictures[name], tuple(own), tuple(a / b for a, b in zip(own, base, strict=True)))
        for name, own in rates.items()
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build both sides, warm them up, let them take turns."""
    device, dtype = pick_device(options.device), parse_dtype(options.dtype)
    grid = load_benchmark(4)
    if options.model == SD15:
        model, sampling = random_sd15(device, dtype, tiny=options.tiny), OFFICIAL
    else:
        model, sampling = load_stable_diffusion(EMBEDDED, device=device, dtype=dtype), grid.sampling
    sampling = replace(sampling, steps=options.steps or sampling.steps)
    panel = JudgePanel({name: load_judge(name, device=device) for name in grid.judges}, grid.feature_judge)
    size = options.batch_size or default_batch(device)
    jobs = grid.jobs(None)[: options.batches * size]
    pipeline = pipeline_of(model)
    agreement = difference(model, pipeline, jobs[:2], sampling) if dtype == torch.float32 else None

    def evaluation(model: StableDiffusion, *, padded: bool) -> Contestant:
        def work() -> int:
            ours(model, jobs, sampling, panel, size, padded=padded)
            return len(jobs)

        return work

    def prompt_by_prompt() -> int:
        return len(theirs(pipeline, jobs[: options.calls], sampling))

    contestants = {THEIRS: prompt_by_prompt, EAGER: evaluation(model, padded=False)}
    once, compiling = replace(sampling, steps=2), None
    theirs(pipeline, jobs[:2], once)
    ours(model, jobs[:size], once, panel, size, padded=False)
    if options.compile:
        fast = replace(model, denoiser=copy.deepcopy(model.denoiser))
        compiling = compile_denoiser(fast, lambda: ours(fast, jobs[:size], once, panel, size, padded=True))
        contestants |= {COMPILED: evaluation(fast, padded=True)} if compiling is not None else {}
        print(f"compiled in {compiling:.0f} s" if compiling is not None else "not compiled", flush=True)
    rows = take_turns(contestants, options.blocks)
    return {
        "date": date.today().isoformat(),
        "model": f"{options.model}{' (tiny)' if options.tiny else ''}",
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "dtype": options.dtype,
        "sampling": asdict(sampling),
        "batch_size": size,
        "pictures_a_block": {"ours": len(jobs), "diffusers": min(options.calls, len(jobs))},
        "compile_seconds": compiling,
        "largest_difference": agreement,
        "tflop_per_picture": tflop_per_picture(model, sampling),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "rows": [{**asdict(row), "rate": row.rate, "ratio": row.ratio} for row in rows],
    }


def show(table: dict[str, Any]) -> None:
    """The table for people."""
    shape = "{steps} steps, guidance {guidance}, eta {eta}".format(**table["sampling"])
    print(f"{table['model']}, {table['dtype']}, {shape}, batch {table['batch_size']}, {table['machine']}")
    print(f"torch {table['torch']}, {table['threads']} threads; {table['tflop_per_picture']:.3f} TFLOP a picture")
    if table["largest_difference"] is not None:
        print(f"largest difference between the two sides' pictures: {table['largest_difference']:.1e}")
    print(f"{'':<15}{'pictures/s':>11}{'TFLOP/s':>10}{'ratio':>8}  lowest to highest over blocks")
    for row in table["rows"]:
        speed, spread = (
            row["rate"] * table["tflop_per_picture"],
            f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
        )
        print(f"{row['name']:<15}{row['rate']:>11.3f}{speed:>10.3f}{row['ratio']:>8.2f}  {spread}")


def main() -> None:
    """Measure, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(EMBEDDED, SD15), default=EMBEDDED)
    parser.add_argument("--tiny", action="store_true", help="sd15-random with few channels, to try the program")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--compile", action="store_true", help="a third contestant: ours with the denoiser compiled")
    parser.add_argument("--steps", type=int, help="default: the benchmark's, 50 for sd15-random")
    parser.add_argument("--batch-size", type=int, help="default: as cgru evaluate, 16 or on a GPU 64")
    parser.add_argument("--batches", type=int, default=1, help="of ours in a block")
    parser.add_argument("--calls", type=int, default=8, help="of diffusers' pipeline in a block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    table = measure(options)
    show(table)
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
