"""Models that are incomplete or contradict themselves: refused with one line, never loaded with random weights."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file

from cgru.backbones import load_model
from cgru.backbones.sd import load_stable_diffusion

WEIGHTS = {
    "unet": "unet/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a json file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a safetensors file."""
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def refusal(folder: Path, *kinds: type[Exception]) -> str:
    """The message of a load that fails, which must be one line."""
    with pytest.raises(kinds or ValueError) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


# ---- files


def test_pickled_weights_load_but_pickled_code_does_not(copied: Path) -> None:
    weights = copied / "unet" / "diffusion_pytorch_model.safetensors"
    UNet2DConditionModel.from_pretrained(copied, subfolder="unet").save_pretrained(
        copied / "unet", safe_serialization=False
    )
    weights.unlink(missing_ok=True)
    load_stable_diffusion(copied, device="cpu")

    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(copied / "executed"),)

    (copied / "unet" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FileNotFoundError, match="cannot read the model"):
        load_stable_diffusion(copied, device="cpu")
    assert not (copied / "executed").exists()


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    assert f"{str(tmp_path)!r} has no model_index.json" in refusal(tmp_path, FileNotFoundError)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_missing_component_is_named(copied: Path, part: str) -> None:
    shutil.rmtree(copied / part)
    assert f"lacks {part}/" in refusal(copied, FileNotFoundError)


def test_missing_weights_are_named(copied: Path) -> None:
    (copied / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks vae/\*\.safetensors; it needs"):
        load_model(copied)


@pytest.mark.parametrize("file", ["unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"])
def test_cut_off_weights_are_named(copied: Path, file: str) -> None:
    (copied / file).write_bytes((copied / file).read_bytes()[:1000])
    assert f"cannot read the model in {str(copied)!r}" in refusal(copied, FileNotFoundError)


def test_another_kind_of_model_is_refused(copied: Path) -> None:
    index = copied / "model_index.json"
    edit_json(index, _class_name="PixArtPipeline", text_encoder=["transformers", "T5EncoderModel"])
    with pytest.raises(ValueError, match="is a PixArtPipeline whose text_encoder is T5EncoderModel"):
        load_model(copied)


def test_parts_that_do_not_fit_are_refused(copied: Path) -> None:
    AutoencoderKL(block_out_channels=(8,), latent_channels=3, norm_num_groups=4).save_pretrained(copied / "vae")
    with pytest.raises(ValueError, match="UNet for 4 channels and text width 16, but its VAE gives 3"):
        load_model(copied)


# ---- weights


@pytest.mark.parametrize("part", list(WEIGHTS))
def test_missing_tensors_are_counted_not_drawn_at_random(copied: Path, part: str) -> None:
    total = len(load_file(copied / WEIGHTS[part]))
    edit_weights(copied / WEIGHTS[part], lambda weights: [weights.pop(name) for name in sorted(weights)[:16]])
    assert f"the {part} of {str(copied)!r} lacks 16 of its {total} tensors and has 0 of another" in refusal(copied)


@pytest.mark.parametrize("part", list(WEIGHTS))
def test_tensors_of_another_shape_are_named(copied: Path, part: str) -> None:
    name = sorted(load_file(copied / WEIGHTS[part]))[0]
    edit_weights(copied / WEIGHTS[part], lambda weights: weights.update({name: torch.zeros(3)}))
    message = refusal(copied)
    assert (
        f"the {part} of" in message and f"has 1 of another shape than its config.json says, first {name!r}" in message
    )


def test_old_names_and_buffers_in_the_files_are_no_error(copied: Path) -> None:
    # Stable Diffusion 1.x as it was published: the prefix text_model, the buffer position_ids, the VAE's first names
    def age_text(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[f"text_model.{name.removeprefix('text_model.')}"] = weights.pop(name)
        weights["text_model.embeddings.position_ids"] = torch.arange(16)[None]

    def age_vae(weights: dict[str, torch.Tensor]) -> None:
        names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        for name in [name for name in weights if ".attentions." in name]:
            new = next((name.replace(now, once) for now, once in names.items() if now in name), name)
            weights[new] = weights.pop(name)

    fresh = load_stable_diffusion(copied, device="cpu")
    edit_weights(copied / WEIGHTS["text_encoder"], age_text)
    edit_weights(copied / WEIGHTS["vae"], age_vae)
    aged = load_stable_diffusion(copied, device="cpu")
    for before, after in ((fresh.text_encoder, aged.text_encoder), (fresh.vae, aged.vae)):
        pairs = zip(before.parameters(), after.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# ---- tokenizer


def test_a_tokenizer_without_a_vocabulary_is_refused(copied: Path) -> None:
    tokenizer = copied / "tokenizer"
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    (tokenizer / "tokenizer.json").unlink()
    (tokenizer / "vocab.json").write_text(json.dumps(vocabulary))
    assert "lacks tokenizer/tokenizer.json (or vocab.json and merges.txt)" in refusal(copied, FileNotFoundError)
    (tokenizer / "merges.txt").write_text("#version: 0.2\n")
    assert len(load_stable_diffusion(copied, device="cpu").tokenizer) == len(vocabulary)


@pytest.mark.filterwarnings("ignore:.*local_dir_use_symlinks.*")  # diffusers' call of huggingface_hub
def test_a_hub_tokenizer_without_a_vocabulary_is_refused(hub_id: str, hub_cache: Path) -> None:
    lacking = hub_cache / "models--tiny--no-vocabulary"
    shutil.copytree(hub_cache / f"models--{hub_id.replace('/', '--')}", lacking)
    for file in ("tokenizer.json", "vocab.json", "merges.txt"):
        for found in lacking.glob(f"snapshots/*/tokenizer/{file}"):
            found.unlink()
    with pytest.raises(ValueError, match="the tokenizer of 'tiny/no-vocabulary' knows 2 tokens; .* allows 3 to 514"):
        load_model("tiny/no-vocabulary", device="cpu")


def test_a_tokenizer_larger_than_the_text_encoder_is_refused(copied: Path) -> None:
    vocabulary = json.loads((copied / "tokenizer" / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["one-too-many"] = len(vocabulary["model"]["vocab"])
    (copied / "tokenizer" / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "knows 515 tokens; its text encoder allows 3 to 514" in refusal(copied)


# ---- configs


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"'])
def test_an_index_that_is_no_table_is_refused(copied: Path, content: str) -> None:
    (copied / "model_index.json").write_text(content)
    assert "it must list components" in refusal(copied)


def test_an_index_entry_that_is_no_pair_is_refused(copied: Path) -> None:
    edit_json(copied / "model_index.json", unet=3)
    assert "whose unet is 3; that of Stable Diffusion 1.x and 2.x is UNet2DConditionModel." in refusal(copied)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta_schedule": "cosine-ish"},
        {"timestep_spacing": "backwards"},
        {"num_train_timesteps": "many"},
        {"num_train_timesteps": 0},
    ],
)
def test_an_unknown_schedule_is_refused(copied: Path, changes: dict[str, object]) -> None:
    edit_json(copied / "scheduler" / "scheduler_config.json", **changes)
    with pytest.raises(ValueError, match="correct scheduler/scheduler_config.json") as caught:
        load_model(copied)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
@pytest.mark.parametrize("content", ["[]", "{", '{"block_out_channels": 3, "hidden_size": "x"}'])
def test_a_broken_config_is_one_line(copied: Path, part: str, content: str) -> None:
    (copied / part / "config.json").write_text(content)
    refusal(copied, FileNotFoundError, ValueError)  # the first for what is no JSON


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_broken_tokenizer_is_one_line(copied: Path, content: str) -> None:
    (copied / "tokenizer" / "tokenizer.json").write_text(content)
    assert "cannot read the model" in refusal(copied, FileNotFoundError, ValueError)


def test_a_scheduler_config_that_is_no_table_is_refused(copied: Path) -> None:
    (copied / "scheduler" / "scheduler_config.json").write_text("[]")
    with pytest.raises(ValueError, match="it must be a table of settings"):
        load_model(copied)
