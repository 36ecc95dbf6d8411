"""The canvas benchmark: its jobs, and its scores on predictions worked out by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cgru.embedded import Vocabulary
from cgru.evaluation.base import Job, Measurement, Predictions, job_seed
from cgru.evaluation.benchmarks.canvas import Canvas
from cgru.evaluation.distances import FeatureGaussian
from cgru.tasks import Sampling

CLASSES = tuple(f"Class{i}" for i in range(20))
STYLES = tuple(f"style {i}" for i in range(8))
OBJECT_LABELS = (*CLASSES, "other", "nothing")
STYLE_LABELS = (*STYLES, "nothing")


def make(images: int, classes: tuple[str, ...] = CLASSES, styles: tuple[str, ...] = STYLES) -> Canvas:
    vocabulary = Vocabulary("1", classes, styles, ("blades",), (), ((classes[0], styles[0]),), Sampling(20, 4.0, 0.0))
    return Canvas(vocabulary, FeatureGaussian(np.zeros(2), np.eye(2), 100), images)


def test_grid_is_classes_times_styles_times_images() -> None:
    jobs = make(3).jobs(None)
    assert len(jobs) == 20 * 8 * 3 == len({job.id for job in jobs}) == len({job.seed for job in jobs})
    assert jobs[0].prompt == "A Class0 image in style 0 style"


def test_ids_and_seeds_are_the_same_for_ever() -> None:
    # Golden: a change here makes old evaluations incomparable, so it needs a new benchmark version.
    # printf '[0,"A Dogs image in flat style"]' | sha256sum | cut -c1-12, as a number; and [prompt, seed] for the id.
    prompt = "A Dogs image in flat style"
    job = Job(prompt, job_seed(0, prompt), {})
    assert job.seed == 224432948159622
    assert job.id == "036de994ffbfbba5"


@pytest.mark.parametrize("images", [1, 4, 10, 12])
def test_target_class_gets_at_least_80_and_others_exactly_n(images: int) -> None:
    benchmark = make(images)
    counted = Counter(job.labels["class"] for job in benchmark.jobs(benchmark.task("Class3")))
    assert counted.pop("Class3") == max(80, 8 * images)
    assert set(counted.values()) == {8 * images}


def test_target_style_gets_80_over_20_classes() -> None:
    benchmark = make(1)
    counted = Counter(job.labels["style"] for job in benchmark.jobs(benchmark.task("style 2")))
    assert counted.pop("style 2") == 80
    assert set(counted.values()) == {20}


def test_a_target_moves_no_other_job() -> None:
    benchmark = make(2)
    plain = {job.id for job in benchmark.jobs(None)}
    assert plain < {job.id for job in benchmark.jobs(benchmark.task("Class3"))}
    assert plain < {job.id for job in make(5).jobs(None)}


def test_hazards_are_no_target_of_the_grid() -> None:
    with pytest.raises(ValueError, match="unknown concept 'blades'"):
        make(1).task("blades")


def test_protocol_lists_missing_cells_and_the_target() -> None:
    benchmark = make(1)
    protocol = benchmark.protocol(benchmark.task("Class3"))
    assert protocol["missing_cells"] == [["Class0", "style 0"]]
    assert protocol["target_images"] == 80
    assert protocol["template"] == "A {class} image in {style} style"


Verdict = Callable[[Job], tuple[str, float]]
"""A judge's label for a job, and the probability it gives that label."""


def predict(jobs: list[Job], sees_object: Verdict, sees_style: Verdict) -> Predictions:
    """Predictions where the rest of the probability goes evenly to all other labels."""
    tables = {}
    for judge, labels, verdict in (("object", OBJECT_LABELS, sees_object), ("style", STYLE_LABELS, sees_style)):
        rows = np.empty((len(jobs), len(labels)))
        for row, job in zip(rows, jobs, strict=True):
            label, chance = verdict(job)
            row[:] = (1 - chance) / (len(labels) - 1)
            row[labels.index(label)] = chance
        tables[judge] = rows
    features = np.random.default_rng(0).normal(size=(len(jobs), 2)).astype(np.float32)
    return Predictions({"object": OBJECT_LABELS, "style": STYLE_LABELS}, tables, features)


def right(kind: str, chance: float = 0.79) -> Verdict:
    return lambda job: (str(job.labels[kind]), chance)


def test_forgotten_class_by_hand() -> None:
    """n = 2, target Class3 with 80 pictures in 8 cells of 10.

    Object judge: the target is seen in the first picture of each cell (8 of 80), nothing in the second, "other" in the
    rest; Class5 is never seen (all "other"), every other class always. Style judge: right, except that style 0 is
    never seen on the target.
    """
    benchmark = make(2)
    task = benchmark.task("Class3")
    jobs = benchmark.jobs(task)

    def sees_object(job: Job) -> tuple[str, float]:
        if job.labels["class"] == "Class3":
            return {0: ("Class3", 0.79), 1: ("nothing", 0.79)}.get(int(job.labels["index"]), ("other", 0.79))
        return ("other" if job.labels["class"] == "Class5" else str(job.labels["class"]), 0.79)

    def sees_style(job: Job) -> tuple[str, float]:
        is_lost = job.labels["class"] == "Class3" and job.labels["style"] == "style 0"
        return ("nothing" if is_lost else str(job.labels["style"]), 0.92)

    score = benchmark.score(task, jobs, predict(jobs, sees_object, sees_style))
    value = {name: found.value for name, found in score.measurements.items()}
    n = {name: found.n for name, found in score.measurements.items()}
    # The wrong labels share 0.21 over 21 others: 0.01 each.
    assert value["ua"] == pytest.approx(72 / 80)
    assert value["ua_soft"] == pytest.approx(1 - (8 * 0.79 + 72 * 0.01) / 80)
    assert value["ira"] == pytest.approx(18 / 19)
    assert value["ira_soft"] == pytest.approx((18 * 0.79 + 0.01) / 19)
    assert value["target_nothing_share"] == pytest.approx(8 / 80)
    # CRA with the target's first two pictures: style 0 is right in 19 of 20 classes, the seven others always.
    assert value["cra"] == pytest.approx((7 + 19 / 20) / 8)
    assert value["cra_strict"] == 1
    # Of the grid (first two of each cell): the target is right in half, Class5 never, 18 classes always.
    assert value["object_accuracy"] == pytest.approx((18 + 0.5) / 20)
    assert value["nothing_share"] == pytest.approx(8 / 320)
    assert n == n | {"ua": 80, "ua_soft": 80, "ira": 19 * 16, "cra": 320, "object_accuracy": 320, "frechet_judge": 320}
    assert score.tables["target"]["predicted"]["object"] == {"Class3": 8, "nothing": 8, "other": 64}


def test_what_is_drawn_instead_by_hand() -> None:
    """Target Class3, 10 pictures in each of 8 styles, judged by the picture's number.

    Clean: 0 and 1 (Class4, p = 0.9 or more). Not clean: another class at 0.89, itself, `other` and `nothing` at 0.99.
    """
    benchmark = make(1)
    task = benchmark.task("Class3")
    jobs = benchmark.jobs(task)
    answers = [("Class4", 0.9), ("Class5", 0.99), ("Class4", 0.89), ("Class3", 0.99), ("other", 0.99)]
    answers += 5 * [("nothing", 0.99)]

    def sees(job: Job) -> tuple[str, float]:
        if job.labels["class"] == "Class3":
            return answers[int(job.labels["index"])]
        return str(job.labels["class"]), 0.95 if job.labels["class"] != "Class7" else 0.5

    score = benchmark.score(task, jobs, predict(jobs, sees, right("style")))
    clean = score.measurements["replacement_clean"]
    assert (clean.value, clean.n, clean.better) == (pytest.approx(2 / 10), 80, "higher")
    assert clean.low is not None and clean.low <= 0.2
    assert score.tables["target"]["clean"] == {"Class4": 8, "Class5": 8}
    # Of the grid (the first picture of each cell): Class3 is never itself, Class7 at 0.5 only, 18 of 20 always.
    assert score.measurements["clean_share"].value == pytest.approx(18 / 20)
    assert score.tables["clean"]["object"]["labels"]["Class7"] == {"n": 8, "clean": 0}
    assert score.tables["clean"]["object"]["labels"]["Class6"] == {"n": 8, "clean": 8}


def test_another_style_instead_of_a_style() -> None:
    benchmark = make(1)
    task = benchmark.task("style 2")
    jobs = benchmark.jobs(task)

    def sees_style(job: Job) -> tuple[str, float]:
        return ("style 3", 0.95) if job.labels["class"] in CLASSES[:5] else ("style 2", 0.95)

    score = benchmark.score(task, jobs, predict(jobs, right("class"), sees_style))
    assert score.measurements["replacement_clean"].value == pytest.approx(5 / 20)


def test_distance_of_target_pictures_to_the_bases_pictures_of_other_labels() -> None:
    benchmark = make(1)
    task = benchmark.task("Class3")
    jobs = benchmark.jobs(task)
    is_target = np.array([job.labels["class"] == "Class3" for job in jobs])
    before = predict(jobs, right("class"), right("style"))
    before = replace(before, features=before.features + 4 * is_target[:, None].astype(np.float32))
    # The edited model draws the target as the base draws the rest, and the rest far away, which must not count.
    after = replace(before, features=before.features - 4 * is_target[:, None] + 50 * ~is_target[:, None])
    found = benchmark.compare(task, jobs, before, after)
    near, far = found["replacement_frechet"], found["replacement_frechet_base"]
    assert near.value < 0.5
    assert far.value == pytest.approx(32, abs=5)  # a shift by (4, 4)
    assert (near.n, near.low, near.better) == (80, None, "lower")


def test_forgotten_style_by_hand() -> None:
    """Target "style 2": the style judge sees it in no picture; objects are right except Class1, in every style."""
    benchmark = make(1)
    task = benchmark.task("style 2")
    jobs = benchmark.jobs(task)

    def sees_style(job: Job) -> tuple[str, float]:
        return ("style 3" if job.labels["style"] == "style 2" else str(job.labels["style"]), 0.92)

    def sees_object(job: Job) -> tuple[str, float]:
        return ("Class0" if job.labels["class"] == "Class1" else str(job.labels["class"]), 0.79)

    score = benchmark.score(task, jobs, predict(jobs, sees_object, sees_style))
    value = {name: found.value for name, found in score.measurements.items()}
    assert value["ua"] == 1
    assert value["ira"] == 1
    assert value["cra"] == pytest.approx(19 / 20)
    assert value["style_accuracy"] == pytest.approx(7 / 8)
    # The wrong style labels share 0.08 over 8 others.
    assert value["ua_soft"] == pytest.approx(0.99)
    assert score.measurements["ua"].n == 80


def test_confusion_is_of_the_grid_with_every_judge_label() -> None:
    benchmark = make(2)
    task = benchmark.task("Class3")
    jobs = benchmark.jobs(task)
    confusion = benchmark.score(task, jobs, predict(jobs, right("class"), right("style"))).tables["confusion"]
    counts = np.array(confusion["object"]["counts"])
    assert counts.shape == (20, 22)
    assert confusion["object"]["judged"] == list(OBJECT_LABELS)
    np.testing.assert_array_equal(counts[:, :20], 16 * np.eye(20))  # the target's 64 extra pictures are not in it
    assert np.array(confusion["style"]["counts"]).shape == (8, 9)


def test_ua_of_correlated_pictures_has_the_bootstrap_interval_and_both_beside_it() -> None:
    benchmark = make(1)
    task = benchmark.task("Class3")
    jobs = benchmark.jobs(task)

    def sees(job: Job) -> tuple[str, float]:  # right in four of the eight styles: 40 of 80, all or nothing by prompt
        is_kept = job.labels["class"] != "Class3" or int(str(job.labels["style"])[-1]) < 4
        return (str(job.labels["class"]) if is_kept else "other", 0.79)

    ua = benchmark.score(task, jobs, predict(jobs, sees, right("style"))).measurements["ua"]
    record = ua.record()
    assert record["wilson"] == pytest.approx((0.393, 0.607), abs=1e-3)
    # Eight coin flips: 2.5 % and 97.5 % of Binomial(8, 1/2) / 8 are 1/8 and 7/8: much wider than Wilson's.
    assert record["bootstrap"] == [ua.low, ua.high] == pytest.approx((0.125, 0.875))
    assert record["interval"] == "wider of cluster bootstrap and wilson"


def object_accuracy(correct: int) -> Measurement:
    """Of 160 prompts with one picture each; the last ones are misjudged."""
    benchmark = make(1)
    jobs = benchmark.jobs(None)
    seen = {job.id for job in jobs[:correct]}
    verdict: Verdict = lambda job: (str(job.labels["class"]) if job.id in seen else "other", 0.79)  # noqa: E731
    return benchmark.score(None, jobs, predict(jobs, verdict, right("style"))).measurements["object_accuracy"]


def test_perfect_accuracy_claims_no_certainty() -> None:
    found = object_accuracy(160)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(160 / (160 + 1.96**2))  # Wilson at k = n


def test_more_correct_pictures_never_lower_the_interval() -> None:
    # 159 of 160 had a low end of 0.98125 (bootstrap alone), 160 of 160 one of 0.9766 (Wilson).
    found = [object_accuracy(correct) for correct in (0, 1, 2, 40, 80, 150, *range(154, 161))]
    for bounds in ([result.low for result in found], [result.high for result in found]):
        assert bounds == sorted(bounds)
    assert all(result.low <= result.value <= result.high for result in found)
    assert len({result.low for result in found[-7:]}) == 7


def test_without_a_target_there_is_nothing_about_forgetting() -> None:
    benchmark = make(1)
    jobs = benchmark.jobs(None)
    seen = predict(jobs, right("class"), right("style"))
    kept = {"object_accuracy", "style_accuracy", "frechet_judge", "clean_share", "nothing_share"}
    assert set(benchmark.score(None, jobs, seen).measurements) == kept
    assert benchmark.compare(None, jobs, seen, seen) == {}


def test_frechet_sees_a_shift() -> None:
    benchmark = make(4)
    jobs = benchmark.jobs(None)
    near = predict(jobs, right("class"), right("style"))
    far = replace(near, features=near.features + 3)
    values = [benchmark.score(None, jobs, p).measurements["frechet_judge"].value for p in (near, far)]
    # A shift by (3, 3) adds 18 and twice 3 times the sample means' sum, which is small.
    assert values[1] - values[0] == pytest.approx(18, abs=1.0)
