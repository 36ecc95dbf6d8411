"""A random LLaVA of the real classes, made small: CLIP of 8 × 8 pixels, Llama of width 16, bytes as tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
SIDE, PATCH = 8, 4


def tiny_text_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    vocab = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )


def write_llava(folder: Path, chat_template: str | None = None) -> Path:
    """Save model and processor as the hub has them."""
    tokenizer = tiny_text_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=16,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
        with torch.no_grad():  # large, so that different pictures get different captions
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "lm_head" not in name:
                    weight.mul_(8)
    model.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template,
    )
    processor.save_pretrained(folder)
    return folder
