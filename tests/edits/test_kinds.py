"""All kinds of edits: they change pictures, leave every bit as it was, and come back from their folder as they were."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_edits import NAMES, away, changed, picture, random_lora, random_weights, state

import cgru
from cgru.backbones.base import networks_of
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.edits import (
    Edit,
    HookEdit,
    WeightsEdit,
    base_model,
    find_edit,
    is_run,
    load_edit,
    model_fingerprint,
    read_note,
    save_edit,
    stack,
    trained_values,
)

KINDS = ("lora", "denoiser", "text_encoder", "both", "hook", "shifted")


@pytest.fixture
def model(sd_folder: Path) -> StableDiffusion:
    return load_stable_diffusion(sd_folder, device="cpu")


def make(kind: str, model: StableDiffusion, folder: Path) -> Edit:
    if kind == "lora":
        return random_lora(model, folder / "lora")
    if kind == "hook":
        return away()
    if kind == "shifted":
        return HookEdit("own_hooks:shifted", {}, {"shift": torch.full((16,), 0.7)})
    weights = random_weights(model, [*NAMES] if kind == "both" else [kind])
    return replace(weights, parameters={"anchor": "cat", "sizes": [1, 0.5]})


def kept(edit: Edit, model: StableDiffusion, folder: Path, fingerprint: str | None = None) -> Path:
    save_edit(edit, folder, base=model.name, base_fingerprint=fingerprint, method="m", concept="cats")
    return folder


OWN = ("own_hooks:away", "own_hooks:shifted", "own_hooks:blind", "own_hooks:nothing", "own_hooks:of_another_shape")


@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_pictures_and_is_undone_bit_for_bit(kind: str, model: StableDiffusion, tmp_path: Path) -> None:
    edit = make(kind, model, tmp_path)
    before, plain, modules = state(model), picture(model), [name for name, _ in model.denoiser.named_modules()]
    with edit.applied(model) as edited:
        assert (picture(edited) - plain).abs().max() > 1e-3
    assert changed(before, state(model)) == []
    with pytest.raises(RuntimeError, match="inside"), edit.applied(model):
        raise RuntimeError("inside")
    assert changed(before, state(model)) == []
    assert modules == [name for name, _ in model.denoiser.named_modules()]
    assert torch.equal(picture(model), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trains", [True, False])
def test_gradients_switches_and_modes_stay(kind: str, trains: bool, model: StableDiffusion, tmp_path: Path) -> None:
    edit = make(kind, model, tmp_path)
    model.denoiser.train(trains)
    model.denoiser.conv_in.weight.requires_grad_(True)
    for _ in range(2):
        with edit.applied(model) as edited:
            assert {module.training for module in edited.denoiser.modules()} == {trains}
        assert {module.training for module in model.denoiser.modules()} == {trains}
        assert [n for n, p in model.denoiser.named_parameters() if p.requires_grad] == ["conv_in.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, model: StableDiffusion, tmp_path: Path) -> None:
    edit = make(kind, model, tmp_path)
    folder = kept(edit, model, tmp_path / "edit", model_fingerprint(model))
    again = load_edit(folder, allow_hooks=OWN)
    assert (again.kind, again.fingerprint, again.parameters) == (edit.kind, edit.fingerprint, edit.parameters)
    assert again.base_fingerprint == model_fingerprint(model)
    with edit.applied(model) as edited:
        expected = picture(edited)
    with again.applied(model) as edited:
        assert torch.equal(picture(edited), expected)
    note = read_note(folder)
    assert note.fingerprint == edit.fingerprint and (note.method, note.concept) == ("m", "cats")
    assert base_model(str(folder), default="other") == model.name and find_edit(str(folder)) == folder / "edit.json"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["edit.json", *note.files])


def test_a_delta_on_the_text_encoder_changes_embeddings_only_inside(model: StableDiffusion) -> None:
    edit, plain = random_weights(model, ["text_encoder"]), model.encode_text(["cat"]).embeddings
    with edit.applied(model):
        assert (model.encode_text(["cat"]).embeddings - plain).abs().max() > 1e-3
    assert torch.equal(model.encode_text(["cat"]).embeddings, plain)


def test_weights_are_the_sum_in_float32_rounded_once(model: StableDiffusion) -> None:
    half = load_stable_diffusion(model.name, device="cpu", dtype="bf16")
    edit = random_weights(model, ["denoiser"])
    name, delta = next(iter(edit.deltas["denoiser"].items()))
    weight = half.denoiser.get_parameter(name)
    expected = (weight.detach().float() + delta).bfloat16()
    with edit.applied(half):
        assert torch.equal(half.denoiser.get_parameter(name), expected)


def test_what_training_in_place_did(model: StableDiffusion) -> None:
    networks = networks_of(model)
    name = next(name for name, _ in model.denoiser.named_parameters() if name.endswith(NAMES["denoiser"]))
    other = "conv_in.bias"
    model.denoiser.get_parameter(name).requires_grad_(True)
    model.denoiser.get_parameter(other).requires_grad_(True)
    before = trained_values(networks)
    assert {role: set(own) for role, own in before.items()} == {"denoiser": {name, other}, "text_encoder": set()}
    model.denoiser.get_parameter(name).data += 0.5
    edit = WeightsEdit.between(before, {role: dict(net.named_parameters()) for role, net in networks.items()})
    assert {role: set(own) for role, own in edit.deltas.items()} == {"denoiser": {name}}  # the other did not change
    torch.testing.assert_close(edit.deltas["denoiser"][name], torch.full_like(before["denoiser"][name], 0.5))


def test_an_edit_of_nothing_or_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="changes no parameter"):
        WeightsEdit({"denoiser": {}})
    with pytest.raises(ValueError, match=r"edit of 'denoiser.w' is not finite"):
        WeightsEdit({"denoiser": {"w": torch.tensor([1.0, torch.nan])}})


@pytest.mark.parametrize("setting", [torch.nan, float("inf"), None, {"a": 1}, [1, None]])
def test_settings_of_a_hook_must_survive_json(setting: object) -> None:
    with pytest.raises(ValueError, match="setting 'strength'"):
        HookEdit("own_hooks:away", {"strength": setting})  # type: ignore[dict-item]


def assert_refused(path: Path, match: str, model: StableDiffusion | None = None) -> None:
    """One line, and no bit of the model touched."""
    before = state(model) if model else {}
    with pytest.raises(ValueError, match=match) as caught:
        edit = load_edit(path, allow_hooks=OWN)
        with edit.applied(model):  # type: ignore[arg-type]
            pass
    assert "\n" not in str(caught.value)
    assert not model or changed(before, state(model)) == []


Table = dict[str, Any]
LIES: dict[str, tuple[Callable[[Table], object], str]] = {
    "another format": (lambda t: t.update(format=2), "format 2; allowed: 1"),
    "no format": (lambda t: t.pop("format"), "format None"),
    "true is no format": (lambda t: t.update(format=True), "format True"),
    "unknown kind": (lambda t: t.update(kind="lorra"), "kind = 'lorra'.*allowed: lora, weights, hook"),
    "kind is a list": (lambda t: t.update(kind=["lora"]), "kind = "),
    "another kind": (lambda t: t.update(kind="lora"), "files = "),
    "no base": (lambda t: t.pop("base"), "base = 'None'"),
    "base is a text": (lambda t: t.update(base="emoji-canvas"), "base = "),
    "base without a model": (lambda t: t["base"].pop("model"), "base.model = 'None'"),
    "fingerprint is a number": (lambda t: t["base"].update(fingerprint=3), "base.fingerprint = '3'"),
    "fingerprint is none": (lambda t: t["base"].update(fingerprint=""), "base.fingerprint = ''"),
    "fingerprint of no dtype": (lambda t: t["base"].update(fingerprint="0" * 64), "base.fingerprint = '0000"),
    "fingerprint of a dtype that is none": (lambda t: t["base"].update(fingerprint="fp32:" + "0" * 64), "= 'fp32:0000"),
    "method is a number": (lambda t: t.update(method=3), "method = '3'"),
    "concept is null": (lambda t: t.update(concept=None), "concept = 'None'"),
    "files is a list": (lambda t: t.update(files=[]), "files = "),
    "no file": (lambda t: t.update(files={}), "files = "),
    "a file outside": (lambda t: t["files"].update({"../w.safetensors": "0" * 64}), "files = .*w.safetensors"),
    "a hash is no hash": (lambda t: t["files"].update({"weights.safetensors": "abc"}), "files.weights.safetensors"),
    "a hash differs": (lambda t: t["files"].update({"weights.safetensors": "0" * 64}), "has sha256 .* says 000000"),
    "parameters is a text": (lambda t: t.update(parameters="x"), "parameters = 'x'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_edit_json_that_lies(lie: str, model: StableDiffusion, tmp_path: Path) -> None:
    folder = kept(random_weights(model, ["denoiser"]), model, tmp_path / "edit")
    table = json.loads((folder / "edit.json").read_text())
    LIES[lie][0](table)
    (folder / "edit.json").write_text(json.dumps(table))
    assert_refused(folder, LIES[lie][1], model)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": 1}'])
def test_an_edit_json_that_is_none(text: str, model: StableDiffusion, tmp_path: Path) -> None:
    folder = kept(random_weights(model, ["denoiser"]), model, tmp_path / "edit")
    (folder / "edit.json").write_text(text)
    assert_refused(folder, "edit.json", model)


def test_a_listed_file_that_is_gone_or_changed(model: StableDiffusion, tmp_path: Path) -> None:
    folder = kept(random_weights(model, ["denoiser"]), model, tmp_path / "edit")
    data = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert_refused(folder, "was changed after it was made", model)
    (folder / "weights.safetensors").unlink()
    assert_refused(folder, "lists 'weights.safetensors', which is not there", model)


def test_another_model_by_shape_name_network_and_fingerprint(
    model: StableDiffusion, sd_folders: dict[str, Path], tmp_path: Path
) -> None:
    name = next(name for name, _ in model.denoiser.named_parameters() if name.endswith(NAMES["denoiser"]))
    shape, absent = WeightsEdit({"denoiser": {name: torch.ones(3)}}), WeightsEdit({"denoiser": {"no.w": torch.ones(3)}})
    assert_refused(kept(shape, model, tmp_path / "shape"), rf"'denoiser.{name}' \(the model's is .*the edit's", model)
    assert_refused(kept(absent, model, tmp_path / "absent"), r"'denoiser.no.w' \(no such parameter\)", model)
    third = WeightsEdit({"text_encoder_3": {"w": torch.ones(3)}})
    assert_refused(kept(third, model, tmp_path / "third"), "'text_encoder_3' and the model .* has denoiser", model)
    other = load_stable_diffusion(sd_folders["epsilon"], device="cpu")
    other.denoiser.conv_in.bias.data += 1.0
    for kind in ("lora", "denoiser", "hook"):
        folder = kept(make(kind, model, tmp_path / kind), model, tmp_path / kind / "edit", model_fingerprint(model))
        assert_refused(folder, "was made for another model", other)
        with pytest.raises(ValueError, match="was made for another model"):
            load_edit(folder, allow_hooks=OWN).check(other)  # what a stack goes by
        with load_edit(folder, allow_hooks=OWN).applied(model):
            pass


def test_a_model_s_fingerprint_is_of_every_network_and_of_whole_tensors(model: StableDiffusion) -> None:
    mark = model_fingerprint(model)
    for network in networks_of(model).values():
        weight = max(network.parameters(), key=torch.Tensor.numel)
        before = weight.data.clone()
        weight.data.view(-1)[weight.numel() // 2 :] += 1.0  # the first half stays
        assert weight.numel() > 1000 and model_fingerprint(model) != mark
        weight.data.copy_(before)
        assert model_fingerprint(model) == mark


def test_a_hook_s_fingerprint_is_of_its_name_settings_and_tensors() -> None:
    settings = {"word": "dog", "strength": 0.5}
    hooks = [
        HookEdit("own_hooks:away", settings),
        HookEdit("own_hooks:blind", settings),
        HookEdit("own_hooks:away", {**settings, "strength": 0.6}),
        HookEdit("own_hooks:away", settings, {"shift": torch.ones(2)}),
        HookEdit("own_hooks:away", settings, {"shift": torch.zeros(2)}),
    ]
    assert len({hook.fingerprint for hook in hooks}) == 5 and away().fingerprint == hooks[0].fingerprint


def test_models_in_another_dtype_are_not_compared(model: StableDiffusion, tmp_path: Path) -> None:
    folder = kept(random_weights(model, ["denoiser"]), model, tmp_path / "edit", model_fingerprint(model))
    half = load_stable_diffusion(model.name, device="cpu", dtype="bf16")
    with load_edit(folder).applied(half) as edited:
        assert picture(edited).isfinite().all()


def test_old_folders_without_edit_json_and_bare_files_are_loras(model: StableDiffusion, tmp_path: Path) -> None:
    edit = random_lora(model, tmp_path / "run" / "edit")
    file = tmp_path / "run" / "edit" / "pytorch_lora_weights.safetensors"
    for path in (tmp_path / "run", tmp_path / "run" / "edit", file):
        found = load_edit(path)
        assert (found.kind, found.fingerprint, found.base_fingerprint) == ("lora", edit.fingerprint, None)
    assert not is_run(tmp_path / "run") and base_model(str(tmp_path / "run"), default="d") == "d"
    (tmp_path / "run" / "config.yaml").write_text("model: m\n")
    assert is_run(tmp_path / "run") and base_model(str(tmp_path / "run"), default="d") == "m"


def test_a_hook_of_ones_own_needs_leave(model: StableDiffusion, tmp_path: Path) -> None:
    folder = kept(away(), model, tmp_path / "edit")
    (tmp_path / "ran.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    assert_refused(kept(HookEdit("ran:hook", {}), model, tmp_path / "code"), "runs the code 'ran:hook'", model)
    assert "ran" not in sys.modules
    for allowed in ([], ["own_hooks:blind"]):
        edit = load_edit(folder, allow_hooks=allowed)
        with pytest.raises(ValueError, match="'own_hooks:away'.*--allow-hook own_hooks:away") as caught:
            edit.check(model)
        with pytest.raises(ValueError, match="--allow-hook own_hooks:away"), edit.applied(model):
            pass
        assert "\n" not in str(caught.value)
    with load_edit(folder, allow_hooks=["own_hooks:away"]).applied(model) as edited:
        assert edited is not model


def test_a_hook_that_is_none(model: StableDiffusion, tmp_path: Path) -> None:
    for name, why in {
        "own_hooks:nothing": "returns a NoneType and no backbone",
        "own_hooks:of_another_shape": "cannot be made",
        "own_hooks:absent": "cannot import 'own_hooks:absent'",
        "negativ": "unknown hook 'negativ'",
    }.items():
        folder = kept(HookEdit(name, {}), model, tmp_path / name.partition(":")[2])
        with pytest.raises(ValueError, match=why) as caught:
            edit = load_edit(folder, allow_hooks=[*OWN, "own_hooks:absent"])
            with edit.applied(model):
                pass
        assert "\n" not in str(caught.value)
    table = json.loads((folder / "edit.json").read_text()) | {"parameters": {"hook": 3, "settings": {}}}
    (folder / "edit.json").write_text(json.dumps(table))
    assert_refused(folder, "a hook's parameters are")


def test_kinds_stack_and_are_undone_in_reverse(model: StableDiffusion, tmp_path: Path) -> None:
    before, plain, mark = state(model), picture(model), model_fingerprint(model)
    edits: list[Edit] = [
        away(),
        random_lora(model, tmp_path / "a"),
        random_lora(model, tmp_path / "b", seed=1),
        random_weights(model, ["denoiser"]),
        random_weights(model, ["denoiser", "text_encoder"], seed=1),
    ]
    edits = [replace(edit, base_fingerprint=mark) for edit in edits]  # type: ignore[type-var]
    seen = [plain]
    for count in range(1, len(edits) + 1):
        with stack(edits[:count], model) as edited:
            seen.append(picture(edited))
        assert changed(before, state(model)) == []
    assert all((one - other).abs().max() > 1e-4 for i, one in enumerate(seen) for other in seen[:i])
    with pytest.raises(RuntimeError, match="inside"), stack(edits, model):
        raise RuntimeError("inside")
    assert changed(before, state(model)) == [] and torch.equal(picture(model), plain)


def test_a_hook_in_a_stack_sees_the_networks_as_they_are_edited(model: StableDiffusion) -> None:
    """It reads the word it leads away from with the edited text encoder, wherever it stands in the list."""
    weights = random_weights(model, ["text_encoder"])
    with weights.applied(model) as edited, away().applied(edited) as hooked:
        expected = picture(hooked)
    with away().applied(model) as hooked, weights.applied(hooked) as edited:
        assert (picture(edited) - expected).abs().max() > 1e-4
    for edits in ([away(), weights], [weights, away()]):
        with stack(edits, model) as stacked:
            assert torch.equal(picture(stacked), expected)


def test_stacked_weights_and_loras_add_up(model: StableDiffusion, tmp_path: Path) -> None:
    x, time, cond = torch.randn(1, 4, 8, 8), torch.tensor([500]), model.encode_text(["cat"])
    one, two = random_weights(model, ["denoiser"]), random_weights(model, ["denoiser"], seed=1)
    total = WeightsEdit({"denoiser": {n: d + two.deltas["denoiser"][n] for n, d in one.deltas["denoiser"].items()}})
    loras = [random_lora(model, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    merged = load_stable_diffusion(model.name, device="cpu")
    for edit in (total, *loras):
        edit.merge(networks_of(merged))
    with torch.no_grad(), stack([loras[0], one, loras[1], two], model) as edited:
        found = edited.predict(x, time, cond, guidance=1.0)
    with torch.no_grad():
        expected = merged.predict(x, time, cond, guidance=1.0)
        assert (model.predict(x, time, cond, guidance=1.0) - expected).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_stack_with_an_edit_for_another_model_touches_nothing(model: StableDiffusion) -> None:
    before, foreign = state(model), WeightsEdit({"denoiser": {"no.w": torch.ones(3)}})
    with (
        pytest.raises(ValueError, match="no such parameter"),
        stack([random_weights(model, ["denoiser"]), foreign], model),
    ):
        pass
    assert changed(before, state(model)) == []


def test_the_public_name_loads_any_kind(model: StableDiffusion, tmp_path: Path) -> None:
    folder = kept(random_weights(model, ["text_encoder"]), model, tmp_path / "edit")
    assert cgru.load_edit(folder).kind == "weights"
