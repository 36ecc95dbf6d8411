"""One run from its config to its edit, whatever the method: check, run folder, lock, `method.run`, edit.

`prepare` loads and checks everything and writes nothing, so a mistake leaves no folder behind. The edit's marker,
edit/edit.json, is written last: a run without it is not finished. Among processes (`cgru.distributed`) all go through
this together, and only the main one writes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cgru import distributed
from cgru.backbones import check_model, load_model
from cgru.backbones.base import Backbone, classes_of, exact_float32, networks_of, one_line
from cgru.config import RLConfig, RunConfig, refuse_unnamed_code
from cgru.edits import Shapes, check_made, model_fingerprint, save_edit, shapes_of
from cgru.lineage import ROLES
from cgru.method import Method, find_method
from cgru.pipeline.trackers import check_tracker
from cgru.prompts import task_for
from cgru.rl.build import Prepared
from cgru.rl.oom_retry import out_of_memory
from cgru.rl.stages import fitted_critic
from cgru.runs import Listener, Run, run_name
from cgru.tasks import UnlearnTask

logger = logging.getLogger(__name__)

RUNS = Path("runs")


@dataclass(frozen=True, eq=False)
class Ready:
    """A run's model, task and whatever its method has prepared; nothing is written yet."""

    config: RunConfig
    method: Method[Any]
    task: UnlearnTask
    backbone: Backbone
    fingerprint: str
    """Of the base model (`cgru.edits.model_fingerprint`)."""
    shapes: Shapes
    """Of the base model's parameters (`cgru.edits.shapes_of`): a method may leave the model with other ones."""
    prepared: Any = None


def check(config: RunConfig) -> None:
    """Refuse what would stop a run, as far as it shows before a model is loaded: names, files, prompts, packages."""
    method = find_method(config.method)
    check_tracker(config.tracker)
    check_model(config.model)
    task_for(config.concept, config.model)
    if method.check is not None:
        method.check(config)


def prepare(config: RunConfig) -> Ready:
    """Check a new run and load what it needs, cheap checks first."""
    check(config)
    ready = load(config)
    if ready.method.prepare is None:
        return ready
    return replace(ready, prepared=ready.method.prepare(ready.backbone, ready.task, config))


def describe_plan(ready: Ready) -> dict[str, Any]:
    """What a run will do, for `--dry-run`: its settings, and what its method estimates."""
    config, method = ready.config, ready.method
    about = {
        "concept": config.concept,
        "kind": ready.task.concept.kind,
        "model": config.model,
        "device": str(ready.backbone.device),
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
    }
    return about | (dict(method.plan(ready.prepared)) if method.plan is not None else {})


def load(config: RunConfig) -> Ready:
    """The model and the task alone, for a run that is continued."""
    backbone = load_model(config.model, device=config.device, dtype=config.dtype)
    task = task_for(config.concept, config.model, classes_of(backbone))
    mark, shapes = model_fingerprint(backbone), shapes_of(networks_of(backbone))
    return Ready(config, find_method(config.method), task, backbone, mark, shapes)


def unlearn(
    config: RunConfig, out: str | Path = RUNS, *, listeners: tuple[Listener, ...] = (), ready: Ready | None = None
) -> Run:
    """Do what is left of a run under the parent folder `out`; returns the finished run.

    Args:
        config: of the run.
        out: parent of the run's folder, which is named after the config.
        listeners: called with each record that the run logs.
        ready: what `prepare` returned for this config; hold no other reference to it.
    """
    with exact_float32(), oom_as_message():
        with _opened(config, out, listeners, ready) as (run, ready):
            _finish(run, ready)
    return run


def resume(path: str | Path, *, listeners: tuple[Listener, ...] = (), code: Collection[str] = ()) -> Run:
    """Continue a run folder from its last checkpoint.

    Args:
        path: the run folder.
        listeners: called with each record that the run logs.
        code: code of one's own ("module:attr") that the run's config names and that may run.
    """
    run = distributed.from_main(lambda: Run.open(path, code=code))
    refuse_unnamed_code(run.config, code, f"the run {str(path)!r}", "code")
    run = replace(run, listeners=listeners)
    with exact_float32(), _locked(run), oom_as_message():
        _finish(run, None)
    return run


def fit_critic(config: RLConfig, out: str | Path = RUNS) -> Run:
    """The stages of a policy-gradient run before its policy: reward heads and critic (the ablation of critics)."""
    with exact_float32(), oom_as_message(), _opened(config, out, (), None) as (run, ready):
        ready = ready or distributed.alike(lambda: load(config))
        prepared: Prepared | None = ready.prepared
        fitted_critic(ready.backbone, config, run, prepared)
    return run


@contextmanager
def _opened(
    config: RunConfig, out: str | Path, listeners: tuple[Listener, ...], ready: Ready | None
) -> Iterator[tuple[Run, Ready | None]]:
    """The run, locked; a new one is prepared first, and what is prepared for an existing one is dropped."""
    is_new = distributed.from_main(lambda: not (Path(out) / run_name(config)).exists())
    begun = ready if is_new else None
    del ready  # so that the model of an existing run, which is loaded again, is not held twice
    if is_new:
        begun = distributed.alike(partial(_prepared, config, begun))
    run = replace(distributed.from_main(lambda: Run.create(Path(out), config)), listeners=listeners)
    with _locked(run):
        yield run, begun


def _prepared(config: RunConfig, ready: Ready | None) -> Ready:
    return ready or prepare(config)


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    """The lock of the run, in the main process."""
    with ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(run.locked()))
        yield


@contextmanager
def oom_as_message() -> Iterator[None]:
    """Turn CUDA OOM into one line where no smaller batch can be tried (a critic's update, an earlier stage)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(one_line(error)) from None


def _finish(run: Run, ready: Ready | None) -> None:
    if distributed.from_main(lambda: run.has_edit):
        logger.info("nothing left to do in %s", run.path)
        return
    ready = ready or distributed.alike(lambda: _reloaded(run.config))
    method, config = ready.method, run.config
    given = {} if method.prepare is None else {"prepared": ready.prepared}
    edit = method.run(ready.backbone, ready.task, config, run, **given)
    distributed.from_main(lambda: _save(run, edit, ready))


def _reloaded(config: RunConfig) -> Ready:
    # A run of an older version may hold settings that its method refuses today.
    method = find_method(config.method)
    if method.check is not None:
        method.check(config)
    return load(config)


def _save(run: Run, given: object, ready: Ready) -> None:
    config = run.config
    edit = check_made(given, config.method, ready.backbone, ready.shapes)
    known = run.manifest["extra"]
    if absent := {role: None for role in ROLES if role not in known}:  # networks that this training did not use
        run.annotate(**absent)
    save_edit(
        edit,
        run.path / "edit",
        base=config.model,
        base_fingerprint=ready.fingerprint,
        method=config.method,
        concept=config.concept,
    )
