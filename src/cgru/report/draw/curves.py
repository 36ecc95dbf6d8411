"""The curves of a run as one SVG: forgetting according to the reward and to the outside detector, and other metrics.

Everything comes from metrics.jsonl. The horizontal axis counts finished iterations: a batch and its critic are plotted
before their own update (0 is the base model), updates and validation checks after it, as in the log and the names in
samples/. The gap is the measured one, between reward and detector on the same validation pictures; the batch curve is
the policy's own batch, sampled with noise. Reads files only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from cgru.config import RLConfig, RunConfig
from cgru.report.draw.svg import (
    Frame,
    Point,
    Series,
    Show,
    axes,
    band,
    curve,
    element,
    end_labels,
    style,
    text,
    ticks,
    triangle,
)
from cgru.runs import METRICS, Run, Scalar, read_metrics

Records = Sequence[Mapping[str, Scalar]]
WIDTH, LEFT, PLOT = 720, 74, 478
"""Units of the view box: the page, the left edge of every plot, its width; the rest is for labels at line ends."""
CURVES = "curves.svg"
"""The file in a run folder."""
SCALED = ("concept", "clip", "nsfw")
"""Rewards that go from 0 to reward.scale."""
FIXED = {"aesthetic": (0.0, 10.0)}
FLOOR = -1.0
"""Lower end of the axis of explained variance; otherwise one bad batch of -50 would hide all others."""
EXPLAINED = "critic/explained_variance/"


WHOLE = (0.0, 1.0)
HEAD, FOOT = 74, 34
"""Above a plot: title and note; below it: the ticks of x."""


def short(value: float) -> str:
    """Three digits, below 1 two."""
    return (f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}").replace("-", "−")


def percent(value: float) -> str:
    """Whole numbers, below 10 one decimal."""
    digits = f"{100 * value:.0f}" if abs(value) >= 0.1 else f"{100 * value:.1f}".removesuffix(".0")
    return f"{digits} %".replace("-", "−").replace("−0 %", "0 %")


@dataclass(frozen=True)
class Panel:
    """One plot; `series` without a value are left out, a panel without series is not drawn."""

    title: str
    note: str
    series: tuple[Series, ...]
    height: float = 84
    y_range: tuple[float, float] | None = None
    """None: from 0, or the round number below the smallest value, to the one above the largest."""
    show: Show = short
    gap: tuple[Series, Series] | None = None
    """What is shaded between: the reward and the detector."""
    alarms: tuple[tuple[float, str], ...] = ()
    """Iteration and message."""


def run_curves(run: Run) -> str:
    """The SVG of a run folder, finished or not."""
    path, config = run.path / METRICS, run.config
    records = [record for record in read_metrics(path) if "iteration" in record]
    if not records:
        raise ValueError(f"no iteration in {str(path)!r} yet; allowed: a run with one or more. Wait, or resume it.")
    done = int(_iteration(records[-1])) + 1
    about = f"{config.method}, seed {config.seed}: {done} of {config.length} iterations"
    return draw_curves(records, f"Unlearning {config.concept}", about, reward_range(config))


def reward_range(config: RunConfig) -> tuple[float, float] | None:
    """Lowest and highest reward of forget prompts, if the config determines them: not for sums and the user's
    rewards."""
    if not isinstance(config, RLConfig):
        return None
    name = config.reward.name.strip()
    return (0.0, config.reward.scale) if name in SCALED else FIXED.get(name)


def draw_curves(records: Records, heading: str, about: str, scale: tuple[float, float] | None) -> str:
    """One self-contained SVG from the records of metrics.jsonl, in order.

    Args:
        scale: lowest and highest reward; None: not known, so the batch's reward gets an axis of its own.
    """
    groups = (_gone(records, scale), *_unscaled(records, scale), *_kept(records), *_critic(records), *_policy(records))
    panels = [panel for panel in groups if any(line.values for line in panel.series)]
    last = max((x for panel in panels for line in panel.series for x, _ in line.points), default=1.0)
    parts, top = [text(20, 36, heading, "ink heading"), text(20, 62, about)], 62.0
    for panel in panels:
        parts.append(_drawn(panel, top, max(last, 1.0)))
        top += _height(panel)
    summary = " ".join(f"{panel.title}; {panel.note}." for panel in panels)
    return _page(parts, top + 20, f"{heading}, {about}", summary)


def points(records: Records, key: str, shift: int = 0) -> list[Point]:
    """Iteration + shift and value of the records that have the key; null, NaN and infinity are None."""
    return [(_iteration(record) + shift, _finite(record[key])) for record in records if key in record]


def _gone(records: Records, scale: tuple[float, float] | None) -> Panel:
    seen = points(records, "watch/target_share", 1)
    detector = Series("detector", "orange", [(x, None if y is None else 1 - y) for x, y in seen])
    reward = Series("reward", "blue", _believed(records), mark="ring")
    batch = Series("batch", "blue", _shares(points(records, "reward/mean"), scale))
    explored = Series("explored", "slate", _shares(points(records, "reward/explored_mean"), scale))
    alarms = tuple((_iteration(row) + 1, str(row["watch/alarm"])) for row in records if row.get("watch/alarm"))
    if reward.values and detector.values:
        title = f"Gone: {percent(reward.values[-1])} says the reward, {percent(detector.values[-1])} the detector"
        note = f"of the same validation pictures; {_verdict(reward, detector, len(alarms))}"
    else:
        title = f"Reward of the batch, of its scale: {_change(batch, percent)}"
        note = "no outside detector has looked: nothing confirms the reward"
    if scale is None:
        batch, explored = (replace(line, points=[]) for line in (batch, explored))
    return Panel(title, note, (explored, batch, reward, detector), 236, WHOLE, percent, (reward, detector), alarms)


def _verdict(reward: Series, detector: Series, alarms: int) -> str:
    pairs = zip(reward.points, detector.points, strict=True)
    is_ahead = any(a is not None and b is not None and a > b for (_, a), (_, b) in pairs)
    words = "red: the reward claims more" if is_ahead else "the detector confirms it"
    return f"{words}; ▼ {alarms} alarm{'s' * (alarms > 1)}" if alarms else f"{words}; no alarm"


def _unscaled(records: Records, scale: tuple[float, float] | None) -> list[Panel]:
    if scale is not None:
        return []
    batch = Series("batch", "blue", points(records, "reward/mean"))
    explored = Series("explored", "slate", points(records, "reward/explored_mean"))
    note = "in the reward's own units: its range does not follow from the settings"
    return [Panel(f"Reward of the batch: {_change(batch)}", note, (explored, batch), 120)]


def _kept(records: Records) -> list[Panel]:
    kept = Series("kept", "green", points(records, "watch/keep_share", 1))
    nothing = Series("nothing", "purple", points(records, "watch/nothing_share", 1), mark="ring")
    title = f"Kept: {_end(kept, percent)} of the other pictures are still right"
    note = f"nothing recognisable in {_end(nothing, percent)} of the concept's pictures"
    return [Panel(title, note, (nothing, kept), 120, WHOLE, percent)]


def _critic(records: Records) -> list[Panel]:
    error = Series("", "ink", points(records, "critic/value_error"))
    explained = Series("", "ink", _explained(records))
    lowest = max(FLOOR, min([0.0, *explained.values]))
    span = (min(ticks(lowest, 1.0, 3)), 1.0)
    return [
        Panel(f"Critic, squared error of V: {_change(error)}", "mean over steps, in squared units of reward", (error,)),
        Panel(
            f"Critic, variance explained: {_change(explained, percent)}",
            "of the reward, mean over steps; 0 % is a constant guess",
            (explained,),
            y_range=span,
            show=percent,
        ),
    ]


def _policy(records: Records) -> list[Panel]:
    kl = Series("", "ink", points(records, "policy/kl", 1))
    clipped = Series("", "ink", points(records, "policy/clipped", 1))
    norm = Series("policy", "ink", points(records, "policy/gradient_norm", 1))
    total = Series("with KL", "slate", points(records, "policy/total_gradient_norm", 1))
    return [
        Panel(f"Policy, KL from the base model: {_change(kl)}", "on retain states, before it is weighted", (kl,)),
        Panel(
            f"Policy, outside the clip range: {_change(clipped, percent)}",
            "share of the ratios, before clipping",
            (clipped,),
            y_range=(0.0, ticks(0.0, max([0.01, *clipped.values]), 3)[-1]),
            show=percent,
        ),
        Panel(f"Policy, gradient norm: {_change(norm)}", "mean of the updates, before clipping", (total, norm)),
    ]


def _drawn(panel: Panel, top: float, last: float) -> str:
    series = [line for line in panel.series if line.values]
    low, high = panel.y_range or _span(series)
    y_ticks = ticks(low, high, 5 if panel.height > 200 else 3)
    if panel.y_range is None:  # up to the next round number
        low, high = y_ticks[0], y_ticks[-1]
    frame = Frame(LEFT, top + HEAD, PLOT, panel.height, (0.0, last), (low, high))
    x_ticks = [tick for tick in ticks(0.0, last, min(8, int(last))) if tick <= last]
    parts = [
        text(20, top + 34, panel.title, "ink title"),
        text(20, top + 57, panel.note),
        axes(frame, x_ticks, [tick for tick in y_ticks if low <= tick <= high], panel.show, "iterations"),
        band(frame, panel.gap[0].points, panel.gap[1].points, ("red", "slate")) if panel.gap else "",
        *(curve(frame, line, panel.show) for line in series),
        _alarms(frame, panel.alarms),
        end_labels(frame, series, panel.show),
    ]
    return element("g", {}, "".join(parts))


def _height(panel: Panel) -> float:
    return HEAD + panel.height + FOOT


def _alarms(frame: Frame, alarms: Sequence[tuple[float, str]]) -> str:
    marks = [triangle(frame.x(x), frame.top, is_up=False, words=message) for x, message in alarms]
    return element("g", {"class": "red"}, "".join(marks)) if marks else ""


def _page(parts: Sequence[str], height: float, title: str, summary: str) -> str:
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {WIDTH} {height:g}",
        "width": 900,
        "style": "max-width:100%;height:auto",
        "role": "img",
        "aria-labelledby": "title desc",
    }
    told = f'<title id="title">{escape(title)}</title><desc id="desc">{escape(summary)}</desc>'
    paper = element("rect", {"class": "page paper", "width": WIDTH, "height": height})
    return element("svg", attributes, "\n".join([told, style(), paper, *parts])) + "\n"


def _believed(records: Records) -> list[Point]:
    # What the reward says of the validation pictures is not logged; the gap is it minus 1 - target_share.
    looks = [row for row in records if "watch/target_share" in row]
    pairs = [(_finite(row.get("watch/gap")), _finite(row["watch/target_share"])) for row in looks]
    shares = [None if gap is None or seen is None else gap + 1 - seen for gap, seen in pairs]
    return [(_iteration(row) + 1, share) for row, share in zip(looks, shares, strict=True)]


def _explained(records: Records) -> list[Point]:
    found = []
    for row in records:
        values = [_finite(value) for key, value in row.items() if key.startswith(EXPLAINED)]
        numbers = [value for value in values if value is not None]
        if values:
            found.append((_iteration(row), sum(numbers) / len(numbers) if numbers else None))
    return found


def _shares(found: Sequence[Point], scale: tuple[float, float] | None) -> list[Point]:
    low, high = scale or (0.0, 1.0)
    return [(x, None if y is None else (y - low) / (high - low)) for x, y in found]


def _span(series: Sequence[Series]) -> tuple[float, float]:
    values = [value for line in series for value in line.values]
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high > low else (0.0, 1.0)


def _end(series: Series, show: Show) -> str:
    return show(series.values[-1]) if series.values else "an unknown share"


def _change(series: Series, show: Show = short) -> str:
    ends = [show(series.values[i]) for i in (0, -1)] if series.values else ["no number"]
    return " → ".join(ends if len(series.values) > 1 else ends[:1])


def _iteration(record: Mapping[str, Scalar]) -> float:
    return float(record["iteration"] or 0)


def _finite(value: Scalar) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
