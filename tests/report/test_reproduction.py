"""The page of a reproduction: the paper's tables from files, computed bold and means, holes where nothing was run."""

import hashlib
import json
import re
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cgru.config import RLConfig, override
from cgru.edit_folder import LORA_FILE
from cgru.experiments.cells import Cell
from cgru.experiments.paper import plan
from cgru.experiments.scales import SCALES
from cgru.report.paper.figures import averaged
from cgru.report.paper.objects import mean
from cgru.report.paper.page import PARTS, reproduction_page
from cgru.report.paper.read import read_reproduction
from cgru.runs import Run

EDIT = Path("edit") / LORA_FILE
SMALL = replace(SCALES["small"], classes=("Cats", "Dogs"))


def share(value: float, n: int = 80) -> dict[str, Any]:
    return {"value": value, "low": value - 0.02, "high": value + 0.02, "n": n, "unit": "proportion", "better": "higher"}


def canvas_scores(target: str, ua: float, ira: float) -> dict[str, Any]:
    counts = {"prompted": ["Cats", "Dogs"], "judged": ["Cats", "Dogs", "nothing"], "counts": [[3, 1, 0], [0, 4, 0]]}
    distance = {"value": 7.5, "low": None, "high": None, "n": 160, "unit": "distance", "better": "lower"}
    found = {"ua": share(ua), "ira": share(ira), "cra": share(0.6), "frechet_judge": distance}
    return {
        "benchmark": "canvas",
        "version": 3,
        "protocol": {"target": {"name": target, "kind": "class"}, "images": 2},
        "measurements": found,
        "confusion": {"object": counts},
        "base": {"measurements": {"ua": share(0.03), "ira": share(0.98), "cra": share(0.7), "frechet_judge": distance}},
    }


def hazard_scores(counts: dict[str, int], reduction: float | None) -> dict[str, Any]:
    change = {} if reduction is None else {"hazard_reduction": share(reduction)}
    return {
        "benchmark": "hazard",
        "version": 1,
        "protocol": {"target": {"name": "hazard", "kind": "hazard", "labels": list(counts)}},
        "measurements": {"hazard_detections": share(sum(counts.values()) / 144), "object_accuracy": share(0.97)},
        "detections": {"by_category": counts, "pictures": 144},
        "base": None,
        "change": change,
    }


def attack_scores(pre: float, post: float, *, without_word: bool) -> dict[str, Any]:
    return {
        "benchmark": "unlearndiffatk",
        "version": 1,
        "protocol": {
            "target": {"name": "hazard", "kind": "hazard"},
            "without_word": without_word,
            "prompts": 50,
            "targets": {"found": 49},
            "schedule": {"name": "short"},
        },
        "measurements": {"pre_asr": share(pre), "post_asr": share(post)},
        "examples": [],
        "base": None,
        "change": {},
    }


def make_run(out: Path, cell: Cell) -> Run:
    assert cell.concept is not None
    own = {"critic": [f"critic.kind={cell.name.split('-')[1]}"], "ddpo": ["reward.name=jpeg"]}
    config = RLConfig(concept=cell.concept, seed=cell.seed, method=cell.method)
    run = Run.create(out / "runs", override(config, ["policy.iterations=4", *own.get(cell.experiment, [])]))
    if cell.stage == "critic":
        accuracy = {"film": 0.512, "plain": 0.333}[run.config.critic.kind] + 0.01 * cell.seed
        run.finish("2-critic", {"accuracy": accuracy, "macro_precision": accuracy + 0.1, "held_out": 192})
        return run
    kind = "ddpo" if cell.method == "ddpo" else "critic"
    for i in range(4):
        variance = {f"variance/{kind}": 2.0 + i, f"variance/{kind}_raw_normalised": 3.0}
        ratios = {"policy/ratio_mean": 0.99, "policy/ratio_max": 0.05, "ratio/std/t0": 0.01, "ratio/std/t1": 0.02}
        run.log({"iteration": i, "reward/mean": float(i + cell.seed), **variance, **ratios})
    run.finish("3-policy", {"iterations": 4})
    run.save(str(EDIT), b"weights of " + cell.name.encode())
    return run


def add(folder: Path, scores: dict[str, Any], run: Run | None) -> None:
    folder.mkdir(parents=True)
    edit = hashlib.sha256((run.path / EDIT).read_bytes()).hexdigest() if run else None
    scores["protocol"]["model"] = {"edit_sha256": edit}
    (folder / "scores.json").write_text(json.dumps(scores))


def measure(out: Path, cell: Cell, run: Run | None) -> None:
    place = run.path / "eval" if run else out / "base"
    if cell.experiment == "objects" and run:
        ua = {"anchored": 0.97, "cgru": 0.97, "ddpo": 0.91}[cell.method] - (0.02 if cell.concept == "Dogs" else 0.0)
        add(place / "canvas", canvas_scores(str(cell.concept), ua, 0.9), run)
    if cell.experiment == "safety":
        counts = {"weapons": 3, "skulls": 2} if run else {"weapons": 61, "skulls": 70}
        add(place / "hazard", hazard_scores(counts, 0.962 if run else None), run)
        rates = (0.04, 0.37, False) if run else (0.02, 0.98, True)
        add(place / "attack", attack_scores(*rates[:2], without_word=rates[2]), run)


def make(out: Path, cells: tuple[Cell, ...], failed: str = "") -> Path:
    (out / "cells").mkdir(parents=True)
    rows = [{**asdict(cell), "fingerprint": cell.fingerprint} for cell in cells]
    about = {"scale": "small", "model": "emoji-canvas", "command": "cgru reproduce --scale small", "cells": rows}
    (out / "plan.json").write_text(json.dumps(about))
    for cell in cells:
        record: dict[str, Any] = {"name": cell.name, "fingerprint": cell.fingerprint}
        if cell.name == failed:
            record["error"] = "ValueError: out of <memory>"
        elif cell.missing:
            record["not_run"] = cell.missing
        else:
            run = make_run(out, cell) if cell.concept else None
            measure(out, cell, run)
            base = {"evaluations": ["base/hazard"], "attacks": ["base/attack"]} if cell.name == "safety-base" else {}
            made = [f"runs/{run.path.name}/eval/{path.name}" for path in (run.path / "eval").glob("*")] if run else []
            record |= {"run": f"runs/{run.path.name}" if run else None, "evaluations": made, "attacks": [], **base}
            record |= {"seconds": {"training": 61.0}, "device": "cpu", "commit": "abc"}
        (out / "cells" / f"{cell.name}.json").write_text(json.dumps(record))
    return out


def words(page: str) -> str:
    body = re.sub(r"<(style|script)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = make(tmp_path_factory.mktemp("whole"), plan(SMALL))
    return reproduction_page(read_reproduction(out))


def test_every_part_of_the_contents_is_on_the_page(whole: str) -> None:
    for anchor in PARTS:
        assert f'id="{anchor}"' in whole, anchor
        assert f'href="#{anchor}"' in whole


def test_methods_are_means_over_classes_and_the_best_is_bold(whole: str) -> None:
    # anchored and CGRU: (0.97 + 0.95) / 2, DDPO: (0.91 + 0.89) / 2; averages with an IRA of 0.9.
    assert "<strong><span>96.0 %" in whole
    assert "<span>90.0 %" in whole
    assert "<strong><span>93.0 %" in whole


def test_classes_that_were_not_removed_say_so(whole: str) -> None:
    row = re.search(r"<tr><th scope=\"row\">Bears</th>(.*?)</tr>", whole)
    assert row is not None
    assert row[1].count("not run") == 6  # two figures of three methods


def test_hazards_are_summed_by_the_page(whole: str) -> None:
    text = words(whole)
    assert "61 70 131" in text
    assert "3 2 5" in text
    assert "anchored, seed 0: 96.2 % fewer than the base" in text


def test_the_attack_table_has_the_base_without_the_word(whole: str) -> None:
    text = words(whole)
    assert "base model, without the word 2.0 %" in text
    assert "anchored, seed 0 4.0 %" in text
    assert "49 of 50 prompts, short" in text


def test_critics_are_means_over_seeds_with_their_deviation(whole: str) -> None:
    # 51.2, 52.2, 53.2 %: mean 52.2, deviation 1.
    assert "film 52.2 ± 1.0 % 62.2 ± 1.0 % 192 trajectories, 3 seeds" in words(whole)


def test_what_failed_or_was_not_run_is_a_hole(tmp_path: Path) -> None:
    cells = tuple(replace(cell, missing="a judge") if cell.experiment == "critic" else cell for cell in plan(SMALL))
    page = reproduction_page(read_reproduction(make(tmp_path / "x", cells, failed="objects-dogs-ddpo-s0")))
    text = words(page)
    assert "objects-dogs-ddpo-s0: failed" in text
    assert "critic-film-s0: not run: needs a judge" in text
    assert "out of <memory>" in text  # escaped, and shown whole
    assert "1 of 2" in text  # DDPO's runs behind its mean


def test_a_plan_that_has_not_begun_is_a_page_of_holes(tmp_path: Path) -> None:
    rows = [{**asdict(cell), "fingerprint": cell.fingerprint} for cell in plan(SMALL)]
    (tmp_path / "plan.json").write_text(json.dumps({"scale": "s", "model": "m", "command": "c", "cells": rows}))
    page = reproduction_page(read_reproduction(tmp_path))
    assert "not run yet" in page
    assert not re.search(r"\d+\.\d %", words(page).split("Published")[0])


def test_a_result_of_another_definition_is_left_out(tmp_path: Path) -> None:
    out = make(tmp_path / "x", plan(SMALL))
    path = out / "cells" / "objects-cats-cgru-s0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": "other"}))
    text = words(reproduction_page(read_reproduction(out)))
    assert "objects-cats-cgru-s0: its result is of another definition" in text


def test_runs_of_another_protocol_are_never_averaged(tmp_path: Path) -> None:
    out = make(tmp_path / "x", plan(SMALL))
    path = next(out.glob("runs/cats-ddpo-*/eval/canvas/scores.json"))
    scores = json.loads(path.read_text())
    path.write_text(json.dumps(scores | {"version": 4}))
    page = reproduction_page(read_reproduction(out))
    text = words(page)
    assert "Runs were measured by different protocols of canvas (version)" in text
    assert "96.0 %" not in text.split("Each class")[0]


def test_only_what_a_cell_made_counts_and_what_is_lost_is_told(tmp_path: Path) -> None:
    out = make(tmp_path / "x", plan(SMALL))
    folder = next(out.glob("runs/cats-cgru-*/eval/canvas"))
    folder.rename(folder.with_name("by-hand"))
    text = words(reproduction_page(read_reproduction(out)))
    assert "eval/canvas is damaged, gone or of another edit" in text
    assert "1 of 2" in text  # the run evaluated by hand is not in CGRU's mean


def test_an_experiment_that_was_not_asked_for_says_so(tmp_path: Path) -> None:
    page = reproduction_page(read_reproduction(make(tmp_path / "x", plan(SMALL, only=["critic"]))))
    assert "Not asked for: the plan has no cells of objects" in words(page)
    assert all(f'id="{anchor}"' in page for anchor in PARTS)


def test_a_folder_that_is_no_reproduction(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"plan.json"):
        read_reproduction(tmp_path)


def test_means_over_runs_take_iterations_that_all_have() -> None:
    runs = [[{"iteration": 0, "x": 1.0}, {"iteration": 1, "x": 3.0}], [{"iteration": 0, "x": 2.0}]]
    assert averaged(runs, "x") == [(0.0, 1.5)]
    assert averaged([[{"iteration": 0, "x": None}], [{"iteration": 0, "x": 2.0}]], "x") == [(0.0, None)]


def test_one_class_has_no_interval_over_classes() -> None:
    found = mean([("Cats", {"ua": 0.9})], "ua")
    assert found is not None
    assert (found["value"], found["low"]) == (0.9, None)
    assert mean([], "ua") is None
