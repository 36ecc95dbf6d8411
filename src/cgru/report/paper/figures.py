"""The paper's figures from the cells of a reproduction: trade-off, progression, reward, gradient variance, ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgru.report.draw import pictures
from cgru.report.draw.charts import COLOURS, Spot, lines, plane, ratio_steps, ratios
from cgru.report.draw.curves import short
from cgru.report.draw.html import Content, Html, figure, hole, note, section, table, tabs, tag
from cgru.report.draw.svg import Series
from cgru.report.paper.objects import label_of, mean, methods, mixed, of_objects
from cgru.report.paper.read import Done, Reproduction
from cgru.runs import Scalar

PAIRS = 6
"""Pictures before and after, of the concept and of the rest each."""
PROGRESSIONS = 3
"""Runs whose pictures over training are shown."""
Metrics = Sequence[Mapping[str, Scalar]]
STUDY: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "reward": ("Mean reward of a batch, mean over seeds", {"cgru": "reward/mean", "ddpo": "reward/mean"}),
    "gradient-variance": (
        "Variance of the gradient (trace of the covariance over trajectories)",
        {"cgru": "variance/critic", "ddpo": "variance/ddpo"},
    ),
    "gradient-variance-normalised": (
        "The same over the squared norm of the mean gradient",
        {"cgru": "variance/critic_raw_normalised", "ddpo": "variance/ddpo_raw_normalised"},
    ),
}
"""File -> title, and the logged number of each method."""


def figures(found: Reproduction) -> dict[str, str]:
    """Every drawing by the name of its file."""
    groups = studied(found)
    merged = _merged([done.run.metrics for done in _of_first_method(found, "objects") if done.run])
    drawn = {
        "trade-off": _plane(found),
        **{name: _compared(groups, keys, title) for name, (title, keys) in STUDY.items()},
        "ratios": ratios(merged),
        "ratios-by-step": ratio_steps(merged),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def _plane(found: Reproduction) -> str | None:
    """UA and IRA of each method, means over classes."""
    if mixed(found):
        return None
    spots = []
    for method, colour in zip(methods(found), COLOURS, strict=False):
        rows = [
            (str(done.cell.concept), {key: hit.scores["measurements"][key]["value"] for key in ("ua", "ira")})
            for done in found.of("objects")
            if done.cell.method == method and (hit := of_objects(done))
        ]
        gone, kept = mean(rows, "ua"), mean(rows, "ira")
        if gone and kept:
            spots.append(Spot(f"{label_of(method)} (n {gone['n']})", _bounds(gone), _bounds(kept), colour))
    return plane(spots, "forgotten (UA)", "kept (IRA)", has_front=len(spots) > 1) if spots else None


def trade_off(found: Reproduction) -> Html:
    """The plane of the paper's Pareto figure."""
    title, lead = "Trade-off", "Forgetting is easy if everything else may break; this shows both at once."
    drawing = _plane(found)
    if drawing is None:
        return section(title, lead, hole(mixed(found) or "No class was removed and measured."), anchor="plane")
    words = "A cross is the 95 % interval over classes. Published methods have a plane of their own below."
    return section(title, lead, tag("div", figure(drawing, title), class_="chart"), note(words), anchor="plane")


def _bounds(found: Mapping[str, float | None]) -> tuple[float, float, float]:
    value = float(found["value"] or 0.0)
    low, high = (value if found[key] is None else float(found[key] or 0.0) for key in ("low", "high"))
    return value, low, high


def before_after(found: Reproduction, limit: int = PAIRS) -> Html:
    """Pairs on the same noise for each class of our method, and rows over training for the first few."""
    title, lead = "Pictures", "The same prompt and noise, before and after; then over training."
    runs = _of_first_method(found, "objects") + _of_first_method(found, "safety")
    first = [done for done in runs if done.cell.seed == runs[0].cell.seed]
    if not first:
        return section(title, lead, hole("No finished run has pictures."), anchor="pictures")
    pairs = [
        (str(done.cell.concept), pictures.before_after(done.run, f"pairs-{i}", limit=limit))
        for i, done in enumerate(first)
        if done.run
    ]
    rows = [
        (str(done.cell.concept), pictures.progression(done.run, f"rows-{i}"))
        for i, done in enumerate(first[:PROGRESSIONS])
        if done.run
    ]
    parts = [tabs("pictures-pairs", pairs), tag("h4", "Over training"), tabs("pictures-rows", rows)]
    return section(title, lead, *parts, anchor="pictures")


def against_ddpo(found: Reproduction) -> Html:
    """Reward and gradient variance over training, means over seeds."""
    title = "CGRU and DDPO on the same reward"
    lead = "Nothing is forgotten here: both raise one score, and differ in the advantage alone."
    groups = studied(found)
    if not any(groups.values()):
        return section(title, lead, hole("Not run."), anchor="ddpo")
    charts = [_chart(words, _compared(groups, keys, words)) for words, keys in STUDY.values()]
    parts = [
        *charts,
        _finals(groups),
        note(
            "DDPO divides rewards by their deviation, so its gradients have another scale: only the quotient compares. "
            "The paper's figure gives no formula."
        ),
    ]
    return section(title, lead, *parts, anchor="ddpo")


def studied(found: Reproduction) -> dict[str, list[Metrics]]:
    """Method -> the logs of its runs."""
    return {
        method: [done.run.metrics for done in found.of("ddpo") if done.run and done.cell.method == method]
        for method in ("cgru", "ddpo")
    }


def _compared(groups: Mapping[str, Sequence[Metrics]], keys: Mapping[str, str], title: str) -> str | None:
    series = [
        Series(label_of(method), colour, averaged(runs, keys[method]))
        for (method, runs), colour in zip(groups.items(), COLOURS, strict=False)
    ]
    return lines(series, "iterations", short, title)


def averaged(runs: Sequence[Metrics], key: str) -> list[tuple[float, float | None]]:
    """Mean over runs of a logged number, at the iterations that all of them logged."""
    tables = [{int(row["iteration"] or 0): row.get(key) for row in run if key in row} for run in runs]
    shared = sorted(set.intersection(*(set(one) for one in tables))) if tables else []
    found: list[tuple[float, float | None]] = []
    for iteration in shared:
        values = [one[iteration] for one in tables]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        found.append((float(iteration), sum(numbers) / len(numbers) if len(numbers) == len(values) else None))
    return found


def _finals(groups: Mapping[str, Sequence[Metrics]]) -> Html:
    """Mean reward of the first and the last quarter of iterations, by seed."""
    rows: list[list[Content]] = []
    for method, runs in groups.items():
        ends = [_quarters(rewards) for run in runs if (rewards := _rewards(run))]
        last = [end for _, end in ends if end is not None]
        if not ends or len(last) < len(ends):
            state = "not run" if not ends else "not finite in the last quarter"
            rows.append([label_of(method), "—", state, "—", len(ends)])
            continue
        begun = _mean([start for start, _ in ends])
        first = "not finite" if begun is None else f"{begun:.3g}"
        spread = f"{min(last):.3g} – {max(last):.3g}"
        rows.append([label_of(method), first, f"{sum(last) / len(last):.3g}", spread, len(ends)])
    head = ["", "first quarter", "last quarter ↑", "lowest – highest seed", "seeds"]
    return table(head, rows, "Mean reward", "numbers")


def _rewards(run: Metrics) -> list[float | None]:
    """Of each iteration; None where it was not finite."""
    found = [row["reward/mean"] for row in run if "reward/mean" in row]
    return [float(value) if isinstance(value, int | float) else None for value in found]


def _quarters(rewards: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Means of the first and the last quarter; None where one of its numbers was not finite."""
    size = max(1, len(rewards) // 4)
    return _mean(rewards[:size]), _mean(rewards[-size:])


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def stability(found: Reproduction) -> Html:
    """Importance ratios before clipping, over the runs of each experiment's first method."""
    title, lead = "Importance ratios", "Ratios far from 1 mean that an update left the data it was computed from."
    groups = {"objects": "Runs that removed an object", "ddpo": "Runs on the reward that forgets nothing"}
    parts: list[Content] = []
    for experiment, heading in groups.items():
        if done := _of_first_method(found, experiment):
            heading = f"{heading}, {label_of(done[0].cell.method)}"
            runs = [one.run.metrics for one in done if one.run]
            parts += _ratio_charts(heading, runs, len({one.cell.seed for one in done}))
    return section(title, lead, *(parts or [hole("No run was made.")]), anchor="ratios")


def _of_first_method(found: Reproduction, experiment: str) -> list[Done]:
    done = [one for one in found.of(experiment) if one.run]
    return [one for one in done if one.cell.method == done[0].cell.method]


def _ratio_charts(heading: str, runs: Sequence[Metrics], seeds: int) -> list[Html]:
    merged = _merged(runs)
    count = f"{len(runs)} run{'s' * (len(runs) > 1)} of {seeds} seed{'s' * (seeds > 1)}"
    words = f"Mean over {count}, before clipping; `largest` is the mean of the runs' largest distance from 1."
    return [
        tag("h4", heading),
        _chart("Mean ratio, and the largest distance from 1", ratios(merged)),
        _chart("Spread of the ratios by denoising step (0 is pure noise)", ratio_steps(merged)),
        note(words),
    ]


def _merged(runs: Sequence[Metrics]) -> list[dict[str, Scalar]]:
    """One log whose numbers are means over runs, at the iterations and keys that all of them have."""
    if not runs:
        return []
    keys = set.intersection(*({key for row in run for key in row if "ratio" in key} for run in runs))
    found: dict[int, dict[str, Scalar]] = {}
    for key in sorted(keys):
        for iteration, value in averaged(runs, key):
            found.setdefault(int(iteration), {"iteration": int(iteration)})[key] = value
    return [found[iteration] for iteration in sorted(found)]


def _chart(title: str, drawing: str | None) -> Html:
    inside = figure(drawing, title) if drawing else hole("Nothing was logged.")
    return tag("div", tag("h4", title), inside, class_="chart")
