"""One evaluation from a request to scores.json.

`prepare` checks and loads everything and writes nothing: a user's mistake surfaces there. `run` does the work. A model
that is not the base itself is scored beside its base on the same jobs, for the floor of UA and the ceiling of IRA and
CRA: an edit beside the model it belongs to, any other model beside Emoji Canvas, or with judges of one's own beside the
base that the user names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from cgru import processes
from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.backbones.compiled import compile_denoiser
from cgru.catalog import resolve
from cgru.edits import Edit, base_model, find_edit, is_run, load_edit
from cgru.evaluation.assets import EMBEDDED, ROOT, is_embedded, model_source
from cgru.evaluation.base import BASE_REFERENCE, Benchmark, Job, Predictions, stable_hash
from cgru.evaluation.drawing import Gallery, default_batch, draw
from cgru.evaluation.eyes import Eye, load_eyes
from cgru.evaluation.runner import Panel, fingerprint, predict
from cgru.evaluation.store import SCORES, check_contents, check_protocol, check_writable, scores_pending, write_json
from cgru.lineage import STAMP, Kinship, check_judges, judge_lineage, trainers_of
from cgru.tasks import UnlearnTask

IMAGES = 4
"""Pictures per prompt of a benchmark that has no number of its own."""
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "pillow")
COUNTS = ("images", "target_images")
"""Keys of a protocol that say how many pictures were drawn."""
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
Progress = Callable[[str, int, int], None]
"""Called with (what is being drawn, pictures done, pictures in all)."""


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
    kinship: Kinship
    """What is known of judges and training networks."""
    gallery: Gallery | None = None
    """Pictures shared with other sessions of this process."""


def evaluate(model: str | Path, benchmark: str = "canvas", **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Score a model on a benchmark; the contents of scores.json. Settings are the fields of `Request`."""
    return run(prepare(Request(str(model), benchmark, **settings)))


def prepare(request: Request) -> Session:
    """Check and load, cheap checks first; raises ValueError or OSError for a user's mistake (in all processes)."""
    return processes.alike(lambda: _prepared(request))


def _prepared(request: Request) -> Session:
    _check_counts(request)
    benchmark = _benchmark(request)
    task = benchmark.task(request.target)
    edit_file = find_edit(request.model)
    is_foreign = request.judges is not None or request.source is not None
    if request.base is not None and edit_file is None and not is_foreign:
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
    judges = load_eyes(benchmark, root=request.root, device=backbone.device)
    lineages = {name: judge_lineage(judge.lineage, judge.weights_sha256) for name, judge in judges.items()}
    kinship = check_judges(lineages, trainers_of(request.model, edit_file), request.allow_judge)
    out = request.out or _default_parent(request) / _default_name(request, benchmark, task, mark)
    for folder in (out, out / "base"):
        check_contents(folder)
    panel = Panel(judges, benchmark.feature_judge)
    session = Session(request, benchmark, task, benchmark.jobs(task), panel, backbone, edit, base, mark, out, kinship)
    check_protocol(out, _fixed(session))
    return session


def run(session: Session, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Draw, judge and score; scores.json is written last, and no earlier one is there while it is not true.

    Among processes each draws its share; the main one scores and writes, and tells all.
    """
    session = _compiled(session)
    with ExitStack() as stack:
        processes.from_main(lambda: stack.enter_context(scores_pending(session.out)))
        base = _measure_base(session, progress)
        found = _measure_model(session, progress)
        scores = {
            "benchmark": session.benchmark.name,
            "version": session.benchmark.version,
            "protocol": _protocol(session),
            **found.record,
            "base": base.record if base else None,
            "change": processes.from_main(lambda: _change(session, base, found)),
            "notices": list(session.kinship.notices),
        }
        processes.from_main(lambda: write_json(session.out / SCORES, scores))
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
    key = stable_hash([session.benchmark.name, session.benchmark.version, _provenance(session), mark])[:16]
    predictions = predict(
        backbone,
        session.jobs,
        session.panel,
        session.benchmark.sampling,
        folder=folder,
        key=key,
        mark=mark,
        gallery=session.gallery,
        batch_size=_batch_size(session),
        progress=lambda done, total: progress(what, done, total),
        padded=session.request.compile,
    )
    score = processes.from_main(lambda: session.benchmark.score(session.task, session.jobs, predictions))
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
    own = session.benchmark.protocol(session.task)
    return {**own, **_provenance(session), **session.kinship.stamp, "model": _identity(session)}


def _fixed(session: Session) -> dict[str, Any]:
    """What must be equal for a result to take the place of another: all but the model and, if they may grow, counts."""
    benchmark, protocol = session.benchmark, _protocol(session)
    free = {"model", *RESCORED, *(() if "variant" in protocol else COUNTS)}  # with a variant: biased in the number
    fixed = {name: value for name, value in protocol.items() if name not in free}
    return {"benchmark": benchmark.name, "version": benchmark.version, STAMP: None, **fixed}


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
    if not request.with_base:
        return None
    if edit:
        return backbone
    if request.judges is not None or request.source is not None:
        return _load(request.base, request) if request.base else None  # Emoji Canvas knows nothing of such prompts
    if request.reference is not None or is_embedded(name, request.root):
        return None  # a reference takes the place of a base that the model does not come from
    return _load(EMBEDDED, request)


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


def _lasting(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """A protocol without what is applied to stored predictions."""
    return {name: value for name, value in protocol.items() if name not in RESCORED}


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
            listed = [stable_hash(_lasting(protocol))[:8]] if "subset" in protocol else []
            parts += [protocol["variant"], *listed]
    return "-".join(re.sub(r"[^a-z0-9@.]+", "-", part.lower()).strip("-") for part in parts if part)
