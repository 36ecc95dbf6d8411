"""A sweep: concepts × seeds × methods as cells, and the base model beside them.

A benchmark gets the concept as its target if it knows the concept's kind (`canvas` does not know hazards), else no
target. The base is a separate cell and comes first, because the others reuse its pictures; benchmarks that compare with
the base (`kid`) are not run for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from cgru.embedded import EMBEDDED, ROOT, main_benchmark
from cgru.evaluation.base import BASE_REFERENCE, MOST_PICTURES, Benchmark
from cgru.experiments.cells import Cell, Measure
from cgru.experiments.settings import config_of
from cgru.method import find_method
from cgru.presets import default_preset, preset

NAME = "sweep"
BASE_CELL = "base"
MOST = 500
"""Runs, since one page compares them."""
BY_OPTION = {"seed": "--seeds", "device": "--device", "model": "--model", "method": "--methods"}
"""What a setting would change behind the plan's back."""


@dataclass(frozen=True)
class Sweep:
    """What is crossed, and what all runs have in common."""

    concepts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] | None = None
    """None: the preset's."""
    model: str | None = None
    """None: the preset's; without a preset, Emoji Canvas."""
    preset: str | None = None
    """None: each method's own for the model; without a method, the model's default."""
    settings: tuple[str, ...] = ()
    """key=value, laid over the preset."""
    benchmarks: tuple[str, ...] | None = None
    """None: on Emoji Canvas `canvas`, and `hazard` for hazards; no benchmark on other models, for which we ship no
    judges."""
    images: int = 1
    """Pictures per prompt."""


def plan(sweep: Sweep, root: Path = ROOT) -> tuple[Cell, ...]:
    """All cells; the base comes first, if there is more than one run and a benchmark for the base.

    Args:
        sweep: the concepts, seeds and methods to combine.
        root: the asset folder.
    """
    _check(sweep)
    load = cache(lambda name: benchmark_of(Measure(name, sweep.images), root))
    crossed = product(sweep.concepts, sweep.seeds, sweep.methods or (_own_method(sweep),))
    runs = [_run(sweep, *point, load) for point in crossed]
    twice = _repeated(cell.name for cell in runs)
    if twice is not None:
        raise ValueError(f"{twice!r} is in the sweep twice; allowed: each concept, seed and method once. Leave it out.")
    measured = dict.fromkeys(measure.benchmark for cell in runs for measure in cell.measures)
    of_base = [name for name in measured if load(name).protocol(None).get("reference") != BASE_REFERENCE]
    measures = tuple(Measure(name, sweep.images) for name in of_base)
    if len(runs) == 1:
        return tuple(runs)
    return (*([Cell(BASE_CELL, NAME, runs[0].model, measures=measures)] if measures else []), *runs)


def _check(sweep: Sweep) -> None:
    for what, given, example in (
        ("concept", sweep.concepts, "cgru sweep Dogs Cats --seeds 0,1,2"),
        ("seed", sweep.seeds, "--seeds 0,1,2"),
        ("method", sweep.methods, "--methods cgru,ddpo"),
    ):
        if given is not None and not given:
            raise ValueError(f"no {what} to sweep over; allowed: one or more. Try: {example}")
    count = len(sweep.concepts) * len(sweep.seeds) * len(sweep.methods or (1,))
    if count > MOST:
        raise ValueError(f"{count} runs; allowed: at most {MOST}, since one page compares them. Sweep in parts.")
    if not 1 <= sweep.images <= MOST_PICTURES:
        raise ValueError(f"--images {sweep.images}; allowed: 1 to {MOST_PICTURES}. Give a number in that range.")
    for setting in sweep.settings:
        if (key := setting.partition("=")[0].strip()) in BY_OPTION:
            raise ValueError(f"{setting!r} is no setting of a sweep; allowed: {BY_OPTION[key]}. Give it there.")


def _own_method(sweep: Sweep) -> str:
    return preset(sweep.preset or default_preset(sweep.model), sweep.concepts[0], sweep.model).method


def _run(sweep: Sweep, concept: str, seed: int, method: str, load: Callable[[str], Benchmark]) -> Cell:
    start = sweep.preset or find_method(method).default_preset(sweep.model or EMBEDDED) or ""
    model = sweep.model or (preset(start, concept).model if sweep.preset else EMBEDDED)
    raw = Cell("", NAME, model, concept, method, start, seed, sweep.settings)
    spelled = config_of(raw, "auto").concept  # spelled as in the vocabulary; invalid settings raise here
    measures = [_measure(name, load(name), spelled, sweep.images) for name in _benchmarks(sweep, spelled, model)]
    return Cell(
        "-".join((_slug(spelled), _slug(method), f"s{seed}")),
        NAME,
        model,
        spelled,
        method,
        start,
        seed,
        sweep.settings,
        measures=tuple(measures),
    )


def _benchmarks(sweep: Sweep, concept: str, model: str) -> Sequence[str]:
    if sweep.benchmarks is not None:
        return sweep.benchmarks
    if model != EMBEDDED:
        return ()
    return (main_benchmark(concept),)


def _measure(name: str, benchmark: Benchmark, concept: str, images: int) -> Measure:
    """The concept as the benchmark's target; None if the benchmark does not know its kind, as canvas for hazards."""
    try:
        benchmark.task(concept)
    except ValueError:
        return Measure(name, images)
    return Measure(name, images, concept)


def benchmark_of(measure: Measure, root: Path) -> Benchmark:
    """The benchmark of a measure; a benchmark with options that a sweep cannot set is an error."""
    from cgru.evaluation.request import Request, find_benchmark  # torch comes with it

    try:
        return find_benchmark(Request("", measure.benchmark, images=measure.images, root=root))
    except ValueError as error:
        option = re.match(r"no (--\w+) ", str(error))
        if option is None:
            raise
        raise ValueError(
            f"benchmark {measure.benchmark!r} needs {option[1]}, which a sweep does not have; allowed: benchmarks "
            f"without it. Run `cgru evaluate RUN --benchmark {measure.benchmark} {option[1]} ...` on its runs."
        ) from None


def _slug(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _repeated(names: Iterable[str]) -> str | None:
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
