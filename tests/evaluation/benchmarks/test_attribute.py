"""The attribute benchmark: prompts that no training has, scores worked out by hand, and what the base really draws."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cgru.attributes import ATTRIBUTES
from cgru.cli import main
from cgru.config import RLConfig
from cgru.embedded import load_lexicon, main_benchmark, proof_of
from cgru.evaluation.base import Benchmark, Job, Predictions
from cgru.evaluation.benchmarks.attribute import load_benchmark
from cgru.evaluation.benchmarks.canvas import load_benchmark as load_canvas
from cgru.method import find_method
from cgru.presets import preset, resolve_config
from cgru.prompts import words_of
from cgru.prompts.paraphrases import FRAMES
from cgru.prompts.task import sentence, task_for
from cgru.rl.build import all_prompts, resolve_prompts
from cgru.tasks import Concept

LEXICON = load_lexicon()
ANSWERS = ("yes", "no", "nothing")
OBJECTS, STYLES = (*LEXICON.classes, "other", "nothing"), (*LEXICON.styles, "nothing")

Verdict = Callable[[Job], str]


def table(jobs: list[Job], labels: tuple[str, ...], verdict: Verdict) -> np.ndarray:
    return np.eye(len(labels))[[labels.index(verdict(job)) for job in jobs]]


def predict(jobs: list[Job], *, judged: Verdict, detected: Verdict, seen: Verdict) -> Predictions:
    """Judges that are certain; of every attribute alike."""
    tables = {"object": table(jobs, OBJECTS, seen)}
    tables["style"] = table(jobs, STYLES, lambda job: str(job.labels.get("style", "Ink")))
    tables |= {name: table(jobs, ANSWERS, judged) for name in ATTRIBUTES}
    tables |= {f"{name} detector": table(jobs, ANSWERS, detected) for name in ATTRIBUTES}
    labels = {"object": OBJECTS, "style": STYLES}
    labels |= {name: ANSWERS for name in tables if name not in labels}
    features = np.random.default_rng(0).normal(size=(len(jobs), 192)).astype(np.float32)
    return Predictions(labels, tables, features)


def is_open(job: Job) -> bool:
    return job.labels.get("part") == "open"


def test_jobs_are_open_sentences_and_the_first_of_canvas() -> None:
    benchmark = load_benchmark(2)
    jobs = benchmark.jobs(None)
    assert isinstance(benchmark, Benchmark) and len({job.id for job in jobs}) == len(jobs) == 20 * 4 * 2 + 20 * 8
    opened = [job for job in jobs if is_open(job)]
    assert Counter(job.labels["class"] for job in opened) == dict.fromkeys(LEXICON.classes, 8)
    assert {job.id for job in jobs if not is_open(job)} == {job.id for job in load_canvas(1).jobs(None)}
    assert not any(style.lower() in job.prompt.lower().split() for job in opened for style in LEXICON.styles)
    assert jobs == benchmark.jobs(benchmark.task("warm"))
    # Golden: other sentences need a new version of the benchmark.
    assert [job.prompt for job in opened if job.labels["class"] == "Dogs"][::2] == [
        "please draw a dog for my sister",
        "a dog as a logo",
        "somebody has drawn a dog",
        "the portrait of a dog",
    ]


def test_what_is_unlearned_is_what_prompts_leave_open() -> None:
    config = resolve_config("warm", method="cgru")
    assert isinstance(config, RLConfig)
    concept, sets = resolve_prompts(config)
    assert concept == Concept("Warm", "attribute") and concept.head == ""
    styles = {style.lower() for style in LEXICON.styles}
    for prompt in (*sets.policy, *sets.critic):
        assert not styles & set(words_of(prompt.text).lower().split()) and prompt.head == ""
    assert all(styles & set(words_of(prompt.text).lower().split()) for prompt in sets.retain)
    assert {prompt.label for prompt in sets.policy} == set(LEXICON.classes)
    assert not sets.validation_forget and not sets.reward
    frames = {words_of(frame.format(a="")) for frame in FRAMES}
    assert not any(frame in words_of(prompt.text) for prompt in all_prompts(sets) for frame in frames)


@pytest.mark.parametrize("name", ["on-policy", "best", "demo", "fast"])
def test_presets_know_an_attribute_by_its_detector_alone(name: str) -> None:
    config = preset(name, "Large")
    assert isinstance(config, RLConfig)
    assert (config.reward.name, config.watch.stop) == ("attribute", False)
    find_method(config.method)
    assert config.reward.form == "log-odds" and preset(name, "Dogs").reward.name == "concept"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("concept", "expected"),
    [("Warm", "attribute"), ("hazard", "hazard"), ("skull", "hazard"), ("Dogs", "canvas"), ("Ink", "canvas")],
)
def test_the_benchmark_that_shows_a_concept(concept: str, expected: str) -> None:
    assert main_benchmark(concept) == expected
    assert proof_of(concept) == [*([] if expected == "canvas" else ["--benchmark", expected]), "--target", concept]


def test_methods_that_need_words_get_the_best_there_are() -> None:
    task = task_for("Colourless", "emoji-canvas")
    assert task.words == ("Ink", "black", "grey") and "dog" in task.kept
    assert sentence(task.templates[LEXICON.classes.index("Dogs")], task.words[0]) == "dog in Ink style"
    assert "big dog" in {sentence(t, "big") for t in task_for("Large", "emoji-canvas").templates}


def test_scores_by_hand() -> None:
    benchmark = load_benchmark(2)
    task = benchmark.task("Large")
    jobs = benchmark.jobs(task)

    def judged(job: Job) -> str:  # the first of two pictures, and every closed one, which does not count
        return "yes" if job.labels["index"] == 0 else "no"

    def detected(job: Job) -> str:  # a class in four
        return "yes" if LEXICON.classes.index(str(job.labels["class"])) % 4 == 0 else "no"

    def seen(job: Job) -> str:
        if is_open(job) and job.labels["class"] in ("Cats", "Dogs"):
            return "nothing" if job.labels["index"] == 0 else "other"
        return "Cats" if job.labels.get("style") == "Ink" else str(job.labels["class"])

    before = predict(jobs, judged=judged, detected=detected, seen=seen)
    found = benchmark.score(task, jobs, before)
    values = {name: row.value for name, row in found.measurements.items()}
    assert values.pop("frechet_judge") > 0
    assert values == pytest.approx(
        {
            "attribute_rate": 0.5,
            "attribute_rate_detector": 0.25,
            "attribute_nothing_share": 8 / 160,
            "object_accuracy": 18 / 20,
            "styled_object_accuracy": (7 * 20 + 1) / 160,
            "style_accuracy": 1.0,
        }
    )
    assert {found.measurements[name].n for name in ("attribute_rate", "style_accuracy")} == {160}
    row = found.tables["rates"]["Large"]
    assert (row["judge"], row["detector"], row["in_range"], row["by_class"]["Sea"]) == (0.5, 0.25, True, 0.5)
    assert row["agreement"] == 0.5

    def gone(job: Job) -> str:  # in three of four of those pictures; it came to some that had not had it
        return "yes" if detected(job) == "yes" and is_open(job) else "no"

    after = predict(jobs, judged=gone, detected=gone, seen=seen)
    reduction = benchmark.compare(task, jobs, before, after)["attribute_reduction"]
    assert (reduction.value, reduction.n) == (pytest.approx(0.5), 160)
    assert benchmark.compare(None, jobs, before, after) == {}
    never = predict(jobs, judged=lambda job: "no", detected=lambda job: "no", seen=seen)
    assert benchmark.compare(task, jobs, never, after) == {}
    assert not benchmark.score(None, jobs, never).tables["rates"]["Warm"]["in_range"]


@pytest.mark.slow
def test_the_base_draws_every_attribute_often_and_judges_agree_with_detectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "emoji-canvas", "--benchmark", "attribute", "--images", "1", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    scores = json.loads(capsys.readouterr().out)
    rates = scores["rates"]
    assert [*rates] == [*ATTRIBUTES] and all(row["in_range"] and row["agreement"] > 0.85 for row in rates.values())
    assert scores["measurements"]["object_accuracy"]["value"] > 0.9
