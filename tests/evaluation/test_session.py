"""A whole evaluation on a tiny random model: files, resuming, base numbers, edits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mishaps import diverged
from PIL import Image
from safetensors.torch import load_file, save_file
from test_edits import write_lora

import cgru
from cgru.backbones.sd import load_stable_diffusion
from cgru.evaluation.drawing import DECODED_AT_ONCE, draw, mend
from cgru.evaluation.request import Request
from cgru.evaluation.runner import fingerprint
from cgru.evaluation.session import Session, evaluate, prepare, run


@pytest.fixture(scope="module")
def lora(asset_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(asset_root / "emoji-canvas", tmp_path_factory.mktemp("lora"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_and_schema(asset_root: Path, tmp_path: Path) -> None:
    scores = cgru.evaluate("emoji-canvas", images=2, target="Dogs", out=tmp_path, root=asset_root)
    assert json.loads((tmp_path / "scores.json").read_text()) == scores
    assert scores["benchmark"] == "canvas"
    assert scores["version"] == 2
    assert scores["base"] is None  # the base itself
    for name, found in scores["measurements"].items():
        assert {"value", "low", "high", "n", "unit", "better"} <= found.keys(), name
        assert found["unit"] != "proportion" or 0 <= found["low"] <= found["value"] <= found["high"] <= 1, name
    jobs = lines(tmp_path / "jobs.jsonl")
    assert len(jobs) == 4 * 2 + 80  # Cats and Human: 2 styles × 2; Dogs: 2 styles × 40
    assert [row["id"] for row in lines(tmp_path / "predictions.jsonl")] == [job["id"] for job in jobs]
    assert len(list((tmp_path / "samples").glob("*/*.png"))) == 6
    assert scores["broken_images"] == 0
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


def test_fewer_images_keep_the_rows_of_more(asset_root: Path, tmp_path: Path) -> None:
    evaluate("emoji-canvas", images=2, out=tmp_path, root=asset_root)
    before = {row["id"]: row for row in lines(tmp_path / "predictions.jsonl")}
    fewer = evaluate("emoji-canvas", images=1, out=tmp_path, root=asset_root)
    assert fewer["measurements"]["object_accuracy"]["n"] == len(lines(tmp_path / "jobs.jsonl")) == 6
    after = lines(tmp_path / "predictions.jsonl")
    assert {row["id"]: row for row in after} == before
    assert [row["id"] for row in after[:6]] == [job["id"] for job in lines(tmp_path / "jobs.jsonl")]


def test_a_run_that_stops_leaves_no_scores_of_an_earlier_one(asset_root: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    evaluate("emoji-canvas", images=1, out=tmp_path, root=asset_root)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(KeyboardInterrupt):
        run(prepare(Request("emoji-canvas", images=2, out=tmp_path, root=asset_root)), stop)
    assert not (tmp_path / "scores.json").exists()
    assert (tmp_path / "scores.previous.json").read_bytes() == before["scores.json"]
    assert (tmp_path / "predictions.jsonl").read_bytes() == before["predictions.jsonl"]
    assert (tmp_path / "jobs.jsonl").read_bytes() == before["jobs.jsonl"]


def test_each_precision_has_its_own_samples(asset_root: Path, tmp_path: Path) -> None:
    folders = []
    for dtype in ("fp32", "bf16"):
        evaluate("emoji-canvas", images=1, out=tmp_path / dtype, root=asset_root, dtype=dtype)
        keys = {row["key"] for row in lines(tmp_path / dtype / "predictions.jsonl")}
        folders += [tmp_path / dtype / "samples" / key for key in keys]
    first, second = ([path.read_bytes() for path in sorted(folder.glob("*.png"))] for folder in folders)
    assert len(first) == len(second) == 6
    assert first != second


def test_another_scheduler_is_another_model_and_drawn_again(asset_root: Path, sd_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sd_folder, tmp_path / "model")
    settings = {"images": 1, "out": tmp_path / "out", "root": asset_root, "with_base": False}
    old = evaluate(model, **settings)
    file = model / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prediction_type": "v_prediction"}))
    new = evaluate(model, **settings)
    assert new["protocol"]["model"]["fingerprint"] != old["protocol"]["model"]["fingerprint"]
    assert new["measurements"]["frechet_judge"] != old["measurements"]["frechet_judge"]


def test_a_diverged_model_shows_nothing_and_is_counted(asset_root: Path, sd_folder: Path, tmp_path: Path) -> None:
    model = diverged(sd_folder, tmp_path / "model")
    scores = evaluate(model, images=1, target="Cats", out=tmp_path / "out", root=asset_root, with_base=False)
    found = scores["measurements"]
    assert scores["broken_images"] == 84  # 2 styles × 2 classes and 80 of the target: all of them
    assert found["nothing_share"]["value"] == found["target_nothing_share"]["value"] == 1
    assert found["object_accuracy"]["value"] == 0  # argmax of NaN would be the first label, Cats
    assert 0 < found["frechet_judge"]["value"] < float("inf")
    picture = next((tmp_path / "out/samples").glob("*/*.png"))
    assert set(Image.open(picture).get_flattened_data()) == {(255, 255, 255)}


def test_only_broken_pictures_are_replaced() -> None:
    images = torch.full((3, 3, 2, 2), 0.5)
    images[0, 1, 0, 0], images[2, 0, 1, 1] = torch.nan, torch.inf
    mended, broken = mend(images)
    assert broken.tolist() == [True, False, True]
    assert mended.flatten(1).mean(1).tolist() == [1.0, 0.5, 1.0]


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
    targeted = prepare(Request(str(tmp_path), images=1, target="dogs", with_base=False, root=asset_root))
    assert session.out == tmp_path / "eval" / "canvas@2"
    assert targeted.out == tmp_path / "eval" / "canvas@2-dogs"
    assert run(session)["base"] is None


def test_prepare_writes_nothing(asset_root: Path, tmp_path: Path) -> None:
    prepare(Request("emoji-canvas", out=tmp_path / "out", root=asset_root))
    assert list(tmp_path.iterdir()) == []


def test_default_folder_tells_target_images_and_weights_apart(asset_root: Path) -> None:
    def folder(**settings: Any) -> str:  # noqa: ANN401
        session: Session = prepare(Request("emoji-canvas", root=asset_root, **settings))
        return session.out.as_posix()

    plain = folder(images=1)
    assert plain.startswith("runs/eval/emoji-canvas-canvas@2-n1-")
    assert len({plain, folder(images=2), folder(images=1, target="Dogs")}) == 3


def test_fingerprint_sees_one_changed_weight_of_any_network(sd_folder: Path) -> None:
    model = load_stable_diffusion(sd_folder, device="cpu")
    marks = {fingerprint(model)}
    for network in (model.denoiser, model.vae, model.text_encoder):
        with torch.no_grad():
            next(network.parameters()).flatten()[0] += 1e-3
        marks.add(fingerprint(model))
    assert len(marks) == 4


def changed(folder: Path, file: str, **values: object) -> Path:
    """A copy of the folder with other values in one of its JSON files."""
    copy = shutil.copytree(folder, folder.parent / f"copy-{len(list(folder.parent.iterdir()))}")
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | values))
    return copy


def test_fingerprint_sees_settings_but_not_places_and_versions(sd_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sd_folder, tmp_path / "model")
    plain = load_stable_diffusion(model, device="cpu")
    mark = fingerprint(plain)
    plain.encode_text(["a cat"])  # a call leaves its length in the tokenizer
    same = [
        changed(model, "unet/config.json", _diffusers_version="0.1", _name_or_path="/home/me"),
        changed(model, "text_encoder/config.json", transformers_version="4.0.0", _name_or_path="/home/me"),
    ]
    words = {word: i for i, word in enumerate(reversed(plain.tokenizer.get_vocab()))}
    tokenizer = json.loads((model / "tokenizer/tokenizer.json").read_text())
    other = [
        changed(model, "scheduler/scheduler_config.json", beta_end=0.02),
        changed(model, "vae/config.json", scaling_factor=0.5),
        changed(model, "unet/config.json", flip_sin_to_cos=False),
        changed(model, "text_encoder/config.json", hidden_act="gelu"),
        changed(model, "tokenizer/tokenizer.json", model=tokenizer["model"] | {"vocab": words}),
    ]
    marks = [fingerprint(load_stable_diffusion(folder, device="cpu")) for folder in (*same, *other)]
    assert marks[:2] == [mark, mark] == [fingerprint(plain), mark]
    assert len({mark, *marks[2:]}) == 6


def test_a_picture_depends_on_its_own_seed_only(asset_root: Path) -> None:
    session = prepare(Request("emoji-canvas", root=asset_root))
    sampling = session.benchmark.sampling
    together = draw(session.backbone, ["a cat", "a dog"], [5, 6], sampling)
    alone = draw(session.backbone, ["a dog"], [6], sampling)
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=0)
    assert (together[:1] - alone).abs().max() > 1e-3


def test_a_padded_batch_gives_the_pictures_asked_for(asset_root: Path) -> None:
    session = prepare(Request("emoji-canvas", root=asset_root))
    sampling = session.benchmark.sampling
    plain = draw(session.backbone, ["a cat", "a dog"], [5, 6], sampling)
    padded = draw(session.backbone, ["a cat", "a dog"], [5, 6], sampling, pad_to=5)
    torch.testing.assert_close(padded, plain, atol=1e-4, rtol=0)


def test_more_pictures_than_are_decoded_at_once(asset_root: Path) -> None:
    session = prepare(Request("emoji-canvas", root=asset_root))
    seeds = list(range(DECODED_AT_ONCE + 2))
    sampling = replace(session.benchmark.sampling, steps=1)
    images = draw(session.backbone, ["a cat"] * len(seeds), seeds, sampling)
    last = draw(session.backbone, ["a cat"], seeds[-1:], sampling)
    assert len(images) == len(seeds)
    torch.testing.assert_close(images[-1:], last, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's own, inside its compiler
def test_compiled_scores_are_the_eager_ones_and_kept_apart(
    asset_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inductor for real; 5 pictures at once leave a shorter last batch, which is padded."""
    settings = {"images": 1, "root": asset_root, "batch_size": 5}
    eager = evaluate("emoji-canvas", out=tmp_path / "eager", **settings)
    compiled = evaluate("emoji-canvas", out=tmp_path / "compiled", compile=True, **settings)
    assert "torch.compile failed" not in caplog.text
    assert "compiled" not in eager["protocol"] and compiled["protocol"]["compiled"] is True
    rows = [lines(tmp_path / folder / "predictions.jsonl") for folder in ("eager", "compiled")]
    assert len(rows[0]) == len(rows[1]) == 6
    assert {row["key"] for row in rows[0]}.isdisjoint(row["key"] for row in rows[1])
    for one, other in zip(*rows, strict=True):
        for judge, chances in one["probabilities"].items():
            np.testing.assert_allclose(other["probabilities"][judge], chances, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # else a warning of torch fails first, not the missing compiler
def test_what_could_not_be_compiled_is_not_called_so(
    asset_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    settings = {"images": 1, "root": asset_root, "out": tmp_path}
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}):
        scores = evaluate("emoji-canvas", compile=True, **settings)
    assert caplog.text.count("torch.compile failed") == 1 and "compiler" in caplog.text.lower()
    assert "compiled" not in scores["protocol"]
    before = (tmp_path / "predictions.jsonl").read_bytes()
    evaluate("emoji-canvas", **settings)
    assert (tmp_path / "predictions.jsonl").read_bytes() == before, "the same pictures, so none is drawn again"
