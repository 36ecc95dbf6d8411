"""Upsampling by two and the 3 × 3 convolution after it, fused into one convolution of the small map.

Upsampling repeats each pixel, so a 3 × 3 kernel covers only 2 × 2 different ones. Which weights fall on the same pixel
depends on the output pixel's position in its 2 × 2 block; summing them gives four 2 × 2 kernels. That is 4/9 of the
arithmetic. The maths is equal, the rounding is not, so it is used only when compiled and other runs are unaffected.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class SubpixelUpsample2D(Upsample2D):
    """diffusers' `Upsample2D`, unchanged unless compiled; weights and their names are the original's."""

    @staticmethod
    def of(original: Upsample2D) -> "SubpixelUpsample2D":
        """Return the same upsampling, sharing its weights."""
        with torch.device("meta"):
            made = SubpixelUpsample2D(original.channels, True, out_channels=original.out_channels)
        made.conv = original.conv
        return made.train(original.training)

    def forward(
        self,
        hidden_states: Float[Tensor, "n c h w"],
        output_size: int | None = None,
        *args: Any,  # noqa: ANN401 - passed on to diffusers
        **kwargs: Any,  # noqa: ANN401
    ) -> Float[Tensor, "n d high wide"]:
        """Return what Upsample2D returns, up to rounding; an output size other than twice the map's is left to it."""
        if output_size is None and torch.compiler.is_compiling():
            return self.on_small_map(hidden_states)
        found: Tensor = super().forward(hidden_states, output_size, *args, **kwargs)
        return found

    def on_small_map(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d high wide"]:
        """Return the upsampled and convolved map from a single convolution."""
        # The bias is added after rearranging; before it, compilers would write the map once more.
        found = interleaved(functional.conv2d(x, phases(self.conv.weight), padding=1))
        return found if self.conv.bias is None else found + self.conv.bias[:, None, None]


def use_subpixels(network: nn.Module) -> None:
    """Replace the network's ordinary upsampling in place; weights and their names stay the same."""
    for name, module in list(network.named_modules()):
        if type(module) is Upsample2D and _is_ordinary(module):
            network.set_submodule(name, SubpixelUpsample2D.of(module))


def phases(weight: Float[Tensor, "d c 3 3"]) -> Float[Tensor, "four_d c 2 2"]:
    """Return the 2 × 2 kernel for each position (row, column) of an output pixel in its block, summed in float32."""
    found = weight.float()[None, None]
    for side in (-2, -1):
        first, middle, last = found.split(1, dim=side)
        pairs = (first, middle + last), (first + middle, last)
        found = torch.cat([torch.cat(pair, dim=side) for pair in pairs], dim=side + 2)
    return found.flatten(0, 2).to(weight)


def interleaved(y: Float[Tensor, "n four_d h1 w1"]) -> Float[Tensor, "n d high wide"]:
    """Interleave the phases: position (p, q) of block (i, j) is y[:, p, q, :, i + p, j + q]; one copy of a view."""
    y = y.unflatten(1, (2, 2, -1))
    n, _, _, channels, high, wide = y.shape
    sample, p, q, channel, i, j = y.stride()
    blocks = y.as_strided((n, high - 1, 2, wide - 1, 2, channels), (sample, i, i + p, j, j + q, channel))
    return blocks.reshape(n, 2 * (high - 1), 2 * (wide - 1), channels).permute(0, 3, 1, 2)


def _is_ordinary(module: Upsample2D) -> bool:
    conv = module.conv if module.name == "conv" else None
    return (
        module.use_conv
        and not module.use_conv_transpose
        and module.interpolate
        and module.norm is None
        and type(conv) is nn.Conv2d
        and (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and (conv.groups, conv.padding_mode) == (1, "zeros")
    )
