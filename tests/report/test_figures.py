"""Figures as files: SVG and PNG of every drawing, light on white, with their letters whatever fonts there are."""

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from test_report_page import add_scores, make_run, page_of, scores, words

from cgru.cli import main
from cgru.report.draw.charts import ratios
from cgru.report.run.figures import ZOOM, all_figures, find_renderer, light, run_figures
from cgru.report.run.read import read_record
from cgru.report.run.reliability import miscalibration, named, reliability
from cgru.runs import Run

# Two ranges of timesteps: the first is right on average, the second 2 too high and then 1 too low.
FIT = {
    "held_out": 6,
    "calibration": [
        {"first": 0, "last": 3, "predicted": [2.0, 6.0], "achieved": [2.0, 6.0], "spread": [1, 1], "counts": [9, 9]},
        {"first": 4, "last": 4, "predicted": [3.0, 7.0], "achieved": [1.0, 8.0], "spread": [1, 1], "counts": [3, 1]},
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = make_run(tmp_path)
    add_scores(made, scores())
    return made


def picture(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as file:
        return file.convert("RGB")


def test_the_command_writes_each_figure_twice(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drawn" / "here"
    assert main(["report", str(run.path), "--figures", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = {Path(path).name for path in told["figures"]}
    assert {"curves.svg", "curves.png", "ratios.png", "critic-error.svg", "plane-canvas-2.png"} <= names
    assert {path.name for path in out.iterdir()} == names
    for path in out.glob("*.png"):
        with Image.open(path) as file:
            assert file.width == 720 * ZOOM and file.getpixel((2, 2))[:3] == (255, 255, 255)


def test_several_runs_have_letters(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed) for seed in range(2)]
    for one in runs:
        add_scores(one, scores())
    found = all_figures([read_record(one.path) for one in runs])
    assert {"A-ratios", "B-ratios", "plane-canvas-2"} <= found.keys() and "ratios" not in found


def test_a_folder_that_is_a_file_is_one_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["report", str(run.path), "--figures", str(tmp_path / "file")]) == 2
    assert "is a file; allowed: a folder" in capsys.readouterr().err
    assert not (run.path / "report.html").exists()


def test_files_are_light_and_have_a_size(run: Run) -> None:
    for name, svg in run_figures(read_record(run.path)).items():
        plain = light(svg)
        assert "@media" not in plain and "#ffffff" in plain, name
        assert re.match(r'<svg width="720" height="[\d.]+" ', plain), plain[:80]
        assert plain.count("{") == plain.count("}")


@pytest.mark.parametrize("has_system_fonts", [True, False])
def test_letters_appear_with_and_without_system_fonts(run: Run, has_system_fonts: bool) -> None:
    svg = ratios(read_record(run.path).metrics)
    assert svg is not None and ">mean 0.9<" in svg
    render = find_renderer(has_system_fonts=has_system_fonts)
    whole, mute = (picture(render(light(text))) for text in (svg, re.sub(r"<text.*?</text>", "", svg)))
    # What the letters add lies right of the plot too, where the lines' names stand (from 550 of 720 units on).
    box = ImageChops.difference(whole, mute).getbbox()
    assert box is not None and box[0] < 74 * ZOOM and box[2] > 560 * ZOOM


def test_without_fonts_no_letter_is_a_box() -> None:
    svg = '<svg viewBox="0 0 100 40" class="x"><style>text{fill:currentColor}</style><text y="20">−{}</text></svg>'
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    render = find_renderer(has_system_fonts=False)
    minus, hyphen = (render(light(svg.replace("−{}", sign))) for sign in ("−1", "-1"))
    assert minus == hyphen


def test_calibration_is_drawn_and_measured(run: Run) -> None:
    drawing = reliability(FIT)
    assert drawing is not None and drawing.count("<circle") == 4
    assert "steps 0–3: 2 → 2, 6 → 6" in drawing and ">Step 4, 4 states<" in drawing
    assert miscalibration(FIT["calibration"][0]) == 0.0
    assert miscalibration(FIT["calibration"][1]) == (2 * 3 + 1 * 1) / 4  # weighted by states
    assert named(FIT["calibration"][1]) == "step 4"
    run.finish("2-critic", FIT)
    text = words(page_of(run))
    assert "22 states of 6 held-out trajectories" in text and "steps 0–3 0; step 4 1.75" in text


def test_a_run_without_calibration_says_so(run: Run) -> None:
    assert "This run recorded no calibration" in words(page_of(run))
    assert reliability({"value_error": [1.0]}) is None and reliability(None) is None
