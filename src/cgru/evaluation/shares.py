"""Outcomes of pictures as measurements: shares, means, counts and reductions, each with its interval.

Pictures come with a cluster (their prompt, the unit of resampling) and a stratum (their label, averaged unweighted).
Every label has equally many pictures, so the pooled share, which Wilson's interval is of, is that average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cgru.evaluation.base import Better, Measurement
from cgru.evaluation.statistics import (
    RESAMPLES,
    cluster_bootstrap,
    paired_reduction,
    poisson_score,
    stratified_mean,
    wider,
    wilson,
)

BOOTSTRAP = {"resamples": RESAMPLES, "unit": "prompt", "strata": "label", "level": 0.95}
"""How every bootstrap here is made, for a benchmark's protocol."""


def share(outcomes: np.ndarray, clusters: Sequence[str], strata: Sequence[str], better: Better) -> Measurement:
    """The share of pictures with outcome 1, with the wider of two intervals.

    The bootstrap knows that pictures of a prompt go together, but near 0 and 1 it shrinks to a point, which would claim
    certainty; Wilson's does the opposite.
    """
    n = len(outcomes)
    parts = {"wilson": wilson(int(outcomes.sum()), n), "bootstrap": cluster_bootstrap(outcomes, clusters, strata)}
    low, high = wider(*parts.values())
    name = "wider of cluster bootstrap and wilson"
    return Measurement(stratified_mean(outcomes, strata), low, high, n, "proportion", better, name, parts)


def mean(values: np.ndarray, clusters: Sequence[str], strata: Sequence[str], better: Better) -> Measurement:
    """The mean of probabilities, with its cluster bootstrap."""
    low, high = cluster_bootstrap(values, clusters, strata)
    value = stratified_mean(values, strata)
    return Measurement(value, low, high, len(values), "proportion", better, "cluster bootstrap")


def reduction(
    before: np.ndarray, after: np.ndarray, clusters: Sequence[str], strata: Sequence[str]
) -> Measurement | None:
    """1 - share(after) / share(before) of the same pictures; None where `before` has no outcome 1.

    The wider of the paired bootstrap and what Wilson's interval of `after` gives with `before` taken as it is: with
    nothing left after, the bootstrap alone would claim certainty.
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
    """Mean count per picture, with the wider of the cluster bootstrap and the score interval of a Poisson count.

    Counts of one picture go together, which the bootstrap knows; with nothing counted it alone would claim certainty.
    """
    n, alike = len(counts), ["all"] * len(counts)
    low, high = poisson_score(int(counts.sum()))
    parts = {"poisson": (low / n, high / n), "bootstrap": cluster_bootstrap(counts, clusters, alike)}
    bounds = wider(*parts.values())
    name = "wider of cluster bootstrap and poisson score"
    return Measurement(float(counts.mean()), *bounds, n, "per picture", better, name, parts)


def count_reduction(before: np.ndarray, after: np.ndarray, clusters: Sequence[str]) -> Measurement | None:
    """`reduction` for counts: 1 - all of `after` / all of `before`; None where `before` has none."""
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
