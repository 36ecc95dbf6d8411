"""The benchmarks fid, kid, cmmd and clipscore on tiny random networks: features, references, protocols, mistakes."""

import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image
from tiny_clip import write_clip_eval, write_hub_clip
from transformers import CLIPModel, CLIPTokenizer

from cgru.cli import main
from cgru.evaluation import kernels
from cgru.evaluation.base import Benchmark
from cgru.evaluation.benchmarks.quality import VARIANTS, load_clipscore, load_fid, load_kid
from cgru.evaluation.distances import fit_gaussian, frechet_distance
from cgru.evaluation.judges.features import HUB_ID, load_eye, load_texts
from cgru.evaluation.request import Request
from cgru.evaluation.session import evaluate, prepare
from cgru.evaluation.store import unpack


@pytest.fixture(scope="module")
def root(asset_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny assets and a tiny clip-eval; read only."""
    folder = shutil.copytree(asset_root, tmp_path_factory.mktemp("quality") / "assets")
    write_clip_eval(folder)
    return folder


@pytest.fixture(scope="module")
def hub_clip(root: Path) -> Iterator[None]:
    """OpenAI's id in the hub's cache, with tiny weights."""
    tokenizer = CLIPTokenizer.from_pretrained(root / "emoji-canvas" / "tokenizer")
    repository = write_hub_clip(Path(HF_HUB_CACHE), HUB_ID, tokenizer)
    yield
    shutil.rmtree(repository)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six random pictures in MJHQ-30K's layout, two of them of another size, and one file that is none."""
    folder, generator = tmp_path_factory.mktemp("reference"), np.random.default_rng(0)
    table = {}
    for k in range(6):
        category, side = ("animals", 16) if k < 4 else ("food", 24)
        (folder / category).mkdir(exist_ok=True)
        pixels = generator.integers(256, size=(side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / category / f"id{k}.png")
        table[f"id{k}"] = {"category": category, "prompt": f"no {k}"}
    (folder / "food" / "broken.jpg").write_bytes(b"no picture")
    (folder / "meta_data.json").write_text(json.dumps(table))
    return folder


def features(out: Path) -> np.ndarray:
    return np.stack(
        [unpack(json.loads(line)["features"]) for line in (out / "predictions.jsonl").read_text().splitlines()]
    )


def jobs(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "jobs.jsonl").read_text().splitlines()]


def test_all_of_them_are_benchmarks_whose_names_say_the_variant() -> None:
    for benchmark in (load_fid(1), load_kid(1, variant="clip-eval"), load_clipscore(1)):
        assert isinstance(benchmark, Benchmark)
        assert len(benchmark.jobs(None)) == 160
    assert load_fid(1).name == "fid-judge"
    assert load_kid(1, variant="clip-eval").name == "kid-clip-eval"
    assert load_clipscore(1).name == "clipscore-clip-eval"


def test_fid_of_the_judge_is_canvas_own_distance(root: Path, tmp_path: Path) -> None:
    """The same pictures, judge and composites: 3 classes × 2 styles × 2."""
    canvas = evaluate("emoji-canvas", images=2, out=tmp_path / "canvas", root=root)["measurements"]["frechet_judge"]
    scores = evaluate("emoji-canvas", "fid", images=2, out=tmp_path / "fid", root=root)
    assert (scores["benchmark"], scores["version"], scores["base"]) == ("fid-judge", 1, None)
    assert scores["measurements"] == {"fid_judge": canvas}
    protocol = scores["protocol"]
    assert protocol["reference"] == {"what": "object-judge features of real composites", "n": 1000}
    assert protocol["features"]["network"] == "object" and "bilinear" in protocol["features"]["resize"]
    assert (protocol["images"], protocol["pictures"]) == (2, 12)


def test_a_folder_is_a_reference_and_broken_files_are_counted(root: Path, pictures: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"images": 2, "root": root, "reference": pictures}
    seen = torch.cat([_look(root, file) for file in sorted(pictures.rglob("*.png"))]).numpy()
    for metric, distance in (("kid", kernels.kid), ("cmmd", kernels.cmmd)):
        out = tmp_path / metric
        scores = evaluate("emoji-canvas", metric, variant="clip-eval", out=out, **settings)
        found = scores["measurements"][f"{metric}_clip_eval"]
        assert found["value"] == pytest.approx(distance(features(out), seen), rel=1e-4)
        assert scores["reference"] == {"pictures": 6, "unreadable": 1}
        assert scores["protocol"]["reference"]["files"] == 7
    fid = evaluate("emoji-canvas", "fid", variant="clip-eval", out=tmp_path / "fid", **settings)
    expected = frechet_distance(fit_gaussian(features(tmp_path / "fid")), fit_gaussian(seen))
    assert fid["measurements"]["fid_clip_eval"]["value"] == pytest.approx(expected, rel=1e-4)


def _look(root: Path, file: Path) -> torch.Tensor:
    with Image.open(file) as picture:
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255
    return load_eye("clip-eval", root=root).look(pixels)[1]


def test_a_changed_reference_is_another_protocol(root: Path, pictures: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(pictures, tmp_path / "changed")
    (changed / "food" / "id5.png").unlink()
    protocols = [
        load_fid(1, root, variant="judge", reference=reference).protocol(None)["reference"]
        for reference in (pictures, changed)
    ]
    assert protocols[0]["sha256"] != protocols[1]["sha256"]


def test_results_of_two_variants_references_or_numbers_have_their_own_folders(
    root: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[dict[str, Any]] = [
        {"variant": "judge"},
        {"variant": "judge", "images": 2},
        {"variant": "judge", "reference": pictures},
        {"variant": "clip-eval", "reference": pictures},
    ]
    requests = [Request("emoji-canvas", "fid", root=root, **{"images": 1, **settings}) for settings in asked]
    assert len({prepare(request).out for request in requests}) == len(asked)


def test_results_of_another_protocol_are_not_overwritten(root: Path, pictures: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"out": tmp_path, "root": root, "images": 1}
    evaluate("emoji-canvas", "fid", **settings)
    stored = (tmp_path / "scores.json").read_bytes()
    evaluate("emoji-canvas", "fid", **settings)
    assert (tmp_path / "scores.json").read_bytes() == stored
    with pytest.raises(ValueError, match=r"another protocol \(different images, pictures\)"):
        evaluate("emoji-canvas", "fid", **{**settings, "images": 2})
    with pytest.raises(ValueError, match=r"another protocol \(different reference\)"):
        evaluate("emoji-canvas", "fid", variant="judge", reference=pictures, **settings)
    with pytest.raises(ValueError, match=r"another protocol \(different benchmark, metric, variant"):
        evaluate("emoji-canvas", "clipscore", **settings)
    assert (tmp_path / "scores.json").read_bytes() == stored


def test_without_a_reference_the_base_on_the_same_noise_is_one(
    root: Path, sd_folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    scores = evaluate(sd_folders["v_prediction"], "kid", images=4, out=out, root=root)
    assert scores["measurements"] == scores["base"]["measurements"] == {}
    found = scores["change"]["kid_judge_to_base"]
    model, base = features(out), features(out / "base")
    assert found["value"] == pytest.approx(kernels.kid(model, base, paired=True), rel=1e-9)
    error = kernels.kid_error(model, base, paired=True)
    assert error is not None and found["high"] - found["low"] == pytest.approx(2 * 1.96 * error)
    assert scores["protocol"]["reference"] == {"what": "the base model's pictures on the same noise"}


def test_clipscore_is_the_cosine_that_clip_itself_finds(root: Path, tmp_path: Path) -> None:
    scores = evaluate("emoji-canvas", "clipscore", images=2, out=tmp_path, root=root)
    model = CLIPModel.from_pretrained(root / "clip-eval").eval()
    tokenizer = CLIPTokenizer.from_pretrained(root / "emoji-canvas" / "tokenizer")
    prompts = [job["prompt"] for job in jobs(tmp_path)]
    tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        texts = model.get_text_features(**tokens).pooler_output.double().numpy()
    pictures = features(tmp_path).astype(np.float64)
    expected = 100 * (pictures * texts / np.linalg.norm(texts, axis=1, keepdims=True)).sum(1)
    found = scores["measurements"]
    assert found["clipscore_clip_eval"]["value"] == pytest.approx(expected.mean(), rel=1e-5)
    assert found["clipscore_clip_eval"]["low"] < expected.mean() < found["clipscore_clip_eval"]["high"]
    hessel = 2.5 * np.clip(expected / 100, 0, None).mean()
    assert found["clipscore_clip_eval_hessel"]["value"] == pytest.approx(hessel, rel=1e-5, abs=1e-9)
    assert found["clipscore_clip_eval_torchmetrics"]["value"] == pytest.approx(max(expected.mean(), 0), rel=1e-5)
    # One token a character: every prompt is longer than the tiny tower's 16.
    assert scores["prompts_cut"] == {"cut": 6, "longest": 16}


def test_equal_texts_are_read_once_and_in_order(root: Path) -> None:
    texts = load_texts("clip-eval", root=root)
    rows = texts.embed(["b", "a", "b"])
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_allclose(rows[1], texts.embed(["a"])[0], atol=1e-6)
    assert texts.cut(["a", "a" * 14, "a" * 15, "a" * 15]) == 1  # with the marks of start and end 3, 16, 17


def test_the_target_s_prompts_are_left_out(root: Path, sd_folders: dict[str, Path], tmp_path: Path) -> None:
    model, out = str(sd_folders["v_prediction"]), tmp_path / "out"
    command = ["evaluate", model, "--benchmark", "clipscore", "--images", "1", "--target", "dogs"]
    assert main([*command, "--out", str(out)], root=root) == 0
    assert {job["labels"]["class"] for job in jobs(out)} == {"Cats", "Human"}
    scores = json.loads((out / "scores.json").read_text())
    assert scores["protocol"]["target"] == {"name": "Dogs", "kind": "class"}
    assert scores["protocol"]["pictures"] == scores["measurements"]["clipscore_clip_eval"]["n"] == 4
    before, after = (part["measurements"]["clipscore_clip_eval"]["value"] for part in (scores["base"], scores))
    assert scores["change"]["clipscore_clip_eval_change"]["value"] == pytest.approx(after - before, abs=1e-9)
    assert (out / "before_after.png").is_file()


def test_prompts_of_a_folder_with_clip_from_the_hub(
    root: Path, pictures: Path, hub_clip: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "emoji-canvas", "--images", "1", "--reference", str(pictures)]
    assert main([*command, "--benchmark", "clipscore", "--out", str(tmp_path / "fit"), "--json"], root=root) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["benchmark"] == "clipscore-clip-l14-336" and scores["base"] is None
    assert scores["measurements"]["clipscore_clip_l14_336"]["n"] == 6
    assert (scores["protocol"]["steps"], scores["protocol"]["guidance"]) == (50, 7.5)
    assert scores["protocol"]["prompts"]["listed"] == 6
    assert [job["labels"]["category"] for job in jobs(tmp_path / "fit")] == ["animals"] * 4 + ["food"] * 2
    assert (tmp_path / "fit" / "grid.png").is_file()
    assert main([*command, "--benchmark", "cmmd", "--out", str(tmp_path / "cmmd")], root=root) == 0
    assert "cmmd_clip_l14_336 ↓" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--benchmark", "fid", "--variant", "juge"], ["unknown variant of fid 'juge'", "'judge'"]),
        (["--benchmark", "cmmd", "--variant", "judge"], ["unknown variant of cmmd 'judge'", "clip-l14-336"]),
        (["--benchmark", "fid", "--variant", "inception-clean"], ["no --reference", "MJHQ-30K"]),
        (["--benchmark", "fid", "--reference", "nowhere"], ["no folder 'nowhere'"]),
        (["--benchmark", "kid"], ["nothing to compare with", "--reference FOLDER"]),
        (["--benchmark", "canvas", "--variant", "judge"], ["--variant 'judge' with benchmark 'canvas'"]),
        (["--benchmark", "hazard", "--reference", "."], ["--reference '.' with benchmark 'hazard'"]),
        (["--benchmark", "clipscore", "--reference", "."], ["--reference '.'", "clip-l14-336"]),
        (["--benchmark", "fid", "--target", "Dgos"], ["'Dgos'", "'Dogs'"]),
    ],
)
def test_a_mistake_is_one_line(
    given: list[str],
    told: list[str],
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "emoji-canvas", *given], root=root) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in told) and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "lists no pictures"),
        ('{"a": {"category": "food"}}', "'a' has no category or prompt"),
        ('{"a": {"category": "food", "prompt": " "}}', "the prompt of 'a' is empty"),
        (None, "no meta_data.json"),
    ],
)
def test_a_broken_list_of_prompts_is_refused(text: str | None, told: str, root: Path, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "meta_data.json").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        load_clipscore(1, root, variant="clip-l14-336", reference=tmp_path)


def test_a_folder_needs_two_pictures_and_takes_no_target(root: Path, pictures: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    with pytest.raises(ValueError, match="1 picture"):
        load_fid(1, root, variant="judge", reference=tmp_path)
    with pytest.raises(ValueError, match="--target 'Dogs' with prompts of a folder"):
        load_clipscore(1, root, reference=pictures).task("Dogs")


@pytest.mark.parametrize("damage", ["no picture", "a bomb"])
def test_a_reference_without_pictures_is_refused_before_drawing(
    damage: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "reference"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "whole.png")
    for name in ("a.png", "b.jpg"):
        (folder / name).write_bytes(b"no picture" if damage == "no picture" else bomb())
    assert main(["evaluate", "emoji-canvas", "--benchmark", "fid", "--reference", "reference"], root=root) == 2
    error = capsys.readouterr().err
    assert "1 of 3 pictures in 'reference' can be read; allowed: at least 2" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]


def test_a_bomb_counts_as_unreadable(root: Path, pictures: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pictures, tmp_path / "reference"))
    (folder / "food" / "bomb.png").write_bytes(bomb())
    out = tmp_path / "out"
    scores = evaluate("emoji-canvas", "fid", images=1, reference=folder, variant="judge", out=out, root=root)
    assert scores["reference"] == {"pictures": 6, "unreadable": 2}


def bomb() -> bytes:
    """A PNG that says it has 30,000 × 30,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(100))
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (header, data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_every_metric_has_a_default_for_both_worlds() -> None:
    assert {metric: names[0] for metric, names in VARIANTS.items()} == {
        "fid": "judge",
        "kid": "judge",
        "cmmd": "clip-eval",
        "clipscore": "clip-eval",
    }
