"""The work after each iteration: log, outside detector, sample strip, checkpoint, and the decision to stop.

With several processes, each draws its share of the pictures; the main one evaluates, writes and logs, and all stop
together.
"""

from __future__ import annotations

import io
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from cgru import distributed
from cgru.backbones.base import as_rgb
from cgru.lora.train import weights_swapped
from cgru.mdp.rollout import sample
from cgru.outside_detector import BestTradeOff, Look, alarm, look, record
from cgru.rewards.base import checked
from cgru.rl.build import Setting
from cgru.rl.checkpoint import to_files
from cgru.rl.reward_stage import forget_reward
from cgru.rl.state import Learner, Problem
from cgru.rl.train import Iteration, Record
from cgru.runs import Run

logger = logging.getLogger(__name__)

POLICY_STAGE = "3-policy"
SHOWN = 8
"""Pictures in the strip of each look, of fixed prompts and seeds (the paper's progression figure)."""


@dataclass(eq=False)
class Observer:
    """All work around an iteration except learning; the loop calls `after`."""

    setting: Setting
    learner: Learner
    run: Run
    trade_off: BestTradeOff = field(init=False)
    stop: bool = False
    """Asked of this process (Ctrl-C)."""
    is_stopped: bool = False
    """Asked of any process by the end of the last iteration; the same in all."""

    def __post_init__(self) -> None:
        """Start without a best look."""
        watch = self.setting.problem.config.watch
        self.trade_off = BestTradeOff(watch.target, watch.patience)

    def after(self, done: Iteration) -> bool:
        """Log, look, save; True to stop."""
        config, count = self.setting.problem.config, self.learner.iteration
        is_last = count >= config.policy.iterations
        found: Record = dict(done.record)
        if self.setting.detector is not None and (count % config.watch.every == 0 or is_last):
            found |= self._watch(count)
        if config.samples_every and (count % config.samples_every == 0 or self.is_complete):
            self.save_strip(count)
        distributed.from_main(lambda: self.run.log(found))
        self.is_stopped = distributed.any_of(self.stop)  # read once: a Ctrl-C from here on is for the next iteration
        stop = self.is_stopped or self.is_complete
        if stop or count % config.checkpoint_every == 0:
            distributed.from_main(self.checkpoint)
        return stop

    @property
    def is_complete(self) -> bool:
        """Whether training is over: all iterations are done, or validation checks have stopped it."""
        config = self.setting.problem.config
        is_enough = config.watch.stop and self.trade_off.is_over
        return is_enough or self.learner.iteration >= config.policy.iterations

    def checkpoint(self) -> None:
        """Keep everything the next iteration reads."""
        extra = {"trade_off": self.trade_off.state_dict()}
        self.run.checkpoint(POLICY_STAGE, to_files(self.learner, extra), self.learner.iteration)

    def shrink(self, problem: Problem) -> None:
        """Continue with smaller batches, and record them in the run."""
        self.setting = replace(self.setting, problem=problem)
        distributed.from_main(lambda: self.run.annotate(sizes=asdict(problem.sizes)))

    def restore(self, extra: dict[str, Any]) -> None:
        """Take over what a checkpoint knew."""
        self.trade_off.load_state_dict(extra["trade_off"])

    def _watch(self, iteration: int) -> Record:
        seen = self.look(iteration)
        if self.trade_off.update(seen):
            self.learner.best = {name: value.clone() for name, value in self.learner.exported.items()}
        found: Record = dict(record(seen))
        if message := alarm(seen, self.setting.problem.config.watch.alarm):
            logger.warning(message)
            found["watch/alarm"] = message
        return found

    def look(self, iteration: int) -> Look:
        """Run the outside detector on validation prompts, always with the same noise, with the weights that are
        saved."""
        problem, detector = self.setting.problem, self.setting.detector
        assert detector is not None
        forget, retain = problem.prompts.validation_forget, problem.prompts.validation_retain
        images = self.pictures([prompt.text for prompt in (*forget, *retain)], "validation")
        gone, kept = images[: len(forget)], images[len(forget) :]
        own = forget_reward(problem.reward)

        def seen() -> Look:
            mean = float(checked(own, gone, [prompt.text for prompt in forget]).mean())
            fraction = (mean - own.low) / (own.high - own.low)
            return look(detector, gone, kept, retain, iteration=iteration, reward_fraction=fraction)

        return distributed.from_main(seen)  # sent to all, not recomputed: it decides on stopping, so it must be equal

    @torch.no_grad()
    def pictures(self, prompts: list[str], purpose: str) -> Tensor:
        """Pictures as users sample them: no noise in the sampler, fixed seeds."""
        problem = self.setting.problem
        sampling, sizes, cond = problem.config.sampling, problem.sizes, problem.encode(prompts)
        seeds = [problem.seed(purpose, i) for i in range(len(prompts))]

        def drawn(some: slice) -> Tensor:
            with weights_swapped(self.learner.parameters, self.learner.exported):
                x = sample(
                    problem.backbone,
                    cond[some],
                    seeds[some],
                    kernel=problem.backbone.kernel(sampling.steps, eta=0.0),
                    guidance=sampling.guidance,
                    batch_size=sizes.rollout,
                )
            return problem.backbone.decode(x, batch_size=sizes.decode)

        return distributed.spread(len(prompts), drawn)

    def save_strip(self, iteration: int) -> None:
        """Fixed prompts and seeds as one row: samples/0010.png; half forget, half retain where there are any."""
        sets = self.setting.problem.prompts
        forget = [prompt.text for prompt in (sets.validation_forget or sets.policy)[: SHOWN // 2]]
        retain = [prompt.text for prompt in (sets.validation_retain or sets.retain)[: SHOWN - SHOWN // 2]]
        images = self.pictures(forget + retain, "samples")
        distributed.from_main(lambda: self.run.save(f"samples/{iteration:04d}.png", _png(images)))


def _png(images: Tensor) -> bytes:
    row = torch.cat(list(as_rgb(images)), 2).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(row).save(buffer, "PNG")
    return buffer.getvalue()
