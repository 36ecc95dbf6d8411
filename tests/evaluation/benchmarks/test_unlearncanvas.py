"""The benchmark unlearncanvas: its grid, scores by hand, and whole evaluations with tiny random judges."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_grid
import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from mishaps import diverged
from test_edits import write_lora
from tiny_vit import WIDTH, write_judges

from cgru.cli import main
from cgru.evaluation.base import Benchmark, Job, Predictions
from cgru.evaluation.benchmarks.unlearncanvas import CLASSES, STYLES, UnlearnCanvas, load_benchmark, seeds
from cgru.evaluation.judges.features import OwnJudges
from cgru.evaluation.request import Request
from cgru.evaluation.session import evaluate, prepare, run


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with both checkpoints; read only."""
    return str(write_judges(tmp_path_factory.mktemp("judges")))


@pytest.fixture(scope="module")
def lora(asset_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(asset_root / "emoji-canvas", tmp_path_factory.mktemp("lora"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_names_are_the_official_ones_in_the_judges_order() -> None:
    assert len(CLASSES) == 20 and len(STYLES) == 51
    # The official order of labels (OPTML-Group/UnlearnCanvas): index -> name
    assert [CLASSES[i] for i in (0, 5, 11, 19)] == ["Architectures", "Dogs", "Human", "Waterfalls"]
    assert [STYLES[i] for i in (0, 25, 38, 45, 50)] == [
        "Abstractionism",
        "Magic_Cube",
        "Seed_Images",
        "Van_Gogh",
        "Winter",
    ]
    assert list(CLASSES) == sorted(CLASSES) and list(STYLES) == sorted(STYLES)


@pytest.mark.parametrize(
    ("variant", "pictures", "prompt"),
    [
        (None, 5100, "A Cats image in Van Gogh style."),
        ("official", 5100, "A Cats image in Van Gogh style."),
        ("official-50", 5000, "A Cats image in Van Gogh style."),
        ("paper", 20400, "A Cats image in Van Gogh style"),
    ],
)
def test_grid_of_each_variant(variant: str | None, pictures: int, prompt: str, judges: str) -> None:
    benchmark = load_benchmark(variant=variant, judges=judges)
    assert isinstance(benchmark, Benchmark) and isinstance(benchmark, OwnJudges)
    jobs = benchmark.jobs(benchmark.task("Cats"))
    assert len(jobs) == len({job.id for job in jobs}) == pictures
    cell = [job for job in jobs if job.labels["class"] == "Cats" and job.labels["style"] == "Van_Gogh"]
    assert {job.prompt for job in cell} == {prompt}
    assert [job.seed for job in cell[:5]] == [188, 288, 588, 688, 888]
    assert (benchmark.sampling.steps, benchmark.sampling.guidance, benchmark.sampling.eta) == (100, 9.0, 0.0)
    assert benchmark.protocol(None)["variant"] == (variant or "official")


def test_a_picture_has_the_same_seed_for_every_prompt_and_more_of_them_move_none(judges: str) -> None:
    jobs = load_benchmark(7, judges=judges).jobs(None)
    assert Counter(job.seed for job in jobs) == dict.fromkeys((188, 288, 588, 688, 888, 988, 1088), 1020)
    assert {job.id for job in load_benchmark(2, judges=judges).jobs(None)} < {job.id for job in jobs}
    assert len(set(seeds(20))) == 20


@pytest.mark.parametrize(
    ("given", "name", "kind"),
    [
        ("Humans", "Human", "class"),
        ("dog", "Dogs", "class"),
        ("van gogh", "Van_Gogh", "style"),
        ("Ink_Art", "Ink_Art", "style"),
    ],
)
def test_targets_by_name_and_alias(given: str, name: str, kind: str, judges: str) -> None:
    benchmark = load_benchmark(judges=judges)
    task = benchmark.task(given)
    assert task and (task.concept.name, task.concept.kind) == (name, kind)
    # 51 styles, or 20 classes, × 5: the official numbers of pictures
    assert benchmark.protocol(task)["target_images"] == {"class": 255, "style": 100}[kind]


@pytest.mark.parametrize("given", ["Seed_Images", "VanGoh", "Realistic_Watercolor"])
def test_no_target(given: str, judges: str) -> None:
    with pytest.raises(ValueError, match=f"unknown class or style '{given}'; allowed: Architectures") as caught:
        load_benchmark(judges=judges).task(given)
    assert "Did you mean 'Van_Gogh'?" in str(caught.value) or given != "VanGoh"
    assert "\n" not in str(caught.value)


def small(judges: str) -> UnlearnCanvas:
    """2 classes × 3 styles × 2."""
    return replace(own_grid.load(2, judges=judges), classes=("Cats", "Dogs"))


def predict(
    jobs: list[Job], sees_class: dict[tuple[str, str, int], str], sees_style: dict[tuple[str, str], str]
) -> Predictions:
    """What is prompted is seen with probability 0.8, except where the tables say otherwise; the rest is shared."""
    tables = {}
    for judge, labels in (("object", CLASSES), ("style", STYLES)):
        rows = np.zeros((len(jobs), len(labels) + 1))
        for row, job in zip(rows, jobs, strict=True):
            label, style, index = (job.labels[key] for key in ("class", "style", "index"))
            own = {
                "object": sees_class.get((label, style, index), label),
                "style": sees_style.get((label, style), style),
            }
            row[:-1] = 0.2 / (len(labels) - 1)
            row[labels.index(str(own[judge]))] = 0.8
        tables[judge] = rows
    features = np.random.default_rng(0).normal(size=(len(jobs), 2)).astype(np.float32)
    return Predictions({"object": (*CLASSES, "nothing"), "style": (*STYLES, "nothing")}, tables, features)


def test_forgotten_class_by_hand(judges: str) -> None:
    """Dogs are seen on photos only (2 of 6); one cat of 6 is a bear. Crayon is lost on dogs, photos are never seen."""
    benchmark = small(judges)
    task = benchmark.task("Dogs")
    jobs = benchmark.jobs(task)
    lost = {("Dogs", style, i): "Bears" for style in ("Crayon", "Van_Gogh") for i in (0, 1)}
    sees_style = {("Dogs", "Crayon"): "Monet", ("Dogs", "Seed_Images"): "Crayon", ("Cats", "Seed_Images"): "Crayon"}
    predictions = predict(jobs, {**lost, ("Cats", "Seed_Images", 0): "Bears"}, sees_style)
    score = benchmark.score(task, jobs, predictions)
    value = {name: found.value for name, found in score.measurements.items()}
    n = {name: found.n for name, found in score.measurements.items()}
    assert value["ua"] == pytest.approx(4 / 6)
    assert value["ira"] == pytest.approx(5 / 6)
    # Over Crayon (right on cats: 2 of 4) and Van_Gogh (4 of 4), the target's pictures counted, photos not.
    assert value["cra"] == value["style_accuracy"] == pytest.approx(0.75)
    assert value["cra_strict"] == 1
    assert value["object_accuracy"] == pytest.approx((2 / 6 + 5 / 6) / 2)
    # A label that is not seen has 0.2 / 19 of 20 classes, 0.2 / 50 of 51 styles.
    assert value["ua_soft"] == pytest.approx(1 - (2 * 0.8 + 4 * 0.2 / 19) / 6)
    assert value["ira_soft"] == pytest.approx((5 * 0.8 + 0.2 / 19) / 6)
    assert value["cra_soft"] == pytest.approx(((0.8 + 0.2 / 50) / 2 + 0.8) / 2)
    assert value["average_ua_ira"] == pytest.approx((4 / 6 + 5 / 6) / 2)
    assert value["average_ua_ira_cra"] == pytest.approx((4 / 6 + 5 / 6 + 0.75) / 3)
    assert n == n | {"ua": 6, "ira": 6, "cra": 8, "cra_strict": 4, "object_accuracy": 12, "average_ua_ira": 12}
    assert score.tables["target"]["predicted"]["object"] == {"Bears": 4, "Dogs": 2}
    row = score.tables["labels"]["object"]["Dogs"]
    assert row == {"n": 6, "correct": 2, "accuracy": 2 / 6, "probability": pytest.approx(1 - value["ua_soft"])}
    assert score.tables["labels"]["style"]["Seed_Images"]["correct"] == 0
    confusion = score.tables["confusion"]["object"]
    assert confusion["counts"][1][CLASSES.index("Bears")] == 4 and len(confusion["judged"]) == 21


def test_forgotten_style_by_hand(judges: str) -> None:
    """Van_Gogh is gone, Crayon kept, photos are not seen and do not count; a dog is lost on photos, which counts."""
    benchmark = small(judges)
    task = benchmark.task("Van Gogh")
    jobs = benchmark.jobs(task)
    gone = {(label, "Van_Gogh"): "Monet" for label in ("Cats", "Dogs")}
    predictions = predict(jobs, {("Dogs", "Seed_Images", 0): "Bears"}, {**gone, ("Cats", "Seed_Images"): "Monet"})
    found = benchmark.score(task, jobs, predictions).measurements
    assert (found["ua"].value, found["ua"].n) == (1, 4)
    assert (found["ira"].value, found["ira"].n) == (1, 4)
    assert (found["cra"].value, found["cra"].n) == (pytest.approx(11 / 12), 12)
    assert found["cra_strict"].value == pytest.approx((1 + 3 / 4) / 2)


def test_frechet_to_base_is_of_what_is_kept(judges: str) -> None:
    benchmark = small(judges)
    task = benchmark.task("Dogs")
    jobs = benchmark.jobs(task)
    before = predict(jobs, {}, {})
    is_dog = np.array([job.labels["class"] == "Dogs" for job in jobs])
    only_dogs = replace(before, features=before.features + 3 * is_dog[:, None].astype(np.float32))
    others = replace(before, features=before.features + 3 * (~is_dog[:, None]).astype(np.float32))
    values = [benchmark.compare(task, jobs, before, after)["frechet_to_base"] for after in (only_dogs, others)]
    assert values[0].value == pytest.approx(0, abs=1e-5)
    assert values[1].value == pytest.approx(18, abs=1e-4)  # a shift by (3, 3)
    assert values[1].n == 6


def settings(judges: str, root: Path, **more: object) -> dict[str, Any]:
    return {"benchmark": "own_grid:load", "images": 2, "judges": judges, "root": root, **more}


def test_files_protocol_and_resume(asset_root: Path, judges: str, tmp_path: Path) -> None:
    scores = evaluate("emoji-canvas", **settings(judges, asset_root, target="humans", out=tmp_path))
    assert (scores["benchmark"], scores["version"], scores["base"]) == ("unlearncanvas", 1, None)
    protocol = scores["protocol"]
    assert (protocol["steps"], protocol["guidance"], protocol["jpeg"]["quality"]) == (2, 9.0, 75)
    assert protocol["seeds"].startswith("188, 288: one per picture")
    assert protocol["target"] == {"name": "Human", "kind": "class"}
    assert protocol["judges"]["style"]["id"] == "unlearncanvas-style (style50)"
    assert len(protocol["judges"]["style"]["weights_sha256"]) == 64
    assert protocol["judge_lineage"]["object"]["started_from"] == ["timm/vit_large_patch16_224.augreg_in21k"]
    assert len(lines(tmp_path / "jobs.jsonl")) == 12
    rows = lines(tmp_path / "predictions.jsonl")
    assert len(rows[0]["probabilities"]["style"]) == 52
    # Half of it gone, as after a kill: what is there is kept, and the result is the same.
    kept = [row | {"mark": True} for row in rows[:6]]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    again = evaluate("emoji-canvas", **settings(judges, asset_root, target="Human", out=tmp_path))
    assert [row.get("mark", False) for row in lines(tmp_path / "predictions.jsonl")] == [True] * 6 + [False] * 6
    assert again["confusion"] == scores["confusion"]


def test_an_edit_is_scored_beside_its_base(
    asset_root: Path, judges: str, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(lora), "--model", "emoji-canvas", "--benchmark", "own_grid:load", "--judges", judges]
    command += ["--target", "Dogs", "--images", "2", "--variant", "official-50", "--out", str(tmp_path / "out")]
    assert main(command, root=asset_root) == 0
    told = capsys.readouterr().out
    assert all(
        word in told for word in ("unlearncanvas@1", "CRA, other kind kept", "average_ua_ira_cra", "frechet_to_base")
    )
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    assert scores["base"]["measurements"]["ua"]["n"] == scores["measurements"]["ua"]["n"] == 4  # 2 styles × 2
    assert scores["change"]["frechet_to_base"]["n"] == 4
    assert scores["protocol"]["styles"] == ["Crayon", "Van_Gogh"]
    assert (tmp_path / "out/grid.png").is_file() and (tmp_path / "out/before_after.png").is_file()


def test_a_whole_model_is_scored_beside_the_base_that_is_named(
    asset_root: Path, judges: str, sd_folders: dict[str, Path], tmp_path: Path
) -> None:
    model, base = (str(sd_folders[name]) for name in ("v_prediction", "epsilon"))
    alone = prepare(Request(model, **settings(judges, asset_root, out=tmp_path / "a")))
    assert alone.base is None  # Emoji Canvas is no base of it
    scores = evaluate(model, **settings(judges, asset_root, base=base, out=tmp_path / "b"))
    assert scores["base"]["model"] == base
    assert scores["change"]["frechet_to_base"]["value"] > 0


def test_broken_pictures_are_nothing_and_never_the_first_label(
    asset_root: Path, judges: str, sd_folder: Path, tmp_path: Path
) -> None:
    model = diverged(sd_folder, tmp_path / "model")
    scores = evaluate(model, **settings(judges, asset_root, target="Dogs", out=tmp_path / "out"))
    assert scores["broken_images"] == 12
    assert scores["target"]["predicted"] == {"object": {"nothing": 6}, "style": {"nothing": 6}}
    assert scores["measurements"]["ua_soft"]["value"] == 1


def test_the_catalogs_own_has_the_official_size_and_variants_have_folders_of_their_own(
    asset_root: Path, judges: str
) -> None:
    found = {}
    for variant in (None, "paper"):
        session = prepare(Request("emoji-canvas", "unlearncanvas", judges=judges, variant=variant, root=asset_root))
        found[session.out.name.split("unlearncanvas")[1]] = len(session.jobs)
        assert session.panel.judges["object"].look
    parts = [(name.split("-")[1], name.rpartition("-")[2]) for name in found]
    assert parts == [("n5", "official"), ("n20", "paper")]
    assert [*found.values()] == [5100, 20400]


def test_results_of_another_variant_are_not_overwritten(asset_root: Path, judges: str, tmp_path: Path) -> None:
    run(prepare(Request("emoji-canvas", **settings(judges, asset_root, out=tmp_path))))
    with pytest.raises(ValueError, match="another protocol \\(different variant, template, images, seeds\\)"):
        prepare(
            Request("emoji-canvas", **settings(judges, asset_root, out=tmp_path, variant="paper") | {"images": None})
        )


def test_judges_from_the_hubs_cache(asset_root: Path, judges: str) -> None:
    repository = Path(HF_HUB_CACHE) / "models--tiny--unlearncanvas-judges"
    shutil.copytree(judges, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    try:
        session = prepare(Request("emoji-canvas", **settings("tiny/unlearncanvas-judges", asset_root)))
    finally:
        shutil.rmtree(repository)
    assert session.panel.judges["style"].look(torch.zeros(1, 3, 16, 16))[1].shape == (1, WIDTH)


def mistake(case: str, judges: str, tmp_path: Path) -> list[str]:
    """A folder of judges with one thing wrong, as options."""
    folder = Path(shutil.copytree(judges, tmp_path / "judges"))
    if case == "no object judge":
        (folder / "style50_cls.pth").unlink()
    elif case == "swapped":
        (folder / "style50_cls.pth").write_bytes((folder / "style50.pth").read_bytes())
    elif case == "truncated":
        (folder / "style50.pth").write_bytes((folder / "style50.pth").read_bytes()[:5000])
    return ["--judges", str(folder)]


@pytest.mark.parametrize(
    ("case", "more", "told"),
    [
        ("none given", [], ["no --judges for unlearncanvas", "style50_cls.pth"]),
        ("a mistyped path", ["--judges", "./nowhere"], ["no folder './nowhere'", "style50.pth"]),
        ("no such hub id", ["--judges", "nobody/nothing"], ["no --judges 'nobody/nothing'", "style50.pth"]),
        ("no object judge", [], ["no file 'style50_cls.pth'"]),
        ("swapped", [], ["51 outputs; allowed: 20", "other judge's"]),
        ("truncated", [], ["cannot read the checkpoint", "style50.pth", "Download it again"]),
        ("unknown variant", ["--variant", "papr"], ["unknown variant of unlearncanvas 'papr'", "'paper'"]),
        ("unknown style", ["--target", "VanGoh"], ["unknown class or style 'VanGoh'", "'Van_Gogh'"]),
        ("no pictures", ["--images", "0"], ["--images 0"]),
        ("judges for canvas", ["--benchmark", "canvas"], ["--judges", "allowed with unlearncanvas"]),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    case: str,
    more: list[str],
    told: list[str],
    asset_root: Path,
    judges: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    needs_none = case == "none given" or "--judges" in more
    given = [] if needs_none else mistake(case, judges, tmp_path)
    out = tmp_path / "out"
    command = ["evaluate", "emoji-canvas", "--benchmark", "unlearncanvas", *given, *more, "--out", str(out)]
    assert main(command, root=asset_root) == 2
    error = capsys.readouterr().err
    assert error.startswith("cgru: ") and error.count("\n") == 1
    assert all(word in error for word in told), error
    assert not out.exists()
