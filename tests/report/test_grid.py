"""Grids: every picture is where its row and column say."""

import json
from pathlib import Path

from PIL import Image

from cgru.evaluation.picture_grid import CAPTION_WIDTH, GAP, canvas_grid, captioned_grid, labelled_grid

RED, BLUE = (255, 0, 0), (0, 0, 255)


def plain(colour: tuple[int, int, int], side: int = 8) -> Image.Image:
    return Image.new("RGB", (side, side), colour)


def centres(grid: Image.Image, colour: tuple[int, int, int]) -> tuple[float, float]:
    """The mean place of a colour."""
    places = [(x, y) for x in range(grid.width) for y in range(grid.height) if grid.getpixel((x, y)) == colour]
    assert len(places) == 64, f"{len(places)} pixels of {colour}"
    return sum(x for x, _ in places) / 64, sum(y for _, y in places) / 64


def test_cells_are_at_their_row_and_column() -> None:
    pictures = {("cats", "flat"): plain(RED), ("dogs", "pencil"): plain(BLUE)}
    grid = labelled_grid(["cats", "dogs"], ["flat", "pencil"], pictures)
    (red_x, red_y), (blue_x, blue_y) = centres(grid, RED), centres(grid, BLUE)
    assert (blue_x - red_x, blue_y - red_y) == (8 + GAP, 8 + GAP)


def test_a_wrong_cell_is_framed() -> None:
    pictures = {("cats", "flat"): plain(BLUE, 16)}
    right = labelled_grid(["cats"], ["flat"], pictures)
    wrong = labelled_grid(["cats"], ["flat"], pictures, frozenset({("cats", "flat")}))
    assert sum(count for count, colour in right.getcolors(10_000) if colour == BLUE) == 256
    assert sum(count for count, colour in wrong.getcolors(10_000) if colour == BLUE) == 144  # 12 × 12 inside the frame


def test_small_pictures_are_enlarged_by_a_whole_factor() -> None:
    grid = captioned_grid([plain(RED, 64)], ["a very long caption that cannot fit " * 5], 1)
    side = 128  # the first multiple of 64 above the caption's width
    assert side >= CAPTION_WIDTH
    assert sum(count for count, colour in grid.getcolors(10_000) if colour == RED) == side * side


def test_the_grid_of_an_evaluation_has_a_row_per_style_and_frames_what_was_misjudged(tmp_path: Path) -> None:
    cells = [("Cats", "flat", "Cats"), ("Cats", "ink", "Dogs"), ("Dogs", "flat", "Dogs"), ("Dogs", "ink", "Dogs")]
    samples = tmp_path / "samples" / "k"
    samples.mkdir(parents=True)
    plain((0, 255, 0)).save(tmp_path / "samples" / "j0.png")  # of another key: never shown
    jobs, answers = [], []
    for i, (label, style, judged) in enumerate(cells):
        jobs.append({"id": f"j{i}", "labels": {"class": label, "style": style, "index": 0}})
        answers.append({"id": f"j{i}", "key": "k", "judged": {"object": judged}})
        plain(BLUE if (label, style) == ("Cats", "ink") else RED, 16).save(samples / f"j{i}.png")
    (tmp_path / "jobs.jsonl").write_text("\n".join(json.dumps(job) for job in jobs))
    (tmp_path / "predictions.jsonl").write_text("\n".join(json.dumps(answer) for answer in answers))
    grid = canvas_grid(tmp_path)
    counts = {colour: count for count, colour in grid.getcolors(100_000)}
    assert counts[RED] == 3 * 256 and counts[BLUE] == 144  # one frame, around the one misjudged picture
    blue = [y for y in range(grid.height) for x in range(grid.width) if grid.getpixel((x, y)) == BLUE]
    red = [y for y in range(grid.height) for x in range(grid.width) if grid.getpixel((x, y)) == RED]
    assert min(red) < min(blue)  # "ink" is the second row
