"""A whole evaluation on a tiny random model: files, resuming, base numbers, edits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_edits import write_lora

import cgru
from cgru.backbones.sd import load_stable_diffusion
from cgru.evaluation.runner import draw, fingerprint
from cgru.evaluation.session import Request, Session, evaluate, prepare, run


@pytest.fixture(scope="module")
def lora(asset_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(asset_root / "emoji-canvas", tmp_path_factory.mktemp("lora"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_and_schema(asset_root: Path, tmp_path: Path) -> None:
    scores = cgru.evaluate("emoji-canvas", images=2, target="Dogs", out=tmp_path, root=asset_root)
    assert json.loads((tmp_path / "scores.json").read_text()) == scores
    assert scores["benchmark"] == "canvas"
    assert scores["version"] == 1
    assert scores["base"] is None  # the base itself
    for name, found in scores["measurements"].items():
        assert {"value", "low", "high", "n", "unit", "better"} <= found.keys(), name
        assert found["unit"] != "proportion" or 0 <= found["low"] <= found["value"] <= found["high"] <= 1, name
    jobs = lines(tmp_path / "jobs.jsonl")
    assert len(jobs) == 4 * 2 + 80  # Cats and Human: 2 styles × 2; Dogs: 2 styles × 40
    assert [row["id"] for row in lines(tmp_path / "predictions.jsonl")] == [job["id"] for job in jobs]
    assert len(list((tmp_path / "samples").glob("*.png"))) == 6
    protocol = scores["protocol"]
    assert (protocol["steps"], protocol["guidance"], protocol["dtype"], protocol["device"]) == (2, 2.0, "fp32", "cpu")
    assert protocol["judges"]["object"]["accuracy"] == {"composites": 0.5}
    assert not list(tmp_path.glob(".*"))


def test_resume_keeps_what_is_there_and_draws_only_the_rest(asset_root: Path, tmp_path: Path) -> None:
    first = evaluate("emoji-canvas", images=2, out=tmp_path, root=asset_root)
    file = tmp_path / "predictions.jsonl"
    rows = lines(file)
    # A mark that only a kept row can carry; the other half is gone, as after a kill.
    kept = [row | {"mark": True} for row in rows[: len(rows) // 2]]
    file.unlink()
    (tmp_path / "predictions.partial.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept) + '{"id": "c')
    again = evaluate("emoji-canvas", images=2, out=tmp_path, root=asset_root)
    after = lines(file)
    assert [row.get("mark", False) for row in after] == [True] * len(kept) + [False] * (len(rows) - len(kept))
    for old, new in zip(rows, after, strict=True):
        assert new["judged"] == old["judged"]
        assert new["probabilities"]["object"] == pytest.approx(old["probabilities"]["object"], abs=1e-4)
    assert again["confusion"] == first["confusion"]


def test_same_command_again_changes_no_byte_and_more_images_reuse(asset_root: Path, tmp_path: Path) -> None:
    evaluate("emoji-canvas", images=1, out=tmp_path, root=asset_root)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    evaluate("emoji-canvas", images=1, out=tmp_path, root=asset_root)
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    seen: list[int] = []
    request = Request("emoji-canvas", images=2, out=tmp_path, root=asset_root)
    run(prepare(request), lambda what, done, total: seen.append(done))
    assert seen[0] == 6  # of 12: the first pictures are there


def test_predictions_of_other_weights_are_not_reused(asset_root: Path, sd_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sd_folder, tmp_path / "model")
    weights = load_file(model / "unet/diffusion_pytorch_model.safetensors")
    save_file(
        {name: 1.5 * weight for name, weight in weights.items()}, model / "unet/diffusion_pytorch_model.safetensors"
    )
    out = tmp_path / "out"
    old = evaluate("emoji-canvas", images=1, out=out, root=asset_root)
    new = evaluate(model, images=1, out=out, root=asset_root, with_base=False)
    assert new["protocol"]["model"]["fingerprint"] != old["protocol"]["model"]["fingerprint"]
    assert new["measurements"]["frechet_judge"] != old["measurements"]["frechet_judge"]


def test_edit_is_scored_beside_its_base_on_the_same_jobs(asset_root: Path, lora: Path, tmp_path: Path) -> None:
    plain = evaluate("emoji-canvas", images=1, target="Dogs", out=tmp_path / "plain", root=asset_root)
    edited = evaluate(lora, images=1, target="Dogs", out=tmp_path / "edited", root=asset_root)
    assert edited["base"]["measurements"] == plain["measurements"]
    assert edited["base"]["fingerprint"] == plain["protocol"]["model"]["fingerprint"]
    assert edited["measurements"]["frechet_judge"] != plain["measurements"]["frechet_judge"]
    assert edited["protocol"]["model"]["edit_sha256"]
    names = [(tmp_path / folder / "jobs.jsonl").read_text() for folder in ("plain", "edited", "edited/base")]
    assert names[0] == names[1] == names[2]


def test_run_folder_is_scored_inside_itself(asset_root: Path, lora: Path, tmp_path: Path) -> None:
    (tmp_path / "edit").mkdir()
    shutil.copy(lora, tmp_path / "edit")
    (tmp_path / "config.yaml").write_text("model: emoji-canvas\n")
    session = prepare(Request(str(tmp_path), images=1, with_base=False, root=asset_root))
    assert session.out == tmp_path / "eval" / "canvas@1"
    assert run(session)["base"] is None


def test_prepare_writes_nothing(asset_root: Path, tmp_path: Path) -> None:
    prepare(Request("emoji-canvas", out=tmp_path / "out", root=asset_root))
    assert list(tmp_path.iterdir()) == []


def test_default_folder_tells_target_images_and_weights_apart(asset_root: Path) -> None:
    def folder(**settings: Any) -> str:  # noqa: ANN401
        session: Session = prepare(Request("emoji-canvas", root=asset_root, **settings))
        return session.out.as_posix()

    plain = folder(images=1)
    assert plain.startswith("runs/eval/emoji-canvas-canvas@1-n1-")
    assert len({plain, folder(images=2), folder(images=1, target="Dogs")}) == 3


def test_fingerprint_sees_one_changed_weight_of_any_network(sd_folder: Path) -> None:
    model = load_stable_diffusion(sd_folder, device="cpu")
    marks = {fingerprint(model)}
    for network in (model.denoiser, model.vae, model.text_encoder):
        with torch.no_grad():
            next(network.parameters()).flatten()[0] += 1e-3
        marks.add(fingerprint(model))
    assert len(marks) == 4


def test_a_picture_depends_on_its_own_seed_only(asset_root: Path) -> None:
    session = prepare(Request("emoji-canvas", root=asset_root))
    sampling = session.benchmark.sampling
    together = draw(session.backbone, ["a cat", "a dog"], [5, 6], sampling)
    alone = draw(session.backbone, ["a dog"], [6], sampling)
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=0)
    assert (together[:1] - alone).abs().max() > 1e-3
