"""LoRA edits: they change pictures while applied and leave no trace after."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import cgru
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.edits import base_model, find_edit, is_run, load_edit
from cgru.evaluation.base import Sampling
from cgru.evaluation.runner import draw

FILE = "pytorch_lora_weights.safetensors"


def write_lora(model: Path, folder: Path) -> Path:
    """A random LoRA on the attention of a model, written by plain diffusers."""
    pipeline = StableDiffusionPipeline.from_pretrained(model)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    pipeline.unet.add_adapter(LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=targets))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for name, parameter in pipeline.unet.named_parameters():
            if "lora" in name:
                parameter.normal_()
    weights = get_peft_model_state_dict(pipeline.unet)
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=weights)
    return folder / FILE


@pytest.fixture(scope="module")
def lora(sd_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(sd_folder, tmp_path_factory.mktemp("lora"))


@pytest.fixture
def model(sd_folder: Path) -> Iterator[StableDiffusion]:
    yield load_stable_diffusion(sd_folder, device="cpu")


def state(model: StableDiffusion) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.denoiser.state_dict().items()}


def test_edit_changes_pictures_and_restores_every_bit(model: StableDiffusion, lora: Path) -> None:
    sampling = Sampling(2, 1.0, 0.0)
    before, modules = state(model), [name for name, _ in model.denoiser.named_modules()]
    plain = draw(model, ["cat"], [1], sampling)
    with load_edit(lora).applied(model) as edited:
        changed = draw(edited, ["cat"], [1], sampling)
    after = state(model)
    assert (changed - plain).abs().max() > 1e-3
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert modules == [name for name, _ in model.denoiser.named_modules()]
    assert not any(parameter.requires_grad for parameter in model.denoiser.parameters())
    assert torch.equal(draw(model, ["cat"], [1], sampling), plain)


def test_edit_is_undone_after_an_error_too(model: StableDiffusion, lora: Path) -> None:
    before = state(model)
    with pytest.raises(RuntimeError, match="inside"), load_edit(lora).applied(model):
        raise RuntimeError("inside")
    after = state(model)
    assert before.keys() == after.keys()


def test_edit_equals_plain_diffusers(model: StableDiffusion, lora: Path, sd_folder: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(sd_folder)
    pipeline.load_lora_weights(lora.parent, weight_name=FILE)
    x, time = torch.randn(1, 4, 8, 8), torch.tensor([500])
    condition = model.encode_text(["cat"])
    with torch.no_grad(), load_edit(lora).applied(model):
        ours = model.predict(x, time, condition, guidance=1.0)
        theirs = pipeline.unet(x, time, condition.embeddings).sample
    torch.testing.assert_close(ours, theirs)


def test_saved_edit_loads_again(model: StableDiffusion, lora: Path, tmp_path: Path) -> None:
    edit = load_edit(lora)
    edit.save(tmp_path / "edit")
    assert cgru.load_edit(tmp_path / "edit").fingerprint == edit.fingerprint


@pytest.mark.parametrize("change", ["layer", "size"])
def test_lora_of_another_model_is_refused_untouched(
    change: str, model: StableDiffusion, lora: Path, tmp_path: Path
) -> None:
    weights = load_file(lora)
    first = next(key for key in weights if "lora_A" in key)
    taken = weights.pop(first)
    if change == "layer":
        weights[first.replace("down_blocks.0", "down_blocks.7")] = taken
    else:
        weights[first] = torch.zeros(2, 99)
    save_file(weights, tmp_path / FILE)
    before = state(model)
    with pytest.raises(ValueError, match="does not fit the model"), load_edit(tmp_path / FILE).applied(model):
        pass
    assert before.keys() == state(model).keys()


@pytest.mark.parametrize("content", [b"", b"not a safetensors file"])
def test_a_broken_file_is_a_plain_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match="cannot read"):
        load_edit(tmp_path / FILE)


def test_text_encoder_loras_are_refused(lora: Path, tmp_path: Path) -> None:
    weights = load_file(lora) | {"text_encoder.layer.lora_A.weight": torch.zeros(2, 2)}
    save_file(weights, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"text_encoder.layer"):
        load_edit(tmp_path / FILE)


def test_run_folder_names_its_model(lora: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    load_edit(lora).save(run / "edit")
    assert (find_edit(str(run)), is_run(run)) == (run / "edit" / FILE, False)
    assert base_model(str(run), default="emoji-canvas") == "emoji-canvas"
    (run / "config.yaml").write_text("model: some/where\n")
    assert is_run(run)
    assert base_model(str(run), default="emoji-canvas") == "some/where"
    (run / "config.yaml").write_text("method: cgru\n")
    with pytest.raises(ValueError, match="names no 'model'"):
        base_model(str(run), default="emoji-canvas")
    assert find_edit("some/model") is None
    with pytest.raises(FileNotFoundError, match="no LoRA file"):
        find_edit(str(tmp_path / "absent.safetensors"))
