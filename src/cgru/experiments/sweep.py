"""A sweep: concepts × seeds × methods as cells, and the base model beside them.

A benchmark is asked about the concept where it has a place for its kind (`canvas` has none for hazards), else about no
target. The base is a cell of its own and comes first, because the others reuse its pictures; benchmarks that compare
with the base (`kid`) have nothing to say of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cgru.evaluation.assets import ROOT
from cgru.evaluation.base import BASE_REFERENCE, Benchmark
from cgru.experiments.cells import Cell, Measure
from cgru.presets import EMBEDDED, default_preset, is_hazard, preset
from cgru.tasks import Kind, find_concept, load_lexicon

NAME = "sweep"
BASE_CELL = "base"
KINDS: Mapping[str, tuple[Kind, ...]] = {
    "canvas": ("class", "style"),
    "fid": ("class", "style"),
    "kid": ("class", "style"),
    "cmmd": ("class", "style"),
    "clipscore": ("class", "style"),
    "paraphrase": ("class",),
    "hazard": ("hazard",),
}
"""What a benchmark takes as a target; one that is not here takes every kind."""
MOST = 500
"""Runs, since one page compares them."""
BY_OPTION = {"seed": "--seeds", "device": "--device", "model": "--model", "method": "--methods"}
"""What a setting would change behind the plan's back."""


@dataclass(frozen=True)
class Sweep:
    """What is crossed, and what all runs have in common."""

    concepts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = ("cgru",)
    model: str | None = None
    """None: the preset's; without a preset, Emoji Canvas."""
    preset: str | None = None
    """None: the model's default."""
    settings: tuple[str, ...] = ()
    """key=value, laid over the preset."""
    benchmarks: tuple[str, ...] | None = None
    """None: on Emoji Canvas `canvas`, and `hazard` for hazards; none on another model, whose judges are not ours."""
    images: int = 1
    """Pictures per prompt."""


def plan(sweep: Sweep, root: Path = ROOT) -> tuple[Cell, ...]:
    """Every cell, the base first (where something can be measured of it, and there is more than one run).

    Args:
        sweep: what is crossed.
        root: the asset folder.
    """
    _check(sweep)
    crossed = product(sweep.concepts, sweep.seeds, sweep.methods)
    runs = [_run(sweep, *point) for point in crossed]
    twice = _repeated(cell.name for cell in runs)
    if twice is not None:
        raise ValueError(f"{twice!r} is in the sweep twice; allowed: each concept, seed and method once. Leave it out.")
    measured = dict.fromkeys(measure.benchmark for cell in runs for measure in cell.measures)
    alone = [Measure(benchmark, sweep.images) for benchmark in measured]
    measures = tuple(measure for measure in alone if not _compares_with_base(measure, root))
    if len(runs) == 1:
        return tuple(runs)
    return (*([Cell(BASE_CELL, NAME, runs[0].model, measures=measures)] if measures else []), *runs)


def _check(sweep: Sweep) -> None:
    for what, given, example in (
        ("concept", sweep.concepts, "cgru sweep Dogs Cats --seeds 0,1,2"),
        ("seed", sweep.seeds, "--seeds 0,1,2"),
        ("method", sweep.methods, "--methods cgru,ddpo"),
    ):
        if not given:
            raise ValueError(f"no {what} to sweep over; allowed: one or more. Try: {example}")
    count = len(sweep.concepts) * len(sweep.seeds) * len(sweep.methods)
    if count > MOST:
        raise ValueError(f"{count} runs; allowed: at most {MOST}, since one page compares them. Sweep in parts.")
    if sweep.images < 1:
        raise ValueError(f"--images {sweep.images}; allowed: 1 or more. Give a positive number.")
    for setting in sweep.settings:
        if (key := setting.partition("=")[0].strip()) in BY_OPTION:
            raise ValueError(f"{setting!r} is no setting of a sweep; allowed: {BY_OPTION[key]}. Give it there.")


def _run(sweep: Sweep, concept: str, seed: int, method: str) -> Cell:
    start = sweep.preset or default_preset(sweep.model or EMBEDDED)
    model = sweep.model or (preset(start, concept).model if sweep.preset else EMBEDDED)
    raw = Cell("", NAME, model, concept, method, start, seed, sweep.settings)
    spelled = raw.config("auto").concept  # as the vocabulary has it; and whatever does not fit is said here
    return Cell(
        "-".join((_slug(spelled), _slug(method), f"s{seed}")),
        NAME,
        model,
        spelled,
        method,
        start,
        seed,
        sweep.settings,
        measures=tuple(_measure(name, spelled, model, sweep.images) for name in _benchmarks(sweep, spelled, model)),
    )


def _benchmarks(sweep: Sweep, concept: str, model: str) -> Sequence[str]:
    if sweep.benchmarks is not None:
        return sweep.benchmarks
    if model != EMBEDDED:
        return ()
    return ("hazard",) if is_hazard(concept) else ("canvas",)


def _measure(benchmark: str, concept: str, model: str, images: int) -> Measure:
    return Measure(benchmark, images, concept if _takes(benchmark, concept, model) else None)


def _takes(benchmark: str, concept: str, model: str) -> bool:
    if model != EMBEDDED or benchmark not in KINDS:
        return True
    lexicon = load_lexicon()
    return find_concept(concept, lexicon.vocabulary, lexicon.aliases).kind in KINDS[benchmark]


def benchmark_of(measure: Measure, root: Path) -> Benchmark:
    """The benchmark of a measure; one that wants more than a sweep can give is an error."""
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


def _compares_with_base(measure: Measure, root: Path) -> bool:
    return benchmark_of(measure, root).protocol(None).get("reference") == BASE_REFERENCE


def _slug(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _repeated(names: Iterable[str]) -> str | None:
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
