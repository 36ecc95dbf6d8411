"""The Stable Diffusion adapter on tiny pipelines of diffusers' own classes: loading, text, images, users' mistakes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
)
from transformers import CLIPTextModel

from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.backbones.loading import resolve_source
from cgru.backbones.schedules import ddim_scheduler
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion

SD_SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a json file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- loading


def test_a_loaded_model_is_a_frozen_backbone(backbone: StableDiffusion) -> None:
    assert isinstance(backbone, Backbone)
    assert backbone.latent_shape == (4, 8, 8) and backbone.image_size == (16, 16)
    for network in (backbone.denoiser, backbone.vae, backbone.text_encoder):
        assert not network.training and not any(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_network_gets_the_dtype_and_results_are_float32(copied: Path, dtype: str) -> None:
    # The text encoder is stored in half precision here, which transformers would keep if it were not told otherwise.
    CLIPTextModel.from_pretrained(copied, subfolder="text_encoder").half().save_pretrained(copied / "text_encoder")
    backbone = load_model(copied, device="cpu", dtype=dtype)
    assert isinstance(backbone, StableDiffusion)
    for network in (backbone.denoiser, backbone.vae, backbone.text_encoder):
        assert {p.dtype for p in network.parameters()} == {backbone.dtype}
    cond = backbone.encode_text(["a dog"])
    x = torch.zeros(1, *backbone.latent_shape)
    with torch.no_grad():
        prediction = backbone.predict(x, torch.tensor([500]), cond, guidance=3.0)
        images = backbone.decode(x)
        latents = backbone.encode(images)
    assert {prediction.dtype, images.dtype, latents.dtype} == {torch.float32}
    assert prediction.isfinite().all() and images.isfinite().all()


def test_v_prediction_is_read_from_the_folder(sd_folders: dict[str, Path]) -> None:
    for prediction_type, folder in sd_folders.items():
        kernel = load_stable_diffusion(str(folder), device="cpu").kernel(4, eta=1.0)
        assert kernel.prediction_type == prediction_type


@pytest.mark.filterwarnings("ignore:.*local_dir_use_symlinks.*")  # diffusers' call of huggingface_hub
def test_a_hub_id_loads_through_diffusers(hub_id: str, sd_folder: Path) -> None:
    from_hub = load_model(hub_id, device="cpu", revision="main")
    from_folder = load_model(sd_folder, device="cpu")
    assert from_hub.name == hub_id
    pairs = zip(from_hub.denoiser.parameters(), from_folder.denoiser.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# ---- schedule


@pytest.mark.parametrize("scheduler", [PNDMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler])
def test_other_schedulers_are_read_as_ddim(copied: Path, scheduler: Callable[..., PNDMScheduler]) -> None:
    saved = scheduler(**SD_SCHEDULE, prediction_type="v_prediction", timestep_spacing="leading")
    saved.save_pretrained(copied / "scheduler")
    backbone = load_stable_diffusion(copied, device="cpu")
    config = backbone.scheduler.config
    assert (config.beta_schedule, config.prediction_type) == ("scaled_linear", "v_prediction")
    assert not config.clip_sample and config.steps_offset == 1
    # 5 steps, leading, offset 1: 801, 601, ..., 1
    assert backbone.kernel(5, eta=1.0).timesteps.tolist() == [801, 601, 401, 201, 1]


@pytest.mark.parametrize("setting", ["clip_sample", "thresholding"])
def test_clipping_schedulers_are_refused(copied: Path, setting: str) -> None:
    edit_json(copied / "scheduler" / "scheduler_config.json", **{setting: True})
    with pytest.raises(ValueError, match=f"{setting} = true.*set {setting} to false"):
        load_stable_diffusion(copied, device="cpu")


@pytest.mark.parametrize(("spacing", "limit"), [("leading", 999), ("linspace", 1000), ("trailing", 1000)])
def test_a_wrong_number_of_steps_is_named(copied: Path, spacing: str, limit: int) -> None:
    # Of 1000 training times, 0 to 999, 1000 steps with "leading" and its offset 1 would reach time 1000.
    edit_json(copied / "scheduler" / "scheduler_config.json", timestep_spacing=spacing)
    backbone = load_stable_diffusion(copied, device="cpu")
    kernel = backbone.kernel(limit, eta=1.0)
    assert len(kernel) == limit and int(kernel.timesteps.max()) == 999
    for steps in (0, -3, limit + 1, 5000):
        with pytest.raises(ValueError, match=f"^{steps} denoising steps; .* allows 1 to {limit}$"):
            backbone.kernel(steps, eta=1.0)


def test_trailing_steps_are_as_many_as_asked(copied: Path) -> None:
    edit_json(copied / "scheduler" / "scheduler_config.json", timestep_spacing="trailing")
    backbone = load_stable_diffusion(copied, device="cpu")
    assert len(backbone.kernel(61, eta=1.0)) == 61  # diffusers itself lists 62 times, the last of them -1


def test_an_old_steps_offset_is_read_as_diffusers_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scheduler = ddim_scheduler({**SD_SCHEDULE, "steps_offset": 0})
    assert scheduler.config.steps_offset == 1 and "steps_offset 0 read as 1" in caplog.text


# ---- text and images


def test_equal_prompts_have_equal_embeddings(backbone: StableDiffusion) -> None:
    cond = backbone.encode_text(["a dog", "a cat", "a dog", ""])
    assert cond.prompts == ("a dog", "a cat", "a dog", "")
    assert cond.embeddings.shape == (4, 16, 16) and cond.unconditional["embeddings"].shape == (1, 16, 16)
    assert torch.equal(cond.embeddings[0], cond.embeddings[2])
    assert torch.equal(cond.embeddings[3], cond.unconditional["embeddings"][0])
    assert (cond.embeddings[0] - cond.embeddings[1]).abs().max() > 0.01


def test_many_prompts_are_embedded_like_one(backbone: StableDiffusion) -> None:
    prompts = [f"{i}" for i in range(130)]  # over two batches of 64
    alone = backbone.encode_text([prompts[-1]])
    torch.testing.assert_close(backbone.encode_text(prompts).embeddings[-1:], alone.embeddings)


def test_long_prompts_are_cut_with_one_warning(backbone: StableDiffusion, caplog: pytest.LogCaptureFixture) -> None:
    fits = "x" * 14  # 16 tokens with start and end
    with caplog.at_level(logging.WARNING):
        cond = backbone.encode_text(["a dog", "a very long prompt indeed", fits, fits + "x"])
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 prompts are longer than 16 tokens and were cut"
    ]
    assert torch.equal(cond.embeddings[2][:14], cond.embeddings[3][:14])


def test_the_warning_counts_every_prompt_of_the_list(
    backbone: StableDiffusion, caplog: pytest.LogCaptureFixture
) -> None:
    # 100 copies of one long prompt, an empty one and 70 short ones: each text is embedded once, in batches of 64.
    prompts = ["a very long prompt indeed"] * 100 + [""] + [f"{i}" for i in range(70)]
    with caplog.at_level(logging.WARNING):
        backbone.encode_text(prompts)
    assert [record.getMessage() for record in caplog.records] == [
        "100 of 171 prompts are longer than 16 tokens and were cut"
    ]


@pytest.mark.parametrize("prompts", [[], "a dog"])
def test_prompts_must_be_a_list(backbone: StableDiffusion, prompts: object) -> None:
    with pytest.raises(ValueError, match="give a list with at least one prompt"):
        backbone.encode_text(prompts)  # type: ignore[arg-type]


def test_images_keep_the_convention_in_any_batch(backbone: StableDiffusion) -> None:
    x = 5 * torch.randn((5, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = backbone.decode(x)
        torch.testing.assert_close(backbone.decode(x, batch_size=2), images, atol=1e-5, rtol=0)
    assert images.shape == (5, 3, 16, 16) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    with pytest.raises(ValueError, match="batch size is 0"):
        backbone.decode(x, batch_size=0)


def test_encode_is_the_scaled_posterior_mean(backbone: StableDiffusion) -> None:
    images = torch.rand((2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = backbone.vae.encode(images * 2 - 1).latent_dist.mean
        latents = backbone.encode(images, batch_size=1)
    torch.testing.assert_close(latents, 0.18215 * mean, atol=1e-5, rtol=1e-5)  # SD's scaling factor


def test_decode_and_predict_are_differentiable(backbone: StableDiffusion) -> None:
    x = torch.zeros(1, 4, 8, 8, requires_grad=True)
    prediction = backbone.predict(x, torch.tensor([1]), backbone.encode_text(["a dog"]), guidance=2.0)
    (backbone.decode(x).sum() + prediction.sum()).backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


# ---- what users get wrong: one line that says what was given, what is allowed and what to do


def one_line(error: BaseException) -> str:
    """The message, which must be one line."""
    assert "\n" not in str(error)
    return str(error)


def test_a_wrong_name_gets_the_nearest_match(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        resolve_source("emoji-canvs")
    message = one_line(caught.value)
    assert "no model 'emoji-canvs'; allowed: 'emoji-canvas', a diffusers folder" in message
    assert "Did you mean 'emoji-canvas'?" in message

    (tmp_path / "my-model").mkdir()
    with pytest.raises(FileNotFoundError, match="Did you mean '.*/my-model'"):
        resolve_source(tmp_path / "my-modle")


@pytest.mark.parametrize("parent", [".", "models", "models/deep"])
def test_a_mistyped_folder_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / parent / "sd15").mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_source(str(Path(parent) / "sd-15"))
    message = one_line(caught.value)
    assert f"{str(Path(parent) / 'sd-15')!r}; allowed:" in message
    assert f"Did you mean {str(Path(parent) / 'sd15')!r}?" in message
    assert resolve_source("owner/sd-15") == "owner/sd-15"


@pytest.mark.filterwarnings("ignore:.*local_dir_use_symlinks.*")  # diffusers' call of huggingface_hub
def test_an_unreachable_hub_is_one_clear_line() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_model("nobody/no-such-model")
    message = one_line(caught.value)
    assert "'nobody/no-such-model' is no folder here and could not be read from the hub" in message
    assert "Check the spelling, the network" in message
