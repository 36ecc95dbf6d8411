"""Charts of the report other than the training curves: the plane of forgetting and keeping, ratios, variance, critic.

Each chart is one SVG made from plain numbers. A chart without numbers is None, and the page gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from cgru.report.draw.curves import percent, points, short
from cgru.report.draw.svg import (
    LABEL_STEP,
    Frame,
    Series,
    Show,
    axes,
    curve,
    element,
    end_labels,
    spread,
    style,
    text,
    ticks,
)
from cgru.runs import Scalar

WIDTH = 720
COLOURS = ("blue", "orange", "green", "purple", "red", "slate")
Records = Sequence[Mapping[str, Scalar]]


@dataclass(frozen=True)
class Spot:
    """A model in the plane: shares in 0..1 with their intervals."""

    label: str
    forgotten: tuple[float, float, float]
    """Value, low, high."""
    kept: tuple[float, float, float]
    colour: str
    is_base: bool = False


def plane(spots: Sequence[Spot], x_title: str, y_title: str, *, has_front: bool) -> str:
    """Forgotten to the right, kept upwards; a cross is the 95 % interval, a ring is a base model.

    Args:
        has_front: join the models that no other beats in both; only for models that were to forget the same.
    """
    y_ticks = ticks(min([0.9, *(spot.kept[1] for spot in spots)]), 1.0, 5)
    frame = Frame(74, 30, 500, 330, (0.0, 1.0), (y_ticks[0], 1.0))
    start = f" (axis from {percent(y_ticks[0])})" if y_ticks[0] > 0 else ""
    parts = [
        axes(frame, [], [tick for tick in y_ticks if tick <= 1], percent),
        *(text(frame.x(k / 5), 382, f"{20 * k} %", anchor="middle") for k in range(6)),
        text(frame.left, 18, f"↑ {y_title}{start}", "ink"),
        text(frame.left + frame.width, 408, f"{x_title} →", "ink", anchor="end"),
        _front(frame, spots) if has_front else "",
        *(_spot(frame, spot) for spot in spots),
        _labels(frame, spots),
    ]
    words = "; ".join(f"{spot.label}: {percent(spot.forgotten[0])}, {percent(spot.kept[0])}" for spot in spots)
    return drawing(parts, 420, f"{x_title} and {y_title}. {words}")


def efficient(spots: Sequence[Spot]) -> list[Spot]:
    """The models that no other beats in both, from least to most forgotten; base models stand outside."""
    models = [spot for spot in spots if not spot.is_base]
    return sorted(
        (one for one in models if not any(_beats(other, one) for other in models)), key=lambda spot: spot.forgotten[0]
    )


def ratios(records: Records) -> str | None:
    """Importance ratios over training: their mean, and how far the largest is from 1."""
    mean = Series("mean", "blue", points(records, "policy/ratio_mean", 1))
    largest = Series("largest", "orange", points(records, "policy/ratio_max", 1))
    return lines([mean, largest], "iterations", short, "Importance ratios over training")


def ratio_steps(records: Records) -> str | None:
    """Spread of the ratios at each denoising step, first and last iteration."""
    return _steps(records, "ratio/std/t", "Spread of the ratios by step", short)


def variances(records: Records, suffix: str = "") -> str | None:
    """Variance of the policy gradient for three baselines; `suffix` names the form that was logged."""
    names = {"critic": "r − V", "mean": "r − mean", "ddpo": "DDPO"}
    drawn = [
        Series(label, colour, points(records, f"variance/{name}{suffix}"))
        for (name, label), colour in zip(names.items(), COLOURS, strict=False)
    ]
    return lines(drawn, "iterations", short, "Variance of the gradient over training")


def critic_steps(records: Records, fit: Mapping[str, object] | None, key: str, show: Show) -> str | None:
    """A measure of the critic at each denoising step: on held-out trajectories of its fit, first and last batch."""
    held_out = (fit or {}).get(key)
    extra: list[Series] = []
    if isinstance(held_out, list):
        values = [(float(k), value if isinstance(value, int | float) else None) for k, value in enumerate(held_out)]
        extra = [Series("fit", "slate", values, mark="ring")]
    return _steps(records, f"critic/{key}/t", f"Critic, {key.replace('_', ' ')} by step", show, extra)


def _steps(records: Records, prefix: str, title: str, show: Show, extra: Sequence[Series] = ()) -> str | None:
    logged = [row for row in records if any(key.startswith(prefix) for key in row)]
    ends = [("first", "blue", logged[0]), ("last", "orange", logged[-1])] if logged else []
    if len(logged) == 1:
        ends = ends[:1]
    series = [*extra, *(Series(label, colour, _by_step(row, prefix)) for label, colour, row in ends)]
    return lines(series, "step", show, title)


def _by_step(row: Mapping[str, Scalar], prefix: str) -> list[tuple[float, float | None]]:
    found = {int(key.removeprefix(prefix)): value for key, value in row.items() if key.startswith(prefix)}
    return [(float(k), value if isinstance(value, int | float) else None) for k, value in sorted(found.items())]


def lines(series: Sequence[Series], x_title: str, show: Show, title: str) -> str | None:
    """Lines over one axis with their names at their ends; None where there is no number."""
    drawn = [line for line in series if line.values]
    if not drawn:
        return None
    values = [value for line in drawn for value in line.values]
    low, high = min(0.0, *values), max(0.0, *values)
    y_ticks = ticks(low, high if high > low else 1.0, 4)
    last = max(1.0, *(x for line in drawn for x, value in line.points if value is not None))
    frame = Frame(74, 16, 460, 150, (0.0, last), (y_ticks[0], y_ticks[-1]))
    x_ticks = [tick for tick in ticks(0.0, last, min(8, int(last))) if tick <= last]
    parts = [
        axes(frame, x_ticks, y_ticks, show, x_title),
        *(curve(frame, line, show) for line in drawn),
        end_labels(frame, drawn, show),
    ]
    ends = "; ".join(f"{line.label}: {show(line.values[0])} to {show(line.values[-1])}" for line in drawn)
    return drawing(parts, 204, f"{title}. {ends}")


def _spot(frame: Frame, spot: Spot) -> str:
    (x, x_low, x_high), (y, y_low, y_high) = spot.forgotten, spot.kept
    cross = f"M{frame.x(x_low):.1f} {frame.y(y):.1f}H{frame.x(x_high):.1f}"
    cross += f"M{frame.x(x):.1f} {frame.y(y_low):.1f}V{frame.y(y_high):.1f}"
    kind = "ring" if spot.is_base else "dot"
    circle = {"class": kind, "cx": frame.x(x), "cy": frame.y(y), "r": 6.0}
    inside = element("path", {"class": "thin", "d": cross}) + element("circle", circle)
    if spot.is_base:  # far from the others, so its name stands beside it
        inside += text(frame.x(x) + 11, frame.y(y) - 9, spot.label, spot.colour)
    return element("g", {"class": spot.colour}, inside)


def _labels(frame: Frame, spots: Sequence[Spot]) -> str:
    """Names right of the plot, each joined to its place; moved apart where they would touch."""
    ordered = sorted((spot for spot in spots if not spot.is_base), key=lambda spot: -spot.kept[0])
    right = frame.left + frame.width + 14
    wanted = [frame.y(spot.kept[0]) for spot in ordered]
    parts = []
    for place, spot in zip(spread(wanted, LABEL_STEP, frame.top, frame.top + frame.height), ordered, strict=True):
        start = f"M{frame.x(spot.forgotten[0]) + 7:.1f} {frame.y(spot.kept[0]):.1f}"
        leader = element("path", {"class": "thin", "opacity": "0.45", "d": f"{start}L{right - 3:.1f} {place:.1f}"})
        parts.append(element("g", {"class": spot.colour}, leader + text(right, place + 5, spot.label, spot.colour)))
    return "".join(parts)


def _front(frame: Frame, spots: Sequence[Spot]) -> str:
    best = efficient(spots)
    if len(best) < 2:
        return ""
    path = "M" + "L".join(f"{frame.x(spot.forgotten[0]):.1f} {frame.y(spot.kept[0]):.1f}" for spot in best)
    return element("g", {"class": "axis"}, element("path", {"class": "line dashed", "d": path}))


def _beats(one: Spot, other: Spot) -> bool:
    pairs = ((one.forgotten[0], other.forgotten[0]), (one.kept[0], other.kept[0]))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def drawing(parts: Sequence[str], height: float, title: str) -> str:
    """One SVG of WIDTH × height units with the rules of every drawing."""
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height:g}", "role": "img"}
    # No width of its own: a narrow picture then takes its rules for narrow screens, with larger letters.
    return element("svg", attributes, "\n".join([f"<title>{escape(title)}</title>", style(), *parts])) + "\n"
