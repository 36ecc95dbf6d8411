"""The view of an attacker who has the weights: tokens as vectors, the text encoder, the noise schedule.

Text is given as vectors instead of ids, so that a gradient reaches the tokens. The vocabulary contains every token that
text can contain, but not start, end and padding, because no prompt can contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cgru.backbones.base import Backbone
from cgru.backbones.hooked import Hooked
from cgru.mdp.kernel import DDIMKernel, ddim_kernel
from cgru.mdp.trajectory import EMBEDDINGS, Conditioning


class OneEncoder(Backbone, Protocol):
    """A model whose denoiser reads the last hidden states of one CLIP text encoder and nothing else."""

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - untyped library
        """Of transformers."""

    @property
    def text_encoder(self) -> nn.Module:
        """Of transformers."""

    @property
    def scheduler(self) -> Any:  # noqa: ANN401
        """diffusers' DDIM scheduler."""

    @property
    def max_tokens(self) -> int:
        """How many tokens of a prompt it reads."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of its pictures."""


@runtime_checkable
class HasWhiteBox(Protocol):
    """A backbone that white-box attacks can open."""

    def white_box(self) -> WhiteBox:
        """The model opened up."""


@dataclass(frozen=True, eq=False)
class WhiteBox:
    """The model as a white box; `open_up` returns it."""

    model: OneEncoder
    choices: Tensor
    """(v,) the ids an attack may choose."""
    vectors: Tensor
    """(v, d) their embeddings, float32."""
    hook: Hooked | None = None
    """The backbone with an inference-time edit, if one is attacked: the gradient passes through the edit, too."""

    def ids(self, prompts: Sequence[str]) -> Tensor:
        """(n, l) token ids, start, end and padding included."""
        padded = self.model.tokenizer(
            list(prompts), padding="max_length", max_length=self.model.max_tokens, truncation=True, return_tensors="pt"
        )
        ids: Tensor = padded["input_ids"].to(self.model.device)
        return ids

    def room(self, prompt: str) -> int:
        """How many tokens fit beside a prompt."""
        return self.model.max_tokens - len(self.model.tokenizer(prompt, verbose=False)["input_ids"])

    def encode(self, ids: Tensor, prefix: Tensor) -> Tensor:
        """Text embeddings (n, l, d) of prompts (n, l) with vectors (n, k, d) before their first word; differentiable.

        The k last places, which hold padding, fall away.
        """
        k = prefix.shape[1]
        encoder: Any = self.model.text_encoder
        shifted = torch.cat([ids[:, :1].expand(-1, k + 1), ids[:, 1 : ids.shape[1] - k]], 1)
        layer = encoder.get_input_embeddings()

        def replaced(_module: torch.nn.Module, _given: tuple[Tensor, ...], vectors: Tensor) -> Tensor:
            return torch.cat([vectors[:, :1], prefix.to(vectors), vectors[:, k + 1 :]], 1)

        # transformers' text model takes ids only; a hook on its own embedding layer keeps all that follows as it is.
        handle = layer.register_forward_hook(replaced)
        try:
            embeddings: Tensor = encoder(shifted)[0]
        finally:
            handle.remove()
        return embeddings

    def text(self, ids: Sequence[int], prompt: str) -> str:
        """The prompt with tokens before its first word, as the text that a user would type."""
        words = self.model.tokenizer.decode([*ids, *self._plain_ids(prompt)])
        return " ".join(str(words).split())

    def schedule(self, times: Sequence[int]) -> DDIMKernel:
        """The noise levels at training times, in the order given."""
        scheduler = self.model.scheduler
        return ddim_kernel(
            scheduler.alphas_cumprod,
            torch.tensor(list(times)),
            final_alpha=float(scheduler.final_alpha_cumprod),
            eta=0.0,
            prediction_type=scheduler.config.prediction_type,
        ).to(self.model.device)

    @property
    def train_times(self) -> int:
        """How many times the noise schedule has."""
        return int(self.model.scheduler.config.num_train_timesteps)

    def noise_error(self, x0: Tensor, noise: Tensor, index: int, embeddings: Tensor, schedule: DDIMKernel) -> Tensor:
        """(n,) mean squared error of the predicted noise on noised latents, without guidance; differentiable."""
        alpha = schedule.alpha[index]
        x = alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise
        time = schedule.timesteps[index].expand(len(x))
        tensors = {EMBEDDINGS: embeddings.float()}
        cond = Conditioning(("",) * len(x), tensors, {EMBEDDINGS: embeddings[:1].detach().float()})
        if self.hook is None:
            prediction = self.model.predict(x, time, cond, guidance=1.0)
        else:
            prediction = self.hook.predict(x, time, self.hook.embed(cond), guidance=1.0)
        predicted = (x - alpha.sqrt() * schedule.x0(prediction, x, index)) / (1 - alpha).sqrt()
        return (predicted - noise).square().flatten(1).mean(1)

    def _plain_ids(self, prompt: str) -> list[int]:
        return list(self.model.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])


def open_up(backbone: Backbone) -> WhiteBox:
    """The model behind a backbone as a white box, for attacks that need its gradients."""
    if isinstance(backbone, Hooked):
        if backbone.no_gradient is not None:
            reason = f"the edit of {backbone.name!r} cannot be attacked white box: {backbone.no_gradient}"
            raise ValueError(f"{reason}. Attack another edit, or evaluate this one with other prompts.")
        return replace(open_up(backbone.inner), hook=backbone)
    if not isinstance(backbone, HasWhiteBox):
        raise ValueError(
            f"{backbone.name!r} is a {type(backbone).__name__}, which lacks `white_box`: its tokens as vectors through "
            "one text encoder, which is all that Stable Diffusion 1.x and 2.x read. Attack such a model instead."
        )
    return backbone.white_box()


def opened(model: OneEncoder) -> WhiteBox:
    """A model with one text encoder opened up."""
    encoder: Any = model.text_encoder
    table = encoder.get_input_embeddings().weight.detach().float()
    special = torch.tensor(sorted(set(model.tokenizer.all_special_ids)))
    ids = torch.arange(min(len(table), len(model.tokenizer)))
    choices = ids[~torch.isin(ids, special)].to(model.device)
    return WhiteBox(model, choices, table[choices])
