"""The stages of a run (Alg. 3): 1-reward (where heads must be trained), 2-critic (Alg. 1), 3-policy (Alg. 2), edit.

Each stage leaves its outputs and then its marker; a stage with a marker is not done again. Batch sizes that were chosen
for this machine are stored in the manifest and reused, because the last bits of a result depend on them.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from cgru.backbones.adapter import attach, save_adapter, weights_swapped
from cgru.backbones.base import exact_float32
from cgru.backbones.lora import LORA_FILE
from cgru.config import RunConfig
from cgru.pipeline.critic import critic_stage
from cgru.pipeline.observer import POLICY_STAGE, Listener, Observer
from cgru.pipeline.reward import needs_heads, train_heads
from cgru.pipeline.setting import Parts, Setting, build_setting, load_parts, prompts_hash
from cgru.rl.checkpoint import from_files
from cgru.rl.problem import Learner, Problem, Sizes, make_learner
from cgru.rl.retention import make_bank
from cgru.rl.train import train
from cgru.runs import Run, run_name

logger = logging.getLogger(__name__)

RUNS = Path("runs")
REWARD_STAGE = "1-reward"


class Interrupted(Exception):
    """Ctrl-C: the run is saved and can be resumed; its argument is the run's folder."""


def unlearn(config: RunConfig, out: str | Path = RUNS, *, listeners: tuple[Listener, ...] = ()) -> Run:
    """Run everything that is left to do for this config under the parent folder `out`; returns the finished run."""
    with exact_float32():
        is_new = not (Path(out) / run_name(config)).exists()
        # Before there is a folder: what cannot be built leaves none behind.
        parts = load_parts(config) if is_new else None
        setting = build_setting(config, parts=parts) if parts and not needs_heads(config, parts.concept) else None
        run = Run.create(Path(out), config)
        with run.locked():
            _stages(run, listeners, parts, setting)
    return run


def resume(path: str | Path, *, listeners: tuple[Listener, ...] = ()) -> Run:
    """Go on with a run folder, from its last checkpoint."""
    run = Run.open(path)
    with exact_float32(), run.locked():
        _stages(run, listeners)
    return run


def _stages(
    run: Run, listeners: tuple[Listener, ...], parts: Parts | None = None, setting: Setting | None = None
) -> None:
    if run.is_done(POLICY_STAGE):
        logger.info("nothing left to do in %s", run.path)
        return
    parts = _known_parts(run, parts)
    heads = reward_stage(run, parts)
    if setting is None or setting.problem.sizes != parts.sizes:
        setting = build_setting(run.config, heads=heads, parts=parts)
    run.annotate(reward=dict(setting.problem.reward.lineage))
    critic = critic_stage(run, setting)
    # The bank holds what the base policy does, so it is made before there is a LoRA, also on resume.
    bank = make_bank(setting.problem)
    learner = _learner(setting.problem, critic)
    observer = Observer(setting, learner, run, listeners)
    if (found := run.latest(POLICY_STAGE)) is not None:
        observer.restore(from_files(setting.problem, learner, found[1]))
    run.truncate_log(learner.iteration)
    if learner.iteration == 0 and run.config.samples_every:
        observer.save_strip(0)
    if not observer.is_complete:  # it is where a run was killed after its last checkpoint
        with _saving_on_interrupt(observer):
            train(setting.problem, learner, bank, after=observer.after)
    if observer.stop and not observer.is_complete:
        raise Interrupted(str(run.path))
    export_edit(run, setting, learner)
    run.finish(POLICY_STAGE, {"iterations": learner.iteration, **_best(observer)})


def _known_parts(run: Run, parts: Parts | None) -> Parts:
    """Parts with the sizes and prompts that the run began with."""
    stored: dict[str, Any] = run.manifest["extra"]
    sizes = Sizes(**stored["sizes"]) if "sizes" in stored else None
    parts = parts or load_parts(run.config, sizes=sizes)
    parts = replace(parts, sizes=sizes or parts.sizes)
    found = prompts_hash(parts.prompts)
    if stored.get("prompts", found) != found:
        raise ValueError(
            f"the prompts of the run {str(run.path)!r} are not those it began with; allowed: the same. "
            f"Restore {run.config.prompts.source!r}, or start another run."
        )
    run.annotate(sizes=asdict(parts.sizes), prompts=found)
    return parts


def reward_stage(run: Run, parts: Parts) -> Path | None:
    """Class heads trained on the base model's own pictures, once; None where the reward needs none of them."""
    if not needs_heads(run.config, parts.concept):
        return None
    folder = run.stage(REWARD_STAGE)
    if not run.is_done(REWARD_STAGE):
        record = train_heads(run.config, parts.prompts, parts.backbone, parts.sizes, folder)
        run.finish(REWARD_STAGE, asdict(record))
    return folder


def export_edit(run: Run, setting: Setting, learner: Learner) -> Path:
    """Write edit/pytorch_lora_weights.safetensors: the best look's weights if the run stops by looks, else the last."""
    chosen = learner.best if setting.problem.config.watch.stop and learner.best else learner.exported
    with weights_swapped(learner.parameters, chosen), tempfile.TemporaryDirectory() as folder:
        data = save_adapter(setting.problem.backbone.denoiser, Path(folder)).read_bytes()
    return run.save(f"edit/{LORA_FILE}", data)


def _learner(problem: Problem, critic: nn.Module | None) -> Learner:
    policy = problem.config.policy
    parameters = attach(
        problem.backbone.denoiser,
        rank=policy.rank,
        alpha=policy.alpha,
        targets=policy.targets,
        seed=problem.seed("lora"),
    )
    return make_learner(problem, parameters, critic)


@contextmanager
def _saving_on_interrupt(observer: Observer) -> Iterator[None]:
    """The first Ctrl-C ends the run after the current iteration, saved; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals in the main thread only
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        if observer.stop:
            raise KeyboardInterrupt
        observer.stop = True
        logger.warning(
            "stopping after this iteration; press Ctrl-C again to stop at once (back to the last checkpoint)"
        )

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _best(observer: Observer) -> dict[str, Any]:
    best = observer.trade_off.best
    return {"best_look": asdict(best)} if best else {}
