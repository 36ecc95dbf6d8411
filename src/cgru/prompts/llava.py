"""LLaVA-1.5 as a captioner through transformers: greedy decoding, one sentence per picture, deterministic.

The same instruction is used for every picture (captions.py quotes the paper's); only new tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from cgru.backbones.base import parse_dtype, pick_device
from cgru.prompts.captions import INSTRUCTION, MODEL, TOKENS
from cgru.rewards.weights import load_network, origin_of, read_json, reading, refuse_code_of

PLAIN = "USER: <image>\n{} ASSISTANT:"
"""The prompt format LLaVA-1.5 was trained with, for processors without a chat template."""


@dataclass(frozen=True, eq=False)
class Llava:
    """A loaded model and its processor."""

    model: Any
    processor: Any
    instruction: str
    tokens: int

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> list[str]:
        """Return one caption per image, in order."""
        prompts = [self.prompt] * len(images)
        inputs = self.processor(images=list(images), text=prompts, return_tensors="pt", padding=True)
        inputs = inputs.to(self.model.device, self.model.dtype)
        written = self.model.generate(**inputs, do_sample=False, max_new_tokens=self.tokens)
        new = written[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.batch_decode(new, skip_special_tokens=True)]

    @property
    def prompt(self) -> str:
        """The instruction in the model's training format, with a placeholder for the image."""
        if not self.processor.chat_template:
            return PLAIN.format(self.instruction)
        content = [{"type": "image"}, {"type": "text", "text": self.instruction}]
        messages = [{"role": "user", "content": content}]
        text: str = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        return text


def load_llava(
    source: str = MODEL,
    *,
    instruction: str = INSTRUCTION,
    tokens: int = TOKENS,
    device: str = "auto",
    dtype: str = "fp32",
) -> Llava:
    """Load a LLaVA from a folder or the hub.

    Args:
        source: a folder in the transformers layout or a hub id.
        instruction: what to ask about each picture.
        tokens: maximum number of new tokens.
        device: `auto`, `cpu`, `cuda`, ...
        dtype: `fp32`, `bf16` or `fp16`; the 7B model takes 28 GB in fp32 and 14 GB in the others.
    """
    place, precision = pick_device(device), parse_dtype(dtype)
    origin = origin_of(source)
    kind = read_json(origin, "config.json").get("model_type")
    if kind != "llava":
        raise ValueError(f"{source!r} is a {kind!r}; allowed: a LLaVA-1.5 ('llava'), such as {MODEL}. Give another.")
    refuse_code_of(origin)
    with reading(origin):
        processor = AutoProcessor.from_pretrained(origin, trust_remote_code=False)
    processor.tokenizer.padding_side = "left"  # new tokens follow the prompt, so what is filled up stands before it
    model = load_network(LlavaForConditionalGeneration, origin, dtype=precision)
    return Llava(model.to(place), processor, instruction, tokens)
