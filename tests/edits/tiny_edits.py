"""Edits of each kind for the tiny model, and what they must leave as it was."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cgru.backbones.base import networks_of
from cgru.backbones.sd import StableDiffusion
from cgru.edits import HookEdit, LoraEdit, WeightsEdit
from cgru.evaluation.drawing import draw
from cgru.lora.train import attach, detach, save_adapter
from cgru.tasks import Sampling

NAMES = {"denoiser": "attn2.to_k.weight", "text_encoder": "mlp.fc1.weight"}


def random_weights(model: StableDiffusion, roles: Sequence[str], *, seed: int = 0, size: float = 0.3) -> WeightsEdit:
    """A delta on the cross-attention keys, on the text encoder's first layers, or both."""
    generator = torch.Generator().manual_seed(seed)
    return WeightsEdit(
        {
            role: {
                name: torch.randn(parameter.shape, generator=generator) * size
                for name, parameter in networks_of(model)[role].named_parameters()
                if name.endswith(NAMES[role])
            }
            for role in roles
        }
    )


def random_lora(model: StableDiffusion, folder: object, *, seed: int = 0) -> LoraEdit:
    """A LoRA with random factors; the model is as it was."""
    from pathlib import Path

    generator = torch.Generator().manual_seed(seed)
    for parameter in attach(model.denoiser, rank=2, alpha=4.0, targets="attention", seed=0).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    path = save_adapter(model.denoiser, Path(str(folder)))
    detach(model.denoiser)
    return LoraEdit.read(path)


def away(strength: float = 0.5) -> HookEdit:
    """The test's own hook."""
    return HookEdit("own_hooks:away", {"word": "dog", "strength": strength})


def state(model: StableDiffusion) -> dict[str, Tensor]:
    """Every weight of the networks that an edit may touch."""
    return {
        f"{role}.{name}": tensor.clone()
        for role, network in networks_of(model).items()
        for name, tensor in network.state_dict().items()
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ, or that one of them lacks."""
    names = before.keys() ^ after.keys()
    return sorted({*names, *(n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n]))})


def picture(model: object) -> Tensor:
    """One picture in two steps with guidance."""
    return draw(model, ["cat"], [1], Sampling(2, 3.0, 0.0))  # type: ignore[arg-type]
