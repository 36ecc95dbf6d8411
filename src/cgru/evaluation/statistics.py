"""Intervals: Wilson for one proportion, a stratified cluster bootstrap for means (evals/statistics.md).

Pictures of one prompt are correlated, so the prompt is the unit that is resampled. Wilson treats pictures as
independent and is narrow for many pictures per prompt; the bootstrap is narrow, or a point, where nearly all outcomes
are alike. A share therefore reports the wider of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.96
RESAMPLES = 2000


def wilson(k: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of k successes in n, in 0..1.

    >>> [round(bound, 3) for bound in wilson(0, 142)]
    [0.0, 0.026]
    """
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"{k} successes in {n} trials; need 0 <= k <= n and n >= 1")
    p = k / n
    shrink = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At k = 0 and k = n one bound is 0 or 1 exactly; rounding would leave it a hair inside.
    low = 0.0 if k == 0 else centre - half
    high = 1.0 if k == n else centre + half
    return low, high


def poisson_score(k: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a count's mean: Wilson's for counts without an upper end.

    >>> [round(bound, 2) for bound in poisson_score(0)]
    [0.0, 3.84]
    """
    centre, half = k + z * z / 2, z * math.sqrt(k + z * z / 4)
    return (0.0 if k == 0 else centre - half), centre + half


def wider(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The smallest interval that holds both."""
    return min(a[0], b[0]), max(a[1], b[1])


def stratified_mean(values: np.ndarray, strata: Sequence[str]) -> float:
    """The unweighted mean over strata of the mean inside each: UnlearnCanvas' mean of class accuracies."""
    labels = np.asarray(strata)
    return float(np.mean([values[labels == label].mean() for label in np.unique(labels)]))


def cluster_bootstrap(
    values: np.ndarray,
    clusters: Sequence[str],
    strata: Sequence[str],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of `stratified_mean`, resampling whole clusters (prompts) inside each stratum (class).

    Args:
        values: (n,) outcomes in 0..1.
        clusters: (n,) what each outcome shares its noise or prompt with; drawn with replacement, all of it at once.
        strata: (n,) the label whose means are averaged.
    """
    return _percentiles(resampled_means(values, clusters, strata, seed=seed, resamples=resamples), level)


def paired_reduction(
    before: np.ndarray, after: np.ndarray, clusters: Sequence[str], strata: Sequence[str], *, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of 1 - mean(after) / mean(before), both means of the same resampled clusters.

    A resample in which `before` is 0 throughout has no ratio and is left out.
    """
    base, left = (resampled_means(values, clusters, strata) for values in (before, after))
    return _percentiles(1 - left[base > 0] / base[base > 0], level)


def resampled_means(
    values: np.ndarray, clusters: Sequence[str], strata: Sequence[str], *, seed: int = 0, resamples: int = RESAMPLES
) -> np.ndarray:
    """(resamples,) `stratified_mean` of resampled clusters.

    Which clusters are drawn depends on the seed and the names alone: two calls that differ in `values` are paired.
    """
    generator = np.random.default_rng(seed)
    cluster_of, stratum_of = np.asarray(clusters), np.asarray(strata)
    total = np.zeros(resamples)
    labels = np.unique(stratum_of)
    for label in labels:
        inside = stratum_of == label
        total += _resampled_means(values[inside], cluster_of[inside], generator, resamples)
    return total / len(labels)


def _percentiles(means: np.ndarray, level: float) -> tuple[float, float]:
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def _resampled_means(
    values: np.ndarray, clusters: np.ndarray, generator: np.random.Generator, resamples: int
) -> np.ndarray:
    names, index = np.unique(clusters, return_inverse=True)
    sums = np.bincount(index, weights=values)
    counts = np.bincount(index)
    drawn = generator.integers(len(names), size=(resamples, len(names)))
    return sums[drawn].sum(1) / counts[drawn].sum(1)
