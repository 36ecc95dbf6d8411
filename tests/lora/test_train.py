"""The trainable LoRA: nothing at the start, off and on without a trace, and the same pictures in plain diffusers."""

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from products import Products
from torch import Tensor, nn

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.edits import load_edit
from cgru.lora.train import (
    attach,
    base_policy,
    check_targets,
    detach,
    save_adapter,
    weights_swapped,
)
from cgru.mdp.rollout import sample

PROMPTS = ["a dog", "trees"]


@pytest.fixture
def tiny(sd_folder: Path) -> StableDiffusion:
    """A model of its own for each test."""
    return load_stable_diffusion(sd_folder, device="cpu")


def put_on(
    backbone: StableDiffusion, *, moved: bool = True, rank: int = 4, alpha: float = 2.0
) -> dict[str, nn.Parameter]:
    """A LoRA, as trained weights would be: B not zero."""
    parameters = attach(backbone.denoiser, rank=rank, alpha=alpha, targets="attention", seed=3)
    if moved:
        generator = torch.Generator().manual_seed(4)
        for parameter in parameters.values():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return parameters


def pictures(backbone: StableDiffusion) -> Tensor:
    kernel = backbone.kernel(3, eta=0.0)
    x = sample(backbone, backbone.encode_text(PROMPTS), [5, 6], kernel=kernel, guidance=3.0)
    return backbone.decode(x)


def state(backbone: StableDiffusion) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in backbone.denoiser.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_at_the_start_the_policy_is_the_base_model(tiny: StableDiffusion) -> None:
    before = pictures(tiny)
    parameters = put_on(tiny, moved=False)
    assert torch.equal(pictures(tiny), before)
    assert parameters and all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())
    trained = {id(p) for p in tiny.denoiser.parameters() if p.requires_grad}
    assert trained == {id(p) for p in parameters.values()}


def test_in_bf16_weights_and_gradients_are_fine_and_products_coarse(sd_folder: Path) -> None:
    model = load_stable_diffusion(sd_folder, device="cpu", dtype="bf16")
    parameters = put_on(model)
    x = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    cond = model.encode_text(PROMPTS)
    with Products() as products:
        prediction = model.predict(x, torch.tensor([1, 500]), cond, guidance=3.0)
        prediction.square().mean().backward()
    assert len(products.dtypes) > len(parameters) and set(products.dtypes) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in parameters.values())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters.values())


def test_the_seed_decides_the_first_weights_and_the_global_generator_is_left_alone(sd_folder: Path) -> None:
    made = []
    for seed in (1, 1, 2):
        backbone = load_stable_diffusion(sd_folder, device="cpu")
        before = torch.get_rng_state()
        parameters = attach(backbone.denoiser, rank=2, alpha=2, targets="cross-attention-kv", seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        made.append(torch.cat([p.detach().flatten() for p in parameters.values()]))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_off_and_on_again_restores_every_bit(tiny: StableDiffusion) -> None:
    bare, base = state(tiny), pictures(tiny)
    parameters = put_on(tiny)
    changed, weights = pictures(tiny), state(tiny)
    assert not torch.equal(changed, base)
    with base_policy(tiny.denoiser):
        assert torch.equal(pictures(tiny), base)
    assert torch.equal(pictures(tiny), changed) and same(state(tiny), weights)
    assert all(p.requires_grad for p in parameters.values())
    detach(tiny.denoiser)
    assert same(state(tiny), bare) and torch.equal(pictures(tiny), base)
    assert not any(p.requires_grad for p in tiny.denoiser.parameters())


def test_swapped_weights_come_back_even_after_an_error(tiny: StableDiffusion) -> None:
    parameters = put_on(tiny)
    own, tensors = state(tiny), [p.data for p in parameters.values()]
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    with pytest.raises(KeyError), weights_swapped(parameters, zeros):
        assert not any(p.any() for p in parameters.values())
        raise KeyError
    assert same(state(tiny), own)
    # the very same memory: an optimiser's in-place step must reach what the network uses
    assert all(p.data.data_ptr() == t.data_ptr() for p, t in zip(parameters.values(), tensors, strict=True))


@pytest.mark.parametrize("alpha", [2.0, 4.0, 12.0])
def test_plain_diffusers_draws_the_same_pictures(sd_folder: Path, tmp_path: Path, alpha: float) -> None:
    """Rank 4 with alpha 2, 4 and 12: half, once and three times the LoRA."""
    tiny = load_stable_diffusion(sd_folder, device="cpu")
    base = pictures(tiny)
    put_on(tiny, alpha=alpha)
    ours = pictures(tiny)
    save_adapter(tiny.denoiser, tmp_path)
    pipe = StableDiffusionPipeline.from_pretrained(sd_folder, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(tmp_path)
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    drawn = pipe(PROMPTS, num_inference_steps=3, guidance_scale=3.0, generator=generators, output_type="pt").images
    assert (ours - base).abs().max() > 1e-3
    torch.testing.assert_close(drawn, ours, atol=1e-4, rtol=0)
    detach(tiny.denoiser)
    with load_edit(tmp_path).applied(tiny):
        torch.testing.assert_close(pictures(tiny), ours, atol=1e-5, rtol=0)


def test_saving_twice_gives_the_same_bytes(tiny: StableDiffusion, tmp_path: Path) -> None:
    """safetensors alone shuffles the metadata: 8 equal files by chance are one in 128."""
    put_on(tiny)
    assert len({save_adapter(tiny.denoiser, tmp_path / str(i)).read_bytes() for i in range(8)}) == 1


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("atention", r"'atention' match no layer .* attention, .* e\.g\. '.*attn2\.to_k'"),
        ("(", r"'\(' are no regular expression"),
        (".*attn2", r"match '.*attn2', which is no linear or conv layer"),
    ],
)
def test_wrong_targets_are_one_line_and_touch_nothing(tiny: StableDiffusion, targets: str, message: str) -> None:
    before = state(tiny)
    with pytest.raises(ValueError, match=message) as caught:
        attach(tiny.denoiser, rank=4, alpha=4, targets=targets, seed=0)
    assert "\n" not in str(caught.value)
    assert same(state(tiny), before)


@pytest.mark.parametrize("targets", ["attention", "cross-attention", "cross-attention-kv", "attention+ff"])
def test_every_name_matches_something(tiny: StableDiffusion, targets: str) -> None:
    check_targets(tiny.denoiser, targets)
