"""One evaluation from a request to scores.json.

`prepare` checks and loads everything and writes nothing: a user's mistake surfaces there. `run` does the work. A model
that is not the base itself is scored beside its base on the same jobs, for the floor of UA and the ceiling of IRA and
CRA: an edit beside the model it belongs to, any other model beside Emoji Canvas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.backbones.compiled import compile_denoiser
from cgru.catalog import resolve
from cgru.edits import Edit, base_model, find_edit, is_run, load_edit
from cgru.evaluation.assets import EMBEDDED, ROOT, is_embedded, model_source
from cgru.evaluation.base import BASE_REFERENCE, Benchmark, Job, Predictions, stable_hash
from cgru.evaluation.eyes import Eye, load_eye
from cgru.evaluation.runner import Panel, default_batch, draw, fingerprint, predict
from cgru.evaluation.store import SCORES, check_contents, check_protocol, check_writable, scores_pending, write_json
from cgru.tasks import UnlearnTask

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "pillow")
Progress = Callable[[str, int, int], None]
"""Called with (what is being drawn, pictures done, pictures in all)."""


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how."""

    model: str
    """A hub id, a diffusers folder, "emoji-canvas", a run folder or a LoRA file."""
    benchmark: str = "canvas"
    images: int = 4
    """Pictures per prompt."""
    target: str | None = None
    """The concept that is meant to be forgotten."""
    variant: str | None = None
    """Of a benchmark that has several; None: its default."""
    reference: Path | None = None
    """A folder of pictures to compare with, for benchmarks that take one."""
    out: Path | None = None
    base: str | None = None
    """The model an edit belongs to; None: the run's own, else Emoji Canvas."""
    with_base: bool = True
    device: str = "auto"
    dtype: str = "fp32"
    batch_size: int | None = None
    """Pictures drawn at once; None: 16 on a CPU, 64 elsewhere."""
    compile: bool = False
    """torch.compile the denoiser: a minute or so first, faster after; part of what stored predictions depend on."""
    root: Path = ROOT
    """The asset folder."""


@dataclass(frozen=True)
class Session:
    """Everything checked and loaded, nothing written."""

    request: Request
    benchmark: Benchmark
    task: UnlearnTask | None
    jobs: Sequence[Job]
    panel: Panel
    backbone: Backbone
    edit: Edit | None
    base: Backbone | None
    """What the backbone is compared with; the backbone itself when there is an edit."""
    fingerprint: str
    out: Path


def evaluate(model: str | Path, benchmark: str = "canvas", **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Score a model on a benchmark; the contents of scores.json. Settings are the fields of `Request`."""
    return run(prepare(Request(str(model), benchmark, **settings)))


def prepare(request: Request) -> Session:
    """Check and load, cheap checks first; raises ValueError or OSError for a user's mistake."""
    _check_counts(request)
    benchmark = _benchmark(request)
    task = benchmark.task(request.target)
    edit_file = find_edit(request.model)
    if request.base is not None and edit_file is None:
        allowed = "allowed with a LoRA file or a run folder only. Leave --model out."
        raise ValueError(f"--model {request.base!r} names the base of a LoRA, and {request.model!r} is none; {allowed}")
    check_writable(request.out or _default_parent(request))
    edit = load_edit(edit_file) if edit_file else None
    name = request.base or base_model(request.model, default=EMBEDDED) if edit else request.model
    backbone = _load(name, request)
    if edit:
        with edit.applied(backbone):
            pass  # a LoRA of another model is refused here, before anything is written
    base = _base(request, name, backbone, edit)
    _check_reference(request, benchmark.protocol(task), base)
    mark = fingerprint(backbone) if edit is None else stable_hash([fingerprint(backbone), edit.fingerprint])
    judges = {judge: load_eye(judge, root=request.root, device=backbone.device) for judge in benchmark.judges}
    out = request.out or _default_parent(request) / _default_name(request, benchmark, task, mark)
    for folder in (out, out / "base"):
        check_contents(folder)
    if "variant" in (protocol := benchmark.protocol(task)):
        check_protocol(out, {"benchmark": benchmark.name, **protocol})
    panel = Panel(judges, benchmark.feature_judge)
    return Session(request, benchmark, task, benchmark.jobs(task), panel, backbone, edit, base, mark, out)


def run(session: Session, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Draw, judge and score; scores.json is written last, and no earlier one is there while it is not true."""
    session = _compiled(session)
    with scores_pending(session.out):
        base = _measure_base(session, progress)
        found = _measure_model(session, progress)
        scores = {
            "benchmark": session.benchmark.name,
            "version": session.benchmark.version,
            "protocol": _protocol(session),
            **found.record,
            "base": base.record if base else None,
            "change": _change(session, base, found),
        }
        write_json(session.out / SCORES, scores)
    return scores


@dataclass(frozen=True)
class Findings:
    """What the judges said of a model, and its part of scores.json."""

    predictions: Predictions
    record: dict[str, Any]


def _measure_base(session: Session, progress: Progress) -> Findings | None:
    if session.base is None:
        return None
    mark = fingerprint(session.base)
    found = _measure(session, session.base, mark, session.out / "base", "base", progress)
    return Findings(found.predictions, {"model": session.base.name, "fingerprint": mark, **found.record})


def _change(session: Session, base: Findings | None, found: Findings) -> dict[str, Any]:
    if base is None:
        return {}
    change = session.benchmark.compare(session.task, session.jobs, base.predictions, found.predictions)
    return {name: measurement.record() for name, measurement in change.items()}


def _measure_model(session: Session, progress: Progress) -> Findings:
    if session.edit is None:
        return _measure(session, session.backbone, session.fingerprint, session.out, "model", progress)
    with session.edit.applied(session.backbone) as edited:
        return _measure(session, edited, session.fingerprint, session.out, "edited model", progress)


def _measure(session: Session, backbone: Backbone, mark: str, folder: Path, what: str, progress: Progress) -> Findings:
    folder.mkdir(parents=True, exist_ok=True)
    key = stable_hash([session.benchmark.name, session.benchmark.version, _provenance(session), mark])[:16]
    predictions = predict(
        backbone,
        session.jobs,
        session.panel,
        session.benchmark.sampling,
        folder=folder,
        key=key,
        batch_size=_batch_size(session),
        progress=lambda done, total: progress(what, done, total),
        padded=session.request.compile,
    )
    score = session.benchmark.score(session.task, session.jobs, predictions)
    found = {name: measurement.record() for name, measurement in score.measurements.items()}
    return Findings(predictions, {"measurements": found, "broken_images": predictions.broken, **score.tables})


def _compiled(session: Session) -> Session:
    """The session with its denoisers compiled; where that fails its request says so, and with it protocol and key."""
    if not session.request.compile:
        return session
    size, once = _batch_size(session), replace(session.benchmark.sampling, steps=1)
    models = {id(model): model for model in (session.base, session.backbone) if model is not None}.values()
    seconds = [compile_denoiser(model, partial(draw, model, [""] * size, range(size), once)) for model in models]
    is_compiled = any(taken is not None for taken in seconds)
    return replace(session, request=replace(session.request, compile=is_compiled))


def _batch_size(session: Session) -> int:
    return session.request.batch_size or default_batch(session.backbone.device)


def _protocol(session: Session) -> dict[str, Any]:
    return {**session.benchmark.protocol(session.task), **_provenance(session), "model": _identity(session)}


def _provenance(session: Session) -> dict[str, Any]:
    """What decides a prediction beside job and model weights; part of the key of stored predictions."""
    judges = {name: _judge_record(judge) for name, judge in session.panel.judges.items()}
    return {
        **asdict(session.benchmark.sampling),
        "judges": judges,
        "dtype": session.request.dtype,
        "device": session.backbone.device.type,
        **({"compiled": True} if session.request.compile else {}),  # other kernels, other rounding
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def _judge_record(judge: Eye) -> dict[str, Any]:
    lineage = judge.lineage
    return {"id": lineage["name"], "weights_sha256": judge.weights_sha256, "accuracy": lineage.get("accuracy")}


def _identity(session: Session) -> dict[str, Any]:
    edit = session.edit.fingerprint if session.edit else None
    return {
        "name": session.request.model,
        "base": session.backbone.name if session.edit else None,
        "edit_sha256": edit,
        "fingerprint": session.fingerprint,
    }


def _base(request: Request, name: str, backbone: Backbone, edit: Edit | None) -> Backbone | None:
    if not request.with_base or (edit is None and is_embedded(name, request.root)):
        return None
    if edit is None and request.reference is not None:
        return None  # the reference takes the place of a base that the model does not come from
    return backbone if edit else _load(EMBEDDED, request)


def _check_reference(request: Request, protocol: Mapping[str, Any], base: Backbone | None) -> None:
    if base is None and protocol.get("reference") == BASE_REFERENCE:
        raise ValueError(
            f"{request.benchmark!r} of {request.model!r} has nothing to compare with: neither reference pictures nor "
            "another base model. Give --reference FOLDER, or evaluate an edit without --no-base."
        )


def _load(name: str, request: Request) -> Backbone:
    return load_model(model_source(name, request.root), device=request.device, dtype=request.dtype)


def _benchmark(request: Request) -> Benchmark:
    factory = resolve("benchmark", request.benchmark)
    mistake = f"{request.benchmark!r} makes no benchmark"
    advice = "allowed: a function (images, root) that returns one. See `cgru list benchmarks`."
    try:
        benchmark = factory(request.images, request.root, **_settings(request, factory))
    except TypeError as error:
        raise ValueError(f"{mistake} ({error}); {advice}") from error
    if not isinstance(benchmark, Benchmark):
        raise ValueError(f"{mistake} but a {type(benchmark).__name__}; {advice}")
    return benchmark


def _settings(request: Request, factory: Callable[..., Any]) -> dict[str, Any]:
    """Variant and reference, if given; only to a factory whose signature names them."""
    given = {"variant": request.variant, "reference": request.reference}
    chosen = {name: value for name, value in given.items() if value is not None}
    taken = signature(factory).parameters if chosen else {}
    for name in chosen.keys() - taken.keys():
        takers = "fid, kid, cmmd, clipscore"
        advice = f"allowed with {takers}, or a benchmark of yours that takes it. Leave it out."
        raise ValueError(f"--{name} {str(chosen[name])!r} with benchmark {request.benchmark!r}; {advice}")
    return chosen


def _check_counts(request: Request) -> None:
    counts = {"--images": request.images, "--batch-size": request.batch_size}
    for option, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{option} {count}; allowed: 1 or more. Give a positive number.")


def _default_parent(request: Request) -> Path:
    return Path(request.model) / "eval" if is_run(request.model) else Path("runs") / "eval"


def _default_name(request: Request, benchmark: Benchmark, task: UnlearnTask | None, mark: str) -> str:
    """A run keeps its evaluations by target; others are told apart by model, number of pictures and weights too."""
    test, target = f"{benchmark.name}@{benchmark.version}", task.concept.name if task else ""
    model = Path(request.model).resolve().name if Path(request.model).exists() else request.model
    parts = [model.removesuffix(".safetensors"), test, f"n{request.images}", target, mark[:8]]
    if is_run(request.model):
        parts = [test, target]
    if "variant" in (protocol := benchmark.protocol(task)):  # biased in n, and nothing without its reference
        parts += [f"n{request.images}"] if is_run(request.model) else []
        parts += [f"ref-{stable_hash(protocol['reference'])[:8]}"]
    return "-".join(re.sub(r"[^a-z0-9@.]+", "-", part.lower()).strip("-") for part in parts if part)
