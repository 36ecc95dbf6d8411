"""Layers that multiply by their weight and its LoRA in one product.

A small LoRA needs little arithmetic, but as a separate sum it reads and writes all activations five more times. Here x
is extended by A x, and the frozen weight by B:

    W x + B A x = [W, B] [x, A x]

Query, key and value of self-attention share x, so they and their gradient are one product. `JointLinear` uses peft's
interface for another way to compute a LoRA, and the attention processor uses diffusers'; weights and their names do not
change. Hooks on the projections of an attention do not run in this mode.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from jaxtyping import Float
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional

ADAPTER = "cgru_policy"
"""The name of our LoRA among peft's."""
USUAL = AttnProcessor2_0()
ALIGNED = 8
"""Numbers of half precision that a GPU's fast products take at once: 16 bytes."""


class JointProjections:
    """An attention processor for what `join_projections` puts it on; a mask is left to diffusers' own."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Float[Tensor, "n s c"],
        encoder_hidden_states: Float[Tensor, "n words w"] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "n s c"]:
        """Return what AttnProcessor2_0 returns, but for rounding; the arguments' names are diffusers'."""
        if attention_mask is not None:
            found: Tensor = USUAL(attn, hidden_states, encoder_hidden_states, attention_mask)
            return found
        if encoder_hidden_states is None:
            rows = joint(hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        else:
            rows = (*joint(hidden_states, (attn.to_q,)), *joint(encoder_hidden_states, (attn.to_k, attn.to_v)))
        heads = (row.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for row in rows)
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        out, dropout = attn.to_out
        dropped: Tensor = dropout(*joint(mixed, (out,)))
        return dropped


class JointLinear(Linear):
    """peft's linear layer with a LoRA. The factors may be finer than x: they multiply in x's precision."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return what peft's layer returns, but for rounding; with the LoRA off or merged, it is peft's."""
        found: Tensor = joint(x, (self,))[0] if _is_live(self) else super().forward(x, *args, **kwargs)
        return found


def join_projections(network: nn.Module) -> None:
    """Let the network's ordinary attention multiply by several weights at once; no effect without a LoRA."""
    for part in network.modules():
        if isinstance(part, Attention) and _is_ordinary(part):
            part.set_processor(JointProjections())


def part_projections(network: nn.Module) -> None:
    """Let attention be computed layer by layer again."""
    for part in network.modules():
        if isinstance(part, Attention) and isinstance(part.processor, JointProjections):
            part.set_processor(AttnProcessor2_0())


def joint(x: Float[Tensor, "*n c"], layers: Sequence[nn.Module]) -> tuple[Float[Tensor, "*n _"], ...]:
    """What each of the layers makes of x."""
    if not all(_is_live(layer) for layer in layers):
        return tuple(layer(x) for layer in layers)
    adapters: list[Any] = list(layers)
    a = torch.cat([layer.lora_A[ADAPTER].weight for layer in adapters])
    b = torch.block_diag(*(layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER] for layer in adapters))
    missing = -len(a) % ALIGNED
    a, b = functional.pad(a, (0, 0, 0, missing)).to(x.dtype), functional.pad(b, (0, missing)).to(x.dtype)
    bases = [layer.get_base_layer() for layer in adapters]
    weight = bases[0].weight if len(bases) == 1 else torch.cat([base.weight for base in bases])
    y: Tensor = _Widened.apply(x, weight, _bias(bases), a, b)
    return y.split([base.out_features for base in bases], dim=-1)


class _Widened(torch.autograd.Function):
    """[W, B] [x, A x] + bias, without a gradient of the frozen W."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context takes any attribute
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)  # A x is made again: kept, it would have no gradient of its own
        wide = torch.cat([x, functional.linear(x, a)], dim=-1)
        return functional.linear(wide, torch.cat([weight, b], dim=1), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor]:  # noqa: ANN401
        input, weight, a, b = ctx.saved_tensors
        x, g, back = input.flatten(0, -2), gradient.flatten(0, -2), None
        if ctx.needs_input_grad[0]:
            direct, pull = (g @ torch.cat([weight, b], dim=1)).tensor_split([weight.shape[1]], dim=1)
            back = (direct + pull @ a).view_as(input)
        else:  # words
            pull = g @ b
        return back, None, None, pull.T @ x, g.T @ functional.linear(x, a)


def _bias(bases: Sequence[nn.Linear]) -> Tensor | None:
    if all(base.bias is None for base in bases):
        return None
    return torch.cat([base.weight.new_zeros(base.out_features) if base.bias is None else base.bias for base in bases])


def _is_live(layer: nn.Module) -> bool:
    """Whether the layer has our LoRA and it is switched on."""
    if not isinstance(layer, JointLinear) or layer.disable_adapters or layer.merged:
        return False
    return layer.active_adapters == [ADAPTER] and ADAPTER in layer.lora_A


def _is_ordinary(attn: Attention) -> bool:
    layers = (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0] if attn.to_out is not None else None)
    extras = (attn.group_norm, attn.spatial_norm, attn.norm_q, attn.norm_k, attn.norm_cross, attn.residual_connection)
    return (
        type(attn.processor) is AttnProcessor2_0
        and all(isinstance(layer, nn.Linear | Linear) for layer in layers)
        and not any(extras)
        and attn.rescale_output_factor == 1
    )
