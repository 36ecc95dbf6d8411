"""Numbers and tables as Markdown, and the rule by which one of two methods is called better (for tools/results.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any

RULE = (
    "Rule: one is called better only if the means differ by more than √(sd² + sd²) of the two over seeds, with at "
    "least two seeds of each; else no difference was seen."
)


def verdict(a: str, ours: Sequence[float], b: str, theirs: Sequence[float], better: str) -> str:
    """Which of two is better, by RULE; `better` is "higher" or "lower"."""
    if min(len(ours), len(theirs)) < 2:
        return "too few seeds to say"
    difference = mean(ours) - mean(theirs)
    if not abs(difference) > math.hypot(stdev(ours), stdev(theirs)):
        return "no difference seen"
    return f"{a if (difference > 0) == (better == 'higher') else b} is better"


def cell(found: Sequence[Any] | None) -> str:
    """A share in per cent with its interval and n; a dash where it was not measured.

    >>> cell([0.95, 0.878, 0.98, 80])
    '95.0 [87.8, 98.0], n 80'
    """
    if found is None:
        return "–"
    value, low, high, n = found
    interval = "" if low is None else f" [{percent(low)}, {percent(high)}]"
    return f"{percent(value)}{interval}, n {n}"


def percent(share: float) -> str:
    """A share in per cent, without the sign."""
    return f"{100 * share:.1f}"


def spread(values: Sequence[float | None], digits: int = 2) -> str:
    """Mean ± standard deviation; only the mean of one value, a dash for none, and how many are not finite."""
    given = [value for value in values if value is not None]
    if endless := sum(map(math.isinf, given)):
        return f"∞ in {endless} of {len(given)}"
    if len(given) < 2:
        return f"{given[0]:.{digits}f}" if given else "–"
    return f"{mean(given):.{digits}f} ± {stdev(given):.{digits}f}"


def met(is_met: bool) -> str:
    """A verdict on a target."""
    return "met" if is_met else "missed"


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
