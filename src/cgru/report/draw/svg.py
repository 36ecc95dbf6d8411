"""Line plots as SVG text: scales, ticks, lines that show where nothing was measured, labels at line ends.

A line is solid between neighbouring iterations and dashed across those that were not measured; a value that is not a
number breaks it. Values outside the axis appear at its edge as triangles. Colours are CSS classes, light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float | None]
"""Iteration and value; None where there was no finite number."""
Show = Callable[[float], str]

PALETTE = {
    "paper": ("#ffffff", "#14191f"),
    "ink": ("#1d2733", "#e6ebf1"),
    "muted": ("#586474", "#9eaab8"),
    "grid": ("#e2e6eb", "#2c343e"),
    "axis": ("#aeb7c2", "#566271"),
    "blue": ("#1f5fbf", "#7fb2ff"),
    "slate": ("#64748b", "#a3b1c2"),
    "orange": ("#b4530a", "#ffb066"),
    "green": ("#1a7f4b", "#6fd6a0"),
    "purple": ("#7a4fb0", "#c9b0f5"),
    "red": ("#c0262d", "#ff8080"),
}
"""Name -> (light, dark); every text colour has a contrast of at least 4.5 on its paper."""
FONT = 'text{font-family:system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}'
RULES = """
text{font-size:13px;fill:currentColor}
.heading{font-size:19px;font-weight:600}.title{font-size:15px;font-weight:600}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.dashed{stroke-dasharray:5 5}.thin{fill:none;stroke:currentColor;stroke-width:1}
.dot{fill:currentColor}.ring{fill:none;stroke:currentColor;stroke-width:2}
.band{fill:currentColor;fill-opacity:.14}.stem{stroke:currentColor;stroke-opacity:.55;stroke-width:5}
.page{fill:currentColor}
"""
# Of a picture shown narrow, as on a phone, the letters grow while the drawing shrinks.
NARROW = "@media (max-width:600px){text{font-size:19px}.title{font-size:20px}.heading{font-size:24px}}"
LABEL_STEP = 22
"""Least distance of two labels, units of the view box: the letters of a narrow screen fit."""


@dataclass(frozen=True)
class Frame:
    """A plot's place in the view box, and the range of data that it spans."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """From data to the view box."""
        low, high = self.x_range
        return self.left + self.width * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """From data to the view box, whose y grows downwards; outside the range: the edge."""
        low, high = self.y_range
        return self.top + self.height * (1 - (min(max(value, low), high) - low) / (high - low))


@dataclass(frozen=True)
class Series:
    """One line with the words at its end."""

    label: str
    colour: str
    points: Sequence[Point]
    mark: str = "dot"
    """The points where something was measured: "dot" or "ring"."""

    @property
    def values(self) -> list[float]:
        """The finite ones."""
        return [value for _, value in self.points if value is not None]


def style() -> str:
    """The rules of every drawing, light unless the reader asks for dark."""
    light, dark = ("".join(f".{name}{{color:{shades[i]}}}" for name, shades in PALETTE.items()) for i in range(2))
    return f"<style>{FONT}{RULES}{light}@media (prefers-color-scheme:dark){{{dark}}}{NARROW}</style>"


def element(name: str, attributes: Mapping[str, object], inside: str = "") -> str:
    """One element; attributes are escaped and numbers rounded, `inside` is taken as it is."""
    written = "".join(f" {key}={quoteattr(_number(value))}" for key, value in attributes.items())
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def text(x: float, y: float, words: str, classes: str = "muted", anchor: str = "start") -> str:
    """Words on their base line."""
    return element("text", {"x": x, "y": y, "class": classes, "text-anchor": anchor}, escape(words))


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that span low..high: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def axes(frame: Frame, x_ticks: Iterable[float], y_ticks: Iterable[float], show: Show, x_title: str = "") -> str:
    """Grid lines and tick labels; x gets labels only with a title, which stands at their end."""
    left, right, top, bottom = frame.left, frame.left + frame.width, frame.top, frame.top + frame.height
    parts = []
    for value in y_ticks:
        y = frame.y(value)
        parts += [_rule(left, y, right, y, "grid"), text(left - 8, y + 5, show(value), anchor="end")]
    for value in x_ticks:
        parts.append(_rule(frame.x(value), top, frame.x(value), bottom, "grid"))
        if x_title:
            parts.append(text(frame.x(value), bottom + 20, f"{value:g}", anchor="middle"))
    if x_title:
        parts.append(text(right + 16, bottom + 20, x_title))
    zero = frame.y(max(0.0, frame.y_range[0]))
    return "".join([*parts, _rule(left, zero, right, zero, "axis")])


def curve(frame: Frame, series: Series, show: Show) -> str:
    """The line, a mark at each value with an unmeasured neighbour, a triangle for one beyond the axis."""
    parts = [f"<title>{escape(series.label)}</title>"]
    for classes, is_solid in (("line", True), ("line dashed", False)):
        if path := _path(frame, series.points, is_solid=is_solid):
            parts.append(element("path", {"class": classes, "d": path}))
    parts += [
        _mark(frame, x, value, series.mark, f"{series.label}, {x:g}: {show(value)}")
        for i, (x, value) in enumerate(series.points)
        if value is not None and (_is_alone(series.points, i) or value != _within(frame, value))
    ]
    return element("g", {"class": series.colour}, "".join(parts))


def band(frame: Frame, upper: Sequence[Point], lower: Sequence[Point], colours: tuple[str, str]) -> str:
    """The distance of two lines: a bar at each value, a tint between; the first colour where `upper` is above."""
    rows = [(x, a, b) for (x, a), (_, b) in zip(upper, lower, strict=True) if a is not None and b is not None]
    parts = []
    for (x, a, b), (after, c, d) in pairwise(rows):
        # Where the lines cross, both tints end in that point.
        cross = (a - b) / ((a - b) - (c - d)) if (a - b) * (c - d) < 0 else 1.0
        mid = (x + cross * (after - x), a + cross * (c - a), b + cross * (d - b))
        for one, two in pairwise([(x, a, b), mid, *([(after, c, d)] if cross < 1 else [])]):
            corners = [(one[0], one[1]), (two[0], two[1]), (two[0], two[2]), (one[0], one[2])]
            colour = colours[0] if one[1] + two[1] > one[2] + two[2] else colours[1]
            path = " ".join(f"{_number(frame.x(p))},{_number(frame.y(q))}" for p, q in corners)
            parts.append(element("polygon", {"class": f"band {colour}", "points": path}))
    for x, a, b in rows:
        parts.append(_rule(frame.x(x), frame.y(a), frame.x(x), frame.y(b), f"stem {colours[0 if a > b else 1]}"))
    return "".join(parts)


def end_labels(frame: Frame, series: Iterable[Series], show: Show) -> str:
    """Name and last value right of the plot, moved apart where they would touch."""
    shown = sorted(((frame.y(line.values[-1]), line) for line in series if line.values), key=lambda pair: pair[0])
    right = frame.left + frame.width
    parts = []
    places = spread([y for y, _ in shown], LABEL_STEP, frame.top, frame.top + frame.height - 4)
    for place, (y, line) in zip(places, shown, strict=True):
        words = f"{line.label} {show(line.values[-1])}".strip()
        leader = element("path", {"class": "thin", "d": f"M{right + 3:.1f} {y:.1f}L{right + 12:.1f} {place:.1f}"})
        parts.append(element("g", {"class": line.colour}, leader + text(right + 16, place + 5, words, line.colour)))
    return "".join(parts)


def spread(wanted: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Sorted places moved apart to at least `step`, as little as possible from below, then back into low..high."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + step) if places else max(place, low))
    limit = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - step
    return places


def triangle(x: float, y: float, *, is_up: bool, words: str) -> str:
    """A mark of 12 × 10 units whose tip is at (x, y)."""
    base = y + 10 if is_up else y - 10
    path = f"M{x:.1f} {y:.1f}L{x - 6:.1f} {base:.1f}L{x + 6:.1f} {base:.1f}Z"
    return element("path", {"class": "dot", "d": path}, f"<title>{escape(words)}</title>")


def _path(frame: Frame, points: Sequence[Point], *, is_solid: bool) -> str:
    # Solid: over one iteration. Dashed: over several, of which nothing is known. None over a value that is no number.
    path, end = "", None
    for one, two in pairwise(points):
        if one[1] is None or two[1] is None or (two[0] - one[0] == 1) != is_solid:
            continue
        path += "" if one == end else f"M{_place(frame, one[0], one[1])}"
        path += f"L{_place(frame, two[0], two[1])}"
        end = two
    return path


def _place(frame: Frame, x: float, value: float) -> str:
    return f"{_number(frame.x(x))} {_number(frame.y(value))}"


def _mark(frame: Frame, x: float, value: float, kind: str, words: str) -> str:
    centre = (frame.x(x), frame.y(value))
    if value != _within(frame, value):
        return triangle(*centre, is_up=value > frame.y_range[1], words=words)
    place = {"class": kind, "cx": centre[0], "cy": centre[1], "r": 4 if kind == "dot" else 4.5}
    return element("circle", place, f"<title>{escape(words)}</title>")


def _is_alone(points: Sequence[Point], i: int) -> bool:
    # A value without a neighbour one iteration away on either side; ends of a line have one by nature.
    beside = [points[j] for j in (i - 1, i + 1) if 0 <= j < len(points)]
    return not any(value is not None and abs(x - points[i][0]) == 1 for x, value in beside)


def _within(frame: Frame, value: float) -> float:
    return min(max(value, frame.y_range[0]), frame.y_range[1])


def _rule(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    kind = f"thin {classes}" if classes in ("grid", "axis") else classes
    return element("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
