"""Attacks and the benchmarks beside the headline: every number from scores.json, what is missing "not run"."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_report_page import add_scores, make_run, measured, page_of, scores, words

from cgru.report.run.families import ATTACKS, HAZARDS, NUDITY, OBJECTS, PARAPHRASES, kind_of, metric_of
from cgru.report.run.read import read_record
from cgru.report.run.repeat import evaluate_command, first_command
from cgru.runs import Run


def attack_scores(post: float = 0.31, *, prompts: int = 3, **protocol: object) -> dict[str, Any]:
    return {
        "benchmark": "unlearndiffatk",
        "version": 1,
        "protocol": {
            "target": {"name": "Dogs", "kind": "class"},
            "prompts": prompts,
            "targets": {"from": "emoji-canvas", "found": 3, "candidates": 5},
            "schedule": {"name": "short", "timesteps": 10, "iterations": 20},
            "tokens": 3,
            "without_word": False,
            "attack_seed": 0,
            "judge": {"id": "object", "weights_sha256": "judge", "success": "argmax is Dogs"},
            **protocol,
        },
        "measurements": {
            "pre_asr": measured(0.0713, 0.0101, 0.3456, 29, "lower"),
            "post_asr": measured(post, 0.1234, 0.5678, 29, "lower"),
        },
        "examples": [],
        "base": None,
        "change": {},
    }


def add_attack(run: Run, found: dict[str, Any], name: str = "unlearndiffatk@1-dogs-short") -> Path:
    """Three prompts: brought back, held, seen without any attack."""
    folder = add_scores(run, found, name)
    outcomes = [(False, False), (True, True), (False, True)]
    rows = []
    for i, (before, after) in enumerate(outcomes):
        attack = None if before else {"prompt": f"tok<b>{i} a dog", "tokens": [1], "time": 50}
        rows.append({"id": f"a{i}", "key": "k", "prompt": f"prompt {i}", "seed": i, "target": f"base/a{i}.png"})
        rows[-1] |= {"before": before, "after": after, "broken": False, "attack": attack}
        files = [f"base/a{i}.png", f"samples/k/a{i}-before.png", *([] if before else [f"samples/k/a{i}-after.png"])]
        for place in files:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(folder / place)
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "jobs.jsonl").write_text("".join(json.dumps({"id": f"a{i}"}) + "\n" for i in range(3)))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = make_run(tmp_path)
    add_scores(made, scores())
    return made


def test_an_attack_shows_rates_examples_and_its_command(run: Run) -> None:
    add_attack(run, attack_scores())
    page = page_of(run)
    text = words(page)
    assert "Pre-ASR ↓ 7.1 % 1.0 % – 34.6 % 29" in text and "Post-ASR ↓ 31.0 % 12.3 % – 56.8 % 29" in text
    assert "Of the attacked ↓ no prompt — 0" in text  # left out of scores.json where nothing was attacked
    # Brought back first, then what held, then what needed no attack.
    order = [text.index(f"prompt {i}") for i in (2, 0, 1)]
    assert order == sorted(order)
    assert "prompt 2 tok<b>2 a dog brought back" in text and "prompt 1 seen without any attack" in text
    assert "tok<b>" not in page  # escaped
    assert page.count('alt="target picture"') == 3 and page.count('alt="with attack"') == 2
    assert f"cgru attack {run.path} --target Dogs --prompts 3 --tokens 3 --schedule short --seed 0" in text
    assert "short: timesteps 10, iterations 20" in text and "argmax is Dogs" in text


def test_an_attack_is_no_evaluation_without_a_base(run: Run) -> None:
    add_attack(run, attack_scores())
    record = read_record(run.path)
    assert record.holes == () and record.main is not None and record.main.name == "canvas@2"


def test_a_run_that_was_not_attacked_says_so(run: Run) -> None:
    assert f"nothing is known about how easily the concept comes back. cgru attack {run.path} --target Dogs" in words(
        page_of(run)
    )


def test_too_few_targets_and_a_lost_picture_are_told(run: Run) -> None:
    folder = add_attack(run, attack_scores(prompts=50))
    (folder / "base" / "a0.png").unlink()
    text = words(page_of(run))
    assert "Only 3 of 50 prompts" in text
    assert text.count("not shown:") == 1


def test_a_target_picture_outside_of_the_run_is_not_shown(run: Run, tmp_path: Path) -> None:
    """Given with --pictures, or named by someone who wants it on the page of a reader."""
    folder = add_attack(run, attack_scores())
    Image.new("RGB", (9, 9), (1, 2, 3)).save(tmp_path / "private.png")
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    rows[0]["target"], rows[1]["target"] = str(tmp_path / "private.png"), "../../../../private.png"
    (folder / "base/a2.png").unlink()
    (folder / "base/a2.png").symlink_to(tmp_path / "private.png")
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(run)
    assert base64.b64encode((tmp_path / "private.png").read_bytes()).decode() not in page
    assert words(page).count(f"not shown: it lies outside of '{folder.name}'") == 3
    assert page.count('alt="without attack"') == 3


def test_attacks_of_two_schedules_are_neither_ranked_nor_averaged(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(3)]
    names = ("short", "short", "official")
    for run, schedule, post in zip(runs, names, (0.31, 0.17, 0.02), strict=True):
        add_scores(run, scores())
        add_attack(run, attack_scores(post, schedule={"name": schedule}))
    top = page_of(*runs).split('id="r0"')[0]
    text = words(top)
    assert "Their protocols differ in schedule" in text
    # Among the two of one schedule the lower is bold and first; 2.0 % of the other schedule is neither.
    assert "<strong>17.0 %</strong>" in top and "<strong>2.0 %</strong>" not in top
    assert "A, B 7.1 % (7.1 % – 7.1 %) 24.0 % (17.0 % – 31.0 %)" in text


def test_attacks_on_other_concepts_are_averaged_but_not_ranked(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, concept) for concept in ("Dogs", "Cats")]
    for run, post in zip(runs, (0.31, 0.17), strict=True):
        name = run.config.concept
        # What names the concept differs: the target, its pictures, what counts as a success.
        judge = {"id": "object", "weights_sha256": "judge", "success": f"argmax is {name}"}
        targets = {"from": "emoji-canvas", "found": len(name), "candidates": 5}
        add_attack(run, attack_scores(post, target={"name": name, "kind": "class"}, judge=judge, targets=targets))
    top = page_of(*runs).split('id="r0"')[0]
    assert "A, B 7.1 % (7.1 % – 7.1 %) 24.0 % (17.0 % – 31.0 %)" in words(top)
    assert "<strong>1" not in top and "<strong>3" not in top


def test_an_attack_that_one_run_lacks_is_not_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(2)]
    for run in runs:
        add_scores(run, scores())
    add_attack(runs[0], attack_scores())
    assert f"unlearndiffatk not run: B ({runs[1].path.name})" in words(page_of(*runs))


def test_wordings_are_told_by_kind(run: Run) -> None:
    found = scores() | {"benchmark": "paraphrase", "version": 1}
    found["measurements"] = {
        "paraphrase_ua": measured(0.8124, 0.7123, 0.8912, 97),
        "paraphrase_ua_breed": measured(0.4321, 0.3123, 0.5512, 31),
        "paraphrase_ira": measured(0.9191, 0.8888, 0.9555, 61),
        "paraphrase_nothing_share": measured(0.0, 0.0, 0.0381, 97, "lower"),
    }
    found["base"] = {"measurements": {"paraphrase_ua_breed": measured(0.0606, 0.0123, 0.1512, 31)}}
    found["by_prompt"] = {"a poodle": {"pictures": 4, "seen": 3}, "a hound": {"pictures": 4, "seen": 0}}
    add_scores(run, found, "paraphrase@1-dogs")
    text = words(page_of(run))
    assert "breeds and kinds 6.1 % 43.2 % 31.2 % – 55.1 % 31" in text
    assert "synonyms not run not run not run not run" in text
    assert "a poodle 3 of 4" in text and "a hound" not in text and "1 of 2 show it at least once" in text
    assert f"cgru evaluate {run.path} --benchmark paraphrase --images 1 --target Dogs" in text


def test_quality_has_variants_and_what_was_not_run_says_so(run: Run) -> None:
    found = scores(metric="fid", variant="judge", reference={"what": "real composites", "n": 4800})
    found |= {"benchmark": "fid-judge", "version": 1, "change": {}}
    row = {"value": 7.891, "low": None, "high": None, "n": 152, "unit": "squared distance", "better": "lower"}
    found["measurements"], found["base"] = {"fid_judge": row}, {"measurements": {"fid_judge": row | {"value": 3.14159}}}
    add_scores(run, found, "fid-judge@1-dogs")
    text = words(page_of(run))
    assert "fid_judge ↓ judge 3.14 7.89 — 152 real composites" in text
    assert "kid not run not run not run not run not run not run" in text
    assert f"cgru evaluate {run.path} --benchmark fid --variant judge --images 1 --target Dogs" in text
    assert f"cgru evaluate {run.path} --benchmark kid --target Dogs" in text  # how to run what is missing


def test_detections_of_pictures_and_of_things_are_counted_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path, "nudity")
    found = scores(subset="all", threshold=0.6) | {"benchmark": "i2p", "version": 1}
    found["measurements"] = {
        "nudity_detections": measured(0.5, 0.1, 0.7, 10, "lower") | {"unit": "detections a picture"},
        "nude_images": measured(0.4, 0.16, 0.68, 10, "lower"),
    }
    # Five things in four of ten pictures: one picture holds both categories.
    counts = {"pictures_by_category": {"feet": 3, "belly": 2}, "pictures_with_any": 4, "threshold": 0.6}
    found["detections"] = {"pictures": 10, "by_category": {"feet": 3, "belly": 2}, **counts}
    found["base"] = {"measurements": {}, "detections": found["detections"] | {"by_category": {"feet": 9, "belly": 8}}}
    found["protocol"]["target"] = None
    add_scores(run, found, "i2p@1")
    text = words(page_of(run))
    assert "Detections in 10 explicit pictures, score at least 0.6" in text
    assert "--benchmark i2p --source FILE.csv --subset all --threshold 0.6" in text
    assert "feet 9 30.0 % 3 30.0 % 10.8 % – 60.3 %" in text  # Wilson's interval of 3 in 10
    assert "total 17 40.0 % 5 40.0 % 16.8 % – 68.7 %" in text
    assert "A picture may hold several detections" in text


def test_a_kind_is_told_by_measurements_not_by_name() -> None:
    row = measured(0.5, 0.4, 0.6, 9)

    def of(benchmark: str, *names: str) -> Any:  # noqa: ANN401 - a kind or None
        protocol = {"metric": "kid"} if benchmark == "kid-judge" else {}
        return kind_of({"benchmark": benchmark, "protocol": protocol, "measurements": dict.fromkeys(names, row)})

    assert of("unlearncanvas", "ua", "ira") == OBJECTS == of("canvas", "ira", "cra", "ua")
    assert of("hazard", "hazard_detections", "object_accuracy") == HAZARDS
    assert of("i2p", "nudity_detections", "nude_images") == NUDITY
    assert of("mine", "paraphrase_ua", "paraphrase_ira") == PARAPHRASES
    assert of("unlearndiffatk", "pre_asr", "post_asr") == ATTACKS
    assert of("kid-judge", "kid_judge").columns == {"kid_judge": "kid_judge ↑"}
    assert of("fidelity", "beauty") is None and metric_of({"benchmark": "fid", "protocol": {}}) is None


def test_a_benchmark_of_ones_own_says_what_its_figures_mean_and_what_it_measures(run: Run) -> None:
    found = scores(metric="sharpness", variant="edges", reference={"what": "the prompts"})
    found |= {"benchmark": "mine", "version": 3, "change": {}, "base": None}
    found["measurements"] = {"sharpness_edges": measured(0.25, 0.2, 0.3, 8) | {"meaning": "edges per picture"}}
    add_scores(run, found, "mine@3-dogs")
    text = words(page_of(run))
    assert "sharpness_edges ↑ edges not run 25.0 % 20.0 % – 30.0 % 8 the prompts" in text  # a row among picture quality
    assert "fid not run" in text
    assert "25.0 % 20.0 % – 30.0 % 8 edges per picture" in text


def test_commands_for_what_is_missing_fit_the_run(tmp_path: Path) -> None:
    hazard = read_record(make_run(tmp_path, "hazard").path)
    other = read_record(make_run(tmp_path, "Dogs", 0, "model=some/model").path)
    assert first_command(hazard, "fid").endswith("--benchmark fid")  # hazards are no part of its prompts
    assert first_command(other, "fid").endswith("--benchmark fid --reference FOLDER")
    assert first_command(other, "unlearndiffatk").endswith("--target Dogs")


def test_a_reference_folder_is_part_of_the_command(run: Run) -> None:
    found = scores(metric="fid", variant="inception-clean", reference={"what": "folder", "name": "mjhq", "sha256": "1"})
    found |= {"benchmark": "fid-inception-clean", "measurements": {"fid_x": measured(0.1, 0.0, 0.2, 3)}}
    add_scores(run, found, "fid")
    record = read_record(run.path)
    fid = next(found for found in record.evaluations if metric_of(found.scores))
    assert "--benchmark fid --variant inception-clean" in evaluate_command(record, fid)
    assert evaluate_command(record, fid).endswith("--reference mjhq")
