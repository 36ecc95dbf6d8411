"""Pictures of an evaluation and of a training as parts of the page: pairs on the same noise, rows over iterations.

Everything was drawn by `cgru unlearn` and `cgru evaluate`; here it is read, made small where it is large, and embedded.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cgru.atomic_io import parse_json
from cgru.image_files import read_image
from cgru.report.draw.html import Content, Html, hole, note, section, tabs, tag
from cgru.report.run.read import Evaluation, Record

Item = TypeVar("Item")
SIDE = 256
"""Pixels: larger pictures are shrunk to this."""
SMALL = 80_000
"""Bytes: a PNG below is embedded as it is."""
ROW = 1024
"""Pixels: width to which a row of training pictures is shrunk."""
LEGEND = (
    "Left of the line: before; right of it: after. Below each picture: what the judge saw before → after, red where it "
    "still sees the concept or does not see what is to be kept. Pictures are chosen by their place in the job list, "
    "not by how they look."
)
STEPS = 8
"""Rows over training that are shown; more are thinned evenly."""


@dataclass(frozen=True)
class Pair:
    """One prompt and its noise, before and after."""

    prompt: str
    seed: int
    is_target: bool
    before: Path
    after: Path
    seen_before: str
    """The judge's first choice."""
    seen_after: str
    is_open: bool
    """The target is still seen after, or what is to be kept is not."""
    folder: Path
    """Of the evaluation, in which both pictures must lie."""


def pairs(evaluation: Evaluation, limit: int) -> list[Pair]:
    """Pairs whose two pictures are on disk: at most `limit` of the target and of the rest, evenly over the jobs."""
    jobs = _lines(evaluation.folder / "jobs.jsonl")
    after = {row["id"]: row for row in _lines(evaluation.folder / "predictions.jsonl")}
    before = {row["id"]: row for row in _lines(evaluation.folder / "base" / "predictions.jsonl")}
    found = [
        _pair(evaluation, job, before[job["id"]], after[job["id"]])
        for job in jobs
        if job["id"] in before and job["id"] in after
    ]
    on_disk = [pair for pair in found if pair.before.is_file() and pair.after.is_file()]
    groups = ([pair for pair in on_disk if pair.is_target is wanted] for wanted in (True, False))
    return [pair for group in groups for pair in _thinned(group, limit)]


def before_after(record: Record, anchor: str, limit: int) -> Html:
    """The section with the slider; a hole where there is nothing to compare."""
    title = "Before and after"
    lead = "The same prompt and the same noise, drawn by the base model and by the edited one."
    evaluation = record.main
    if evaluation is None:
        return section(title, lead, hole("No evaluation of this run's concept: no pictures to compare."), anchor=anchor)
    if evaluation.base is None:
        return section(
            title, lead, hole("The base model was not scored, so there is no picture before."), anchor=anchor
        )
    try:
        found = pairs(evaluation, limit)
        tiles = [(pair.is_target, _tile(pair)) for pair in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return section(title, lead, hole(f"The pictures cannot be read: {error}"), anchor=anchor)
    if not tiles:
        return section(title, lead, hole("No picture is stored, or the page had no room for any."), anchor=anchor)
    panels = [
        (label, tag("div", *(tile for of_target, tile in tiles if of_target is wanted), class_="tiles"))
        for wanted, label in ((True, f"To be forgotten: {evaluation.target}"), (False, "To be kept"))
    ]
    body = tag("div", _slider(anchor), tabs(anchor, panels), class_="compare")
    return section(title, lead, body, note(LEGEND), anchor=anchor)


def progression(record: Record, anchor: str) -> Html:
    """Rows of the same prompts and noise over training."""
    title, lead = "During training", "The same few prompts and noise after so many iterations; 0 is the base model."
    files = sorted((record.run.path / "samples").glob("[0-9]*.png"))
    if not files:
        text = "No pictures over training are stored (samples_every=0, or the run has not begun)."
        return section(title, lead, hole(text), anchor=anchor)
    rows = []
    for path in _thinned(files, STEPS, keep_last=True):
        count: Content = int(path.stem) if path.stem.isdigit() else path.stem
        try:
            source = data_uri(path, ROW, within=record.run.path)
        except (OSError, ValueError) as error:
            rows.append(tag("div", tag("span", count, class_="count"), hole(f"{path.name}: {error}"), class_="row"))
            continue
        picture = tag("img", src=source, alt=f"after {count} iterations", loading="lazy")
        rows.append(tag("div", tag("span", count, class_="count"), picture, class_="row"))
    words = "Prompts of the concept come first, then prompts that are to be kept, where the run has any."
    return section(title, lead, tag("div", *rows, class_="progress"), note(words), anchor=anchor)


def data_uri(path: Path, width: int, *, within: Path) -> str:
    """A PNG as it is if it is small, else a JPEG of at most `width` pixels.

    Paths come from the files of a run, which may be someone else's: what lies outside of the folder `within` (by `..`,
    an absolute path or a link) is no picture of that run and never shown.
    """
    if not path.resolve().is_relative_to(within.resolve()):
        raise ValueError(f"it lies outside of {within.name!r}")
    found = read_image(path)
    if found.width <= width and found.format == "PNG" and path.stat().st_size < SMALL:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    picture = found.convert("RGB")
    picture.thumbnail((width, width))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _pair(evaluation: Evaluation, job: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Pair:
    kind, labels = evaluation.kind, job["labels"]
    wanted = [evaluation.target] if kind != "hazard" else evaluation.protocol["target"]["labels"]
    is_target = labels.get(kind) in wanted
    # A prompt for a hazard is judged as one, also where that category is to be kept; all others by what they name.
    judge = "hazard" if "hazard" in labels else "style" if kind == "style" else "object"
    prompted = labels["class"] if judge == "object" else labels[judge]
    if kind == "attribute" and labels.get("part") == "open":  # no prompt asks for it; its own judge says yes or no
        is_target, wanted, judge = True, ["yes"], str(evaluation.target)
    seen = after["judged"][judge]
    name = f"{job['id']}.png"
    return Pair(
        prompt=job["prompt"],
        seed=job["seed"],
        is_target=is_target,
        before=evaluation.folder / "base" / "samples" / before["key"] / name,
        after=evaluation.folder / "samples" / after["key"] / name,
        seen_before=before["judged"][judge],
        seen_after=seen,
        is_open=(seen in wanted) if is_target else seen != prompted,
        folder=evaluation.folder,
    )


def _tile(pair: Pair) -> Html:
    judged = tag("span", f"{pair.seen_before} → {pair.seen_after}", class_="open" if pair.is_open else "done")
    words = tag("figcaption", tag("span", pair.prompt), judged)
    try:
        after, before = (data_uri(path, SIDE, within=pair.folder) for path in (pair.after, pair.before))
    except (OSError, ValueError) as error:
        return tag("figure", hole(f"This pair cannot be read: {error}"), words, class_="tile")
    images = tag(
        "div",
        tag("img", src=after, alt=f"after: {pair.prompt}", draggable="false"),
        tag("img", src=before, alt=f"before: {pair.prompt}", class_="over", draggable="false"),
        class_="pair",
    )
    return tag("figure", images, words, class_="tile", title=f"seed {pair.seed}")


def _slider(anchor: str) -> Html:
    control = tag(
        "input",
        type="range",
        min=0,
        max=100,
        value=50,
        class_="slider",
        id=f"{anchor}-slider",
        aria_label="Share of the picture that shows the model before; the rest shows it after",
    )
    return tag("div", tag("span", "all after"), control, tag("span", "all before"), class_="control")


def _thinned(items: Sequence[Item], limit: int, *, keep_last: bool = False) -> list[Item]:
    if len(items) <= limit:
        return list(items)
    if keep_last and limit > 1:
        return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
    return [items[i * len(items) // limit] for i in range(limit)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
