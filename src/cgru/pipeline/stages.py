"""The stages of a run (Alg. 3): 1-reward (where heads must be trained), 2-critic (Alg. 1), 3-policy (Alg. 2), edit.

Each stage leaves its outputs and then its marker; a stage with a marker is not done again. Batch sizes that were chosen
for this machine are stored in the manifest and reused on one like it, because the last bits of a result depend on them.

Among processes (`cgru.processes`) all go through the stages together; the main one holds the run and writes, what is
there already is decided by it, and what it wrote is read by all. Their number is no part of the run.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from cgru import processes
from cgru.backbones.adapter import attach, save_adapter, weights_swapped
from cgru.backbones.base import Backbone, exact_float32, one_line
from cgru.backbones.lora import LORA_FILE
from cgru.backbones.steady import compiled_backbone, no_recompiles, steady_backbone
from cgru.config import RunConfig
from cgru.critic.views import SHRINKS
from cgru.pipeline.critic import CRITIC_STAGE, critic_stage, tower_source
from cgru.pipeline.observer import POLICY_STAGE, Listener, Observer
from cgru.pipeline.reward import needs_heads, train_heads
from cgru.pipeline.setting import Parts, Setting, build_setting, load_parts, prompts_hash
from cgru.pipeline.sizes import describe_sizes, machine
from cgru.rewards.weights import lineage_of
from cgru.rl.checkpoint import from_files
from cgru.rl.problem import Learner, Problem, Sizes, make_learner
from cgru.rl.retention import make_bank
from cgru.rl.room import out_of_memory
from cgru.rl.train import train
from cgru.runs import Run, run_name

logger = logging.getLogger(__name__)

RUNS = Path("runs")
REWARD_STAGE = "1-reward"


class Interrupted(Exception):
    """Ctrl-C: the run is saved and can be resumed; its argument is the run's folder."""


def unlearn(
    config: RunConfig,
    out: str | Path = RUNS,
    *,
    listeners: tuple[Listener, ...] = (),
    until: str = POLICY_STAGE,
    parts: Parts | None = None,
) -> Run:
    """Run everything that is left to do for this config under the parent folder `out`, up to a stage; returns the run.

    Args:
        config: what to do.
        out: the parent folder.
        listeners: called after each iteration.
        until: the last stage; "2-critic" for a critic without a policy.
        parts: what was loaded for this config already, for a run that is new; hold no other reference to them.
    """
    processes.from_main(lambda: _refuse_idle_processes(config))
    with exact_float32(), memory_in_words():
        is_new = processes.from_main(lambda: not (Path(out) / run_name(config)).exists())
        # Before there is a folder: what cannot be built leaves none behind.
        parts, setting = processes.alike(lambda: _prepared(config, parts)) if is_new else (None, None)
        run = processes.from_main(lambda: Run.create(Path(out), config))
        with _held(run):
            _stages(run, listeners, parts, setting, until)
    return run


def resume(path: str | Path, *, listeners: tuple[Listener, ...] = ()) -> Run:
    """Go on with a run folder, from its last checkpoint."""
    run = processes.from_main(lambda: Run.open(path))
    _refuse_idle_processes(run.config)
    with exact_float32(), _held(run), memory_in_words():
        _stages(run, listeners, keeps_sizes=True)
    return run


def _refuse_idle_processes(config: RunConfig) -> None:
    count, n = processes.count(), config.policy.trajectories
    if count > n:
        raise ValueError(
            f"{count} processes for {n} trajectories an iteration; allowed: at most {n}, so that each has work. Launch "
            "fewer processes, or raise policy.trajectories."
        )


def _prepared(config: RunConfig, parts: Parts | None) -> tuple[Parts, Setting | None]:
    parts = parts or load_parts(config)
    return parts, None if needs_heads(config, parts.concept) else build_setting(config, parts=parts)


@contextmanager
def _held(run: Run) -> Iterator[None]:
    """The lock of the run, in the main process."""
    with ExitStack() as stack:
        processes.from_main(lambda: stack.enter_context(run.locked()))
        yield


@contextmanager
def memory_in_words() -> Iterator[None]:
    """Memory that runs out where nothing can be halved (a critic's update, an earlier stage): one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(one_line(error)) from None


def _stages(
    run: Run,
    listeners: tuple[Listener, ...],
    parts: Parts | None = None,
    setting: Setting | None = None,
    until: str = POLICY_STAGE,
    keeps_sizes: bool = False,
) -> None:
    if processes.from_main(lambda: run.is_done(until)):
        logger.info("nothing left to do in %s", run.path)
        return
    parts = _known_parts(run, parts, keeps_sizes)
    heads = reward_stage(run, parts)
    setting = _known_setting(run, parts, heads, setting)
    critic = critic_stage(run, setting)
    # After the critic: a tower from the hub is then on this disk, whole.
    processes.from_main(lambda: run.annotate(**trainers(setting)))
    if until == CRITIC_STAGE:
        return
    learner = _learner(setting.problem, critic)
    fast = settled(setting)
    with no_recompiles() if run.config.compile else nullcontext():
        _policy_stage(run, fast, learner, listeners)


def _policy_stage(run: Run, setting: Setting, learner: Learner, listeners: tuple[Listener, ...]) -> None:
    problem = setting.problem
    # The bank holds what the base policy does: a fresh LoRA adds zero. So it is made before anything is restored.
    bank = make_bank(problem)
    observer = Observer(setting, learner, run, listeners)
    _restore(run, problem, learner, observer)
    if learner.iteration == 0 and run.config.samples_every:
        observer.save_strip(0)
    if not observer.is_complete:  # it is where a run was killed after its last checkpoint
        with _saving_on_interrupt(observer):
            train(problem, learner, bank, after=observer.after, after_halving=observer.shrink)
    if observer.is_stopped and not observer.is_complete:
        raise Interrupted(str(run.path))
    processes.from_main(lambda: _finish(run, observer))


def _known_parts(run: Run, parts: Parts | None, keeps_sizes: bool) -> Parts:
    """Parts with the sizes and prompts that the run began with."""
    stored, here = processes.from_main(lambda: (run.manifest["extra"], machine(run.config)))
    memory = _memory(run.config, stored, here) if keeps_sizes else run.config.memory
    sizes, config = _stored_sizes(memory, stored, here), replace(run.config, memory=memory)
    parts = _alike_in_size(config, parts or processes.alike(lambda: load_parts(config, sizes=sizes)))
    found = prompts_hash(parts.prompts)
    if stored.get("prompts", found) != found:
        raise ValueError(
            f"the prompts of the run {str(run.path)!r} are not those it began with; allowed: the same. "
            f"Restore {run.config.prompts.source!r}, or start another run."
        )
    if parts.backbone.device.type == "cuda":
        logger.info("batches: %s", describe_sizes(parts.sizes))
    facts = {"sizes": asdict(parts.sizes), "sized_for": here, "prompts": found}
    processes.from_main(lambda: run.annotate(**facts))
    return parts


def _memory(config: RunConfig, stored: dict[str, Any], here: dict[str, Any]) -> Literal["auto", "fast", "low"]:
    """The mode of `cgru resume`: the folder's is that of the first start, another may have been found since."""
    if "sizes" not in stored:
        return config.memory
    there = stored.get("sized_for", here)
    if there == here or not stored["sizes"]["low_memory"]:
        return "auto"
    # Among another number of processes on the same device: what had not fitted otherwise.
    return "low" if config.memory == "low" or there["device"] == here["device"] else "auto"


def _stored_sizes(memory: str, stored: dict[str, Any], here: dict[str, Any]) -> Sizes | None:
    """The sizes that a run has; None before, on another machine, and where it is now to be in the other memory mode."""
    sizes, there = Sizes(**stored["sizes"]) if "sizes" in stored else None, stored.get("sized_for", here)
    if there != here:
        logger.info("batch sizes were found for %s; here: %s; they are found anew", _words(there), _words(here))
        return None
    is_kept = sizes is not None and memory in ("auto", "low" if sizes.low_memory else "fast")
    return sizes if is_kept else None


def _words(machine: dict[str, Any]) -> str:
    return f"{machine['device']} and {machine['processes']} process{'es' if machine['processes'] > 1 else ''}"


def _alike_in_size(config: RunConfig, parts: Parts) -> Parts:
    """Parts with the sizes of the main process, which may have found others on its device."""
    sizes = processes.from_main(lambda: parts.sizes)
    if processes.any_of(parts.sizes != sizes):
        return processes.alike(lambda: parts if parts.sizes == sizes else load_parts(config, sizes=sizes))
    return parts


def _known_setting(run: Run, parts: Parts, heads: Path | None, setting: Setting | None) -> Setting:
    """The setting, built where there is none yet or one of other sizes; all processes ask, though not all may build."""

    def known() -> Setting:
        if setting is not None and setting.problem.sizes == parts.sizes:
            return setting
        return build_setting(run.config, heads=heads, parts=parts)

    return processes.alike(known)


def trainers(setting: Setting) -> dict[str, dict[str, Any] | None]:
    """The lineages of what the training goes by (`cgru.lineage`), so that no judge of its result is a relative."""
    source, detector = tower_source(setting.problem.config), setting.detector
    return {
        "reward": dict(setting.problem.reward.lineage),
        "critic": None if source is None else lineage_of(source),
        "detector": None if detector is None else dict(detector.lineage),
    }


def _restore(run: Run, problem: Problem, learner: Learner, observer: Observer) -> None:
    """Go back to the newest checkpoint, and drop what was logged after it."""
    found = processes.from_main(lambda: run.latest(POLICY_STAGE))
    if found is not None:
        observer.restore(processes.alike(lambda: from_files(problem, learner, found[1])))
    processes.from_main(lambda: run.truncate_log(learner.iteration))


def _finish(run: Run, observer: Observer) -> None:
    export_edit(run, observer.setting, observer.learner)
    run.finish(POLICY_STAGE, {"iterations": observer.learner.iteration, **_best(observer)})


def reward_stage(run: Run, parts: Parts) -> Path | None:
    """Class heads trained on the base model's own pictures, once; None where the reward needs none of them."""
    return processes.from_main(lambda: _heads(run, parts)) if needs_heads(run.config, parts.concept) else None


def _heads(run: Run, parts: Parts) -> Path:
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


def settled(setting: Setting) -> Setting:
    """The setting as its policy is trained, compiled if the config asks for it; call it with the LoRA on.

    In half precision all predictions are of one shape: else rollout and update would round differently.
    """
    problem = setting.problem
    config, batch, decode = problem.config, problem.sizes.update, problem.sizes.decode
    if config.compile:
        shrink = SHRINKS[config.critic.decode]
        fast: Backbone = compiled_backbone(
            problem.backbone, batch=batch, decode_batch=decode, guidance=config.sampling.guidance, shrink=shrink
        )
    elif problem.backbone.dtype == torch.float32:
        return setting
    else:
        fast = steady_backbone(problem.backbone, batch=batch, decode_batch=decode)
    return replace(setting, problem=replace(problem, backbone=fast))


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
