"""The merged model: the same pictures as base + edit, a plain diffusers folder, and nothing half-written."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open

from cgru.backbones import load_model
from cgru.cli import main
from cgru.config import RLConfig
from cgru.edits import Edit, WeightsEdit, load_edit, model_fingerprint, save_edit
from cgru.evaluation.drawing import draw
from cgru.lineage import Trainers, trainers_of
from cgru.lora.merge import stored_dtype
from cgru.lora.train import attach, detach, save_adapter
from cgru.pipeline.export import export, prepare_export
from cgru.runs import Run
from cgru.tasks import Sampling

PROMPTS, SEEDS = ["a dog", "a cat"], [0, 1]
# Largest difference of a pixel, 0..1. float32: rounding of B·A added to W instead of to W·x. Half precision: weights
# rounded to 11 bits; measured 1.8e-3 on Emoji Canvas, under half a step of an 8-bit picture (1/255 = 3.9e-3).
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    """A run whose LoRA has random weights, alpha twice its rank."""
    made = Run.create(tmp_path_factory.mktemp("runs"), RLConfig(concept="dogs", model=str(sd_folder)))
    denoiser = load_model(sd_folder, device="cpu").denoiser
    generator = torch.Generator().manual_seed(0)
    parameters = attach(denoiser, rank=2, alpha=4.0, targets="attention", seed=0)
    for parameter in parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    (made.path / "edit").mkdir()
    save_adapter(denoiser, made.path / "edit")
    detach(denoiser)
    return made.path


def pictures(model: str | Path, edit: Path | None = None) -> torch.Tensor:
    backbone, sampling = load_model(model, device="cpu"), Sampling(4, 3.0, 0.0)
    if edit is None:
        return draw(backbone, PROMPTS, SEEDS, sampling)
    with load_edit(edit).applied(backbone):
        return draw(backbone, PROMPTS, SEEDS, sampling)


@pytest.mark.parametrize("dtype", [None, "fp32", "fp16"])
def test_the_same_pictures_as_base_and_edit(dtype: str | None, run: Path, sd_folder: Path, tmp_path: Path) -> None:
    folder = export(prepare_export(run, tmp_path / "new" / "model", dtype=dtype))
    edited = pictures(sd_folder, run)
    assert (pictures(folder) - edited).abs().max() <= TOLERANCE[dtype or "fp32"]  # the base is stored in float32
    assert (pictures(sd_folder) - edited).abs().max() > 0.05  # so the edit does something
    stored = torch.float16 if dtype == "fp16" else torch.float32
    assert {stored_dtype(folder / part) for part in ("unet", "vae", "text_encoder")} == {stored}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_plain_diffusers_loads_it_and_nothing_of_the_lora_is_left(run: Path, tmp_path: Path) -> None:
    folder = export(prepare_export(run, tmp_path / "model"))
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        "a dog",
        num_inference_steps=4,
        guidance_scale=3.0,
        latents=torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)),
        output_type="pt",
    ).images
    assert (theirs.float() - pictures(folder)[:1]).abs().max() < 1e-4
    with safe_open(folder / "unet" / "diffusion_pytorch_model.safetensors", "pt") as tensors:
        assert not [key for key in tensors.keys() if "lora" in key]
    assert json.loads((folder / "cgru.json").read_text())["concept"] == "dogs"


def test_each_part_keeps_the_precision_it_was_stored_in(run: Path, sd_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    pipeline = StableDiffusionPipeline.from_pretrained(sd_folder)
    pipeline.vae.half()
    pipeline.unet.half()
    pipeline.save_pretrained(base)
    made = Run.create(tmp_path / "runs", RLConfig(concept="dogs", model=str(base)))
    load_edit(run).save(made.path / "edit")
    folder = export(prepare_export(made.path, tmp_path / "out"))
    found = {part: stored_dtype(folder / part) for part in ("unet", "vae", "text_encoder")}
    assert found == {"unet": torch.float16, "vae": torch.float16, "text_encoder": torch.float32}
    assert (pictures(folder) - pictures(base, made.path)).abs().max() <= TOLERANCE["fp16"]


def test_an_empty_folder_is_filled_and_a_full_one_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(prepare_export(run, tmp_path / "empty"))
    assert (tmp_path / "empty" / "model_index.json").is_file()
    with pytest.raises(ValueError, match="not empty"):
        prepare_export(run, tmp_path / "empty")


def test_it_says_what_trained_it(run: Path, sd_folder: Path, tmp_path: Path) -> None:
    made = Run.create(tmp_path / "runs", RLConfig(concept="dogs", model=str(sd_folder)))
    networks = {role: {"name": role, "weights": [role[0]], "started_from": []} for role in ("reward", "detector")}
    made.annotate(**networks, critic=None, sizes={"update": 4})
    load_edit(run).save(made.path / "edit")
    folder = export(prepare_export(made.path, tmp_path / "out"))
    assert trainers_of(str(folder), None) == Trainers(networks)


def test_a_base_that_is_gone_is_said_at_once(run: Path, tmp_path: Path) -> None:
    made = Run.create(tmp_path / "runs", RLConfig(concept="dogs", model=str(tmp_path / "gone")))
    load_edit(run).save(made.path / "edit")
    with pytest.raises(FileNotFoundError, match="no model .*gone"):
        prepare_export(made.path, tmp_path / "out")


def test_a_run_without_an_edit_is_refused(sd_folder: Path, tmp_path: Path) -> None:
    made = Run.create(tmp_path, RLConfig(concept="dogs", model=str(sd_folder)))
    with pytest.raises(FileNotFoundError, match="no edit yet"):
        prepare_export(made.path, tmp_path / "out")


def test_a_failure_leaves_nothing(run: Path, tmp_path: Path) -> None:
    request = prepare_export(run, tmp_path / "out")
    foreign = WeightsEdit({"denoiser": {"no.such.weight": torch.ones(2)}})
    with pytest.raises(ValueError, match=r"does not fit the model at 'denoiser.no.such.weight'"):
        export(replace(request, edit=foreign))
    assert list(tmp_path.iterdir()) == []


def noted(edit: Edit, base: Path, folder: Path, *, dtype: str = "fp32") -> Path:
    """A run as a method leaves it: with an edit.json that names its base by fingerprint."""
    made = Run.create(folder, RLConfig(concept="dogs", model=str(base)))
    mark = model_fingerprint(load_model(base, device="cpu", dtype=dtype))
    about = {"base": str(base), "base_fingerprint": mark, "method": made.config.method, "concept": "dogs"}
    save_edit(edit, made.path / "edit", **about)
    return made.path


def changed(run: Path, change: Mapping[str, Any]) -> None:
    """Other values in edit.json, whose files still match their hashes."""
    file = run / "edit" / "edit.json"
    table = json.loads(file.read_text())
    base = table["base"] | change.get("base", {})
    file.write_text(json.dumps({**table, **change, "base": base}))


def refused(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal that writes nothing."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert main(["export", str(run), str(folder / "new" / "model")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and sorted(folder.rglob("*")) == before
    return told


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_base_is_compared_in_the_dtype_of_the_run(dtype: str, run: Path, sd_folder: Path, tmp_path: Path) -> None:
    made = noted(load_edit(run), sd_folder, tmp_path / "runs", dtype=dtype)
    folder = export(prepare_export(made, tmp_path / "model"))
    note = json.loads((folder / "cgru.json").read_text())
    assert (note["concept"], note["method"], note["base"]) == ("dogs", "cgru", str(sd_folder))


ZEROS = "0" * 64
LIES: dict[str, tuple[dict[str, Any], str]] = {  # what edit.json says in place of the truth, and the answer
    "fingerprint": ({"base": {"fingerprint": f"float32:{ZEROS}"}}, "was made for another model than"),
    "fingerprint in bf16": ({"base": {"fingerprint": f"bfloat16:{ZEROS}"}}, "was made for another model than"),
    "dtype": (
        {"base": {"fingerprint": f"float64:{ZEROS}"}},
        "the edit's base has the dtype 'float64'; allowed: float32, bfloat16, float16.",
    ),
    "base": ({"base": {"model": "nope/nope"}}, "has the base 'nope/nope' in edit.json and "),
    "code": ({"base": {"model": "evil:load"}}, "has the base 'evil:load' in edit.json and "),
    "concept": (
        {"concept": "cats"},
        "has the concept 'cats' in edit.json and 'dogs' in config.yaml; allowed: ",
    ),
    "method": ({"method": "esd"}, "has the method 'esd' in edit.json and 'cgru' in config.yaml; allowed: "),
}
ALONE = {**LIES, "base": (LIES["base"][0], "'nope/nope'"), "code": (LIES["code"][0], "of the model 'evil:load', which")}
"""The answers where there is no config to compare with."""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that must not be imported."""
    (tmp_path / "evil.py").write_text("def load(name, *, device, dtype): ...\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("evil")
def test_a_run_whose_edit_json_lies(
    lie: str, run: Path, sd_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = noted(load_edit(run), sd_folder, tmp_path / "runs")
    change, said = LIES[lie]
    changed(made, change)
    assert said in refused(made, tmp_path, capsys)
    assert "evil" not in sys.modules


@pytest.mark.parametrize("lie", ["fingerprint", "fingerprint in bf16", "dtype", "base", "code"])
@pytest.mark.usefixtures("evil")
def test_an_edit_alone_whose_edit_json_lies(
    lie: str, run: Path, sd_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = noted(load_edit(run), sd_folder, tmp_path / "runs")
    change, said = ALONE[lie]
    changed(made, change)
    assert said in refused(made / "edit", tmp_path, capsys)
    assert "evil" not in sys.modules


def test_a_base_that_was_trained_since_is_refused(
    run: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = noted(load_edit(run), copied, tmp_path / "runs")
    pipeline = StableDiffusionPipeline.from_pretrained(copied)
    pipeline.unet.conv_in.bias.data += 1.0
    pipeline.save_pretrained(copied)
    told = refused(made, tmp_path, capsys)
    assert "was made for another model than" in told and "Restore that model, or make the edit again." in told


@pytest.mark.parametrize("role", ["denoiser", "vae"])
def test_an_edit_of_parameters_that_the_base_lacks_is_refused(
    role: str, sd_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = noted(WeightsEdit({role: {"no.such.weight": torch.ones(2)}}), sd_folder, tmp_path / "runs")
    said = {"denoiser": "'denoiser.no.such.weight' (no such parameter)", "vae": "has denoiser, text_encoder"}
    assert said[role] in refused(made, tmp_path, capsys)
