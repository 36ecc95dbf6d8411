"""A LoRA on each family's denoiser: put on, trained a little, saved for plain diffusers, taken off without a trace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionXLPipeline
from torch import Tensor

from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.edits import LoraEdit
from cgru.lora.file import LORA_FILE
from cgru.lora.merge import save_merged
from cgru.lora.train import TARGETS, attach, base_policy, check_targets, detach, merged, prefix_of, save_adapter

PIPELINES: dict[str, Any] = {"sdxl": StableDiffusionXLPipeline, "sd3": StableDiffusion3Pipeline}


@pytest.fixture(params=list(PIPELINES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, family_folders: dict[str, Path]) -> Iterator[Backbone]:
    yield load_model(family_folders[name], device="cpu")


def predicted(model: Backbone) -> Tensor:
    """At one noise level, with guidance."""
    x = torch.randn((2, *model.latent_shape), generator=torch.Generator().manual_seed(0))
    time = model.kernel(4, eta=0.0).timesteps[1].expand(2)
    with torch.no_grad():
        return model.predict(x, time, model.encode_text(["a dog", "a cat"]), guidance=3.0)


def trained(model: Backbone, targets: str = "attention") -> dict[str, Any]:
    """With B no longer zero."""
    parameters = attach(model.denoiser, rank=2, alpha=4.0, targets=targets, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters.values():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return parameters


@pytest.mark.parametrize("targets", ["attention", "cross-attention", "cross-attention-kv", "attention+ff"])
def test_every_factor_learns_and_the_base_comes_back(model: Backbone, targets: str) -> None:
    before = predicted(model)
    parameters = attach(model.denoiser, rank=2, alpha=4.0, targets=targets, seed=0)
    torch.testing.assert_close(predicted(model), before, rtol=0, atol=1e-5)  # B is zero
    x, cond = torch.ones(2, *model.latent_shape), model.encode_text(["a dog", "a cat"])
    model.predict(x, model.kernel(4, eta=0.0).timesteps[1].expand(2), cond, guidance=3.0).square().sum().backward()
    ups = [parameter for name, parameter in parameters.items() if "lora_B" in name]
    assert ups and all(parameter.grad is not None for parameter in parameters.values())
    assert sum(bool(parameter.grad.abs().sum() > 0) for parameter in ups) >= len(ups) - 1
    detach(model.denoiser)
    assert torch.equal(predicted(model), before)


def test_diffusers_loads_the_file_and_predicts_the_same(
    name: str, model: Backbone, family_folders: dict[str, Path], tmp_path: Path
) -> None:
    before = predicted(model)
    trained(model)
    expected = predicted(model)
    assert (expected - before).abs().max() > 1e-2
    save_adapter(model.denoiser, tmp_path)
    with merged(model.denoiser):
        torch.testing.assert_close(predicted(model), expected, rtol=0, atol=1e-4)
    with base_policy(model.denoiser):
        assert torch.equal(predicted(model), before)
    detach(model.denoiser)
    plain = load_model(family_folders[name], device="cpu")
    pipe = PIPELINES[name].from_pretrained(family_folders[name])
    pipe.load_lora_weights(tmp_path)
    networks: Any = plain
    own = getattr(pipe, prefix_of(model.denoiser))
    object.__setattr__(networks, "denoiser", own)
    torch.testing.assert_close(predicted(plain), expected, rtol=0, atol=1e-4)


def test_an_edit_is_applied_undone_and_merged(
    name: str, model: Backbone, family_folders: dict[str, Path], tmp_path: Path
) -> None:
    before = predicted(model)
    trained(model)
    expected = predicted(model)
    save_adapter(model.denoiser, tmp_path)
    detach(model.denoiser)
    edit = LoraEdit.read(tmp_path / LORA_FILE)
    with edit.applied(model) as edited:
        torch.testing.assert_close(predicted(edited), expected, rtol=0, atol=1e-5)
    assert torch.equal(predicted(model), before)
    save_merged(family_folders[name], edit.merge, tmp_path / "whole", changed=edit.changed())
    torch.testing.assert_close(predicted(load_model(tmp_path / "whole", device="cpu")), expected, rtol=0, atol=1e-4)


def test_an_edit_for_another_family_is_one_line(
    name: str, model: Backbone, family_folders: dict[str, Path], tmp_path: Path
) -> None:
    trained(model)
    edit = LoraEdit.read(save_adapter(model.denoiser, tmp_path))
    for other in {"sd", "sdxl", "sd3"} - {name}:
        with pytest.raises(ValueError, match=r"the LoRA does not fit the model.*; give its own base with") as caught:
            edit.check(load_model(family_folders[other], device="cpu"))
        assert "\n" not in str(caught.value)


def test_targets_that_match_nothing_are_refused(model: Backbone) -> None:
    with pytest.raises(ValueError, match=r"match no layer of the model; .* attention\+ff or .*, e.g. '.*(to_|add_)k"):
        check_targets(model.denoiser, "attn9")


def test_each_name_of_targets_means_more_than_the_one_before(model: Backbone) -> None:
    counts = []
    for targets in TARGETS[prefix_of(model.denoiser)]:
        counts.append(len(attach(model.denoiser, rank=1, alpha=1.0, targets=targets, seed=0)))
        detach(model.denoiser)
    attention, cross, keys, everything = counts
    assert keys < cross < attention < everything
