"""One evaluation from a request to scores.json.

`prepare` checks and loads everything and writes nothing, so invalid input is reported there. `run` does the work. A
model other than the base is scored beside its base on the same jobs, which gives the floor of UA and the ceiling of IRA
and CRA. The base of an edit is the model it belongs to. For any other model it is Emoji Canvas or, with the user's own
judges, the model that the user names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cgru import distributed
from cgru.atomic_io import atomic_write, to_json
from cgru.backbones import is_own_loader, load_model
from cgru.backbones.base import Backbone, classes_of
from cgru.edit_folder import base_model, find_edit
from cgru.edits import Edit, load_edit
from cgru.embedded import EMBEDDED, is_embedded, model_source
from cgru.evaluation.base import BASE_REFERENCE, Benchmark, Job, Predictions, stable_hash
from cgru.evaluation.drawing import Gallery, default_batch, draw
from cgru.evaluation.judges.features import Eye, load_eyes
from cgru.evaluation.request import RESCORED, Request, check_counts, default_name, default_parent, find_benchmark
from cgru.evaluation.runner import JudgePanel, fingerprint, predict
from cgru.evaluation.store import SCORES, check_contents, check_protocol, check_writable, scores_pending
from cgru.fast.compile import compile_denoiser
from cgru.lineage import STAMP, Kinship, check_judges, judge_lineage, trainers_of
from cgru.tasks import UnlearnTask

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "pillow")
COUNTS = ("images", "target_images")
"""Keys of a protocol that count the pictures drawn."""
Progress = Callable[[str, int, int], None]
"""Called with (what is being drawn, pictures done, pictures in total)."""


@dataclass(frozen=True)
class Session:
    """Everything checked and loaded, nothing written."""

    request: Request
    benchmark: Benchmark
    task: UnlearnTask | None
    jobs: Sequence[Job]
    panel: JudgePanel
    backbone: Backbone
    edit: Edit | None
    base: Backbone | None
    """The model that the backbone is compared with; the backbone itself if there is an edit."""
    fingerprint: str
    out: Path
    kinship: Kinship
    """What is known of judges and training networks."""
    gallery: Gallery | None = None
    """Pictures shared with other sessions of this process."""


def evaluate(model: str | Path, benchmark: str = "canvas", **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Score a model on a benchmark and return the contents of scores.json. Settings are the fields of `Request`."""
    return run(prepare(Request(str(model), benchmark, **settings)))


def prepare(request: Request) -> Session:
    """Check and load everything, cheap checks first; invalid input raises ValueError or OSError, in all processes."""
    return distributed.alike(lambda: _prepared(request))


def _prepared(request: Request) -> Session:
    check_counts(request)
    benchmark = find_benchmark(request)
    task = benchmark.task(request.target)
    edit_file = find_edit(request.model)
    is_foreign = request.judges is not None or request.source is not None
    if request.base is not None and edit_file is None and not is_foreign:
        allowed = "allowed with a run folder, an edit or a LoRA file only. Leave --model out."
        raise ValueError(
            f"--model {request.base!r} names the base of an edit, and {request.model!r} is none; {allowed}"
        )
    check_writable(request.out or default_parent(request))
    edit = load_edit(edit_file, allow_hooks=request.allow_hooks) if edit_file else None
    name = request.base or base_model(request.model, default=EMBEDDED) if edit else request.model
    backbone = _load(name, request)
    if edit:
        with edit.applied(backbone):
            pass  # an edit of another model is refused here, before anything is written
    base = _base(request, name, backbone, edit)
    _check_reference(request, benchmark.protocol(task), base)
    mark = fingerprint(backbone) if edit is None else stable_hash([fingerprint(backbone), edit.fingerprint])
    judges = load_eyes(benchmark, root=request.root, device=backbone.device)
    lineages = {name: judge_lineage(judge.lineage, judge.weights_sha256) for name, judge in judges.items()}
    kinship = check_judges(lineages, trainers_of(request.model, edit_file, request.root), request.allow_judge)
    out = request.out or default_parent(request) / default_name(request, benchmark, task, mark)
    for folder in (out, out / "base"):
        check_contents(folder)
    jobs = benchmark.jobs(task)
    _check_prompts(request, jobs, backbone)
    panel = JudgePanel(judges, benchmark.feature_judge)
    session = Session(request, benchmark, task, jobs, panel, backbone, edit, base, mark, out, kinship)
    check_protocol(out, _fixed(session))
    return session


def run(session: Session, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Draw, judge and score. An older scores.json is moved aside first and the new one written last.

    With several processes, each draws its share; the main one scores, writes the files and sends the result to all.
    """
    session = _compiled(session)
    check_protocol(session.out, _fixed(session))  # again: what was to be compiled may have stayed eager
    with ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(scores_pending(session.out)))
        base = _measure_base(session, progress)
        found = _measure_model(session, progress)
        scores = {
            "benchmark": session.benchmark.name,
            "version": session.benchmark.version,
            "protocol": _protocol(session),
            **found.record,
            "base": base.record if base else None,
            "change": distributed.from_main(lambda: _change(session, base, found)),
            "notices": list(session.kinship.notices),
        }
        distributed.from_main(lambda: atomic_write(session.out / SCORES, to_json(scores)))
    return scores


@dataclass(frozen=True)
class Findings:
    """The judges' predictions for a model, and its part of scores.json."""

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
    score = distributed.from_main(lambda: session.benchmark.score(session.task, session.jobs, predictions))
    found = {name: measurement.record() for name, measurement in score.measurements.items()}
    return Findings(predictions, {"measurements": found, "broken_images": predictions.broken, **score.tables})


def _compiled(session: Session) -> Session:
    """The session with compiled denoisers; if compiling fails, its request, protocol and key record `compile=False`."""
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
    if session.task:  # a benchmark may record more about its target
        concept = session.task.concept
        own = {"target": {"name": concept.name, "kind": concept.kind}} | own
    return {**own, **_provenance(session), **session.kinship.stamp, "model": _identity(session)}


def _fixed(session: Session) -> dict[str, Any]:
    """The parts of a protocol that must be equal for a result to replace another: all but the model and, if the
    benchmark allows more pictures later, their number."""
    benchmark, protocol = session.benchmark, _protocol(session)
    free = {"model", *RESCORED, *(() if "variant" in protocol else COUNTS)}  # with a variant: biased in the number
    fixed = {name: value for name, value in protocol.items() if name not in free}
    return {"benchmark": benchmark.name, "version": benchmark.version, STAMP: None, "compiled": None, **fixed}


def _provenance(session: Session) -> dict[str, Any]:
    """Everything besides job and model weights that a prediction depends on; part of the key of stored predictions."""
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
    if request.judges is not None or request.source is not None or is_own_loader(name):
        return _load(request.base, request) if request.base else None  # Emoji Canvas knows nothing of such prompts
    if request.reference is not None or is_embedded(name, request.root):
        return None  # with reference pictures, an unrelated base is not needed
    return _load(EMBEDDED, request)


def _check_prompts(request: Request, jobs: Sequence[Job], backbone: Backbone) -> None:
    """Refuse prompts that a model without text input has no class for."""
    classes = classes_of(backbone)
    strange = [job.prompt for job in jobs if classes and job.prompt not in classes]
    if strange:
        raise ValueError(
            f"benchmark {request.benchmark!r} draws {strange[0]!r}, but {backbone.name!r} reads no prompts beside "
            f"{', '.join(classes)}; allowed: a benchmark of your own with these. Give --benchmark module:function."
        )


def _check_reference(request: Request, protocol: Mapping[str, Any], base: Backbone | None) -> None:
    if base is None and protocol.get("reference") == BASE_REFERENCE:
        raise ValueError(
            f"{request.benchmark!r} of {request.model!r} has nothing to compare with: neither reference pictures nor "
            "another base model. Give --reference FOLDER, or evaluate an edit without --no-base."
        )


def _load(name: str, request: Request) -> Backbone:
    return load_model(model_source(name, request.root), device=request.device, dtype=request.dtype)
