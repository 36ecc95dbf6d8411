"""What is done with an edit of each kind, on tiny models: evaluated, attacked, drawn with, exported, reported."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from tiny_edits import away, changed, picture, random_lora, random_weights, state

from cgru.backbones.hooked import Hooked
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.backbones.whitebox import open_up
from cgru.cli import main
from cgru.config import RLConfig
from cgru.edits import Edit, HookEdit, load_edit, model_fingerprint, save_edit
from cgru.evaluation.session import Request, prepare, run
from cgru.lora.merge import stored_dtype
from cgru.pipeline.export import export, prepare_export
from cgru.report.run.read import read_record
from cgru.runs import Run

OWN = ("own_hooks:away",)


@pytest.fixture
def model(sd_folder: Path) -> StableDiffusion:
    return load_stable_diffusion(sd_folder, device="cpu")


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def make(kind: str, model: StableDiffusion, folder: Path) -> Edit:
    if kind == "lora":
        return random_lora(model, folder)
    return away() if kind == "hook" else random_weights(model, ["denoiser", "text_encoder"])


def kept(edit: Edit, folder: Path, base: str, fingerprint: str | None = None) -> Path:
    save_edit(edit, folder, base=base, base_fingerprint=fingerprint, method="m", concept="Dogs")
    return folder


@pytest.mark.parametrize("kind", ["lora", "weights", "hook"])
def test_every_kind_is_evaluated_beside_its_base(
    kind: str, model: StableDiffusion, asset_root: Path, tmp_path: Path
) -> None:
    edit = make(kind, model, tmp_path / "made")
    folder = kept(edit, tmp_path / "edit", "emoji-canvas", model_fingerprint(model))
    settings: dict[str, Any] = {"images": 1, "target": "Dogs", "root": asset_root, "allow_hooks": OWN}
    session = prepare(Request(str(folder), out=tmp_path / "out", **settings))
    before = state(session.backbone)  # type: ignore[arg-type]
    scores = run(session)
    assert changed(before, state(session.backbone)) == []  # type: ignore[arg-type]
    identity = scores["protocol"]["model"]
    assert identity["edit_sha256"] == edit.fingerprint and identity["base"] == str(asset_root / "emoji-canvas")
    assert scores["base"]["measurements"].keys() >= {"ua", "ira"}
    drawn = [(tmp_path / "out" / sub / "predictions.jsonl").read_text() for sub in ("", "base")]
    features = [[json.loads(line)["features"] for line in text.splitlines()] for text in drawn]
    assert not set(features[0]) & set(features[1])  # no picture is the base's
    assert any("is an edit without the manifest of its run" in notice for notice in scores["notices"])


def test_a_hook_end_to_end_by_command(
    model: StableDiffusion, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(away(), workdir / "edit", "emoji-canvas")
    command = ["evaluate", "edit", "--images", "1", "--target", "Dogs", "--json"]
    assert main(command, root=asset_root) == 2
    told = capsys.readouterr().err
    assert "--allow-hook own_hooks:away" in told and told.count("\n") == 1 and not Path("runs").exists()
    assert main([*command, "--allow-hook", "own_hooks:away"], root=asset_root) == 0
    assert json.loads(capsys.readouterr().out)["protocol"]["model"]["name"] == "edit"
    draw = ["generate", "a dog", "--out", "dog.png", "--allow-hook", "own_hooks:away", "--json"]
    assert main([*draw, "--model", "edit"], root=asset_root) == 0
    hooked = Path("dog.png").read_bytes()
    assert main([*draw, "--model", "emoji-canvas"], root=asset_root) == 0
    assert hooked != Path("dog.png").read_bytes()


def test_a_damaged_edit_is_one_line_by_command(
    model: StableDiffusion, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(random_weights(model, ["denoiser"]), workdir / "edit", "emoji-canvas")
    (workdir / "edit" / "weights.safetensors").write_bytes(b"junk")
    for command in (
        ["evaluate", "edit", "--target", "Dogs"],
        ["attack", "edit", "--target", "Dogs"],
        ["generate", "a dog", "--model", "edit"],
        ["export", "edit", "whole"],
    ):
        assert main(command, root=asset_root) == 2
        told = capsys.readouterr().err
        assert "was changed after it was made" in told and told.count("\n") == 1
    assert [path.name for path in workdir.iterdir()] == ["edit"]


@pytest.fixture
def targets(tmp_path: Path) -> list[str]:
    """The options of an attack on three prompts with target pictures of their own."""
    (tmp_path / "prompts.txt").write_text("a cat\nmy cat\nold cat\n")
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        Image.new("RGB", (16, 16), (50 * i, 100, 200)).save(tmp_path / "pictures" / f"{i}.png")
    options = ["--target", "cat", "--source", str(tmp_path / "prompts.txt"), "--pictures", str(tmp_path / "pictures")]
    return [*options, "--judge", "own_judges:never", "--tokens", "2", "--prompts", "1", "--json"]


def test_a_hook_with_a_gradient_is_attacked_and_one_without_is_refused(
    sd_folder: Path, asset_root: Path, workdir: Path, targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept(away(), workdir / "away", str(sd_folder))
    kept(HookEdit("own_hooks:blind", {}), workdir / "blind", str(sd_folder))
    allow = ["--allow-hook", "own_hooks:away,own_hooks:blind"]
    assert main(["attack", "blind", *targets, *allow, "--out", "b"], root=asset_root) == 2
    told = capsys.readouterr().err
    assert "cannot be attacked white box: it goes by the words of the prompt" in told and told.count("\n") == 1
    assert not Path("b").exists()
    losses = []
    for subject, out in (("away", "hooked"), (str(sd_folder), "plain")):
        assert main(["attack", subject, *targets, *allow, "--out", out], root=asset_root) == 0
        row = json.loads(Path(out, "predictions.jsonl").read_text().splitlines()[0])
        losses.append(row["attack"]["losses"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)  # the loss goes through the hook
    capsys.readouterr()


def test_the_gradient_of_the_loss_goes_through_prediction_and_embedding(model: StableDiffusion) -> None:
    """A hook that scales what the text does: the gradient at the text is scaled, too."""
    plain, schedule = open_up(model), open_up(model).schedule([300])
    x0, noise = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    embeddings = model.encode_text(["cat"]).embeddings

    def gradient(box: Any) -> torch.Tensor:  # noqa: ANN401
        point = embeddings.clone().requires_grad_(True)
        with torch.enable_grad():
            loss = box.noise_error(x0, noise, 0, point, schedule).sum()
        return torch.autograd.grad(loss, point)[0]

    twice = Hooked(model, prediction=lambda x, t, c, g: 2 * model.predict(x, t, c, guidance=g))
    none = Hooked(model, embed=lambda cond: model.encode_text(["dog"]))
    assert (gradient(open_up(twice)) - gradient(plain)).abs().max() > 1e-6
    with pytest.raises(RuntimeError, match="not have been used in the graph|does not require grad"):
        gradient(open_up(none))


@pytest.mark.parametrize("roles", [("denoiser",), ("denoiser", "text_encoder")])
def test_merged_weights_are_what_plain_diffusers_loads(
    roles: tuple[str, ...], model: StableDiffusion, tmp_path: Path
) -> None:
    edit = random_weights(model, roles)
    folder = kept(edit, tmp_path / "edit", model.name)
    whole = export(prepare_export(folder, tmp_path / "whole"))
    with edit.applied(model) as edited:
        expected = picture(edited)
    torch.testing.assert_close(picture(load_stable_diffusion(whole, device="cpu")), expected, rtol=0, atol=1e-5)
    assert (picture(model) - expected).abs().max() > 1e-3
    pipeline = StableDiffusionPipeline.from_pretrained(whole)
    for role, part in (("denoiser", pipeline.unet), ("text_encoder", pipeline.text_encoder)):
        own = model.denoiser if role == "denoiser" else model.text_encoder
        weights = dict(part.named_parameters())
        for name, base in own.named_parameters():
            delta = edit.deltas.get(role, {}).get(name, torch.zeros(()))
            assert torch.equal(weights[name].detach(), base + delta)
    assert {stored_dtype(whole / part) for part in ("unet", "vae", "text_encoder")} == {torch.float32}
    note = json.loads((whole / "cgru.json").read_text())
    assert (note["concept"], note["base"], note["edit_sha256"]) == ("Dogs", model.name, edit.fingerprint)


def test_a_half_precision_base_stays_one(model: StableDiffusion, tmp_path: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(model.name)
    pipeline.text_encoder.half()
    pipeline.save_pretrained(tmp_path / "base")
    folder = kept(random_weights(model, ["text_encoder"]), tmp_path / "edit", str(tmp_path / "base"))
    whole = export(prepare_export(folder, tmp_path / "whole"))
    found = {part: stored_dtype(whole / part) for part in ("unet", "text_encoder")}
    assert found == {"unet": torch.float32, "text_encoder": torch.float16}


def test_what_is_merged_is_rounded_once(model: StableDiffusion, tmp_path: Path) -> None:
    edit = random_weights(model, ["text_encoder"])
    folder = kept(edit, tmp_path / "edit", model.name)
    whole = export(prepare_export(folder, tmp_path / "whole", dtype="fp16"))
    merged = StableDiffusionPipeline.from_pretrained(whole).text_encoder
    for name, delta in edit.deltas["text_encoder"].items():
        base = model.text_encoder.get_parameter(name).detach()
        found = merged.get_parameter(name).detach()
        assert torch.equal(found, (base + delta).half().float())
        assert not torch.equal(found, (base.half() + delta).half().float())


def test_a_hook_is_not_exported(
    model: StableDiffusion, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = kept(HookEdit("own_hooks:away", {"word": "a", "strength": 1.0}), workdir / "edit", model.name)
    assert main(["export", str(folder), "whole"], root=asset_root) == 2
    told = capsys.readouterr().err
    assert "no weights to merge it into" in told and told.count("\n") == 1
    assert [path.name for path in workdir.iterdir()] == ["edit"]


@pytest.mark.parametrize("kind", ["lora", "weights", "hook"])
def test_a_report_knows_the_edit_of_its_run(
    kind: str, model: StableDiffusion, asset_root: Path, tmp_path: Path
) -> None:
    made = Run.create(tmp_path, RLConfig(concept="Dogs"))
    for stage in ("2-critic", "3-policy"):
        made.finish(stage, {})
    kept(make(kind, model, tmp_path / "made"), made.path / "edit", "emoji-canvas")
    settings: dict[str, Any] = {"images": 1, "target": "Dogs", "root": asset_root, "allow_hooks": OWN}
    run(prepare(Request(str(made.path), **settings)))
    assert [found.name for found in read_record(made.path).evaluations] == ["canvas@2"]
    kept(random_weights(model, ["denoiser"], seed=5), made.path / "edit", "emoji-canvas")
    assert "it scored another edit" in " ".join(read_record(made.path).holes)
    (made.path / "edit" / "weights.safetensors").write_bytes(b"junk")
    record = read_record(made.path)
    assert not record.evaluations and "The edit is damaged" in " ".join(record.holes)
    with pytest.raises(ValueError, match="was changed"):
        load_edit(made.path)
