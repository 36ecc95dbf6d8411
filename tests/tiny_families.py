"""Tiny random pipelines of the families beside Stable Diffusion 1.x and 2.x, of the real classes: XL and 3.

Latents are 4×8×8 and 16×8×8, images 16×16.
"""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

LENGTH = 100


def tiny_words(**settings: Any) -> CLIPTokenizer:  # noqa: ANN401 - passed on to transformers
    """A byte-level CLIP tokenizer without merges: one token a character."""
    letters = sorted(ByteLevel.alphabet())
    vocab = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], model_max_length=LENGTH, **settings
    )


def tiny_t5_words() -> T5TokenizerFast:
    """Letters and T5's own special tokens."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in map(chr, range(33, 127)))]
    return T5TokenizerFast(vocab=vocab + [(f"<extra_id_{i}>", 0.0) for i in range(100)], model_max_length=512)


def clip_config(tokenizer: CLIPTokenizer, width: int, projected: int) -> CLIPTextConfig:
    """Two layers."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        projection_dim=projected,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_vae(channels: int, **settings: Any) -> AutoencoderKL:  # noqa: ANN401
    """Half the side in latents."""
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        **settings,
    )


def tiny_sdxl(*, zeros: bool = True) -> StableDiffusionXLPipeline:
    """As SDXL base: blocks of different depth, Euler's schedule, zeros for the empty prompt."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, second = tiny_words(), tiny_words(pad_token="!")
        return StableDiffusionXLPipeline(
            vae=tiny_vae(4, scaling_factor=0.13025),
            text_encoder=CLIPTextModel(clip_config(first, 16, 16)),
            text_encoder_2=CLIPTextModelWithProjection(clip_config(second, 24, 12)),
            tokenizer=first,
            tokenizer_2=second,
            unet=UNet2DConditionModel(
                sample_size=8,
                block_out_channels=(16, 32),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                transformer_layers_per_block=(1, 2),
                attention_head_dim=(2, 4),
                use_linear_projection=True,
                cross_attention_dim=16 + 24,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + 12,
                norm_num_groups=8,
            ),
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                steps_offset=1,
                timestep_spacing="leading",
            ),
            force_zeros_for_empty_prompt=zeros,
            add_watermarker=False,
        )


def tiny_sd3(*, t5: bool = True) -> StableDiffusion3Pipeline:
    """As SD3.5 medium: two attentions in the first block, normed queries; T5 or none."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        first, second, third = tiny_words(), tiny_words(pad_token="!"), tiny_t5_words()
        t5_config = T5Config(
            vocab_size=len(third),
            d_model=48,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
        return StableDiffusion3Pipeline(
            vae=tiny_vae(
                16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
            ),
            text_encoder=CLIPTextModelWithProjection(clip_config(first, 16, 16)),
            text_encoder_2=CLIPTextModelWithProjection(clip_config(second, 24, 12)),
            text_encoder_3=T5EncoderModel(t5_config) if t5 else None,
            tokenizer=first,
            tokenizer_2=second,
            tokenizer_3=third if t5 else None,
            transformer=SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=16,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=48,
                caption_projection_dim=32,
                pooled_projection_dim=16 + 12,
                out_channels=16,
                pos_embed_max_size=8,
                dual_attention_layers=(0,),
                qk_norm="rms_norm",
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
