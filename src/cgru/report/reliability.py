"""The critic's reliability diagram: the reward that V foretold against the one that came, for ranges of timesteps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from cgru.report.charts import COLOURS, drawing
from cgru.report.curves import short
from cgru.report.svg import LABEL_STEP, Frame, axes, element, spread, text, ticks

Part = Mapping[str, Any]


def calibrations(fit: Mapping[str, Any] | None) -> list[Part]:
    """The ranges of timesteps that a run's 2-critic/done.json records; empty for runs of older versions."""
    found = (fit or {}).get("calibration")
    return [part for part in found if part["counts"]] if isinstance(found, list) else []


def reliability(fit: Mapping[str, Any] | None) -> str | None:
    """One line for each range of timesteps; on the diagonal V is right on average."""
    parts = calibrations(fit)
    if not parts:
        return None
    values = [value for part in parts for key in ("predicted", "achieved") for value in part[key]]
    low, high = min(0.0, *values), max(values)
    marks = ticks(low, high if high > low else low + 1.0, 5)
    frame = Frame(74, 30, 460, 320, (marks[0], marks[-1]), (marks[0], marks[-1]))
    inside = [
        axes(frame, [], marks, short),
        *(text(frame.x(mark), 372, short(mark), anchor="middle") for mark in marks),
        text(frame.left, 18, "↑ reward achieved (mean)", "ink"),
        text(frame.left + frame.width, 398, "reward foretold by V (mean) →", "ink", anchor="end"),
        _diagonal(frame),
        *(_line(frame, part, COLOURS[i % len(COLOURS)]) for i, part in enumerate(parts)),
        _labels(frame, parts),
    ]
    told = "; ".join(f"{named(part)}: {_pairs(part)}" for part in parts)
    return drawing(inside, 410, f"Reward foretold and achieved. {told}")


def named(part: Part) -> str:
    """The range in words."""
    first, last = part["first"], part["last"]
    return f"step {first}" if first == last else f"steps {first}–{last}"


def miscalibration(part: Part) -> float:
    """Mean distance of achieved from foretold, weighted by states: 0 is perfect, in units of the reward."""
    rows = zip(part["predicted"], part["achieved"], part["counts"], strict=True)
    return float(sum(abs(a - p) * n for p, a, n in rows) / sum(part["counts"]))


def _line(frame: Frame, part: Part, colour: str) -> str:
    points = [(frame.x(p), frame.y(a)) for p, a in zip(part["predicted"], part["achieved"], strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    inside = element("path", {"class": "line", "d": path})
    for (x, y), p, a, n in zip(points, part["predicted"], part["achieved"], part["counts"], strict=True):
        words = f"{named(part)}: {short(p)} foretold, {short(a)} achieved, {n} states"
        inside += element("circle", {"class": "dot", "cx": x, "cy": y, "r": 4.5}, f"<title>{escape(words)}</title>")
    return element("g", {"class": colour}, inside)


def _labels(frame: Frame, parts: Sequence[Part]) -> str:
    """Names right of the plot, joined to the line's last point."""
    ends = [(frame.y(part["achieved"][-1]), frame.x(part["predicted"][-1]), i) for i, part in enumerate(parts)]
    ends.sort()
    right, found = frame.left + frame.width + 14, []
    places = spread([y for y, _, _ in ends], LABEL_STEP, frame.top, frame.top + frame.height)
    for place, (y, x, i) in zip(places, ends, strict=True):
        colour = COLOURS[i % len(COLOURS)]
        path = {"class": "thin", "opacity": "0.45", "d": f"M{x + 6:.1f} {y:.1f}L{right - 3:.1f} {place:.1f}"}
        inside = element("path", path) + text(right, place + 5, named(parts[i]), colour)
        found.append(element("g", {"class": colour}, inside))
    return "".join(found)


def _diagonal(frame: Frame) -> str:
    low, high = frame.x_range
    path = f"M{frame.x(low):.1f} {frame.y(low):.1f}L{frame.x(high):.1f} {frame.y(high):.1f}"
    return element("g", {"class": "axis"}, element("path", {"class": "line dashed", "d": path}))


def _pairs(part: Part) -> str:
    pairs = zip(part["predicted"], part["achieved"], strict=True)
    return ", ".join(f"{short(p)} → {short(a)}" for p, a in pairs)
