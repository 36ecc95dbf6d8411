"""Intervals against literal numbers worked out by hand and against scipy."""

import numpy as np
import pytest
from scipy.stats import binomtest

from cgru.evaluation.intervals import cluster_bootstrap, paired_reduction, resampled_means, stratified_mean, wilson


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (243, 255, 92.0, 97.3),  # UA 95.3 % with n = 255
        # The note rounds to "95.3 %" but its interval is that of the paper's 95.37 %: 973 / 1020 = 95.39 %.
        (973, 1020, 93.9, 96.5),
        (0, 142, 0.0, 2.6),
        (14, 142, 6.0, 15.9),
    ],
)
def test_wilson_gives_the_numbers_of_the_statistics_note(k: int, n: int, low: float, high: float) -> None:
    assert [round(100 * bound, 1) for bound in wilson(k, n)] == [low, high]


@pytest.mark.parametrize(("k", "n"), [(0, 5), (1, 1), (3, 7), (80, 80)])
def test_wilson_agrees_with_scipy(k: int, n: int) -> None:
    # scipy takes z = 1.95996..., the note 1.96: equal to 1e-5.
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-5)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(k: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{k} successes in {n}"):
        wilson(k, n)


def test_stratified_mean_weighs_labels_equally() -> None:
    # a: 1 of 1, b: 0 of 3 -> (1 + 0) / 2, not 1 / 4.
    assert stratified_mean(np.array([1.0, 0, 0, 0]), ["a", "b", "b", "b"]) == 0.5


def test_bootstrap_takes_whole_clusters() -> None:
    # Two prompts, one all right and one all wrong, 50 pictures each: resampled means are 0, 0.5 or 1 with chances
    # 1/4, 1/2, 1/4, so the interval is [0, 1]; resampling pictures instead would give about [0.4, 0.6].
    values = np.repeat([1.0, 0.0], 50)
    assert cluster_bootstrap(values, ["p"] * 50 + ["q"] * 50, ["dogs"] * 100) == (0.0, 1.0)


def test_a_cluster_counts_by_its_size() -> None:
    # One prompt with one picture, right, and one with three, wrong: the resamples hold 2, 4 or 6 pictures and have the
    # means 2/2, 1/4 and 0/6 with chances 1/4, 1/2, 1/4. A mean of the prompts' means would be 1, 1/2 or 0.
    means = resampled_means(np.array([1.0, 0, 0, 0]), ["p", "q", "q", "q"], ["dogs"] * 4)
    shares = {mean: float((means == mean).mean()) for mean in (1.0, 0.25, 0.0)}
    assert shares == pytest.approx({1.0: 0.25, 0.25: 0.5, 0.0: 0.25}, abs=0.05)


def test_bootstrap_stays_inside_its_stratum() -> None:
    # One prompt per class: nothing to resample inside a class, so the mean never moves; without strata it would.
    assert cluster_bootstrap(np.array([1.0, 0.0]), ["p", "q"], ["cats", "dogs"]) == (0.5, 0.5)


def test_bootstrap_of_independent_pictures_agrees_with_the_normal_interval() -> None:
    # 400 prompts of one picture each, half right: standard error sqrt(0.25 / 400) = 0.025, 95 % = 0.5 +- 0.049.
    values = np.tile([1.0, 0.0], 200)
    names = [str(i) for i in range(400)]
    low, high = cluster_bootstrap(values, names, ["all"] * 400, seed=1)
    assert low == pytest.approx(0.451, abs=0.006)
    assert high == pytest.approx(0.549, abs=0.006)


def test_bootstrap_is_seeded() -> None:
    values = np.random.default_rng(0).random(60)
    names = [str(i // 3) for i in range(60)]
    runs = [cluster_bootstrap(values, names, ["all"] * 60, seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_a_reduction_is_resampled_in_pairs() -> None:
    # Two prompts, one forgotten and one not: resamples have reductions 0, 1/2 and 1 with chances 1/4, 1/2, 1/4.
    before, after = np.array([1.0, 1.0]), np.array([1.0, 0.0])
    assert paired_reduction(before, after, ["p", "q"], ["all"] * 2) == (0.0, 1.0)
    # Nothing changed: 0 in every resample that has a ratio (a quarter has none), since both see the same prompts.
    same = np.array([1.0, 0.0])
    assert paired_reduction(same, same, ["p", "q"], ["all"] * 2) == (0.0, 0.0)
