"""Sections about how a run trained: reward against the outside detector, ratios, gradient variance, critic by step."""

from __future__ import annotations

from cgru.config import RLConfig
from cgru.report.draw.charts import critic_steps, ratio_steps, ratios, variances
from cgru.report.draw.curves import percent, run_curves, short
from cgru.report.draw.html import Content, Html, figure, hole, note, section, tag
from cgru.report.run.read import Record
from cgru.report.run.reliability import calibrations, miscalibration, named, reliability


def curves(record: Record, anchor: str) -> Html:
    """What the reward believed and what the outside detector saw, over training."""
    title = "Did the reward tell the truth?"
    lead = "Training follows the reward; an outside detector that never trains anything checks it on the same pictures."
    if not record.metrics:
        return section(title, lead, hole("No iteration was logged, so there are no curves."), anchor=anchor)
    try:
        drawing = run_curves(record.run).replace(' width="900"', "", 1)  # as wide as the page lets it
    except (ValueError, OSError, KeyError, TypeError) as error:
        return section(title, lead, hole(f"The curves cannot be drawn: {error}"), anchor=anchor)
    parts: list[Content] = [tag("div", figure(drawing, f"Curves of {record.run.path.name}"), class_="chart")]
    if not any("watch/target_share" in row for row in record.metrics):
        parts.insert(0, hole("No outside detector looked at this run: nothing confirms its reward."))
    parts += [tag("p", f"Alarm: {alarm}", class_="warning") for alarm in _alarms(record)]
    return section(title, lead, *parts, anchor=anchor)


def stability(record: Record, anchor: str) -> Html:
    """Ratios and gradient variance, where they were logged."""
    title = "Was training stable?"
    lead = (
        "Ratios far from 1 mean that an update left the data it was computed from; less variance means steadier steps."
    )
    over_time, by_step, spread = ratios(record.metrics), ratio_steps(record.metrics), variances(record.metrics)
    relative = variances(record.metrics, "_raw_normalised")
    parts = [
        _drawn(
            "Importance ratios: their mean, and the largest distance from 1", over_time, "This run logged no ratios."
        ),
        _drawn(
            "Spread of the ratios by denoising step (0 is pure noise)", by_step, "This run logged no ratios by step."
        ),
        _drawn("Variance of the gradient, by baseline", spread, _no_variance(record)),
    ]
    if relative:
        words = "DDPO's advantages have another scale, so compare baselines here, not above."
        parts += [_drawn("The same over the squared norm of the mean gradient", relative, ""), note(words)]
    return section(title, lead, *parts, anchor=anchor)


def critic(record: Record, anchor: str) -> Html:
    """How well V foretold the reward, at each denoising step."""
    title = "How good was the critic?"
    lead = "The critic guesses the final reward from an unfinished picture; step 0 is pure noise."
    config = record.run.config
    if not isinstance(config, RLConfig) or config.critic.kind == "none":
        return section(title, lead, hole("This run has no critic."), anchor=anchor)
    error = critic_steps(record.metrics, record.fit, "value_error", short)
    explained = critic_steps(record.metrics, record.fit, "explained_variance", percent)
    held_out = (record.fit or {}).get("held_out")
    if isinstance(held_out, int):
        fit = f"fit: on {held_out} trajectories held out when the critic was first fitted; "
    else:
        fit = ""
    words = f"{fit}first and last: on the first and last batch, before the critic saw it."
    parts = [
        *_calibration(record),
        _drawn("Squared error of V", error, "No error by step was logged."),
        _drawn("Share of the reward's variance that V explains", explained, "No explained variance was logged."),
        note(words[0].upper() + words[1:]),
    ]
    return section(title, lead, *parts, anchor=anchor)


def _calibration(record: Record) -> list[Html]:
    """The reliability diagram on held-out trajectories, with its distance from the diagonal by range of timesteps."""
    diagram = reliability(record.fit)
    why = "This run recorded no calibration; new runs do, when the critic is first fitted."
    if record.fit is None:
        why = "The run has no record of a fitted critic, so there is no calibration."
    elif not record.fit.get("trajectories", 1):
        why = "The critic was not fitted before training (critic.trajectories is 0), so there is no calibration."
    parts = [_drawn("Reward foretold against reward achieved, by range of denoising steps", diagram, why)]
    if diagram:
        gaps = "; ".join(f"{named(part)} {short(miscalibration(part))}" for part in calibrations(record.fit))
        states = sum(sum(part["counts"]) for part in calibrations(record.fit))
        words = (
            f"On the dashed line V is right on average. {states} states of {(record.fit or {}).get('held_out', '?')} "
            f"held-out trajectories; states of one trajectory share a reward. Mean distance from the line: {gaps}."
        )
        parts.append(note(words))
    return parts


def _drawn(title: str, drawing: str | None, otherwise: str) -> Html:
    inside = figure(drawing, title) if drawing else hole(otherwise)
    return tag("div", tag("h4", title), inside, class_="chart")


def _no_variance(record: Record) -> str:
    config = record.run.config
    every = config.diagnostics.every if isinstance(config, RLConfig) else 0
    if every == 0:
        return "Gradient variance was not measured (diagnostics.every is 0). A run with diagnostics.every=10 logs it."
    return f"Gradient variance is measured every {every} iterations, and none was logged yet."


def _alarms(record: Record) -> list[str]:
    return [
        f"after iteration {int(row['iteration'] or 0) + 1}: {row['watch/alarm']}"
        for row in record.metrics
        if row.get("watch/alarm")
    ]
