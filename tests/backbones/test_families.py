"""Every family of models: one table of what a backbone must do, and agreement with diffusers' own pipelines."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tiny_families import LENGTH, tiny_sdxl, tiny_words
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from cgru.backbones import load_model
from cgru.backbones.base import Backbone, HasTextLimit, parse_dtype
from cgru.backbones.families import SD, SD3, SDXL, Family, family_of
from cgru.backbones.sd3 import StableDiffusion3
from cgru.backbones.sdxl import StableDiffusionXL
from cgru.backbones.trial import failing
from cgru.mdp.rollout import rescore, rollout, sample
from cgru.mdp.trajectory import EMBEDDINGS, POOLED

PROMPTS = ["a dog", "a cat on a mat"]
SEEDS = [3, 4]


@pytest.fixture(scope="module", params=["sd", "sdxl", "sd3", "sd3 without T5"])
def model(request: pytest.FixtureRequest, family_folders: dict[str, Path]) -> Backbone:
    return load_model(family_folders[request.param], device="cpu")


def test_shapes_and_flags(model: Backbone) -> None:
    assert isinstance(model, Backbone)
    cond = model.encode_text(PROMPTS)
    x = torch.randn((2, *model.latent_shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        time = model.kernel(4, eta=0.7).timesteps[:1].expand(2)
        prediction, images = model.predict(x, time, cond, guidance=3.0), model.decode(x)
        assert prediction.shape == x.shape and prediction.dtype == torch.float32
        assert images.shape == (2, 3, 16, 16) and images.dtype == torch.float32
        assert model.encode(images).shape == x.shape
    assert failing(model) is None


def test_the_ratio_is_one_right_after_collection(model: Backbone) -> None:
    kernel = model.kernel(4, eta=0.7)
    found = rollout(model, model.encode_text(PROMPTS), SEEDS, kernel=kernel, guidance=3.0)
    steps = found.steps(*found.policy_pairs())
    again = rescore(model, steps, kernel=kernel, guidance=3.0)
    torch.testing.assert_close((again - steps.log_prob).exp(), torch.ones(len(steps)), rtol=0, atol=1e-5)
    assert len(steps) >= 6  # flow matching has no noise in its last step


def test_many_prompts_are_embedded_like_one(model: Backbone) -> None:
    prompts = [str(i) for i in range(70)]  # over a batch of 64
    many, alone = model.encode_text(prompts), model.encode_text(prompts[-1:])
    for name, rows in alone.tensors.items():
        torch.testing.assert_close(many.tensors[name][-1:], rows)


def test_long_prompts_are_counted(model: Backbone, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(model, HasTextLimit) and model.max_tokens == LENGTH
    fits = "x" * (LENGTH - 2)
    assert model.count_tokens([fits, fits + "x"]) == [LENGTH, LENGTH + 1]
    model.encode_text([fits, fits + "x", fits])
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 3 prompts are longer than 100 tokens and were cut"
    ]


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
@pytest.mark.parametrize("which", ["tokenizer", "tokenizer_2"])
def test_the_encoder_that_reads_least_decides(family_folders: dict[str, Path], name: str, which: str) -> None:
    model = load_model(family_folders[name], device="cpu")
    assert isinstance(model, StableDiffusionXL | StableDiffusion3)
    wordy, short = tiny_words(), tiny_words()
    wordy.add_tokens(["cat"])  # one token where the other tokenizer has three
    short.model_max_length = 50
    assert replace(model, **{which: wordy}).count_tokens(["a cat"]) == [6]
    assert replace(model, **{which: short}).max_tokens == 50


@torch.no_grad()
def test_latents_are_the_posterior_s_mean_shifted_and_scaled(model: Backbone) -> None:
    images = torch.rand((2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    vae = model.vae  # type: ignore[attr-defined]
    z = vae.encode(images * 2 - 1).latent_dist.mode()
    expected = (z - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
    torch.testing.assert_close(model.encode(images), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_sdxl_s_vae_decodes_in_float32_where_it_overflows_in_float16(
    family_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(family_folders["sdxl"], tmp_path / "model"))
    for upcast, given, expected in (
        (True, "fp16", torch.float32),
        (False, "fp16", torch.float16),
        (True, "bf16", torch.bfloat16),  # has the range of float32
    ):
        change(folder / "vae" / "config.json", force_upcast=upcast)
        model = load_model(folder, device="cpu", dtype=given)
        assert isinstance(model, StableDiffusionXL)
        assert model.vae.dtype == expected and model.denoiser.dtype == parse_dtype(given)


# ---- which family, and that its parts fit


def change(file: Path, **settings: object) -> None:
    """Settings of a json file; None removes one."""
    table = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({name: value for name, value in table.items() if value is not None}))


@pytest.mark.parametrize(
    ("index", "family"),
    [
        ({"_class_name": "StableDiffusionXLImg2ImgPipeline"}, SDXL),
        ({"_class_name": "StableDiffusion3InpaintPipeline"}, SD3),
        ({"_class_name": "StableDiffusionImg2ImgPipeline"}, SD),
        ({"_class_name": "OwnPipeline", "unet": 1, "text_encoder": 1, "text_encoder_2": 1}, SDXL),
        ({"_class_name": "OwnPipeline", "transformer": 1, "text_encoder": 1, "text_encoder_2": 1}, SD3),
        ({"unet": 1, "text_encoder": 1}, SD),
    ],
)
def test_a_family_is_told_by_its_pipeline_or_its_parts(index: Mapping[str, object], family: Family) -> None:
    assert family_of(index) is family


def test_sdxl_leads_away_from_zeros_where_its_index_is_silent(family_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family_folders["sdxl"], tmp_path / "model"))
    change(folder / "model_index.json", force_zeros_for_empty_prompt=None)
    cond = load_model(folder, device="cpu").encode_text(PROMPTS)
    assert cond.unconditional and not any(bool(rows.any()) for rows in cond.unconditional.values())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("sdxl", {"in_channels": 9}, "UNet for 9 channels, text width 40 and 60 numbers .* give 4, 40 and 60"),
        ("sdxl", {"cross_attention_dim": 24}, "UNet for 4 channels, text width 24 .* give 4, 40"),
        ("sdxl", {"projection_class_embeddings_input_dim": 52}, "52 numbers of pooled text and sizes, .* 40 and 60"),
        ("sdxl", {"addition_embed_type": None}, "addition_embed_type is None; Stable Diffusion XL has 'text_time'"),
        ("sd3", {"in_channels": 4}, "a transformer for 4 channels, .* its VAE gives 16"),
        ("sd3", {"pooled_projection_dim": 16}, "pooled text of 16, .* its text encoders 48 and 28"),
        ("sd3 without T5", {"joint_attention_dim": 32}, "text width 32 .* its text encoders 32 and 28"),  # CLIPs: 40
    ],
)
def test_parts_that_do_not_fit_are_refused(
    family_folders: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, object], said: str
) -> None:
    """An inpainting model, a refiner, and so on: each network is whole, but not one for the others."""
    folder = Path(shutil.copytree(family_folders[name], tmp_path / "model"))
    kind, part = (UNet2DConditionModel, "unet") if name == "sdxl" else (SD3Transformer2DModel, "transformer")
    config = {**kind.load_config(folder, subfolder=part), **changes}
    shutil.rmtree(folder / part)
    kind.from_config(config).save_pretrained(folder / part)
    with pytest.raises(ValueError, match=said) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_vae_of_another_family_is_refused(family_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family_folders["sdxl"], tmp_path / "model"))
    change(folder / "vae" / "config.json", latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    with pytest.raises(ValueError, match="has latents_mean, which Stable Diffusion XL has not"):
        load_model(folder, device="cpu")


def test_each_tokenizer_must_suit_its_own_encoder(family_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family_folders["sdxl"], tmp_path / "model"))
    config = CLIPTextConfig.from_pretrained(folder / "text_encoder_2", vocab_size=400)
    shutil.rmtree(folder / "text_encoder_2")
    CLIPTextModelWithProjection(config).save_pretrained(folder / "text_encoder_2")
    with pytest.raises(ValueError, match="the tokenizer_2 of .* knows 514 tokens; its text encoder allows 3 to 400"):
        load_model(folder, device="cpu")


# ---- agreement with diffusers


def drawn(model: Backbone, guidance: float) -> torch.Tensor:
    """Our pictures without noise after x_T."""
    kernel = model.kernel(4, eta=0.0)
    return model.decode(sample(model, model.encode_text(PROMPTS), SEEDS, kernel=kernel, guidance=guidance))


def drawn_by(pipe: Any, model: Backbone, guidance: float) -> torch.Tensor:  # noqa: ANN401 - untyped library
    """Those of diffusers from the same x_T."""
    pipe.set_progress_bar_config(disable=True)
    noise = [torch.randn(model.latent_shape, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS]
    options = {"guidance_scale": guidance, "num_inference_steps": 4, "output_type": "pt"}
    pictures: torch.Tensor = pipe(PROMPTS, latents=torch.stack(noise), **options).images
    return pictures


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("zeros", [True, False])
@torch.no_grad()
def test_sdxl_draws_what_diffusers_draws(tmp_path: Path, zeros: bool, guidance: float) -> None:
    pipe = tiny_sdxl(zeros=zeros)
    pipe.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    torch.testing.assert_close(drawn(model, guidance), drawn_by(pipe, model, guidance), rtol=0, atol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("name", ["sd3", "sd3 without T5"])
@torch.no_grad()
def test_sd3_draws_what_diffusers_draws(family_folders: dict[str, Path], name: str, guidance: float) -> None:
    without = {"text_encoder_3": None, "tokenizer_3": None} if name != "sd3" else {}  # diffusers must be told
    pipe = StableDiffusion3Pipeline.from_pretrained(family_folders[name], **without)
    model = load_model(family_folders[name], device="cpu")
    torch.testing.assert_close(drawn(model, guidance), drawn_by(pipe, model, guidance), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["sdxl", "sd3", "sd3 without T5"])
@torch.no_grad()
def test_prompts_are_read_as_diffusers_reads_them(family_folders: dict[str, Path], name: str) -> None:
    """Tensor by tensor: attention has no order, so pictures would not show that tokens have changed places."""
    without = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3 without T5" else {}
    kind = StableDiffusionXLPipeline if name == "sdxl" else StableDiffusion3Pipeline
    pipe, model = kind.from_pretrained(family_folders[name], **without), load_model(family_folders[name], device="cpu")
    more = {} if name == "sdxl" else {"prompt_2": None, "prompt_3": None}
    embeddings, empty, pooled, empty_pooled = pipe.encode_prompt(PROMPTS, device=torch.device("cpu"), **more)
    cond = model.encode_text(PROMPTS)
    found = cond.tensors, {part: rows.expand(2, *rows.shape[1:]) for part, rows in cond.unconditional.items()}
    for tensors, expected in zip(found, ((embeddings, pooled), (empty, empty_pooled)), strict=True):
        torch.testing.assert_close(tensors[EMBEDDINGS], expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(tensors[POOLED], expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_prompts_and_guidance_matter(family_folders: dict[str, Path], name: str) -> None:
    """Tiny networks say little of what they read: the agreement above would not show an ignored prompt."""
    model = load_model(family_folders[name], device="cpu")
    cond, x = model.encode_text(PROMPTS), torch.randn((2, *model.latent_shape), generator=torch.Generator())
    time = model.kernel(4, eta=0.0).timesteps[1].expand(2)
    with torch.no_grad():
        plain = model.predict(x, time, cond, guidance=3.0)
        for part in cond.tensors:
            other = {**cond.tensors, part: cond.tensors[part] + 3}
            changed = model.predict(x, time, replace(cond, tensors=other), guidance=3.0)
            assert (changed - plain).abs().max() > 1e-3, part
