"""Layers and attention that multiply by weight and LoRA at once: as peft and diffusers do, but for rounding."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from peft import LoraConfig
from products import Products
from torch import Tensor

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.lora.fused import JointProjections, _Widened, join_projections
from cgru.lora.train import ADAPTER, UNET_TARGETS, attach, base_policy, detach, merged

PROMPTS = ["a dog", "trees", "two cats"]


def model_with_lora(
    folder: Path, targets: str = "attention", *, dtype: str = "fp32", by_peft: bool = False, seed: int = 5
) -> StableDiffusion:
    """A LoRA far from the base, of a rank that has to be filled up; `by_peft` is peft's own, layer by layer."""
    model = load_stable_diffusion(folder, device="cpu", dtype=dtype)
    if by_peft:
        network: Any = model.denoiser
        network.add_adapter(LoraConfig(r=3, lora_alpha=6.0, target_modules=UNET_TARGETS.get(targets, targets)), ADAPTER)
    else:
        attach(model.denoiser, rank=3, alpha=6.0, targets=targets, seed=3)
    draw = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.denoiser.parameters() if p.requires_grad):
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw)
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


@pytest.mark.parametrize("targets", [*UNET_TARGETS, r".*attn1\.to_q", r".*time_emb_proj"])
def test_predictions_and_gradients_are_peft_s(sd_folder: Path, targets: str) -> None:
    """Also where only some of the projections that share an input have a LoRA."""
    usual, model = (model_with_lora(sd_folder, targets, by_peft=by_peft) for by_peft in (True, False))
    assert all(isinstance(each, JointProjections) for each in processors(model))
    expected, pulls = predicted(usual).detach(), gradients(usual)
    with base_policy(model.denoiser), torch.no_grad():
        assert off(predicted(model), expected) > 1e-2, "the LoRA does next to nothing, so nothing would be tested"
    assert off(predicted(model).detach(), expected) < 1e-5
    found = gradients(model)
    assert list(found) == list(pulls) and all(ADAPTER in name for name in found)
    assert max(off(found[name], pulls[name]) for name in pulls) < 1e-4
    assert off(*(torch.cat([pull.flatten() for pull in each.values()]) for each in (found, pulls))) < 1e-5
    own, theirs = ([name for name, _ in each.denoiser.named_parameters()] for each in (model, usual))
    assert own == theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_the_gradient_is_exact_and_so_is_its_gradient(shape: tuple[int, ...], bias: bool) -> None:
    draw = torch.Generator().manual_seed(7)
    x, weight, a, b = (
        torch.randn(size, generator=draw, dtype=torch.float64) for size in (shape, (5, 4), (2, 4), (5, 2))
    )
    offset = torch.randn(5, generator=draw, dtype=torch.float64) if bias else None

    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = _Widened.apply(x, weight, offset, a, b)
        return found

    torch.testing.assert_close(layer(x, a, b), torch.nn.functional.linear(x, weight + b @ a, offset))
    inputs = [each.requires_grad_() for each in (x, a, b)]
    assert torch.autograd.gradcheck(layer, inputs) and torch.autograd.gradgradcheck(layer, inputs)
    assert torch.autograd.gradcheck(layer, [x.detach(), a, b])  # as of words


def test_fewer_products_than_layer_by_layer(sd_folder: Path) -> None:
    """What it is for: a product of self-attention's three projections, one of its three A, and one of the way out."""
    attention = (part for part in model_with_lora(sd_folder).denoiser.modules() if isinstance(part, Attention))
    attn = next(part for part in attention if not part.is_cross_attention)
    with torch.no_grad(), Products() as products:
        attn(torch.zeros(2, 4, attn.to_q.in_features))
    assert len(products.dtypes) == 4


def test_without_its_lora_the_model_is_the_base(sd_folder: Path) -> None:
    """Switched off, added into the weights, taken away."""
    base = load_stable_diffusion(sd_folder, device="cpu")
    with torch.no_grad():
        expected = predicted(base)
        model = model_with_lora(sd_folder)
        learned = predicted(model)
        assert off(learned, expected) > 1e-2
        with base_policy(model.denoiser):
            assert torch.equal(predicted(model), expected)
        with merged(model.denoiser):
            assert off(predicted(model), learned) < 1e-5
        assert off(predicted(model), learned) < 1e-5
        detach(model.denoiser)
        assert torch.equal(predicted(model), expected)
        assert all(type(each) is AttnProcessor2_0 for each in processors(model))


def test_in_bf16_it_is_as_near_to_float32_as_the_separate_layers(sd_folder: Path) -> None:
    """On the mean of several LoRAs: for one of them either may be nearer by a fifth, whatever the CPU."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(8):
        exact = gradients(model_with_lora(sd_folder, seed=seed))
        for by_peft, found in errors.items():
            pulls = gradients(model_with_lora(sd_folder, dtype="bf16", by_peft=by_peft, seed=seed))
            assert all(pull.dtype == torch.float32 for pull in pulls.values())
            found.append(statistics.mean(off(pulls[name], exact[name]) for name in exact))
    usual, joined = (statistics.mean(each) for each in errors.values())
    assert joined < 1.2 * usual < 0.1


def test_a_mask_is_left_to_diffusers(sd_folder: Path) -> None:
    model = model_with_lora(sd_folder)
    attn = next(part for part in model.denoiser.modules() if isinstance(part, Attention))
    x = torch.randn(2, 4, attn.to_q.in_features, generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(2, 1, 4)
    mask[..., 2:] = -1e4
    with torch.no_grad():
        expected = AttnProcessor2_0()(attn, x, attention_mask=mask)
        assert torch.equal(attn(x, attention_mask=mask), expected)
        assert not torch.allclose(attn(x), expected)


def test_attention_of_other_kinds_is_left_alone(sd_folder: Path) -> None:
    """The VAE's has a norm and a residual of its own."""
    model = load_stable_diffusion(sd_folder, device="cpu")
    others = [part for part in model.vae.modules() if isinstance(part, Attention)]
    join_projections(model.vae)
    assert others and all(type(part.processor) is AttnProcessor2_0 for part in others)
