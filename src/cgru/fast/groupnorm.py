"""GroupNorm from per-channel statistics, for compiled networks, whose maps are channels-last.

In that layout a group's values are scattered, a few channels at a time: a kernel that reduces one group reads whole
memory sectors and uses as little as a quarter of each (bf16, four channels per group). Reducing per channel uses every
byte read, and the means and variances of a group's channels determine the group's. The maths is equal, the rounding is
not.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ChannelGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`, unchanged unless compiled; weights and their names are the original's."""

    @staticmethod
    def of(original: nn.GroupNorm) -> "ChannelGroupNorm":
        """Return the same normalisation, sharing its weights."""
        made = ChannelGroupNorm(original.num_groups, original.num_channels, original.eps, device="meta")
        made.weight, made.bias = original.weight, original.bias
        return made.train(original.training)

    def forward(self, input: Float[Tensor, "n c *places"]) -> Float[Tensor, "n c *places"]:
        """Return what nn.GroupNorm returns, up to rounding."""
        return self.by_channel(input) if torch.compiler.is_compiling() else super().forward(input)

    def by_channel(self, x: Float[Tensor, "n c w *more"]) -> Float[Tensor, "n c w *more"]:
        """Return the group norm computed from the statistics of channels."""
        wide, places = x.to(torch.promote_types(x.dtype, torch.float32)), tuple(range(2, x.ndim))
        variance, mean = (
            statistic.unflatten(1, (self.num_groups, -1))
            for statistic in torch.var_mean(wide, dim=places, correction=0)
        )
        # mean_g = mean_c(mean);  var_g = mean_c(var_c + (mean_c - mean_g)²), for channels of equal size
        centre = mean.mean(2, keepdim=True)
        spread = (variance + (mean - centre).square()).mean(2, keepdim=True)
        scale = self.weight.unflatten(0, (self.num_groups, -1)) * torch.rsqrt(spread + self.eps)
        centre, scale, bias = (
            part.expand_as(scale).flatten(1).unflatten(1, (-1, *[1] * len(places)))
            for part in (centre, scale, self.bias.unflatten(0, (self.num_groups, -1)))
        )
        return ((wide - centre) * scale + bias).to(x.dtype)


def use_channel_norms(network: nn.Module) -> None:
    """Replace the network's ordinary GroupNorms in place; weights and their names stay the same."""
    for name, module in list(network.named_modules()):
        if type(module) is nn.GroupNorm and module.affine:
            network.set_submodule(name, ChannelGroupNorm.of(module))
