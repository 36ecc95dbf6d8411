"""Convolutions as matrix products: the same numbers and gradients as torch's, weights shared, large maps untouched."""

import pytest
import torch
from torch import nn

from cgru.fast.batch_invariant import FEW, FEW_ROWS, BatchInvariantConv2d, gathered, make_batch_invariant, windowed


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 1, 0), (3, 2, 0), (4, 3, 1)])
def test_it_is_the_convolution_and_its_gradient(kernel: int, stride: int, padding: int) -> None:
    conv = nn.Conv2d(5, 7, kernel, stride, padding).double().requires_grad_(False)
    mine = BatchInvariantConv2d.of(conv)
    x = torch.randn(2, 5, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = mine(ours), conv(theirs)
    torch.testing.assert_close(found, expected)
    pull = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found.backward(pull)
    expected.backward(pull)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_sample_has_the_same_bits_in_any_place() -> None:
    conv = BatchInvariantConv2d.of(nn.Conv2d(16, 16, 3, padding=1).bfloat16().requires_grad_(False))
    x = torch.randn(6, 16, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    assert torch.equal(conv(x)[order], conv(x[order]))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA, where torch's own convolutions do not keep to it"
)
@pytest.mark.parametrize("size", [8, 16])
def test_so_it_has_on_cuda_where_cudnn_s_do_not_promise_it(size: int) -> None:
    conv = BatchInvariantConv2d.of(nn.Conv2d(640, 640, 3, padding=1).requires_grad_(False).to("cuda", torch.bfloat16))
    x = torch.randn(32, 640, size, size, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(conv(x)[order], conv(x[order]))


def test_a_trained_convolution_keeps_its_weight_gradient() -> None:
    conv = BatchInvariantConv2d.of(nn.Conv2d(2, 2, 3, padding=1))
    conv(torch.ones(1, 2, 4, 4)).sum().backward()
    assert conv.weight.grad is not None and conv.weight.grad.abs().sum() > 0


def test_a_network_keeps_its_names_and_weights() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(2, 2))
    before = {name: value.data_ptr() for name, value in network.state_dict().items()}
    make_batch_invariant(network)
    assert {name: value.data_ptr() for name, value in network.state_dict().items()} == before
    # The second has groups, which are not rewritten.
    assert [type(module).__name__ for module in network] == ["BatchInvariantConv2d", "Conv2d", "Linear"]


@pytest.mark.parametrize(("channels", "places"), [(1024, FEW // 1024), (1, FEW_ROWS)])
def test_large_maps_stay_with_torch(channels: int, places: int) -> None:
    conv = nn.Conv2d(1, channels, 3, padding=1).requires_grad_(False)
    x = torch.randn(1, 1, 128, places // 128 + 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(BatchInvariantConv2d.of(conv)(x), conv(x))


@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
def test_both_ways_to_cut_patches_agree(stride: tuple[int, int]) -> None:
    rows = torch.randn(3, 6, 5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gathered(rows, (3, 2), stride), windowed(rows, (3, 2), stride))
