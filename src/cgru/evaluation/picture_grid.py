"""Grids of pictures with captions, drawn with Pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from cgru.atomic_io import atomic_write, parse_json
from cgru.image_files import read_rgb

CELL_LIMIT = 128
"""Pixels; larger pictures are shrunk, since a 20 × 8 grid of 512-pixel pictures would have 40 million pixels."""
CAPTION_WIDTH = 96
"""Pixels; minimum width of a captioned picture."""
STRIP = 6
"""Number of pictures of the target, and of other prompts, in the before-and-after strip."""
LISTED = 64
"""Number of pictures shown of prompts that form no grid: there may be 30,000."""
NO_HAZARD = {"none", "nothing"}
"""Labels of the hazard judge for a picture without a hazard."""
GAP = 4
FONT = 12
INK, PAPER, FAINT, WRONG = (30, 30, 30), (255, 255, 255), (225, 225, 225), (205, 40, 40)


def labelled_grid(
    rows: Sequence[str],
    columns: Sequence[str],
    pictures: Mapping[tuple[str, str], Image.Image],
    wrong: frozenset[tuple[str, str]] = frozenset(),
    note: str = "",
) -> Image.Image:
    """Draw rows × columns with their names at the edges; red frames around cells in `wrong`; `note` at the bottom."""
    font = _font()
    side = _cell_side(list(pictures.values()))
    left = max(_width(font, name) for name in rows) + 3 * GAP
    top, step = FONT * 2 + GAP, side + GAP
    # Names wider than a cell alternate between two lines, so that neighbours do not overlap.
    lines = 2 if max(_width(font, name) for name in columns) > side else 1
    top += (lines - 1) * (FONT + GAP)
    canvas = Image.new("RGB", (left + step * len(columns) + GAP, top + step * len(rows) + FONT * 2 + GAP), PAPER)
    pen = ImageDraw.Draw(canvas)
    for j, name in enumerate(columns):
        middle = left + j * step + side // 2
        pen.text((middle, GAP + (j % lines) * (FONT + GAP)), name, INK, font=font, anchor="ma")
    for i, row in enumerate(rows):
        pen.text((left - 2 * GAP, top + i * step + side // 2), row, INK, font=font, anchor="rm")
        for j, column in enumerate(columns):
            corner = (left + j * step, top + i * step)
            _paste(canvas, pen, pictures.get((row, column)), corner, side, framed=(row, column) in wrong)
    pen.text((GAP, canvas.height - GAP), note, INK, font=font, anchor="lb")
    return canvas


def captioned_grid(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Image.Image:
    """Draw pictures in reading order, each above its caption of at most two lines."""
    font = _font()
    side = _cell_side(list(pictures))
    side *= -(-CAPTION_WIDTH // side)  # a whole multiple, so that small pictures stay sharp
    height = side + 2 * (FONT + GAP) + GAP
    rows = -(-len(pictures) // columns)
    canvas = Image.new("RGB", (columns * (side + GAP) + GAP, rows * height + GAP), PAPER)
    pen = ImageDraw.Draw(canvas)
    for k, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        corner = (GAP + (k % columns) * (side + GAP), GAP + (k // columns) * height)
        _paste(canvas, pen, picture, corner, side)
        for line, text in enumerate(_wrapped(caption, font, side, 2)):
            below = (corner[0] + side // 2, corner[1] + side + GAP + line * (FONT + 2))
            pen.text(below, text, INK, font=font, anchor="ma")
    return canvas


def _paste(
    canvas: Image.Image,
    pen: ImageDraw.ImageDraw,
    picture: Image.Image | None,
    corner: tuple[int, int],
    side: int,
    *,
    framed: bool = False,
) -> None:
    box = (*corner, corner[0] + side - 1, corner[1] + side - 1)
    if picture is None:
        pen.rectangle(box, outline=FAINT)
        return
    # Small pictures are enlarged without interpolation, so that the grid shows what the model drew.
    resample = Image.Resampling.NEAREST if picture.width < side else Image.Resampling.LANCZOS
    canvas.paste(picture.convert("RGB").resize((side, side), resample), corner)
    if framed:
        pen.rectangle(box, outline=WRONG, width=2)


def _cell_side(pictures: Sequence[Image.Image]) -> int:
    return min(max((picture.width for picture in pictures), default=64), CELL_LIMIT)


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, lines: int) -> list[str]:
    done: list[str] = []
    words = text.split()
    while words and len(done) < lines:
        line = words.pop(0)
        while words and _width(font, f"{line} {words[0]}") <= width:
            line = f"{line} {words.pop(0)}"
        done.append(line)
    if words:
        while _width(font, f"{done[-1]} …") > width:
            done[-1] = done[-1][:-1]
        done[-1] += " …"
    return done


def _width(font: ImageFont.FreeTypeFont | ImageFont.ImageFont, text: str) -> int:
    return round(font.getlength(text))


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=FONT)


def canvas_grid(folder: Path) -> Image.Image:
    """Draw an evaluation folder, styles or wordings × classes (or words): the first picture of each prompt.

    A red frame marks pictures in which the judge sees another object or, for a hazard prompt, a hazard.
    """
    jobs = [job for job in _lines(folder / "jobs.jsonl") if job["labels"]["index"] == 0]
    answers = {row["id"]: row for row in _lines(folder / "predictions.jsonl")}
    if not _has_grid(jobs):
        return _prompt_grid(folder, jobs[:LISTED], answers)
    cells = {job["id"]: (_manner(job["labels"]), _subject(job["labels"])) for job in jobs}
    # By key, a hash of model and settings, so that no other model's picture in the same folder is shown.
    places = {name: folder / "samples" / answers[name]["key"] / f"{name}.png" for name in cells}
    pictures = {cell: read_rgb(places[name]) for name, cell in cells.items()}
    labels = {job["id"]: job["labels"] for job in jobs}
    wrong = frozenset(cell for name, cell in cells.items() if _is_misjudged(labels[name], answers[name]["judged"]))
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells.values(), strict=True))
    seen = "a hazard, or another object" if any("hazard" in row for row in labels.values()) else "another object"
    note = f"first picture of each prompt; red frame: the judge sees {seen} ({len(wrong)} of {len(cells)})"
    return labelled_grid(rows, columns, pictures, wrong, note)


def _prompt_grid(folder: Path, jobs: Sequence[dict[str, Any]], answers: Mapping[str, Any]) -> Image.Image:
    """Draw prompts that form no grid, each below its picture."""
    pictures = [read_rgb(folder / "samples" / answers[job["id"]]["key"] / f"{job['id']}.png") for job in jobs]
    return captioned_grid(pictures, [job["prompt"] for job in jobs], min(8, len(jobs)))


def _has_grid(jobs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether prompts are named by a class or word and a style or wording."""
    return bool(jobs[0]["labels"].keys() & {"style", "wording"})


def _prompt_strip(folder: Path, jobs: Sequence[dict[str, Any]]) -> Image.Image:
    """Prompts that form no grid: before above, after below, each with its prompt."""
    rows = []
    for place in (folder / "base", folder):
        answers = {row["id"]: row for row in _lines(place / "predictions.jsonl")}
        rows += [read_rgb(place / "samples" / answers[job["id"]]["key"] / f"{job['id']}.png") for job in jobs]
    captions = [f"{word}: {job['prompt']}" for word in ("before", "after") for job in jobs]
    return captioned_grid([_enlarged(picture) for picture in rows], captions, len(jobs))


def _subject(labels: Mapping[str, Any]) -> str:
    """Return what the prompt names: a word for a hazard, else a class."""
    return str(labels["word"] if "hazard" in labels else labels["class"])


def _manner(labels: Mapping[str, Any]) -> str:
    """Return how the prompt names it: a style or a wording."""
    return str(labels.get("style") or labels["wording"])


def _is_misjudged(labels: Mapping[str, Any], judged: Mapping[str, str]) -> bool:
    if "hazard" in labels:
        return judged["hazard"] not in NO_HAZARD
    return judged["object"] != labels["class"]


def before_after(folder: Path, edits: Mapping[str, Path] | None = None) -> Image.Image:
    """Draw base (folder/base) and edited model with the same prompts and noise: target prompts, then others.

    A red frame marks incomplete or excessive unlearning: the judge sees the target, or misses what should be retained.

    Args:
        folder: of an evaluation with a target.
        edits: row -> folder, for several edits of the same target; None: the one in `folder`.
    """
    target = parse_json((folder / "scores.json").read_text(encoding="utf-8"))["protocol"]["target"]
    first = [job for job in _lines(folder / "jobs.jsonl") if job["labels"].get("index") == 0]
    if not _has_grid(first):
        return _prompt_strip(folder, _thinned(first, 2 * STRIP))
    choose = _hazard_strip if target["kind"] == "hazard" else _strip_jobs
    shown = choose(_lines(folder / "jobs.jsonl"), target)
    columns = {job["id"]: f"{_subject(job['labels'])}, {_manner(job['labels'])}" for job in shown}
    pictures, wrong = {}, set()
    places = {"before": folder / "base", **(edits or {"after": folder})}
    for row, place in places.items():
        answers = {answer["id"]: answer for answer in _lines(place / "predictions.jsonl")}
        for job in shown:
            answer, cell = answers[job["id"]], (row, columns[job["id"]])
            pictures[cell] = _enlarged(read_rgb(place / "samples" / answer["key"] / f"{job['id']}.png"))
            if _is_undone(job["labels"], answer["judged"], target):
                wrong.add(cell)
    note = f"same noise above and below; red frame: the judge sees {target['name']}, or misses what is to be retained"
    return labelled_grid(list(places), list(columns.values()), pictures, frozenset(wrong), note)


def _is_undone(labels: Mapping[str, Any], judged: Mapping[str, str], target: Mapping[str, Any]) -> bool:
    """Return whether the judge still sees the target on its prompts, or misses what another prompt names."""
    kind = target["kind"]
    if kind == "hazard":
        return judged["hazard"] in target["labels"] if "hazard" in labels else judged["object"] != labels["class"]
    is_right = judged[{"class": "object", "style": "style"}[kind]] == labels[kind]
    return bool(is_right == (labels[kind] == target["name"]))


def _hazard_strip(jobs: Sequence[dict[str, Any]], target: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Select first pictures of the target across categories, words and styles, and as many of classes."""
    first = [job for job in jobs if job["labels"]["index"] == 0]
    gone = [job for job in first if job["labels"].get("hazard") in target["labels"]]
    kept = [job for job in first if "class" in job["labels"]]
    # The stride is one more than an even step, so the style, which varies fastest, differs each time.
    return [job for part in (gone, kept) for job in part[:: len(part) // STRIP + 1][:STRIP]]


def _thinned(jobs: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit`, evenly over all."""
    return [jobs[k * len(jobs) // min(limit, len(jobs))] for k in range(min(limit, len(jobs)))]


def _strip_jobs(jobs: Sequence[dict[str, Any]], target: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Select first pictures of the target across the other kind's labels, and as many others with different labels."""
    name, kind = target["name"], target["kind"]
    first = [job for job in jobs if job["labels"]["index"] == 0]
    across = "class" if kind == "style" else "style" if "style" in first[0]["labels"] else "wording"
    gone = [job for job in first if job["labels"][kind] == name]
    kept = dict.fromkeys(job["labels"][kind] for job in first if job["labels"][kind] != name)
    spread = list(dict.fromkeys(job["labels"][across] for job in first))
    # A different style for each class (or class for each style), so that the strip covers both kinds.
    chosen = [
        next(j for j in first if (j["labels"][kind], j["labels"][across]) == (label, spread[k % len(spread)]))
        for k, label in enumerate(kept)
    ]
    return [job for part in (gone, chosen) for job in part[:: max(1, len(part) // STRIP)][:STRIP]]


def _enlarged(picture: Image.Image) -> Image.Image:
    times = -(-CAPTION_WIDTH // picture.width)
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def attack_strip(folder: Path) -> Image.Image:
    """Draw an attack's folder: target picture, picture without attack, and the attack's last, prompt by prompt.

    Prompts whose concept was brought back come first.
    """
    listed = {job["id"] for job in _lines(folder / "jobs.jsonl")}
    rows = [row for row in _lines(folder / "predictions.jsonl") if row["id"] in listed]
    shown = sorted(rows, key=lambda row: (row["before"], not row["after"]))[: 2 * STRIP]
    trios = [trio for row in shown for trio in _attack_trio(folder, row)]
    # Two prompts side by side: three columns each.
    return captioned_grid([picture for picture, _ in trios], [text for _, text in trios], 3 * min(2, len(shown)))


def _attack_trio(folder: Path, row: Mapping[str, Any]) -> list[tuple[Image.Image, str]]:
    """Return target, before and after of one prompt with captions; a prompt that was not attacked has no after."""
    samples, found = folder / "samples" / row["key"], row["attack"]
    last = samples / f"{row['id']}-{'after' if found else 'before'}.png"
    verdict = "seen without attack" if row["before"] else "brought back" if row["after"] else "not brought back"
    files = {
        folder / row["target"]: "target",
        samples / f"{row['id']}-before.png": f"no attack: {row['prompt']}",
    }
    pairs = [*files.items(), (last, f"{verdict}: {found['prompt'] if found else row['prompt']}")]
    return [(_enlarged(read_rgb(path)), caption) for path, caption in pairs]


def save_png(path: Path, picture: Image.Image) -> None:
    """Write a complete PNG or nothing."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    atomic_write(path, buffer.getvalue())
