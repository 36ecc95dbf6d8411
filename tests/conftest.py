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
# Also for the commands that tests start: as many tests as cores run side by side; two threads would spin.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

for package in ("mdp", "rl", "critic", "rewards"):
    install_import_hook(f"cgru.{package}", "beartype.beartype")
torch.set_num_threads(1)  # tiny networks: a second thread only waits

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: E402
from tiny_assets import write_assets  # noqa: E402
from tiny_families import tiny_sd3, tiny_sdxl  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer  # noqa: E402

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion  # noqa: E402

TOKENS = 16


def tiny_tokenizer(length: int = TOKENS) -> CLIPTokenizer:
    """A byte-level CLIP tokenizer without merges: one token a character."""
    letters = sorted(ByteLevel.alphabet())
    vocab = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(vocab)}, merges=[], model_max_length=length)


def tiny_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Two layers of width 16."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def tiny_pipeline(prediction_type: str, length: int = TOKENS) -> StableDiffusionPipeline:
    """A whole random pipeline that reads `length` tokens; the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = tiny_tokenizer(length)
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
def long_sd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SD 1.x-like model with room for any of our prompts, since a run refuses those that its model would cut."""
    folder = tmp_path_factory.mktemp("models") / "long"
    tiny_pipeline("epsilon", length=100).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory, long_sd_folder: Path) -> dict[str, Path]:
    """A folder of each family; read only."""
    root = tmp_path_factory.mktemp("families")
    pipelines = {"sdxl": tiny_sdxl(), "sd3": tiny_sd3(), "sd3 without T5": tiny_sd3(t5=False)}
    for name, pipeline in pipelines.items():
        pipeline.save_pretrained(root / name)
    return {"sd": long_sd_folder, **{name: root / name for name in pipelines}}


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


@pytest.fixture
def copied(sd_folder: Path, tmp_path: Path) -> Path:
    """A model folder that a test may break."""
    return Path(shutil.copytree(sd_folder, tmp_path / "model"))


@pytest.fixture
def no_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no tracker's package were installed, whatever is: each needs one that nobody has."""
    from cgru.pipeline.trackers import PACKAGES

    for name in PACKAGES:
        monkeypatch.setitem(PACKAGES, name, (f"{name}-that-nobody-has",))


@pytest.fixture
def hub_cache() -> Path:
    """The hub's cache of this test run."""
    return Path(os.environ["HF_HUB_CACHE"])


@pytest.fixture(scope="session")
def asset_root(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    """A tiny asset folder; read only."""
    return write_assets(tmp_path_factory.mktemp("assets"), sd_folder)
