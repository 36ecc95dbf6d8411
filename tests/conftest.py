"""Shared fixtures: tiny random Stable Diffusion folders made of diffusers' and transformers' own classes.

Two flavours: `epsilon` looks like SD 1.x, `v_prediction` like SD 2.x. Latents are 4×8×8, images 16×16. No network is
used: the hub is switched off and its cache is an empty folder. Shapes are checked under pytest only.
"""

import os
import shutil
import tempfile
from pathlib import Path

HUB_CACHE = tempfile.TemporaryDirectory(prefix="cgru-test-hub-")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": HUB_CACHE.name}  # read once, when huggingface_hub is imported

import pytest  # noqa: E402
import torch  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

for package in ("mdp", "rl", "critic", "rewards"):
    install_import_hook(f"cgru.{package}", "beartype.beartype")
torch.set_num_threads(1)  # tiny networks: a second thread only waits

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer  # noqa: E402

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion  # noqa: E402

TOKENS = 16


def tiny_tokenizer() -> CLIPTokenizer:
    """A byte-level CLIP tokenizer without merges: one token a character."""
    letters = sorted(ByteLevel.alphabet())
    vocab = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(vocab)}, merges=[], model_max_length=TOKENS)


def tiny_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Two layers of width 16."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def tiny_pipeline(prediction_type: str) -> StableDiffusionPipeline:
    """A whole random pipeline; the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = tiny_tokenizer()
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=8,
            use_linear_projection=prediction_type == "v_prediction",  # SD 2.x has it, 1.x has not
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
        )
        text_encoder = tiny_text_encoder(tokenizer)
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@pytest.fixture(scope="session")
def sd_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prediction type -> a saved pipeline folder; read only, copy it before changing anything."""
    root = tmp_path_factory.mktemp("models")
    for prediction_type in ("epsilon", "v_prediction"):
        tiny_pipeline(prediction_type).save_pretrained(root / prediction_type)
    return {prediction_type: root / prediction_type for prediction_type in ("epsilon", "v_prediction")}


@pytest.fixture(scope="session")
def sd_folder(sd_folders: dict[str, Path]) -> Path:
    """The SD 1.x-like folder."""
    return sd_folders["epsilon"]


@pytest.fixture(scope="session")
def hub_id(sd_folder: Path) -> str:
    """A hub id whose files are already in the hub's cache, as after a download."""
    commit = "0" * 40
    repository = Path(HUB_CACHE.name) / "models--tiny--stable-diffusion"
    shutil.copytree(sd_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return "tiny/stable-diffusion"


@pytest.fixture(scope="session", params=["epsilon", "v_prediction"])
def backbone(request: pytest.FixtureRequest, sd_folders: dict[str, Path]) -> StableDiffusion:
    """A loaded tiny model in fp32 on the CPU, one of each prediction type; do not change its weights."""
    return load_stable_diffusion(sd_folders[request.param], device="cpu")
