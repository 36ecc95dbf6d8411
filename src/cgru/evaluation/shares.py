"""Measurements from outcomes of pictures: shares, means, counts and reductions, each with its interval.

Each picture has a cluster (its prompt, the unit of resampling) and a stratum (its label; labels are averaged
unweighted). All labels have equally many pictures, so the pooled share that Wilson's interval describes is the same
average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cgru.evaluation.base import Better, Measurement
from cgru.evaluation.intervals import (
    RESAMPLES,
    cluster_bootstrap,
    paired_reduction,
    poisson_score,
    stratified_mean,
    wider,
    wilson,
)

BOOTSTRAP = {"resamples": RESAMPLES, "unit": "prompt", "strata": "label", "level": 0.95}
"""Parameters of every bootstrap here, for a benchmark's protocol."""


def share(outcomes: np.ndarray, clusters: Sequence[str], strata: Sequence[str], better: Better) -> Measurement:
    """Return the share of pictures with outcome 1, with the wider of two intervals.

    The bootstrap accounts for the dependence of pictures of one prompt, but shrinks to a point near 0 and 1, which
    would claim certainty; Wilson's interval has the opposite strengths.
    """
    n = len(outcomes)
    parts = {"wilson": wilson(int(outcomes.sum()), n), "bootstrap": cluster_bootstrap(outcomes, clusters, strata)}
    low, high = wider(*parts.values())
    name = "wider of cluster bootstrap and wilson"
    return Measurement(stratified_mean(outcomes, strata), low, high, n, "proportion", better, name, parts)


def mean(values: np.ndarray, clusters: Sequence[str], strata: Sequence[str], better: Better) -> Measurement:
    """Return the mean of probabilities with its cluster bootstrap."""
    low, high = cluster_bootstrap(values, clusters, strata)
    value = stratified_mean(values, strata)
    return Measurement(value, low, high, len(values), "proportion", better, "cluster bootstrap")


def reduction(
    before: np.ndarray, after: np.ndarray, clusters: Sequence[str], strata: Sequence[str]
) -> Measurement | None:
    """Return 1 - share(after) / share(before) for the same pictures; None if `before` has no outcome 1.

    The interval is the wider of the paired bootstrap and of Wilson's interval of `after` with `before` taken as exact:
    if nothing is left after, the bootstrap alone would claim certainty.
    """
    base = stratified_mean(before, strata)
    if base == 0:
        return None
    low, high = wilson(int(after.sum()), len(after))
    parts = {
        "wilson": (1 - high / base, 1 - low / base),
        "bootstrap": paired_reduction(before, after, clusters, strata),
    }
    bounds = wider(*parts.values())
    name = "wider of paired cluster bootstrap and wilson of what is left"
    value = 1 - stratified_mean(after, strata) / base
    return Measurement(value, *bounds, len(after), "proportion", "higher", name, parts)


def count(counts: np.ndarray, clusters: Sequence[str], better: Better) -> Measurement:
    """Return the mean count per picture, with the wider of cluster bootstrap and Poisson score interval.

    The bootstrap accounts for the dependence of counts in one picture; if nothing is counted, it alone would claim
    certainty.
    """
    n, alike = len(counts), ["all"] * len(counts)
    low, high = poisson_score(int(counts.sum()))
    parts = {"poisson": (low / n, high / n), "bootstrap": cluster_bootstrap(counts, clusters, alike)}
    bounds = wider(*parts.values())
    name = "wider of cluster bootstrap and poisson score"
    return Measurement(float(counts.mean()), *bounds, n, "per picture", better, name, parts)


def count_reduction(before: np.ndarray, after: np.ndarray, clusters: Sequence[str]) -> Measurement | None:
    """Return `reduction` for counts: 1 - total(after) / total(before); None if `before` has none."""
    base = float(before.sum())
    if base == 0:
        return None
    low, high = poisson_score(int(after.sum()))
    parts = {
        "poisson": (1 - high / base, 1 - low / base),
        "bootstrap": paired_reduction(before, after, clusters, ["all"] * len(before)),
    }
    bounds = wider(*parts.values())
    name = "wider of paired cluster bootstrap and poisson score of what is left"
    return Measurement(1 - float(after.sum()) / base, *bounds, len(after), "proportion", "higher", name, parts)
