"""GroupNorm by channel: the same numbers and gradients, few graphs, nn.GroupNorm where not compiled."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cgru.fast.compile import compile_network
from cgru.fast.groupnorm import ChannelGroupNorm, use_channel_norms


def norm(channels: int = 12, groups: int = 4, eps: float = 1e-5) -> nn.GroupNorm:
    made, draw = nn.GroupNorm(groups, channels, eps=eps), torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(channels, generator=draw)
    return made.requires_grad_(False)


def maps(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Channels that differ in mean and spread, as those of one group do."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    own = torch.arange(1.0, 1 + shape[1]).view(-1, *[1] * (len(shape) - 2))
    return (own * x + own).to(dtype)


@pytest.mark.parametrize("shape", [(3, 12, 5, 7), (2, 12, 9), (1, 12, 1, 2)])
def test_the_same_numbers_and_gradient(shape: tuple[int, ...]) -> None:
    usual, pulls, weights = norm(), [], torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for layer in (usual, ChannelGroupNorm.of(usual).by_channel):
        x = maps(*shape).requires_grad_()
        found = layer(x)
        (found * weights).sum().backward()
        pulls.append((found.detach(), x.grad))
    for expected, found in zip(*pulls, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_epsilon_and_every_groups_own_statistics_count() -> None:
    flat = ChannelGroupNorm.of(norm(eps=1.0))
    torch.testing.assert_close(flat.by_channel(maps(2, 12, 4, 4)), norm(eps=1.0)(maps(2, 12, 4, 4)))
    assert not torch.allclose(flat.by_channel(maps(2, 12, 4, 4)), norm()(maps(2, 12, 4, 4)), atol=1e-3)


def test_half_precision_is_rounded_once() -> None:
    x = maps(2, 12, 4, 4, dtype=torch.bfloat16)
    found, exact = ChannelGroupNorm.of(norm().bfloat16()).by_channel(x), norm().bfloat16().float()(x.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=1e-6, rtol=2**-8)  # half the distance of two numbers


def test_where_nothing_is_compiled_it_is_torchs() -> None:
    network = nn.Sequential(norm(), nn.Sequential(norm(8, 2)), nn.GroupNorm(2, 8, affine=False))
    before, plain = dict(network.named_parameters()), norm()(maps(2, 12, 4, 4))
    use_channel_norms(network)
    assert [type(network[0]), type(network[1][0]), type(network[2])] == [ChannelGroupNorm] * 2 + [nn.GroupNorm]
    after = dict(network.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    assert torch.equal(network[0](maps(2, 12, 4, 4)), plain)


class Norms(nn.Module):
    """Norms outside any block, on other maps and of other widths, as in a UNet."""

    def __init__(self, kinds: list[tuple[int, int]]) -> None:
        super().__init__()
        self.kinds = kinds
        self.norms = nn.ModuleList([norm(12 * wider) for _, wider in kinds])

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(())
        for layer, (smaller, wider) in zip(self.norms, self.kinds, strict=True):
            part = x[..., ::smaller, ::smaller].repeat(1, wider, 1, 1)
            found = found + layer(part.contiguous(memory_format=torch.channels_last)).sin().sum()
        return found


@pytest.mark.filterwarnings("default")  # torch warns while tracing; as errors these are failures to compile
def test_norms_outside_blocks_have_a_graph_for_each_large_shape_of_several() -> None:
    """Of 16 × 16 and 8 × 8, a quarter of it; not of 4 × 4, nor of shapes that come once."""
    torch.compiler.reset()
    network, pulls = Norms([(1, 1), (1, 1), (2, 2), (2, 2), (4, 4), (4, 4), (1, 3), (2, 1)]), []
    x = maps(2, 12, 16, 16).requires_grad_()

    def update() -> None:
        x.grad = None
        network(x).backward()
        assert x.grad is not None
        pulls.append(x.grad)

    update()
    before = counters["stats"]["unique_graphs"]
    assert compile_network(network, update, what="norms", glimpse=lambda: network(x), backend="aot_eager") is not None
    assert counters["stats"]["unique_graphs"] - before == 2
    update()
    assert counters["stats"]["unique_graphs"] - before == 2
    torch.testing.assert_close(pulls[2], pulls[0], atol=1e-5, rtol=1e-4)
    assert not torch.equal(pulls[2], pulls[0])  # channels are summed up first
