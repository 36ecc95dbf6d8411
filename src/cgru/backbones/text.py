"""Shared code for CLIP and T5 text encoders: each text is embedded once, in batches, and cut at the model's limit."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from cgru.backbones.base import HasTextLimit
from cgru.backbones.offload import Parking, bring, park
from cgru.mdp.trajectory import Conditioning

logger = logging.getLogger(__name__)

TEXT_BATCH = 64

Read = Callable[[Sequence[str]], dict[str, Tensor]]
"""m texts -> the conditioning's tensors, (m, ...) each."""


def conditioning(prompts: Sequence[str], read: Read, model: HasTextLimit) -> Conditioning:
    """Embed prompts, and the empty prompt for guidance; equal prompts get equal bits.

    Prompts over the model's token limit will be cut: one warning counts them.
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts are {prompts!r}; give a list with at least one prompt")
    # Each text once: training prompts repeat.
    texts = list(dict.fromkeys(["", *prompts]))
    counts = dict(zip(texts, model.count_tokens(texts), strict=True))
    if cut := sum(counts[prompt] > model.max_tokens for prompt in prompts):
        logger.warning("%d of %d prompts are longer than %d tokens and were cut", cut, len(prompts), model.max_tokens)
    places = {text: i for i, text in enumerate(texts)}
    rows = [places[prompt] for prompt in prompts]
    tables = read(texts)
    tensors = {name: table[rows] for name, table in tables.items()}
    return Conditioning(tuple(prompts), tensors, {name: table[:1] for name, table in tables.items()})


def encoder_outputs(
    encoder: Any,  # noqa: ANN401 - any of transformers' text encoders
    tokenizer: Any,  # noqa: ANN401
    texts: Sequence[str],
    *,
    length: int,
    parking: Parking | None,
    **options: bool,
) -> Iterator[Any]:
    """What a text encoder returns for each batch of texts, padded or cut to `length` tokens."""
    padded = tokenizer(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    bring(parking, encoder)
    tokens: Tensor = padded["input_ids"].to(encoder.device)
    for part in tokens.split(TEXT_BATCH):
        yield encoder(part, **options)
    park(parking, encoder)


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:  # noqa: ANN401
    """How many tokens each text has, start and end included."""
    return [len(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]]


def clip_limit(tokenizer: Any, encoder: Any) -> int:  # noqa: ANN401
    """How many tokens a CLIP text encoder reads, start and end included."""
    return int(min(tokenizer.model_max_length, encoder.config.max_position_embeddings))
