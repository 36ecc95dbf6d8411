"""The stages of a policy-gradient run (Alg. 3): 1-reward (where heads must be trained), 2-critic (Alg. 1), 3-policy
(Alg. 2).

Each stage writes its outputs and then its marker; a stage with a marker is skipped. Batch sizes found for this machine
are kept in the manifest and reused on one like it, because the last bits of a result depend on them. Among processes
(`cgru.distributed`) all go through the stages together, and only the main one writes.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cgru import distributed
from cgru.backbones.base import Backbone
from cgru.config import RLConfig
from cgru.critic.views import SHRINKS
from cgru.edits import LoraEdit
from cgru.fast.fixed_batch import compiled_backbone, no_recompiles, steady_backbone
from cgru.interrupt import Interrupted, interruptible
from cgru.lora.train import attach, save_adapter, weights_swapped
from cgru.rewards.weights import lineage_of
from cgru.rl.batch_size import describe_sizes, machine
from cgru.rl.build import Parts, Prepared, Setting, build_setting, load_parts, prompts_hash
from cgru.rl.callbacks import POLICY_STAGE, Observer
from cgru.rl.checkpoint import STATE, from_files, reading
from cgru.rl.critic_stage import critic_stage, tower_source
from cgru.rl.preflight import refuse_idle_processes
from cgru.rl.retention import Bank, make_bank
from cgru.rl.reward_stage import needs_heads, train_heads
from cgru.rl.state import Learner, Problem, Sizes, make_learner
from cgru.runs import Run

logger = logging.getLogger(__name__)

REWARD_STAGE = "1-reward"


@dataclass(frozen=True, eq=False)
class PolicyStage:
    """What the policy loop (`cgru.rl.train`) works on."""

    problem: Problem
    learner: Learner
    bank: Bank | None
    observer: Observer


@contextmanager
def policy_stage(backbone: Backbone, config: RLConfig, run: Run, prepared: Prepared | None) -> Iterator[PolicyStage]:
    """The last stage at its newest checkpoint, after those before it; Ctrl-C in the block stops the loop cleanly.

    Args:
        backbone: the base model, changed in place.
        config: of the run.
        run: the locked run folder, new or begun.
        prepared: of a new run; None for one that is continued.
    """
    refuse_idle_processes(config)
    setting, critic = fitted_critic(backbone, config, run, prepared)
    problem = setting.problem
    parameters = attach(
        problem.backbone.denoiser,
        rank=config.policy.rank,
        alpha=config.policy.alpha,
        targets=config.policy.targets,
        seed=problem.seed("lora"),
    )
    learner = make_learner(problem, parameters, critic)
    setting = settled(setting)
    problem = setting.problem
    with no_recompiles() if config.compile else nullcontext():
        # The bank holds what the base policy does. A fresh LoRA adds zero, so make it before anything is restored.
        bank = make_bank(problem)
        observer = Observer(setting, learner, run)
        _restore(run, problem, learner, observer)
        if learner.iteration == 0 and config.samples_every:
            observer.save_strip(0)
        with interruptible(observer):
            yield PolicyStage(problem, learner, bank, observer)
    if observer.is_stopped and not observer.is_complete:
        raise Interrupted(str(run.path))


def finished(run: Run, observer: Observer) -> LoraEdit:
    """Mark the last stage as done; returns the LoRA."""
    return distributed.from_main(lambda: _finished(run, observer))


def fitted_critic(
    backbone: Backbone, config: RLConfig, run: Run, prepared: Prepared | None
) -> tuple[Setting, nn.Module | None]:
    """The stages before the policy: reward heads and the warm-started critic."""
    parts = _known_parts(run, config, backbone, prepared.parts if prepared else None)
    heads = distributed.from_main(lambda: _heads(run, parts)) if needs_heads(config, parts.concept) else None
    setting = _known_setting(run, parts, heads, prepared.setting if prepared and heads is None else None)
    critic = critic_stage(run, setting)
    # After the critic: a tower from the hub is then on this disk, whole.
    distributed.from_main(lambda: run.annotate(**trainers(setting)))
    return setting, critic


def _known_parts(run: Run, config: RLConfig, backbone: Backbone, parts: Parts | None) -> Parts:
    """Parts with the sizes and prompts that the run began with."""
    stored, here = distributed.from_main(lambda: (run.manifest["extra"], machine(config)))
    memory = _memory(config, stored, here) if run.is_reopened else config.memory
    sizes, config = _stored_sizes(memory, stored, here), replace(config, memory=memory)
    parts = parts or distributed.alike(lambda: load_parts(config, backbone=backbone, sizes=sizes))
    parts = _alike_in_size(config, parts)
    found = prompts_hash(parts.prompts)
    if stored.get("prompts", found) != found:
        raise ValueError(
            f"the prompts of the run {str(run.path)!r} are not those it began with; allowed: the same. "
            f"Restore {config.prompts.source!r}, or start another run."
        )
    if parts.backbone.device.type == "cuda":
        logger.info("batches: %s", describe_sizes(parts.sizes))
    facts = {"sizes": asdict(parts.sizes), "sized_for": here, "prompts": found}
    distributed.from_main(lambda: run.annotate(**facts))
    return parts


def _memory(config: RLConfig, stored: dict[str, Any], here: dict[str, Any]) -> Literal["auto", "fast", "low"]:
    """The memory mode of `cgru resume`, where the folder's is that of the first start."""
    if "sizes" not in stored:
        return config.memory
    there = stored.get("sized_for", here)
    if there == here or not _read_sizes(stored["sizes"]).low_memory:
        return "auto"
    # The same device with another number of processes: full speed did not fit before.
    return "low" if config.memory == "low" or there["device"] == here["device"] else "auto"


def _stored_sizes(memory: str, stored: dict[str, Any], here: dict[str, Any]) -> Sizes | None:
    """The run's stored batch sizes; None if there are none, on another machine, or in another memory mode."""
    sizes, there = _read_sizes(stored["sizes"]) if "sizes" in stored else None, stored.get("sized_for", here)
    if there != here:
        logger.info("batch sizes were found for %s; this is %s: finding them again", _words(there), _words(here))
        return None
    is_kept = sizes is not None and memory in ("auto", "low" if sizes.low_memory else "fast")
    return sizes if is_kept else None


def _read_sizes(table: Any) -> Sizes:  # noqa: ANN401 - what a JSON file holds
    try:
        sizes = Sizes(**table)
        is_good = all(isinstance(n, int) and n >= 1 for n in (sizes.rollout, sizes.update, sizes.decode, sizes.score))
    except TypeError:  # another key, or no table
        is_good = False
    if not is_good:
        allowed = f"allowed: {', '.join(field.name for field in fields(Sizes))}, from 1. Restore the file."
        raise ValueError(f"manifest.json has the batch sizes {str(table)[:80]}; {allowed}")
    return sizes


def _words(machine: dict[str, Any]) -> str:
    return f"{machine['device']} and {machine['processes']} process{'es' if machine['processes'] > 1 else ''}"


def _alike_in_size(config: RLConfig, parts: Parts) -> Parts:
    """Parts with the sizes of the main process, which may have found others on its device."""
    sizes = distributed.from_main(lambda: parts.sizes)
    if distributed.any_of(parts.sizes != sizes):
        return distributed.alike(lambda: parts if parts.sizes == sizes else load_parts(config, sizes=sizes))
    return parts


def _known_setting(run: Run, parts: Parts, heads: Path | None, setting: Setting | None) -> Setting:
    """The setting, built if there is none yet or one of other sizes; call it in all processes."""

    def known() -> Setting:
        if setting is not None and setting.problem.sizes == parts.sizes:
            return setting
        return build_setting(parts.config, heads=heads, parts=parts)

    return distributed.alike(known)


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
    found = distributed.from_main(lambda: run.latest(POLICY_STAGE))
    if found is not None:
        extra = distributed.alike(lambda: from_files(problem, learner, found[1]))
        with reading(found[1] / STATE):
            observer.restore(extra)
        if learner.iteration != found[0]:
            raise ValueError(
                f"{str(found[1] / STATE)!r} is of iteration {learner.iteration}; allowed: {found[0]}, as the folder's "
                "name says. Restore it, or remove the folder: the stage then starts again."
            )
    distributed.from_main(lambda: run.truncate_log(learner.iteration))


def _finished(run: Run, observer: Observer) -> LoraEdit:
    """The LoRA of the best look if the run stops by looks, else the last weights; then the stage's marker."""
    learner, problem, best = observer.learner, observer.setting.problem, observer.trade_off.best
    chosen = learner.best if problem.config.watch.stop and learner.best else learner.exported
    with weights_swapped(learner.parameters, chosen), tempfile.TemporaryDirectory() as folder:
        data = save_adapter(problem.backbone.denoiser, Path(folder)).read_bytes()
    record = {"iterations": learner.iteration} | ({"best_look": asdict(best)} if best else {})
    run.finish(POLICY_STAGE, record)
    return LoraEdit.from_bytes(data)


def _heads(run: Run, parts: Parts) -> Path:
    folder = run.stage(REWARD_STAGE)
    if not run.is_done(REWARD_STAGE):
        record = train_heads(parts.config, parts.prompts, parts.backbone, parts.sizes, folder)
        run.finish(REWARD_STAGE, asdict(record))
    return folder


def settled(setting: Setting) -> Setting:
    """Wrap the backbone for training; call after the LoRA is attached.

    It is compiled if the config says so. In half precision all calls have one shape, so that rollouts and updates round
    alike.
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
