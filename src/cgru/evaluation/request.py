"""The request for an evaluation, the benchmark that it names, and the default folder for its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from cgru.catalog import BENCHMARKS, call_own, resolve, unknown
from cgru.edit_folder import is_run
from cgru.embedded import ROOT
from cgru.evaluation.base import MOST_PICTURES, Benchmark, stable_hash
from cgru.tasks import UnlearnTask

IMAGES = 4
"""Pictures per prompt for benchmarks without their own default."""
OPTIONS = ("variant", "reference", "judges", "source", "subset", "threshold", "judge")
"""Fields of a request that only some benchmarks accept: those whose factory has a parameter of that name."""
RESCORED = ("threshold",)
"""Parts of a protocol that are applied to stored predictions; changing them needs no new pictures."""


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how."""

    model: str
    """A hub id, a diffusers folder, "emoji-canvas", a run folder, an edit folder or a LoRA file."""
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
    """Judges that are accepted although they are related to networks that trained the model; scores.json records it."""
    judges: str | None = None
    """Folder or hub id of the judges, for benchmarks whose judges are not shipped."""
    source: Path | None = None
    """i2p: a .csv of prompts."""
    subset: str | None = None
    """i2p: which of its rows; None: all."""
    threshold: str | None = None
    """i2p: the lowest score that counts as a detection, as a number or a name; None: the paper's."""
    judge: str | None = None
    """i2p: nudenet, or nudenet=FILE.onnx; None: nudenet."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the user's own benchmark: keyword-only parameters of its factory, by name."""
    out: Path | None = None
    base: str | None = None
    """The model an edit belongs to; None: the run's own, else Emoji Canvas. With `judges` or `source`: of any model."""
    allow_hooks: tuple[str, ...] = ()
    """The user's own hooks ("module:attr") that an edit may import."""
    with_base: bool = True
    device: str = "auto"
    dtype: str = "fp32"
    batch_size: int | None = None
    """Pictures drawn at once; None: 16 on a CPU, 64 elsewhere."""
    compile: bool = False
    """Compile the denoiser with torch.compile: takes about a minute, then draws faster. Part of the predictions'
    key."""
    root: Path = ROOT
    """The asset folder."""


def find_benchmark(request: Request) -> Benchmark:
    """The benchmark that is asked for, with its settings."""
    factory = resolve("benchmark", request.benchmark)
    mistake = f"{request.benchmark!r} makes no benchmark"
    advice = "allowed: a function (images, root) that returns one. See `cgru list benchmarks`."
    try:
        images, settings = _images(request, factory), _settings(request, factory)
        benchmark = (
            factory(images, request.root, **settings)
            if request.benchmark in BENCHMARKS
            else call_own("benchmark", request.benchmark, factory, images, request.root, **settings)
        )
    except TypeError as error:
        raise ValueError(f"{mistake} ({error}); {advice}") from error
    if not isinstance(benchmark, Benchmark):
        raise ValueError(f"{mistake} but a {type(benchmark).__name__}; {advice}")
    return benchmark


def _images(request: Request, factory: Callable[..., Any]) -> int | None:
    """The requested number; else IMAGES, or None if the factory has its own default."""
    if request.images is not None:
        return request.images
    first = next(iter(signature(factory).parameters.values()), None)
    return None if first and first.default is None else IMAGES


def _settings(request: Request, factory: Callable[..., Any]) -> dict[str, Any]:
    """The given options and the benchmark's own settings; an option without a parameter in the factory is refused."""
    taken = signature(factory).parameters
    chosen = {name: value for name in OPTIONS if (value := getattr(request, name)) is not None}
    for name in chosen.keys() - taken.keys():
        advice = f"allowed with {', '.join(_takers(name))}, or a benchmark of yours that takes it. Leave it out."
        raise ValueError(f"--{name} {str(chosen[name])!r} with benchmark {request.benchmark!r}; {advice}")
    own = _own_settings(factory)
    for name in request.settings.keys() - own.keys():
        if not own:
            raise ValueError(f"{name!r} with benchmark {request.benchmark!r}, which has no settings. Leave it out.")
        raise ValueError(unknown(f"setting of benchmark {request.benchmark!r}", name, own, "Give KEY=VALUE."))
    return chosen | {name: _read(name, text, own[name]) for name, text in request.settings.items()}


def _takers(option: str) -> list[str]:
    """The benchmarks of the catalog that take an option."""
    return [name for name in BENCHMARKS if option in signature(resolve("benchmark", name)).parameters]


def _own_settings(factory: Callable[..., Any]) -> dict[str, str]:
    """Name -> type of the settings that can be given as KEY=VALUE: keyword-only parameters without an option."""
    own = [(name, found) for name, found in signature(factory).parameters.items() if name not in OPTIONS]
    return {name: _type_of(found) for name, found in own if found.kind is Parameter.KEYWORD_ONLY}


def _type_of(parameter: Parameter) -> str:
    """The last word of an annotation, which may be a type or text: Path of `pathlib.Path | None`."""
    found = parameter.annotation
    text = found.__name__ if isinstance(found, type) else str(found)
    return text.removesuffix(" | None").rpartition(".")[2]


def _read(name: str, text: str, kind: str) -> Any:  # noqa: ANN401 - as the parameter is annotated
    """The value of KEY=VALUE as int, float or Path if the parameter is annotated so; else as text."""
    try:
        return {"int": int, "float": float, "Path": Path}.get(kind, str)(text)
    except ValueError:
        allowed = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"{name}={text}; allowed: {allowed}. Give {name}=1, for example.") from None


def lasting(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """A protocol without the parts that are applied to stored predictions."""
    return {name: value for name, value in protocol.items() if name not in RESCORED}


def check_counts(request: Request) -> None:
    """Numbers that must be positive."""
    counts = {"--images": request.images, "--batch-size": request.batch_size}
    for option, count in counts.items():
        if count is not None and not 1 <= count <= MOST_PICTURES:
            raise ValueError(f"{option} {count}; allowed: 1 to {MOST_PICTURES}. Give a number in that range.")


def default_parent(request: Request) -> Path:
    """A run keeps its own evaluations."""
    return Path(request.model) / "eval" if is_run(request.model) else Path("runs") / "eval"


def default_name(request: Request, benchmark: Benchmark, task: UnlearnTask | None, mark: str) -> str:
    """Default folder: by target inside a run; otherwise also by model, number of pictures and weights."""
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
