"""The critic's reliability diagram: the reward that V foretold against the one that came, for ranges of timesteps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from cgru.report.draw.charts import drawing
from cgru.report.draw.curves import short
from cgru.report.draw.svg import Frame, axes, element, text, ticks

Part = Mapping[str, Any]
COLUMN, ROW = 356, 244
"""Units from one plot to the next."""


def calibrations(fit: Mapping[str, Any] | None) -> list[Part]:
    """The ranges of timesteps that a run's 2-critic/done.json records; empty for runs of older versions."""
    found = (fit or {}).get("calibration")
    return [part for part in found if part["counts"]] if isinstance(found, list) else []


def reliability(fit: Mapping[str, Any] | None) -> str | None:
    """A plot for each range of timesteps, two abreast, on the same axes; on the diagonal V is right on average."""
    parts = calibrations(fit)
    if not parts:
        return None
    values = [value for part in parts for key in ("predicted", "achieved") for value in part[key]]
    low, high = min(0.0, *values), max(values)
    marks = ticks(low, high if high > low else low + 1.0, 4)
    inside = [text(20, 18, "↑ reward achieved (mean)", "ink")]
    inside += [_panel(part, marks, COLUMN * (i % 2), ROW * (i // 2)) for i, part in enumerate(parts)]
    height = ROW * -(-len(parts) // 2) + 48
    inside.append(text(700, height - 12, "reward foretold by V (mean) →", "ink", anchor="end"))
    told = "; ".join(f"{named(part)}: {_pairs(part)}" for part in parts)
    return drawing(inside, height, f"Reward foretold and achieved. {told}")


def _panel(part: Part, marks: Sequence[float], left: float, top: float) -> str:
    frame = Frame(left + 64, top + 60, 270, 170, (marks[0], marks[-1]), (marks[0], marks[-1]))
    bottom = frame.top + frame.height
    title = f"{named(part)}, {sum(part['counts'])} states"
    across = [text(frame.x(mark), bottom + 20, short(mark), anchor="middle") for mark in marks]
    heading = text(frame.left, frame.top - 14, title[0].upper() + title[1:], "ink title")
    return "".join([heading, axes(frame, [], marks, short), *across, _diagonal(frame), _line(frame, part)])


def named(part: Part) -> str:
    """The range in words."""
    first, last = part["first"], part["last"]
    return f"step {first}" if first == last else f"steps {first}–{last}"


def miscalibration(part: Part) -> float:
    """Mean distance of achieved from foretold, weighted by states: 0 is perfect, in units of the reward."""
    rows = zip(part["predicted"], part["achieved"], part["counts"], strict=True)
    return float(sum(abs(a - p) * n for p, a, n in rows) / sum(part["counts"]))


def _line(frame: Frame, part: Part) -> str:
    points = [(frame.x(p), frame.y(a)) for p, a in zip(part["predicted"], part["achieved"], strict=True)]
    inside = element("path", {"class": "line", "d": "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)})
    rows = zip(points, part["predicted"], part["achieved"], part["spread"], part["counts"], strict=True)
    for (x, y), p, a, spread, n in rows:
        words = f"{named(part)}: {short(p)} foretold, {short(a)} ± {short(spread)} achieved, {n} states"
        inside += element("circle", {"class": "dot", "cx": x, "cy": y, "r": 4.5}, f"<title>{escape(words)}</title>")
    return element("g", {"class": "blue"}, inside)


def _diagonal(frame: Frame) -> str:
    low, high = frame.x_range
    path = f"M{frame.x(low):.1f} {frame.y(low):.1f}L{frame.x(high):.1f} {frame.y(high):.1f}"
    return element("g", {"class": "axis"}, element("path", {"class": "line dashed", "d": path}))


def _pairs(part: Part) -> str:
    pairs = zip(part["predicted"], part["achieved"], strict=True)
    return ", ".join(f"{short(p)} → {short(a)}" for p, a in pairs)
