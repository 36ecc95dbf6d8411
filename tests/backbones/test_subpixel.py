"""Upsampling and its convolution in one: the same pictures with less arithmetic."""

from pathlib import Path

import pytest
import torch
from diffusers.models.upsampling import Upsample2D
from torch.utils.flop_counter import FlopCounterMode

from cgru.backbones.sd import load_stable_diffusion
from cgru.backbones.subpixel import SubpixelUpsample2D, use_subpixels


def upsampling(*, bias: bool = True) -> Upsample2D:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Upsample2D(5, use_conv=True, out_channels=3, bias=bias).requires_grad_(False)


def maps(high: int, wide: int) -> torch.Tensor:
    return torch.randn(2, 5, high, wide, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("high", "wide"), [(4, 6), (1, 1), (3, 5)])
def test_it_is_upsampling_and_a_convolution(high: int, wide: int, bias: bool) -> None:
    """Edges, too, where the kernel sees zeros."""
    usual, x = upsampling(bias=bias), maps(high, wide)
    found, expected = SubpixelUpsample2D.of(usual)(x), usual(x)
    assert found.shape == (2, 3, 2 * high, 2 * wide)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_gradient_is_the_same() -> None:
    usual, pulls = upsampling(), []
    weights = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(2))
    for layer in (usual, SubpixelUpsample2D.of(usual)):
        x = maps(4, 6).requires_grad_()
        (layer(x) * weights).sum().backward()
        pulls.append(x.grad)
    torch.testing.assert_close(pulls[0], pulls[1], atol=1e-5, rtol=1e-5)


def test_a_size_that_is_asked_for_is_left_to_diffusers() -> None:
    usual, x = upsampling(), maps(4, 6)
    assert torch.equal(SubpixelUpsample2D.of(usual)(x, (7, 11)), usual(x, (7, 11)))


def test_a_decoder_draws_the_same_with_less_arithmetic(sd_folder: Path) -> None:
    model = load_stable_diffusion(sd_folder, device="cpu")
    x, names = (
        torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(3)),
        list(model.decoder.state_dict()),
    )
    counts, pictures = [], []
    for _ in range(2):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            pictures.append(model.decode(x))
        counts.append(counter.get_total_flops())
        use_subpixels(model.decoder)
    assert any(isinstance(part, SubpixelUpsample2D) for part in model.decoder.modules())
    torch.testing.assert_close(pictures[0], pictures[1], atol=1e-5, rtol=0)
    assert counts[1] < 0.95 * counts[0]
    assert list(model.decoder.state_dict()) == names
