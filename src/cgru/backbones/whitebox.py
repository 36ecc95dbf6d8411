"""What an attacker who has the weights sees of a model: its tokens as vectors, its text encoder, its noise schedule.

Text goes in as vectors instead of ids, so that a gradient reaches the tokens. Every token that text can contain is
offered; start, end and padding are not, because no prompt can contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cgru.backbones.base import Backbone
from cgru.backbones.sd import StableDiffusion
from cgru.mdp.kernel import DDIMKernel, ddim_kernel
from cgru.mdp.trajectory import Conditioning


@dataclass(frozen=True, eq=False)
class WhiteBox:
    """A Stable Diffusion model opened up; build it with `open_up`."""

    model: StableDiffusion
    choices: Tensor
    """(v,) the ids an attack may choose."""
    vectors: Tensor
    """(v, d) their embeddings, float32."""

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
        k, encoder = prefix.shape[1], self.model.text_encoder
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
        cond = Conditioning(("",) * len(x), embeddings.float(), embeddings[:1].detach().float())
        prediction = self.model.predict(x, time, cond, guidance=1.0)
        predicted = (x - alpha.sqrt() * schedule.x0(prediction, x, index)) / (1 - alpha).sqrt()
        return (predicted - noise).square().flatten(1).mean(1)

    def _plain_ids(self, prompt: str) -> list[int]:
        return list(self.model.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])


def open_up(backbone: Backbone) -> WhiteBox:
    """The model behind a backbone, for attacks that need its gradients."""
    if not isinstance(backbone, StableDiffusion):
        kind = type(backbone).__name__
        raise ValueError(f"{backbone.name!r} is a {kind}; allowed: Stable Diffusion. Attack such a model instead.")
    table = backbone.text_encoder.get_input_embeddings().weight.detach().float()
    special = torch.tensor(sorted(set(backbone.tokenizer.all_special_ids)))
    ids = torch.arange(min(len(table), len(backbone.tokenizer)))
    choices = ids[~torch.isin(ids, special)].to(backbone.device)
    return WhiteBox(backbone, choices, table[choices])
