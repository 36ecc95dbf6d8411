"""ESD: Erasing Concepts from Diffusion Models (Gandikota, Materzyńska, Fiotto-Kaufman, Bau; ICCV 2023).

Link: https://arxiv.org/abs/2303.07345. Official repository: https://github.com/rohitgandikota/erasing (MIT).
Variant: ESD-x (train=x) and ESD-u (train=u) as in the code of the paper, with the paper's η (a later script of the
authors counts it as η + 1).
What differs: the networks are evaluated at exactly the time that the rollout has reached, as in that later script; the
code of the paper draws a time near it. If the concept has several words, each picture uses one of them at random, and
`prompts=sentences` puts it in a sentence. Any parametrisation of the prediction is supported, not only the noise.
Defaults: the paper's code for Stable Diffusion (`Config`), ours for Emoji Canvas (`CANVAS`, docs/lab.md).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cgru import distributed
from cgru.config import RunConfig
from cgru.config.rules import Count, NotNegative, Positive
from cgru.embedded import EMBEDDED
from cgru.interrupt import Interrupted, interruptible
from cgru.method import Method
from cgru.seeds import child_random, child_seed

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Adam

    from cgru.backbones.base import Backbone
    from cgru.edits import WeightsEdit
    from cgru.mdp.kernel import ReverseKernel
    from cgru.mdp.trajectory import Conditioning
    from cgru.runs import Run
    from cgru.tasks import UnlearnTask

STAGE, STATE = "training", "state.pt"
CROSS_ATTENTION = "attn2"
FROZEN = ("time_embedding", "add_embedding", "conv_norm_out", "conv_out")
"""Parts that ESD-u does not train, besides cross-attention: the embedding of time (in SDXL also of sizes), the head."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings in addition to those of every run; `checkpoint_every` does not change the result."""

    train: Literal["x", "u"] = "x"
    """x: cross-attention, for concepts that a prompt names; u: everything else except time embedding and output
    head."""
    negative_guidance: Positive = 1.0
    """η: distance of the target beyond the empty prompt's prediction, away from the concept's."""
    iterations: Count = 1000
    """Optimiser steps."""
    learning_rate: Positive = 1e-5
    """Adam's."""
    batch: Count = 1
    """Pictures per iteration, all at the same step of their rollouts."""
    steps: Count = 50
    """Steps of a whole rollout; each iteration stops before one of them at random."""
    guidance: NotNegative = 3.0
    """Classifier-free guidance of the rollouts; the loss has none."""
    prompts: Literal["words", "sentences"] = "words"
    """words: the concept's words by themselves; sentences: each in one of the task's sentences."""
    checkpoint_every: Count = 100
    """Iterations between checkpoints; the last one is always saved."""

    @property
    def length(self) -> int:
        """How many iterations there are."""
        return self.iterations


CANVAS: Mapping[str, Mapping[str, Any]] = {
    "x": {"negative_guidance": 1.0, "iterations": 300, "learning_rate": 2e-4, "batch": 4, "steps": 10},
    "u": {"negative_guidance": 1.0, "iterations": 150, "learning_rate": 3e-5, "batch": 4, "steps": 10},
}
"""Defaults for Emoji Canvas: the best of twelve settings each on Dogs, Horses and Flowers (docs/lab.md)."""


def adjust(config: Config) -> Config:
    """On Emoji Canvas, replace settings that still have Stable Diffusion's defaults with those for Emoji Canvas."""
    if config.model != EMBEDDED:
        return config
    given = {field.name: field.default for field in fields(config)}
    own = CANVAS[config.train]
    return replace(config, **{name: value for name, value in own.items() if getattr(config, name) == given[name]})


def check(config: Config) -> None:
    """Refuse settings that cannot be trained, before a model is loaded."""
    if config.dtype == "fp16":
        raise ValueError("dtype is fp16, in which ESD's gradients vanish; allowed: fp32, bf16. Set dtype=bf16.")
    if (count := distributed.count()) > 1:
        raise ValueError(f"{count} processes, and ESD trains in one; allowed: 1. Launch one process for each run.")


def prepare(backbone: Backbone, task: UnlearnTask, config: Config) -> None:
    """Refuse a model without cross-attention or an empty prompt, and more steps than it has times."""
    trained_parameters(backbone, config.train)
    backbone.kernel(config.steps, eta=0.0)
    if not backbone.encode_text([task.words[0]]).unconditional:
        raise ValueError(
            f"{backbone.name!r} has no empty prompt (no unconditional tensors), which ESD steers towards; allowed: a "
            "model with classifier-free guidance. Choose another method."
        )


def run(backbone: Backbone, task: UnlearnTask, config: Config, run: Run, *, prepared: None = None) -> WeightsEdit:
    """Minimise ‖e_θ(z, c, t) - target‖² over the trained parameters; returns their change."""
    from cgru.edits import WeightsEdit

    check(config)
    kernel = backbone.kernel(config.steps, eta=0.0)
    training = begin(backbone, config)
    if found := run.latest(STAGE):
        training.restore(found[1])
    run.truncate_log(training.iteration)
    with interruptible(training):
        while training.iteration < config.iterations and not training.is_stopped:
            i = training.iteration
            # c, and the step k at which its rollout stops
            cond = backbone.encode_text(prompts_of(task, config, i))
            k = child_random(config.seed, "step", i).randrange(config.steps)
            # z: k steps of the guided sampler with the network as trained so far
            seeds = [child_seed(config.seed, "noise", i, j) for j in range(config.batch)]
            z = rollout_to(k, backbone, cond, seeds, kernel=kernel, guidance=config.guidance)
            # L = mean (e_θ(z, c, t) - target)²
            loss = training.step(z, kernel.timesteps[k].expand(len(z)), cond, config.negative_guidance)
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} in iteration {i}: training has diverged. Lower learning_rate.")
            run.log({"iteration": i, "loss": loss, "step": k})
            training.is_stopped = training.stop  # read once: a Ctrl-C from here on is for the next iteration
            count = training.iteration
            if training.is_stopped or count == config.iterations or count % config.checkpoint_every == 0:
                run.checkpoint(STAGE, {STATE: training.save}, count)
    if training.iteration < config.iterations:
        raise Interrupted(str(run.path))
    return WeightsEdit.between({"denoiser": training.before}, {"denoiser": training.learned})


def trained_parameters(backbone: Backbone, part: Literal["x", "u"]) -> dict[str, nn.Parameter]:
    """The parameters of ESD-x or ESD-u by name; ValueError where there is no cross-attention to tell them by."""
    own = dict(backbone.denoiser.named_parameters())
    cross = {name: parameter for name, parameter in own.items() if CROSS_ATTENTION in name.split(".")}
    if not cross:
        raise ValueError(
            f"{backbone.name!r} has no cross-attention layers ('{CROSS_ATTENTION}'), which ESD tells its weights by; "
            "allowed: a diffusers UNet that reads text. Choose another method."
        )
    others = {name: parameter for name, parameter in own.items() if name not in cross}
    return cross if part == "x" else {n: p for n, p in others.items() if n.split(".")[0] not in FROZEN}


def prompts_of(task: UnlearnTask, config: Config, iteration: int) -> list[str]:
    """The prompts of an iteration, drawn anew for each."""
    from cgru.prompts import sentence

    random = child_random(config.seed, "prompts", iteration)
    words = random.choices(task.words, k=config.batch)
    return words if config.prompts == "words" else [sentence(random.choice(task.templates), word) for word in words]


def rollout_to(
    k: int, backbone: Backbone, cond: Conditioning, seeds: list[int], *, kernel: ReverseKernel, guidance: float
) -> Tensor:
    """The states at step k of deterministic rollouts, which steps 0 to k - 1 lead to."""
    import torch

    from cgru.mdp.rollout import noise_for

    with torch.no_grad():
        z = torch.cat([noise_for(seed, backbone.latent_shape, 0) for seed in seeds]).to(backbone.device)
        for index in range(k):
            time = kernel.timesteps[index].expand(len(z))
            z = kernel.step(backbone.predict(z, time, cond, guidance=guidance), z, index).mean
    return z


def target(empty: Tensor, concept: Tensor, negative_guidance: float) -> Tensor:
    """The target, away from the concept: e_*(z, ∅, t) - η (e_*(z, c, t) - e_*(z, ∅, t)).

    The weights add up to 1, so this is the same target whether the network predicts the noise, v or a velocity, all of
    which are linear in the noise at a given z.
    """
    return empty - negative_guidance * (concept - empty)


@dataclass(eq=False)
class Training:
    """The state that changes from iteration to iteration; build it with `begin`."""

    backbone: Backbone
    parameters: Mapping[str, nn.Parameter]
    """Those of the network that are trained."""
    before: Mapping[str, Tensor]
    """Their values in the frozen original θ*; all other weights are shared with it."""
    learned: Mapping[str, nn.Parameter]
    """Their float32 values; they share memory with the network if it is float32 itself."""
    optimiser: Adam
    iteration: int = 0
    stop: bool = False
    """Asked for by Ctrl-C."""
    is_stopped: bool = False
    """Whether a stop was requested before the end of the last iteration."""

    def teacher(self, z: Tensor, time: Tensor, cond: Conditioning, negative_guidance: float) -> Tensor:
        """The target, from one call of the original network for both prompts."""
        import torch

        from cgru.lora.train import weights_swapped
        from cgru.mdp.trajectory import Conditioning

        both = Conditioning.cat([cond.empty, cond])
        with torch.no_grad(), weights_swapped(self.parameters, self.before):
            found = self.backbone.predict(torch.cat([z, z]), torch.cat([time, time]), both, guidance=1.0)
        empty, concept = found.chunk(2)
        return target(empty, concept, negative_guidance)

    def step(self, z: Tensor, time: Tensor, cond: Conditioning, negative_guidance: float) -> float:
        """One step of Adam on the mean squared error; returns the error before it."""
        aim = self.teacher(z, time, cond, negative_guidance)
        loss = (self.backbone.predict(z, time, cond, guidance=1.0) - aim).square().mean()
        loss.backward()
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, f"no gradient reaches {name}"
            self.learned[name].grad, parameter.grad = parameter.grad.float(), None
        self.optimiser.step()
        self.optimiser.zero_grad()
        self._show()
        self.iteration += 1
        return float(loss.detach())

    def _show(self) -> None:
        """Copy the learned values into the network, rounded to its dtype."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.learned[name].data)

    def save(self, file: Any) -> None:  # noqa: ANN401 - a binary file
        """Write everything that the next iteration reads; its random numbers depend only on its number."""
        import torch

        weights = {name: value.detach() for name, value in self.learned.items()}
        state = {"iteration": self.iteration, "weights": weights, "optimiser": self.optimiser.state_dict()}
        torch.save(state, file)

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        import torch

        from cgru.rl.checkpoint import reading

        with reading(folder / STATE):
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
            for name, value in self.learned.items():
                value.data.copy_(state["weights"][name])
            self.optimiser.load_state_dict(state["optimiser"])
            self.iteration = operator.index(state["iteration"])
        self._show()


def begin(backbone: Backbone, config: Config) -> Training:
    """Unfreeze the trained parameters of a frozen model and build Adam on float32 values of them."""
    from torch import nn
    from torch.optim import Adam

    parameters = trained_parameters(backbone, config.train)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    # Half precision cannot represent an Adam step, so float32 values are trained and rounded into the network.
    learned = {name: nn.Parameter(parameter.detach().float()) for name, parameter in parameters.items()}
    optimiser = Adam(learned.values(), lr=config.learning_rate)
    return Training(backbone, parameters, before, learned, optimiser)


METHOD = Method(
    config=Config,
    run=run,
    summary="trains the weights to predict away from the concept",
    adjust=adjust,
    decisive=("train",),
    check=check,
    prepare=prepare,
)
