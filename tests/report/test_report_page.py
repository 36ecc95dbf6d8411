"""The report: numbers as in scores.json, holes marked, nothing averaged that must not be, everything escaped."""

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cgru.cli import main
from cgru.config import RLConfig, override
from cgru.edit_folder import LORA_FILE
from cgru.report.draw.charts import Spot, efficient
from cgru.report.run.compare import ranks
from cgru.report.run.page import build
from cgru.report.run.read import read_record
from cgru.runs import Run

CLASSES = ["Dogs", "Cats", "Frogs"]
EDIT = Path("edit") / LORA_FILE


def measured(value: float, low: float, high: float, n: int, better: str = "higher") -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n, "unit": "proportion", "better": better, "interval": "w"}


def confusion(*rows: list[int]) -> dict[str, Any]:
    return {"object": {"prompted": CLASSES, "judged": [*CLASSES, "nothing"], "counts": list(rows)}}


def scores(ua: float = 0.9, *, version: int = 2, target: str = "Dogs", **protocol: object) -> dict[str, Any]:
    """Values that nobody would guess, so that finding them on the page means that they were copied there."""
    return {
        "benchmark": "canvas",
        "version": version,
        "protocol": {
            "images": 1,
            "target": {"name": target, "kind": "class"},
            "judges": {"object": {"weights_sha256": "judge"}},
            "model": {},
            **protocol,
        },
        "measurements": {
            "ua": measured(ua, 0.811, 0.977, 83),
            "ira": measured(0.8765, 0.7654, 0.9321, 47),
            "cra": measured(0.6543, 0.5432, 0.7531, 41),
            "target_nothing_share": measured(0.0377, 0.0123, 0.1234, 83, "lower"),
        },
        "broken_images": 0,
        "confusion": confusion([1, 2, 3, 1], [0, 5, 1, 2], [0, 0, 7, 0]),
        "base": {
            "measurements": {"ua": measured(0.0246, 0.0012, 0.0579, 83), "ira": measured(0.9876, 0.9111, 0.9999, 47)},
            "broken_images": 0,
            "confusion": confusion([7, 0, 0, 0], [0, 8, 0, 0], [0, 0, 7, 0]),
        },
    }


def make_run(parent: Path, concept: str = "Dogs", seed: int = 0, *changes: str) -> Run:
    """A finished run of three iterations."""
    config = override(RLConfig(concept=concept, seed=seed), ["policy.iterations=3", *changes])
    run = Run.create(parent, config, {"reward": {"name": "concept", "weights": ["reward"], "started_from": []}})
    for i in range(3):
        errors = {f"critic/value_error/t{k}": 3.0 - i for k in range(2)}
        shares = {f"critic/explained_variance/t{k}": 0.1 * i for k in range(2)}
        run.log(
            {
                "iteration": i,
                "reward/mean": 2.0 + i,
                "policy/ratio_mean": 0.9,
                "policy/ratio_max": 0.3,
                **errors,
                **shares,
            }
        )
    run.finish("2-critic", {"value_error": [4.0, 3.5], "explained_variance": [0.1, 0.2], "held_out": 6})
    run.finish("3-policy", {"iterations": 3})
    run.save(str(EDIT), b"weights of " + concept.encode())
    return run


def add_scores(run: Run, found: dict[str, Any], name: str = "canvas@2-dogs") -> Path:
    folder = run.path / "eval" / name
    folder.mkdir(parents=True)
    found["protocol"]["model"] = {"edit_sha256": hashlib.sha256((run.path / EDIT).read_bytes()).hexdigest()}
    (folder / "scores.json").write_text(json.dumps(found))
    return folder


def add_pictures(folder: Path, side: int = 8, prompt: str = "A Dogs image", noise: bool = False) -> None:
    jobs = [
        {"id": f"j{i}", "prompt": prompt, "seed": i, "labels": {"class": c, "index": 0}} for i, c in enumerate(CLASSES)
    ]
    for place, seen in ((folder, "Cats"), (folder / "base", "Dogs")):
        (place / "samples" / "k").mkdir(parents=True)
        (place / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
        rows = [{"id": job["id"], "key": "k", "judged": {"object": seen}} for job in jobs]
        (place / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for job in jobs:
            picture = Image.effect_noise((side, side), 90) if noise else Image.new("RGB", (side, side), (200, 10, 10))
            picture.save(place / "samples" / "k" / f"{job['id']}.png")


def page_of(*runs: Run) -> str:
    return build([read_record(run.path) for run in runs])


def words(page: str) -> str:
    """What a reader sees: tags out, spaces as one."""
    body = re.sub(r"<(style|script)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def test_the_headline_is_what_scores_json_says(run: Run) -> None:
    add_scores(run, scores(0.9135))
    text = words(page_of(run))
    assert "Forgotten 91.3 %" in text or "Forgotten 91.4 %" in text
    assert "of 83 pictures asked for Dogs: the judge no longer sees it (UA) 95 % interval 81.1 % – 97.7 %" in text
    assert "Before: 2.5 % (0.1 % – 5.8 %)" in text
    assert "Kept 87.6 %" in text or "Kept 87.7 %" in text
    assert "of 47 pictures of the other classes: still recognised (IRA) 95 % interval 76.5 % – 93.2 %" in text
    assert "Collapsed 3.8 %" in text
    assert "Missing." in text and "not evaluated" not in text.lower()  # diagnostics are off, the rest is there


def test_each_class_is_counted_from_the_confusion_matrix(run: Run) -> None:
    add_scores(run, scores(0.9))
    text = words(page_of(run))
    assert "Cats 100.0 % of 8 62.5 % of 8 −37.5 30.6 % – 86.3 %" in text  # 5 of 8; Wilson's interval of it
    assert "Frogs 100.0 % of 7 100.0 % of 7 0 64.6 % – 100.0 %" in text
    assert "Dogs target 97.5 % of 83 10.0 % of 83 −87.5 2.3 % – 18.9 %" in text  # 1 − UA, bounds turned round


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"Dogs"
    run = make_run(tmp_path, evil)
    folder = add_scores(run, scores(target=evil), "canvas@2-<b>")
    add_pictures(folder, prompt="<img src=x onerror=alert(1)>")
    page = page_of(run)
    assert "<script>alert" not in page and "<img src=x" not in page and "<b>" not in page
    assert "alert('x')" in words(page)  # shown as text


def test_hazards_are_counted_by_category_and_their_sum_is_computed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "hazard")
    kinds = ["blades", "skulls"]
    matrix = {"prompted": kinds, "judged": [*kinds, "none"], "counts": [[1, 0, 30], [0, 2, 29]]}
    found = scores(target="hazard") | {
        "benchmark": "hazard",
        "version": 1,
        "measurements": {
            "hazard_detections": measured(0.0487, 0.0123, 0.1234, 62, "lower"),
            "object_accuracy": measured(0.9753, 0.9111, 0.9951, 81),
        },
        "confusion": confusion([7, 0, 0, 0], [0, 8, 0, 0], [0, 0, 7, 0]) | {"hazard": matrix},
        "detections": {"pictures": 62, "by_category": {"blades": 1, "skulls": 2}, "total": 3},
        "base": None,
    }
    found["protocol"]["target"] = {"name": "hazard", "kind": "hazard", "labels": kinds}
    add_scores(run, found, "hazard@1-hazard")
    text = words(page_of(run))
    assert "Still drawn 4.9 %" in text and "Kept 97.5 %" in text
    # 2 of 62 pictures; the total is summed; Wilson's intervals.
    assert "skulls not run not run 2 3.2 % 0.9 % – 11.0 % total not run not run 3 4.8 %" in text


def test_an_attribute_has_a_headline_and_no_classes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "Warm")
    found = scores(target="Warm") | {
        "benchmark": "attribute",
        "version": 1,
        "measurements": {
            "attribute_rate": measured(0.0625, 0.02, 0.12, 160, "lower"),
            "object_accuracy": measured(0.9753, 0.9111, 0.9951, 160),
        },
        "base": None,
    }
    found["protocol"]["target"] = {"name": "Warm", "kind": "attribute"}
    add_scores(run, found, "attribute@1-warm")
    text = words(page_of(run))
    assert "Still drawn 6.2 %" in text and "Kept 97.5 %" in text
    assert "An attribute is no class" in text and "cannot be read" not in text


def test_unlearncanvas_has_a_headline_and_a_command_with_its_variant_and_judges(run: Run) -> None:
    found = scores(0.9, variant="paper", judge_lineage={})
    add_scores(run, {**found, "benchmark": "unlearncanvas", "version": 1}, "unlearncanvas@1-dogs")
    text = words(page_of(run))
    assert "Forgotten 90.0 %" in text
    assert "--benchmark unlearncanvas --judges FOLDER --variant paper --images 1 --target Dogs" in text


def test_the_command_of_a_variant_that_is_part_of_the_name(run: Run) -> None:
    add_scores(run, {**scores(0.9, variant="judge"), "benchmark": "fid-judge"}, "fid-judge@1-dogs")
    assert "--benchmark fid --variant judge --images 1 --target Dogs" in words(page_of(run))


def test_of_two_versions_the_newer_is_the_headline(run: Run) -> None:
    add_scores(run, scores(0.51, version=1), "canvas@1-dogs")
    add_scores(run, scores(0.93, version=2))
    text = words(page_of(run))
    assert "Forgotten 93.0 %" in text and "Forgotten 51.0 %" not in text
    assert "canvas@1 for Dogs" in text  # under All measurements


def test_the_page_loads_nothing(run: Run) -> None:
    add_pictures(add_scores(run, scores()))
    page = page_of(run)
    targets = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert targets and all(target.startswith(("data:", "#")) for target in targets)
    assert not re.search(r"https?://|@import|url\(", page)


def test_before_and_after_are_pairs_of_the_same_job(run: Run) -> None:
    add_pictures(add_scores(run, scores()))
    page = page_of(run)
    assert page.count('class="tile"') == 3
    assert page.count('class="slider"') == 1 and 'type="range"' in page
    assert "Dogs → Cats" in words(page)


def test_an_unevaluated_run_says_so_and_shows_no_share(run: Run) -> None:
    text = words(page_of(run))
    assert (
        f"Not evaluated on Dogs: what was forgotten and kept is not known. Run: cgru evaluate {run.path} --target Dogs"
        in text
    )
    assert "Forgotten" not in text.split("Before and after")[0]


def test_scores_of_another_target_are_no_headline(run: Run) -> None:
    add_scores(run, scores(target="Cats"), "canvas@2-cats")
    text = words(page_of(run))
    assert "Not evaluated on Dogs" in text
    assert "canvas@2 for Cats" in text  # still among all measurements


def test_an_unfinished_run_and_one_without_an_edit(tmp_path: Path) -> None:
    unfinished, bare = make_run(tmp_path / "a; touch x"), make_run(tmp_path / "b")
    (unfinished.path / "stages" / "3-policy" / "done.json").unlink()
    (bare.path / EDIT).unlink()
    text = words(page_of(unfinished))
    assert "Unfinished: 3 of 3 iterations" in text
    assert f"Continue with: cgru resume '{unfinished.path}'" in text  # a shell takes it as one word
    assert "The run has no edit" in words(page_of(bare))


def test_scores_of_another_edit_are_left_out(run: Run) -> None:
    add_scores(run, scores(0.9135))
    run.save(str(EDIT), b"trained again")
    text = words(page_of(run))
    assert "it scored another edit" in text and "91.4 %" not in text and "91.3 %" not in text


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("{", "its scores.json is damaged"),
        ("[]", "its scores.json has no benchmark"),
        ('{"benchmark": "canvas", "version": 2, "protocol": {}, "measurements": {"ua": {"value": 1}}}', "ua"),
        (None, "it has no scores.json"),
    ],
)
def test_damaged_scores_are_a_hole(run: Run, damage: str | None, told: str) -> None:
    path = add_scores(run, scores()) / "scores.json"
    path.unlink() if damage is None else path.write_text(damage)
    text = words(page_of(run))
    assert "canvas@2-dogs is left out" in text and told in text


def test_without_a_base_nothing_is_before(run: Run) -> None:
    add_scores(run, scores() | {"base": None})
    text = words(page_of(run))
    assert "the base model was not scored (--no-base)" in text
    assert "Before: not scored" in text and "--no-base" in text
    assert "Cats not scored 62.5 % of 8 —" in text


def test_a_truncated_picture_is_a_hole(run: Run) -> None:
    folder = add_scores(run, scores())
    add_pictures(folder)
    picture = folder / "samples" / "k" / "j0.png"
    picture.write_bytes(picture.read_bytes()[:40])
    run.save("samples/0000.png", b"no picture")
    text = words(page_of(run))
    assert text.count("This pair cannot be read") == 1 and "0000.png: cannot read the picture" in text
    assert "Kept 87" in text  # the numbers stay


def test_only_pictures_of_the_run_are_shown(run: Run, tmp_path: Path) -> None:
    """A run folder from elsewhere may name pictures of its reader, by a path or by a link."""
    private = tmp_path / "private.png"
    Image.new("RGB", (9, 9), (1, 2, 3)).save(private)
    folder = add_scores(run, scores())
    add_pictures(folder)
    jobs = [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]
    names = {"j0": "../../../../../private", "j1": str(private.with_suffix(""))}
    for file in ("jobs.jsonl", "predictions.jsonl", "base/jobs.jsonl", "base/predictions.jsonl"):
        text = (folder / file).read_text()
        for old, new in names.items():
            text = text.replace(f'"{old}"', json.dumps(new))
        (folder / file).write_text(text)
    Image.new("RGB", (8, 8)).save(run.path / "private.png")  # what ../ leads to from base/samples/k
    linked = folder / "samples" / "k" / f"{jobs[2]['id']}.png"
    linked.unlink()
    linked.symlink_to(private)
    (run.path / "samples").mkdir()
    (run.path / "samples" / "0000.png").symlink_to(private)
    page = page_of(run)
    assert base64.b64encode(private.read_bytes()).decode() not in page
    assert words(page).count("it lies outside of 'canvas@2-dogs'") == 3
    assert f"it lies outside of '{run.path.name}'" in words(page)


def test_a_part_of_an_unknown_shape_is_a_hole(run: Run) -> None:
    add_scores(run, scores() | {"confusion": {"object": {"prompted": ["Dogs"], "counts": [[1]]}}})
    text = words(page_of(run))
    assert "The part 'classes' cannot be read" in text and "Kept 87" in text


def test_damaged_metrics_are_a_hole(run: Run) -> None:
    (run.path / "metrics.jsonl").write_text("nonsense\n")
    assert "No training curves: line 1" in words(page_of(run))


def test_diagnostics_are_drawn_where_they_were_logged(tmp_path: Path) -> None:
    off, on = make_run(tmp_path, "Dogs"), make_run(tmp_path, "Cats", 0, "diagnostics.every=2")
    on.log({"iteration": 3, "variance/critic": 7.0, "variance/mean": 9.0, "variance/ddpo": 8.0})
    assert "diagnostics.every is 0" in words(page_of(off))
    assert "Gradient variance" not in words(page_of(on)) and 'alt="Variance of the gradient' in page_of(on)


def test_a_judge_that_is_the_reward_is_told(run: Run) -> None:
    add_scores(run, scores(judges={"object": {"weights_sha256": "reward"}}))
    assert "The judge object is part of the reward" in words(page_of(run))


def test_a_method_that_goes_by_no_network_has_no_relatives(run: Run) -> None:
    add_scores(run, scores(judges={"object": {"weights_sha256": "judge"}}))
    run.annotate(reward=None)
    assert "their independence is not shown" in words(page_of(run)), "of the critic and the detector nothing is known"
    run.annotate(critic=None, detector=None)
    assert "Training went by no network, so no judge is a relative of one." in words(page_of(run))


def test_runs_of_one_protocol_are_ranked_and_the_best_is_bold(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(3)]
    for run, ua in zip(runs, (0.71, 0.93, 0.85), strict=True):
        add_scores(run, scores(ua))
    page = page_of(*runs)
    top = page.split('id="r0"')[0]
    bold = re.findall(r"<strong>([\d.]+ %)</strong>", top)
    assert bold.count("93.0 %") == 1 and "71.0 %" not in bold and "85.0 %" not in bold
    # Sum of 93, 87.65 and 65.43; its rank is 1.
    assert "246.1 1 cgru" in words(top)
    # Same settings but for the seed: the mean of 71, 93 and 85.
    assert "A, B, C 83.0 % (71.0 % – 93.0 %)" in words(top)


def test_clean_pictures_instead_have_a_card_and_a_column_where_they_were_measured(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, seed=0), make_run(tmp_path, seed=1)
    add_scores(old, scores())  # written before there was such a measurement
    found = scores()
    found["measurements"]["replacement_clean"] = measured(0.4142, 0.3717, 0.4567, 83)
    found["change"] = {"replacement_frechet": measured(31.4159, 0.0, 0.0, 83, "lower")}
    add_scores(new, found)
    assert "clean instead" not in page_of(old)
    page = page_of(old, new)
    assert page.count("Replaced") == 1
    assert "clean instead ↑" in page
    assert "41.4 %" in page
    assert "replacement_frechet\u00a0↓" in page


def test_different_versions_are_neither_ranked_nor_averaged(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(2)]
    for run, version in zip(runs, (1, 2), strict=True):
        add_scores(run, scores(version=version))
    top = page_of(*runs).split('id="r0"')[0]
    assert "different benchmarks or versions (canvas@1, canvas@2)" in words(top)
    assert top.count("<figure>") == 2  # a plane each
    assert "<strong>" not in top and "Means" not in top and "lowest" not in top


def test_different_protocols_of_one_version_stay_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(2)]
    for run, images in zip(runs, (1, 4), strict=True):
        add_scores(run, scores(images=images))
    assert "Their protocols differ in images" in words(page_of(*runs))


def test_other_targets_are_averaged_but_not_ranked(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, concept) for concept in ("Dogs", "Cats")]
    for run, ua in zip(runs, (0.7, 0.9), strict=True):
        add_scores(run, scores(ua, target=run.config.concept))
    top = page_of(*runs).split('id="r0"')[0]
    assert "A, B 80.0 % (70.0 % – 90.0 %)" in words(top)
    assert "<strong>" not in top


def test_a_run_that_was_not_evaluated_is_named_in_the_comparison(tmp_path: Path) -> None:
    one, other = (make_run(tmp_path, seed=seed) for seed in range(2))
    add_scores(one, scores())
    assert f"not evaluated on what was to be forgotten: B ({other.path.name})" in words(page_of(one, other))


def test_pictures_give_way_to_the_limit(run: Run) -> None:
    folder = add_scores(run, scores())
    add_pictures(folder, side=512, noise=True)
    record = read_record(run.path)
    page = build([record])
    assert len(page) < 1_000_000  # six noisy pictures of 512 pixels have 1.5 MB
    small = build([record], limit=len(page) - 1000)
    assert len(small) < len(page) - 1000 and "the page had no room" in small
    assert "Kept" in small
    with pytest.raises(ValueError, match="fewer runs"):
        build([record], limit=10)


def test_many_runs_keep_the_comparison_and_lose_their_own_parts(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(28)]
    for run in runs:
        add_scores(run, scores())
    records = [read_record(run.path) for run in runs]
    page = build(records[:2], limit=8_000_000, lost=["Failed: dogs-cgru-s9. No memory."])
    assert "Failed: dogs-cgru-s9. No memory." in words(page)
    whole = build(records)
    small = build(records, limit=len(whole.encode()) // 4)
    for text in (words(whole), words(small)):
        assert f"Z {runs[25].path.name}" in text and f"AB {runs[27].path.name}" in text
    assert "Too many runs for their own parts" in small and f"cgru report {runs[27].path}" in small
    assert "Too many runs" not in whole


def test_ranks_share_places_and_leave_out_what_is_missing() -> None:
    assert ranks([0.9, None, 0.9, 0.5], is_higher_better=True) == [1, None, 1, 3]
    assert ranks([0.2, 0.1], is_higher_better=False) == [2, 1]


def test_the_front_holds_what_nothing_beats() -> None:
    def spot(label: str, gone: float, kept: float, is_base: bool = False) -> Spot:
        return Spot(label, (gone, gone, gone), (kept, kept, kept), "blue", is_base)

    spots = [spot("base", 0.0, 1.0, True), spot("a", 0.9, 0.8), spot("b", 0.7, 0.9), spot("beaten", 0.7, 0.8)]
    assert [found.label for found in efficient(spots)] == ["b", "a"]


def test_the_command_writes_the_page(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    add_scores(run, scores())
    assert main(["report", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert told["report"] == str(run.path / "report.html") and told["bytes"] == len(page.encode())
    assert page.startswith("<!doctype html>")
    assert main(["report", str(run.path), "--out", str(run.path / "new" / "page.html")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(run.path / "new" / "page.html")


def test_mistakes_of_the_command_are_one_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = str(run.path)
    for words_given, told in [
        (["nowhere"], "no run at 'nowhere'"),
        ([str(tmp_path)], "is a folder and not a run"),
        ([here, here], "is given twice"),
        ([here, "--out", str(tmp_path)], "is a folder; allowed: a file"),
        ([here, "--out", "page.pdf"], "allowed: a FILE.html"),
        ([], ""),
    ]:
        assert main(["report", *words_given]) == 2, words_given
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, words_given
    assert not (run.path / "report.html").exists()
