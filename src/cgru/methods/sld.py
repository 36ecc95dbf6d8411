"""SLD: Safe Latent Diffusion (Schramowski, Brack, Deiseroth, Kersting; CVPR 2023).

Link: https://arxiv.org/abs/2211.05105. Official repository: https://github.com/ml-research/safe-latent-diffusion (MIT).
Variant: the published guidance with its four presets; `strength=negative` is plain negative guidance, for comparison.
What differs: the warm-up is given as a share of the steps (the paper's number refers to 50), so that samplings of 10
steps have a warm-up, too; the guidance acts on whatever the network predicts (v in SD 2.x). Nothing is trained, and
only the settings are saved.
Defaults: medium, as in the authors' pipeline; on Emoji Canvas ours (`CANVAS`, docs/lab.md). The safety concept is the
task's concept; the paper's list of 20 is `text=paper-list`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from cgru.config import RunConfig
from cgru.config.rules import Decay, NotNegative, Share, Whole
from cgru.embedded import EMBEDDED
from cgru.method import Method

if TYPE_CHECKING:
    from torch import Tensor

    from cgru.backbones.base import Backbone
    from cgru.edits import HookEdit
    from cgru.mdp.kernel import ReverseKernel
    from cgru.mdp.trajectory import Conditioning
    from cgru.runs import Run
    from cgru.tasks import UnlearnTask

logger = logging.getLogger(__name__)

Strength = Literal["auto", "weak", "medium", "strong", "max", "negative"]
PAPER_LIST = (
    "hate, harassment, violence, suffering, humiliation, harm, suicide, sexual, nudity, bodily fluids, blood, obscene "
    "gestures, illegal activity, drug use, theft, vandalism, weapons, child abuse, brutality, cruelty"
)
NO_GRADIENT = "SLD acts through classifier-free guidance over whole samplings, and the attack's loss has neither"


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings in addition to those of every run. `strength` sets the five numbers, which can also be set one by
    one."""

    strength: Strength = "auto"
    """A preset of the paper, or negative: the concept in place of the empty prompt, without the five numbers. auto:
    medium, as in the authors' pipeline; on Emoji Canvas the best setting that we measured."""
    text: str = ""
    """The safety concept. Empty: the words of the run's concept. paper-list: the paper's 20. Else the text itself."""
    words: Whole = 0
    """Most words of the concept that are used, the plainest first; a plural counts once. 0: 8, or 1 for a class of
    Emoji Canvas, which was best with `max` in our measurements."""
    scale: NotNegative = 1000.0
    """s_S: guidance away from the concept grows this many times faster than the predictions differ, up to 1."""
    threshold: float = 0.01
    """λ: no guidance where the prompt's prediction exceeds the concept's by at least this."""
    warmup: Share = 0.2
    """δ as a share of the steps: in these first steps the guidance is not applied, but its momentum accumulates."""
    momentum: NotNegative = 0.3
    """s_m: weight of the earlier steps' guidance."""
    decay: Decay = 0.4
    """β: share of the momentum that each step keeps."""


NUMBERS = ("scale", "threshold", "warmup", "momentum", "decay")
KEPT = ("strength", "text", *NUMBERS)
"""Settings of the hook, in edit.json."""
PRESETS: Mapping[str, tuple[float, ...]] = {
    "weak": (20.0, 0.0, 15 / 50, 0.0, 0.0),
    "medium": (1000.0, 0.01, 10 / 50, 0.3, 0.4),
    "strong": (2000.0, 0.025, 7 / 50, 0.5, 0.7),
    "max": (5000.0, 1.0, 0.0, 0.5, 0.7),
}
"""The paper's table, in the order of NUMBERS."""
CANVAS: Strength = "max"
"""What `auto` is on Emoji Canvas: the best of twelve settings (docs/lab.md)."""


def adjust(config: Config) -> Config:
    """The numbers of the asked strength."""
    auto: Strength = CANVAS if config.model == EMBEDDED else "medium"
    strength = auto if config.strength == "auto" else config.strength
    numbers: dict[str, Any] = dict(zip(NUMBERS, PRESETS.get(strength, ()), strict=False))
    return replace(config, strength=strength, **numbers)


def prepare(backbone: Backbone, task: UnlearnTask, config: Config) -> None:
    """Refuse a model that has no classifier-free guidance."""
    edit_for(task, config).check(backbone)


def run(backbone: Backbone, task: UnlearnTask, config: Config, run: Run, *, prepared: None = None) -> HookEdit:
    """The hook with its settings; there is nothing to train."""
    edit = edit_for(task, config)
    run.log({"iteration": 0, "safety concept": str(edit.settings["text"])})
    return edit


def edit_for(task: UnlearnTask, config: Config) -> HookEdit:
    """The edit that the settings ask for."""
    from cgru.edits import HookEdit

    kept = {name: getattr(config, name) for name in KEPT}
    return HookEdit("sld", kept | {"text": safety_concept(task, config)})


def safety_concept(task: UnlearnTask, config: Config) -> str:
    """The text for the third branch, the safety concept."""
    if config.text:
        return PAPER_LIST if config.text == "paper-list" else config.text
    distinct: dict[str, str] = {}
    for word in task.words:
        distinct.setdefault(word.lower().removesuffix("s"), word)
    count = config.words or (1 if config.model == EMBEDDED and task.concept.kind == "class" else 8)
    words = list(distinct.values())[:count]
    return ", ".join(f"{word} style" if task.concept.kind == "style" else word for word in words)


def make_hook(backbone: Backbone, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Backbone:
    """The backbone that guides away from the concept, with the settings stored in edit.json (KEPT)."""
    from cgru.backbones.hooked import Hooked

    if settings.keys() != set(KEPT):
        raise ValueError(f"SLD's settings are {', '.join(settings)}; allowed: {', '.join(KEPT)}. Restore edit.json.")
    config = Config(concept=settings["text"], **settings)
    if isinstance(backbone, Hooked) and backbone.prediction is not None:
        raise ValueError(
            "SLD on a model whose predictions another hook makes already; allowed: one such edit. Name several "
            "concepts in one edit instead, as text='dog, cat'."
        )
    safety = backbone.encode_text([config.text])
    if not safety.unconditional:
        raise ValueError(
            f"{backbone.name!r} has no classifier-free guidance (no unconditional tensors), through which SLD acts; "
            "allowed: a model with an empty prompt. Choose another method."
        )
    guide = Guide(backbone, safety, config)
    return Hooked(backbone, prediction=guide.predict, begin=guide.begin, no_gradient=NO_GRADIENT)


def steer(empty: Tensor, prompt: Tensor, safety: Tensor, velocity: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The guidance γ towards the concept that a step takes away, and the momentum ν for the next step.

    Args:
        empty: e(∅), the prediction without a prompt.
        prompt: e(p).
        safety: e(S), for the safety concept.
        velocity: ν.
        config: of the method.
    """
    difference = prompt - safety
    # φ = min(1, s_S |e(p) - e(S)|);  μ = φ where e(p) - e(S) < λ, else 0. Signed, as in the paper.
    share = (config.scale * difference.abs()).clamp(max=1) * (difference < config.threshold)
    # γ = μ (e(S) - e(∅)) + s_m ν
    guidance = share * (safety - empty) + config.momentum * velocity
    # ν' = β ν + (1 - β) γ
    return guidance, config.decay * velocity + (1 - config.decay) * guidance


@dataclass(eq=False)
class Guide:
    """The state of the guidance during a sampling: the current step and the momentum."""

    backbone: Backbone
    safety: Conditioning
    """One row."""
    config: Config
    times: list[float] = field(default_factory=list)
    """Of the kernel that is drawn with."""
    index: int = -1
    """The last step; -1: none yet."""
    velocity: Tensor | None = None
    is_told: bool = False
    """Whether the warning was given that SLD has no effect without guidance."""

    def begin(self, kernel: ReverseKernel) -> None:
        """Forget the sampling before."""
        self.times, self.index, self.velocity = kernel.timesteps.tolist(), -1, None

    def predict(self, x: Tensor, time: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        """e(∅) + s_g (e(p) - e(∅) - γ), all three in one batch; γ counts from the end of the warm-up."""
        import torch

        from cgru.mdp.trajectory import Conditioning

        if guidance <= 1:
            if not self.is_told:
                logger.warning("guidance is %g: without classifier-free guidance, SLD does nothing", guidance)
            self.is_told = True
            return self.backbone.predict(x, time, cond, guidance=guidance)
        if self.config.strength == "negative":
            away = replace(cond, unconditional=self.safety.tensors)
            return self.backbone.predict(x, time, away, guidance=guidance)
        velocity = self._continue(x, time)
        safety = self.safety[torch.zeros(len(x), dtype=torch.long)]
        branches = Conditioning.cat([cond.empty, cond, safety])
        both = self.backbone.predict(torch.cat([x] * 3), torch.cat([time] * 3), branches, guidance=1.0)
        e_empty, e_prompt, e_safety = both.chunk(3)
        away_from, self.velocity = steer(e_empty, e_prompt, e_safety, velocity, self.config)
        direction = e_prompt - e_empty
        if self.index >= round(self.config.warmup * len(self.times)):
            direction = direction - away_from
        return e_empty + guidance * direction

    def _continue(self, x: Tensor, time: Tensor) -> Tensor:
        """The momentum for the step at `time`: zero at a sampling's first step, which the next batch begins with."""
        now = set(time.tolist())
        index = self.times.index(now.pop()) if len(now) == 1 and now <= set(self.times) else None
        before, self.index = self.index, -1 if index is None else index
        if index == 0:
            return x.new_zeros(x.shape)
        if index is None or index != before + 1 or self.velocity is None or self.velocity.shape != x.shape:
            raise ValueError(
                f"SLD, whose momentum goes from step to step, was asked for step {index} after {before}; allowed: one "
                "batch after another, from its first step to its last, with the kernel of the edited model."
            )
        return self.velocity


METHOD = Method(
    config=Config,
    run=run,
    summary="guides each picture away from the concept while it is drawn",
    adjust=adjust,
    decisive=("strength",),
    prepare=prepare,
)
