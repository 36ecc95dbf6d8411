"""Batch-invariant convolutions: a sample's result has the same bits at any position in its batch.

cuDNN distributes a small product over the device in a way that depends on where the rows lie (seen on an H200 for maps
of 16 × 16 and less in batches of 32; matrix products and attention do not, in batches of a power of two: see
`cgru.rl.batch_size`). In bf16 this alone moves the ratio right after collection by 3e-4, more than the paper's clip of
1e-4, because an update sees each pair at another position than the rollout did. Here such a convolution is a matrix
product over its patches. Larger maps stay with cuDNN, and so does the gradient of the input: only the forward pass has
to be reproducible.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import math
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

FEW, FEW_ROWS = 2**24, 2**15
"""cuDNN is not used for outputs with at most FEW numbers (results differed at 15.7 million, not at 21 million) and at
most FEW_ROWS positions in all samples together; the last layer has few numbers only because it has few channels."""

Pair = tuple[int, int]


class BatchInvariantConv2d(nn.Conv2d):
    """A frozen `nn.Conv2d` that computes small maps row by row; weights and their names are the original's."""

    @staticmethod
    def of(conv: nn.Conv2d) -> "BatchInvariantConv2d":
        """Return the same convolution, sharing its weights."""
        kernel, stride, padding = _pair(conv.kernel_size), _pair(conv.stride), _padding(conv)
        made = BatchInvariantConv2d(conv.in_channels, conv.out_channels, kernel, stride, padding, device="meta")
        made.weight, made.bias = conv.weight, conv.bias
        return made.train(conv.training)

    def forward(self, input: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d i j"]:
        """Return what nn.Conv2d returns, up to rounding."""
        stride, padding = _pair(self.stride), _padding(self)
        rows = _rows(input, _pair(self.kernel_size), stride, padding)
        if rows > FEW_ROWS or rows * self.out_channels > FEW or self.weight.requires_grad:
            return super().forward(input)
        found: Tensor = _Product.apply(input, self.weight, self.bias, stride, padding)
        return found


def make_batch_invariant(network: nn.Module) -> None:
    """Replace the network's ordinary convolutions in place; weights and their names stay the same."""
    for name, module in list(network.named_modules()):
        if type(module) is nn.Conv2d and _is_ordinary(module):
            network.set_submodule(name, BatchInvariantConv2d.of(module))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context takes any attribute
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.sides, ctx.stride, ctx.padding = tuple(x.shape[2:]), stride, padding
        patches = _patches(x, (weight.shape[2], weight.shape[3]), stride, padding)
        # Rows are (kernel position, channel), the memory layout of channels-last weights. Flattened to one matrix,
        # because torch splits a product with a higher-dimensional tensor into many small ones in another order.
        found = functional.linear(patches.flatten(0, 2), weight.permute(0, 2, 3, 1).flatten(1), bias)
        return found.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN401
        (weight,) = ctx.saved_tensors
        # The gradient of a convolution is its transpose; pixels that the stride skips at the far edge are added back.
        shapes = zip(ctx.sides, gradient.shape[2:], weight.shape[2:], ctx.stride, ctx.padding, strict=True)
        edges = [side - ((places - 1) * step - 2 * pad + k) for side, places, k, step, pad in shapes]
        pull = functional.conv_transpose2d(gradient, weight, None, ctx.stride, ctx.padding, edges)
        return pull, None, None, None, None


def _patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Float[Tensor, "n i j patch"]:
    rows = x.permute(0, 2, 3, 1)
    if (kernel, stride, padding) == ((1, 1), (1, 1), (0, 0)):
        return rows
    rows = functional.pad(rows, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    if rows.device.type == "cuda" and not torch.compiler.is_compiling():
        return gathered(rows, kernel, stride)
    return windowed(rows, kernel, stride)


def windowed(rows: Float[Tensor, "n h w c"], kernel: Pair, stride: Pair) -> Float[Tensor, "n i j patch"]:
    """Return patches as a copy of a strided view, which a compiler turns into one kernel."""
    windows = rows.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])  # (n, i, j, c, high, wide), no copy
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3)


def gathered(rows: Float[Tensor, "n h w c"], kernel: Pair, stride: Pair) -> Float[Tensor, "n i j patch"]:
    """Return the same patches by index_select of whole rows of channels, which is faster on CUDA without a compiler."""
    n, high, wide, _ = rows.shape
    places = _places((n, high, wide), kernel, stride, rows.device)
    return rows.flatten(0, 2).index_select(0, places.flatten()).view(*places.shape[:3], -1)


@lru_cache(maxsize=64)
def _places(shape: tuple[int, int, int], kernel: Pair, stride: Pair, device: torch.device) -> Int[Tensor, "n i j k"]:
    """Return the row of channels for each part of each patch; cached, since a network has a few dozen map shapes."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    return numbers.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1]).flatten(3).to(device)


def _rows(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> int:
    sides = zip(x.shape[2:], kernel, stride, padding, strict=True)
    high, wide = ((side + 2 * pad - k) // step + 1 for side, k, step, pad in sides)
    return len(x) * high * wide


def _is_ordinary(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1 and _pair(conv.dilation) == (1, 1) and conv.padding_mode == "zeros" and conv.padding != "same"
    )


def _padding(conv: nn.Conv2d) -> Pair:
    return (0, 0) if isinstance(conv.padding, str) else _pair(conv.padding)


def _pair(values: tuple[int, ...]) -> Pair:
    first, second = values
    return first, second
