"""LoRA edits: they change pictures while applied and leave no trace after."""

import json
from collections.abc import Callable, Iterator
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
from cgru.evaluation.drawing import draw
from cgru.tasks import Sampling

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


Weights = dict[str, torch.Tensor]


def as_saved(weights: Weights) -> Weights:
    return dict(weights)


def as_old_diffusers(weights: Weights) -> Weights:
    """diffusers' first layout: `attn1.processor.to_q_lora.down.weight`."""
    renamed = {}
    for key, weight in weights.items():
        layer, _, side = key.rpartition(".lora_")
        block, _, projection = layer.removesuffix(".0").rpartition(".")
        renamed[f"{block}.processor.{projection}_lora.{'down' if side[0] == 'A' else 'up'}.weight"] = weight
    return renamed


def as_later_diffusers(weights: Weights) -> Weights:
    """The layout after it: `attn1.to_q.lora.down.weight`."""
    return {key.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): w for key, w in weights.items()}


def as_kohya(weights: Weights) -> Weights:
    """`lora_unet_..._attn1_to_q.lora_down.weight`, without alphas."""
    renamed = {}
    for key, weight in weights.items():
        layer, _, side = key.removeprefix("unet.").rpartition(".lora_")
        renamed[f"lora_unet_{layer.replace('.', '_')}.lora_{'down' if side[0] == 'A' else 'up'}.weight"] = weight
    return renamed


LAYOUTS = [as_saved, as_old_diffusers, as_later_diffusers, as_kohya]


def predicted(model: StableDiffusion, lora: Path) -> torch.Tensor:
    """The model's output with a LoRA on it, at one point."""
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), load_edit(lora).applied(model):
        return model.predict(x, torch.tensor([500]), model.encode_text(["cat"]), guidance=1.0)


def assert_refused_untouched(model: StableDiffusion, lora: Path, match: str) -> None:
    """Loading and applying must fail with one line, every weight of the model as before."""
    before, modules = state(model), [name for name, _ in model.denoiser.named_modules()]
    with pytest.raises(ValueError, match=match) as caught, load_edit(lora).applied(model):
        pass
    assert "\n" not in str(caught.value)
    assert_same(before, state(model))
    assert modules == [name for name, _ in model.denoiser.named_modules()]


def assert_same(before: Weights, after: Weights) -> None:
    """Bit for bit."""
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


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
    assert_same(before, after)
    assert modules == [name for name, _ in model.denoiser.named_modules()]
    assert not any(parameter.requires_grad for parameter in model.denoiser.parameters())
    assert torch.equal(draw(model, ["cat"], [1], sampling), plain)


def test_edit_is_undone_after_an_error_too(model: StableDiffusion, lora: Path) -> None:
    before = state(model)
    with pytest.raises(RuntimeError, match="inside"), load_edit(lora).applied(model):
        raise RuntimeError("inside")
    assert_same(before, state(model))


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_edit(
    layout: Callable[[Weights], Weights], model: StableDiffusion, lora: Path, tmp_path: Path
) -> None:
    save_file(layout(load_file(lora)), tmp_path / FILE)
    torch.testing.assert_close(predicted(model, tmp_path / FILE), predicted(model, lora))


def test_kohya_alphas_scale_each_layer(model: StableDiffusion, lora: Path, tmp_path: Path) -> None:
    weights = load_file(lora)
    ups = sorted(key for key in weights if "lora_B" in key)
    alphas = {key: 1.0 if i % 3 == 0 else 4.0 for i, key in enumerate(ups)}
    kohya = as_kohya(weights)
    for key, alpha in alphas.items():
        (name,) = as_kohya({key: weights[key]})
        kohya[name.replace("lora_up.weight", "alpha")] = torch.tensor(alpha)
    save_file(kohya, tmp_path / FILE)
    # W + alpha / rank · B A, rank 2
    scaled = weights | {key: alpha / 2 * weights[key] for key, alpha in alphas.items()}
    save_file(scaled, tmp_path / "scaled.safetensors")
    torch.testing.assert_close(predicted(model, tmp_path / FILE), predicted(model, tmp_path / "scaled.safetensors"))


def move_a_layer(weights: Weights, key: str) -> None:
    for side in (key, key.replace("lora_A", "lora_B")):
        weights[side.replace("down_blocks.0", "down_blocks.7")] = weights.pop(side)


def change_size(weights: Weights, key: str) -> None:
    weights[key] = torch.zeros(2, 99)


def change_rank(weights: Weights, key: str) -> None:
    weights[key] = torch.zeros(3, weights[key].shape[1])


def empty_rank(weights: Weights, key: str) -> None:
    for side, shape in ((key, (0, 16)), (key.replace("lora_A", "lora_B"), (16, 0))):
        weights[side] = torch.zeros(shape)


def change_dimensions(weights: Weights, key: str) -> None:
    weights[key] = torch.tensor(1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [move_a_layer, change_size, change_rank, empty_rank, change_dimensions])
def test_lora_of_another_model_is_refused_untouched(
    change: Callable[[Weights, str], None],
    layout: Callable[[Weights], Weights],
    model: StableDiffusion,
    lora: Path,
    tmp_path: Path,
) -> None:
    weights = load_file(lora)
    change(weights, next(key for key in weights if "lora_A" in key))
    save_file(layout(weights), tmp_path / FILE)
    assert_refused_untouched(model, tmp_path / FILE, "does not fit the model at 'down_blocks")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lost", ["lora_A", "lora_B", "all lora_A", "all lora_B"])
def test_half_a_pair_is_refused(
    lost: str, layout: Callable[[Weights], Weights], model: StableDiffusion, lora: Path, tmp_path: Path
) -> None:
    weights = load_file(lora)
    keys = [key for key in weights if lost.removeprefix("all ") in key]
    for key in keys if lost.startswith("all") else keys[:1]:
        del weights[key]
    save_file(layout(weights), tmp_path / FILE)
    reason = "cannot read" if layout is as_kohya else r"allowed: a pair lora_A.weight, lora_B.weight\)"
    assert_refused_untouched(model, tmp_path / FILE, reason)


def test_keys_that_are_no_lora_weights_are_refused(model: StableDiffusion, lora: Path, tmp_path: Path) -> None:
    weights = load_file(lora)
    save_file(weights | {"unet.conv_in.weight": torch.zeros(2)}, tmp_path / FILE)
    assert_refused_untouched(model, tmp_path / FILE, "does not fit the model at 'conv_in.weight'")
    layer = next(iter(weights)).partition(".lora_")[0]
    save_file(weights | {f"{layer}.lora_magnitude_vector": torch.zeros(16)}, tmp_path / FILE)
    assert_refused_untouched(model, tmp_path / FILE, "the file has .*lora_magnitude_vector, allowed: a pair")


@pytest.mark.filterwarnings("ignore")  # peft's own, of the wrong settings
@pytest.mark.parametrize("settings", [{"unet.r": 3}, {"unet.lora_alpha": "x"}, {"unet.no_such": 1}])
def test_settings_that_contradict_the_weights_are_refused(
    settings: dict[str, object], model: StableDiffusion, lora: Path, tmp_path: Path
) -> None:
    save_file(load_file(lora), tmp_path / FILE, {"format": "pt", "lora_adapter_metadata": json.dumps(settings)})
    assert_refused_untouched(model, tmp_path / FILE, "diffusers cannot apply the LoRA")


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
    (run / "config.yaml").write_text("model: [some")
    with pytest.raises(ValueError, match=r"cannot read .*/config.yaml as YAML \(.*line 1") as caught:
        base_model(str(run), default="emoji-canvas")
    assert "\n" not in str(caught.value)
    (run / "config.yaml").write_text("model: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="cannot read .*/config.yaml as YAML"):  # tags that run code are not run
        base_model(str(run), default="emoji-canvas")
    assert find_edit("some/model") is None
    with pytest.raises(FileNotFoundError, match="no edit file"):
        find_edit(str(tmp_path / "absent.safetensors"))


def test_a_run_without_an_edit_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: emoji-canvas\n")
    for find in (find_edit, load_edit):
        with pytest.raises(FileNotFoundError, match=r"the run .* has no edit yet: edit/edit.json is not there"):
            find(str(tmp_path))
    # a model folder may have a config.yaml of its own
    (tmp_path / "model_index.json").write_text("{}")
    assert find_edit(str(tmp_path)) is None
