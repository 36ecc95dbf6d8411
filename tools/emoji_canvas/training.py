"""One training loop for every part: AdamW, warm-up and cosine, bf16, averaged weights, checkpoints it resumes from.

Randomness of a step comes from a generator seeded by (part, step), so a resumed run draws what an uninterrupted
one would have drawn.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a part trains."""

    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 0.01
    warmup: int = 200
    average: float = 0.999
    """Decay of the averaged weights, which are what is kept."""
    until: float | None = None
    """Time (seconds since 1970) by which the schedule ends if `steps` would take longer: for rented machines."""


def seed_of(*parts: object) -> int:
    """A stable 63-bit seed from any names and numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def generator_for(device: torch.device, *parts: object) -> torch.Generator:
    """A generator of its own for a named purpose."""
    return torch.Generator(device=device).manual_seed(seed_of(*parts))


def progress(recipe: Recipe, step: int, begun: float) -> float:
    """Share of the schedule that is done, by steps or by the clock since `begun`, whichever is further."""
    by_steps = step / recipe.steps
    return by_steps if recipe.until is None else max(by_steps, (time.time() - begun) / (recipe.until - begun))


def rate(recipe: Recipe, step: int, done: float) -> float:
    """Learning rate at a step: linear warm-up under a cosine to zero."""
    return recipe.learning_rate * min(1, (step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def fit(
    name: str,
    model: nn.Module,
    loss: Callable[[torch.Generator], Tensor],
    recipe: Recipe,
    work: Path,
    device: torch.device,
    save_every: int = 1000,
) -> nn.Module:
    """Train `model` in place by `loss(generator)` and leave the averaged weights in it.

    `loss` closes over the model and its data. Progress goes to the log; `work/checkpoints/<name>.pt` is resumed from.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        betas=(0.9, 0.99),
        fused=device.type == "cuda",
    )
    average = {key: value.detach().clone().float() for key, value in model.state_dict().items()}
    path = work / "checkpoints" / f"{name}.pt"
    start = _resume(path, model, optimiser, average)
    clock, shown, begun = time.monotonic(), start, time.time()
    for step in range(start, recipe.steps):
        done = progress(recipe, step, begun)
        if done >= 1:
            log.info("%s: out of time after %d steps", name, step)
            break
        for group in optimiser.param_groups:
            group["lr"] = rate(recipe, step, done)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(generator_for(device, name, step))
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        _accumulate(average, model, min(recipe.average, (1 + step) / (10 + step)))
        if (step + 1) % 250 == 0 or step + 1 == recipe.steps:
            pace = (step + 1 - shown) / (time.monotonic() - clock)
            log.info("%s %d/%d loss %.4f %.1f steps/s", name, step + 1, recipe.steps, value.item(), pace)
            clock, shown = time.monotonic(), step + 1
        if (step + 1) % save_every == 0:
            _save(path, model, optimiser, average, step + 1)
    model.load_state_dict({key: value.to(model.state_dict()[key].dtype) for key, value in average.items()})
    return model


@torch.no_grad()
def _accumulate(average: dict[str, Tensor], model: nn.Module, decay: float) -> None:
    state = model.state_dict()
    floats = [key for key in average if state[key].is_floating_point()]
    torch._foreach_lerp_([average[key] for key in floats], [state[key].float() for key in floats], 1 - decay)
    for key in average.keys() - set(floats):
        average[key].copy_(state[key])


def keep(model: nn.Module, folder: Path) -> None:
    """`save_pretrained` into a temporary folder, then rename: a folder that exists is whole."""
    unfinished = folder.with_name(folder.name + ".tmp")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(unfinished)  # type: ignore[operator]
    unfinished.rename(folder)


def _save(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, average: dict[str, Tensor], step: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "average": average, "step": step}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def _resume(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, average: dict[str, Tensor]) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, map_location=next(iter(average.values())).device, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    average.update(state["average"])
    log.info("resumed %s at step %d", path.stem, state["step"])
    return int(state["step"])
