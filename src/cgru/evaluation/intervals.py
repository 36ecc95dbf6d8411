"""Confidence intervals: Wilson (1927) for one proportion, a stratified cluster bootstrap for means.

Pictures of one prompt are correlated, so whole prompts are resampled. Wilson's interval treats pictures as independent
and is too narrow with many pictures per prompt; the bootstrap is too narrow, or a single point, when nearly all
outcomes are equal. A share therefore reports the wider of the two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

Z95 = 1.96
RESAMPLES = 2000
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the last, a little too wide.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


def wilson(k: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval of k successes in n, within 0..1.

    >>> [round(bound, 3) for bound in wilson(0, 142)]
    [0.0, 0.026]
    """
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"{k} successes in {n} trials; need 0 <= k <= n and n >= 1")
    # centre = (p + z²/2n) / (1 + z²/n);  half = z / (1 + z²/n) · √(p (1 - p) / n + z²/4n²)
    p = k / n
    shrink = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At k = 0 and k = n one bound is exactly 0 or 1; rounding would leave it slightly inside.
    low = 0.0 if k == 0 else centre - half
    high = 1.0 if k == n else centre + half
    return low, high


def poisson_score(k: int, z: float = Z95) -> tuple[float, float]:
    """Return the score interval of a Poisson count's mean, the analogue of Wilson's for unbounded counts.

    >>> [round(bound, 2) for bound in poisson_score(0)]
    [0.0, 3.84]
    """
    # (k - mu)² = z² mu, solved for mu: k + z²/2 ± z √(k + z²/4)
    centre, half = k + z * z / 2, z * math.sqrt(k + z * z / 4)
    return (0.0 if k == 0 else centre - half), centre + half


def wider(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Return the smallest interval that contains both."""
    return min(a[0], b[0]), max(a[1], b[1])


def student(means: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's t interval of the mean of a few means, such as one per concept; None of a single one.

    >>> [round(bound, 2) for bound in student([1.0, 2.0, 3.0]) or ()]
    [-0.48, 4.48]
    """
    k = len(means)
    if k < 2:
        return None
    # mean ± t(k - 1) s / √k
    mean, half = statistics.mean(means), T95[min(k - 1, len(T95)) - 1] * statistics.stdev(means) / math.sqrt(k)
    return mean - half, mean + half


def stratified_mean(values: np.ndarray, strata: Sequence[str]) -> float:
    """Return the unweighted mean over strata of the mean within each: UnlearnCanvas' mean of class accuracies."""
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
    """Return the percentile interval of `stratified_mean`, resampling clusters (prompts) within strata (classes).

    Args:
        values: (n,) outcomes in 0..1.
        clusters: (n,) the noise or prompt that outcomes share; whole clusters are drawn with replacement.
        strata: (n,) the labels whose means are averaged.
    """
    return _percentiles(resampled_means(values, clusters, strata, seed=seed, resamples=resamples), level)


def paired_reduction(
    before: np.ndarray, after: np.ndarray, clusters: Sequence[str], strata: Sequence[str], *, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile interval of 1 - mean(after) / mean(before), both means over the same resampled clusters.

    Resamples in which `before` is 0 throughout have no ratio and are left out.
    """
    base, left = (resampled_means(values, clusters, strata) for values in (before, after))
    return _percentiles(1 - left[base > 0] / base[base > 0], level)


def resampled_means(
    values: np.ndarray, clusters: Sequence[str], strata: Sequence[str], *, seed: int = 0, resamples: int = RESAMPLES
) -> np.ndarray:
    """Return (resamples,) values of `stratified_mean` on resampled clusters.

    The drawn clusters depend only on the seed and the names, so two calls that differ in `values` are paired.
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
    # Mean of a resample: total of its clusters' sums over total of their sizes.
    return sums[drawn].sum(1) / counts[drawn].sum(1)
