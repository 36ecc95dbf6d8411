"""GroupNorm with its statistics by channel first, for compiled networks, whose maps are channels-last.

There a group's numbers lie a few channels here, a few channels there: a kernel that sums up one group reads whole
sectors of memory and uses a part of each, down to a quarter (bf16, four channels a group). Channel by channel every
byte that is read is used, and the means and variances of a group's channels are all that is needed of them. The maths
is equal, its rounding is not.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ChannelGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`, which it stays where nothing is compiled; names and weights are the original's."""

    @staticmethod
    def of(original: nn.GroupNorm) -> "ChannelGroupNorm":
        """The same normalisation, sharing its weights."""
        made = ChannelGroupNorm(original.num_groups, original.num_channels, original.eps, device="meta")
        made.weight, made.bias = original.weight, original.bias
        return made.train(original.training)

    def forward(self, input: Float[Tensor, "n c *places"]) -> Float[Tensor, "n c *places"]:
        """Return what nn.GroupNorm returns, but for rounding."""
        return self.by_channel(input) if torch.compiler.is_compiling() else super().forward(input)

    def by_channel(self, x: Float[Tensor, "n c w *more"]) -> Float[Tensor, "n c w *more"]:
        """The same from statistics of channels."""
        wide, places = x.to(torch.promote_types(x.dtype, torch.float32)), tuple(range(2, x.ndim))
        variance, mean = (
            statistic.unflatten(1, (self.num_groups, -1))
            for statistic in torch.var_mean(wide, dim=places, correction=0)
        )
        centre = mean.mean(2, keepdim=True)
        spread = (variance + (mean - centre).square()).mean(2, keepdim=True)
        scale = self.weight.unflatten(0, (self.num_groups, -1)) * torch.rsqrt(spread + self.eps)
        centre, scale, bias = (
            part.expand_as(scale).flatten(1).unflatten(1, (-1, *[1] * len(places)))
            for part in (centre, scale, self.bias.unflatten(0, (self.num_groups, -1)))
        )
        return ((wide - centre) * scale + bias).to(x.dtype)


def use_channel_norms(network: nn.Module) -> None:
    """Replace the network's ordinary GroupNorms in place; weights and their names stay."""
    for name, module in list(network.named_modules()):
        if type(module) is nn.GroupNorm and module.affine:
            network.set_submodule(name, ChannelGroupNorm.of(module))
