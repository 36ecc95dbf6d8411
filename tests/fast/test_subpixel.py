"""Upsampling and its convolution in one: the same pictures with less arithmetic."""

from pathlib import Path

import pytest
import torch
from diffusers.models.upsampling import Upsample2D
from torch.utils.flop_counter import FlopCounterMode

from cgru.backbones.sd import load_stable_diffusion
from cgru.fast.subpixel import SubpixelUpsample2D, use_subpixels

LAYOUTS = torch.contiguous_format, torch.channels_last


def upsampling(*, bias: bool = True) -> Upsample2D:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Upsample2D(5, use_conv=True, out_channels=3, bias=bias).requires_grad_(False)


def maps(high: int, wide: int) -> torch.Tensor:
    return torch.randn(2, 5, high, wide, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("high", "wide"), [(4, 6), (1, 1), (3, 5)])
def test_it_is_upsampling_and_a_convolution(high: int, wide: int, bias: bool, layout: torch.memory_format) -> None:
    """Edges, too, where the kernel sees zeros."""
    usual, x = upsampling(bias=bias), maps(high, wide).to(memory_format=layout)
    found, expected = SubpixelUpsample2D.of(usual).on_small_map(x), usual(x)
    assert found.shape == (2, 3, 2 * high, 2 * wide)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_in_half_precision_it_is_off_by_its_rounding() -> None:
    usual, x = upsampling(), maps(4, 6)
    found = SubpixelUpsample2D.of(upsampling().bfloat16()).on_small_map(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert float((found.float() - usual(x)).norm() / usual(x).norm()) < 2**-7


def test_the_gradient_is_the_same() -> None:
    usual, pulls = upsampling(), []
    weights = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(2))
    for layer in (usual, SubpixelUpsample2D.of(usual).on_small_map):
        x = maps(4, 6).requires_grad_()
        (layer(x) * weights).sum().backward()
        pulls.append(x.grad)
    torch.testing.assert_close(pulls[0], pulls[1], atol=1e-5, rtol=1e-5)


def test_it_takes_four_ninths_of_the_arithmetic() -> None:
    """And one row and one column of blocks more, at the edges."""
    counts, layer = [], SubpixelUpsample2D.of(upsampling())
    for work in (layer.forward, layer.on_small_map):
        with FlopCounterMode(display=False) as counter:
            work(maps(16, 24))
        counts.append(counter.get_total_flops())
    assert counts[1] * 9 * 16 * 24 == counts[0] * 4 * 17 * 25


@pytest.mark.filterwarnings("default")  # torch warns while tracing; as errors these are failures to compile
def test_compiled_it_is_used_unless_a_size_is_asked_for() -> None:
    torch.compiler.reset()
    usual, x = upsampling(), maps(4, 6)
    layer = SubpixelUpsample2D.of(usual)
    assert torch.equal(layer(x), usual(x))
    layer.compile(backend="aot_eager", dynamic=False)
    assert torch.equal(layer(x), layer.on_small_map(x))
    assert not torch.equal(layer(x), usual(x))
    assert torch.equal(layer(x, (7, 11)), usual(x, (7, 11)))


def test_a_decoder_has_it_under_the_same_names(sd_folder: Path) -> None:
    decoder = load_stable_diffusion(sd_folder, device="cpu").decoder
    before = dict(decoder.named_parameters())
    use_subpixels(decoder)
    assert any(isinstance(part, SubpixelUpsample2D) for part in decoder.modules())
    after = dict(decoder.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)
