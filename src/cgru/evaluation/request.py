"""What a user may ask of an evaluation: the request, the benchmark it names, and the folder it goes to by default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from cgru.catalog import resolve
from cgru.edits import is_run
from cgru.evaluation.assets import ROOT
from cgru.evaluation.base import Benchmark, stable_hash
from cgru.tasks import UnlearnTask

IMAGES = 4
"""Pictures per prompt of a benchmark that has no number of its own."""
QUALITY = "fid, kid, cmmd, clipscore"
TAKERS: Mapping[str, str] = {
    "variant": f"{QUALITY}, unlearncanvas, i2p",
    "reference": QUALITY,
    "judges": "unlearncanvas",
    "source": "i2p",
    "subset": "i2p",
    "threshold": "i2p",
    "judge": "i2p",
}
"""Option -> the benchmarks that take it."""
RESCORED = ("threshold",)
"""What of a protocol is applied to stored predictions: another one there costs no picture and loses nothing."""


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how."""

    model: str
    """A hub id, a diffusers folder, "emoji-canvas", a run folder or a LoRA file."""
    benchmark: str = "canvas"
    images: int | None = None
    """Pictures per prompt; None: the benchmark's own number, else 4."""
    target: str | None = None
    """The concept that is meant to be forgotten."""
    variant: str | None = None
    """Of a benchmark that has several; None: its default."""
    reference: Path | None = None
    """A folder of pictures to compare with, for benchmarks that take one."""
    allow_judge: tuple[str, ...] = ()
    """Judges that may be relatives of what trained the model; scores.json then says so."""
    judges: str | None = None
    """Where the judges are, for benchmarks that do not ship with theirs: a folder or a hub id."""
    source: Path | None = None
    """i2p: a .csv of prompts."""
    subset: str | None = None
    """i2p: which of its rows; None: all."""
    threshold: str | None = None
    """i2p: the score from which a detection counts, a number or a name; None: the paper's."""
    judge: str | None = None
    """i2p: nudenet, or nudenet=FILE.onnx; None: nudenet."""
    out: Path | None = None
    base: str | None = None
    """The model an edit belongs to; None: the run's own, else Emoji Canvas. With `judges` or `source`: of any model."""
    with_base: bool = True
    device: str = "auto"
    dtype: str = "fp32"
    batch_size: int | None = None
    """Pictures drawn at once; None: 16 on a CPU, 64 elsewhere."""
    compile: bool = False
    """torch.compile the denoiser: a minute or so first, faster after; part of what stored predictions depend on."""
    root: Path = ROOT
    """The asset folder."""


def find_benchmark(request: Request) -> Benchmark:
    """The benchmark that is asked for, with its settings."""
    factory = resolve("benchmark", request.benchmark)
    mistake = f"{request.benchmark!r} makes no benchmark"
    advice = "allowed: a function (images, root) that returns one. See `cgru list benchmarks`."
    try:
        benchmark = factory(_images(request, factory), request.root, **_settings(request, factory))
    except TypeError as error:
        raise ValueError(f"{mistake} ({error}); {advice}") from error
    if not isinstance(benchmark, Benchmark):
        raise ValueError(f"{mistake} but a {type(benchmark).__name__}; {advice}")
    return benchmark


def _images(request: Request, factory: Callable[..., Any]) -> int | None:
    """As asked for; else IMAGES, unless the factory has a default of its own, which None stands for."""
    if request.images is not None:
        return request.images
    first = next(iter(signature(factory).parameters.values()), None)
    return None if first and first.default is None else IMAGES


def _settings(request: Request, factory: Callable[..., Any]) -> dict[str, Any]:
    """What only some benchmarks take, if given; only to a factory whose signature names it."""
    chosen = {name: value for name, value in vars(request).items() if name in TAKERS and value is not None}
    taken = signature(factory).parameters if chosen else {}
    for name in chosen.keys() - taken.keys():
        advice = f"allowed with {TAKERS[name]}, or a benchmark of yours that takes it. Leave it out."
        raise ValueError(f"--{name} {str(chosen[name])!r} with benchmark {request.benchmark!r}; {advice}")
    return chosen


def lasting(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """A protocol without what is applied to stored predictions."""
    return {name: value for name, value in protocol.items() if name not in RESCORED}


def check_counts(request: Request) -> None:
    """Numbers that must be positive."""
    counts = {"--images": request.images, "--batch-size": request.batch_size}
    for option, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{option} {count}; allowed: 1 or more. Give a positive number.")


def default_parent(request: Request) -> Path:
    """A run keeps its own evaluations."""
    return Path(request.model) / "eval" if is_run(request.model) else Path("runs") / "eval"


def default_name(request: Request, benchmark: Benchmark, task: UnlearnTask | None, mark: str) -> str:
    """A run keeps its evaluations by target; others are told apart by model, number of pictures and weights too."""
    test, target = f"{benchmark.name}@{benchmark.version}", task.concept.name if task else ""
    protocol = benchmark.protocol(task)
    count = f"n{protocol.get('images', request.images or IMAGES)}"
    model = Path(request.model).resolve().name if Path(request.model).exists() else request.model
    parts = [model.removesuffix(".safetensors"), test, count, target, mark[:8]]
    if is_run(request.model):
        parts = [test, target]
    if "variant" in protocol:  # biased in n, and nothing without its reference; or of a variant not in its name
        parts += [count] if is_run(request.model) else []
        if "reference" in protocol:
            parts += [f"ref-{stable_hash(protocol['reference'])[:8]}"]
        else:  # a list of prompts that is the user's, or a variant alone
            listed = [stable_hash(lasting(protocol))[:8]] if "subset" in protocol else []
            parts += [protocol["variant"], *listed]
    return "-".join(re.sub(r"[^a-z0-9@.]+", "-", part.lower()).strip("-") for part in parts if part)
