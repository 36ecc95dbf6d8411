"""The tokenizers of a model without its networks, so that prompts can be counted before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import CLIPTextConfig, CLIPTokenizer

from cgru.backbones import is_own_loader
from cgru.backbones.families import CLIP_WORDS, check_words
from cgru.backbones.loading import family_in, resolve_source
from cgru.backbones.text import clip_limit, token_counts


@dataclass(frozen=True, eq=False)
class Words:
    """CLIP tokenizers; offers `HasTextLimit` as the loaded model does."""

    tokenizers: tuple[Any, ...]
    max_tokens: int

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has for the tokenizer that takes more, start and end included."""
        counts = [token_counts(tokenizer, texts) for tokenizer in self.tokenizers]
        return [max(each) for each in zip(*counts, strict=True)]


def words_of_model(name: str) -> Words | None:
    """The tokenizers of a model by its name; None if they are not readable here, or the user's own code loads it."""
    if is_own_loader(name):
        return None
    try:
        origin = resolve_source(name)
        index = try_to_load_from_cache(origin, "model_index.json") if isinstance(origin, str) else origin / "index"
        return _read_words(Path(index).parent.resolve()) if isinstance(index, str | Path) else None
    except (OSError, ValueError, KeyError, TypeError):  # not downloaded yet, or damaged: loading the model tells
        return None


@lru_cache(maxsize=1)  # a sweep has one model and up to 500 runs
def _read_words(folder: Path) -> Words:
    parts, limits = dict[str, Any](), list[int]()
    for name in (name for name, part in family_in(folder).parts.items() if part is CLIP_WORDS):
        encoder = name.replace("tokenizer", "text_encoder")
        config = CLIPTextConfig.from_pretrained(folder, subfolder=encoder, trust_remote_code=False)
        parts[encoder] = SimpleNamespace(config=config)
        parts[name] = CLIPTokenizer.from_pretrained(folder, subfolder=name, trust_remote_code=False)
        limits.append(clip_limit(parts[name], parts[encoder]))
    check_words(str(folder), parts)
    return Words(tuple(part for name, part in parts.items() if name.startswith("tokenizer")), min(limits))
