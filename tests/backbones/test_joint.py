"""Attention with its projections and LoRA in one product: as by the separate layers, but for rounding."""

import statistics
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor

from cgru.backbones.adapter import ADAPTER, attach, base_policy, detach, merged
from cgru.backbones.joint import JointProjections, join_projections
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion

PROMPTS = ["a dog", "trees", "two cats"]


def model_with_lora(folder: Path, targets: str = "attention", *, dtype: str = "fp32") -> StableDiffusion:
    """A LoRA of a rank that has to be filled up, which is far from the base."""
    model = load_stable_diffusion(folder, device="cpu", dtype=dtype)
    parameters = attach(model.denoiser, rank=3, alpha=6.0, targets=targets, seed=3)
    draw = torch.Generator().manual_seed(5)
    for parameter in parameters.values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def processors(model: StableDiffusion) -> list[object]:
    return [part.processor for part in model.denoiser.modules() if isinstance(part, Attention)]


def predicted(model: StableDiffusion) -> Tensor:
    x = torch.randn(3, *model.latent_shape, generator=torch.Generator().manual_seed(1))
    return model.predict(x, torch.tensor([1, 400, 900]), model.encode_text(PROMPTS), guidance=3.0)


def gradients(model: StableDiffusion) -> dict[str, Tensor]:
    model.denoiser.zero_grad()
    predicted(model).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.denoiser.named_parameters() if p.grad is not None}


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("targets", ["attention", "cross-attention", "cross-attention-kv", r".*attn1\.to_q"])
def test_predictions_and_gradients_are_those_of_the_separate_layers(sd_folder: Path, targets: str) -> None:
    """Also where only some of the projections that share an input have a LoRA."""
    model = model_with_lora(sd_folder, targets)
    expected, pulls = predicted(model).detach(), gradients(model)
    with base_policy(model.denoiser), torch.no_grad():
        assert off(predicted(model), expected) > 1e-3, "the LoRA does next to nothing, so nothing would be tested"
    names = [name for name, _ in model.denoiser.named_parameters()]
    join_projections(model.denoiser)
    assert all(isinstance(each, JointProjections) for each in processors(model))
    assert off(predicted(model).detach(), expected) < 1e-5
    found = gradients(model)
    assert found.keys() == pulls.keys() and all(ADAPTER in name for name in found)
    assert max(off(found[name], pulls[name]) for name in pulls) < 1e-4
    assert [name for name, _ in model.denoiser.named_parameters()] == names


def test_without_its_lora_the_model_is_the_base(sd_folder: Path) -> None:
    """Switched off, added into the weights, taken away."""
    base = load_stable_diffusion(sd_folder, device="cpu")
    with torch.no_grad():
        expected = predicted(base)
        model = model_with_lora(sd_folder)
        learned = predicted(model)
        join_projections(model.denoiser)
        with base_policy(model.denoiser):
            assert torch.equal(predicted(model), expected)
        with merged(model.denoiser):
            assert off(predicted(model), learned) < 1e-5
        assert off(predicted(model), learned) < 1e-5
        detach(model.denoiser)
        assert torch.equal(predicted(model), expected)


def test_in_bf16_it_is_as_near_to_float32_as_the_separate_layers(sd_folder: Path) -> None:
    exact, model = gradients(model_with_lora(sd_folder)), model_with_lora(sd_folder, dtype="bf16")
    usual = gradients(model)
    join_projections(model.denoiser)
    found = gradients(model)
    assert all(pull.dtype == torch.float32 for pull in found.values())
    errors = [statistics.mean(off(each[name], exact[name]) for name in exact) for each in (usual, found)]
    assert errors[1] < 1.2 * errors[0] < 0.1


def test_a_mask_is_left_to_diffusers(sd_folder: Path) -> None:
    model = model_with_lora(sd_folder)
    attn = next(part for part in model.denoiser.modules() if isinstance(part, Attention))
    x = torch.randn(2, 4, attn.to_q.in_features, generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(2, 1, 4)
    mask[..., 2:] = -1e4
    with torch.no_grad():
        expected = AttnProcessor2_0()(attn, x, attention_mask=mask)
        join_projections(model.denoiser)
        assert torch.equal(attn(x, attention_mask=mask), expected)
        assert not torch.allclose(attn(x), expected)


def test_attention_of_other_kinds_is_left_alone(sd_folder: Path) -> None:
    """The VAE's has a norm and a residual of its own."""
    model = load_stable_diffusion(sd_folder, device="cpu")
    others = [part for part in model.vae.modules() if isinstance(part, Attention)]
    join_projections(model.vae)
    assert others and all(type(part.processor) is AttnProcessor2_0 for part in others)
