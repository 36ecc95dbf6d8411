"""All figures of a report, by name and as files: SVG, and PNG by resvg (extra `figures`).

The files always use the light theme on white, for papers and slides. They use the system's fonts, or Pillow's own font
if there are none, so that no label is lost.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path

from PIL import ImageFont

from cgru.atomic_io import atomic_write
from cgru.report.draw import charts
from cgru.report.draw.curves import percent, run_curves, short
from cgru.report.draw.svg import FONT, PALETTE
from cgru.report.run.compare import Entry, families, name_runs, plane_drawing, plane_spots
from cgru.report.run.read import Record
from cgru.report.run.reliability import reliability

Render = Callable[[str], bytes]
ZOOM = 2.5
"""Pixels a unit of the drawing: 720 units are 1800 pixels, six inches at 300 dots an inch."""
MEDIA = re.compile(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
SIZE = re.compile(r' (?:width|height|style)="[^"]*"')
SPARE = "Aileron"
"""The family of pillow's own font."""
PLAIN = str.maketrans({"−": "-", "–": "-", "→": ">", "↑": "", "↓": "", "×": "x", "ρ": "ratio"})
"""For a machine without fonts: pillow's own has no such letters."""


def run_figures(record: Record) -> dict[str, str]:
    """Name -> SVG of what one run's files let one draw."""
    metrics = record.metrics
    found: dict[str, str | None] = {
        "curves": run_curves(record.run) if metrics else None,
        "ratios": charts.ratios(metrics),
        "ratios-by-step": charts.ratio_steps(metrics),
        "gradient-variance": charts.variances(metrics),
        "gradient-variance-normalised": charts.variances(metrics, "_raw_normalised"),
        "critic-error": charts.critic_steps(metrics, record.fit, "value_error", short),
        "critic-explained-variance": charts.critic_steps(metrics, record.fit, "explained_variance", percent),
        "critic-calibration": reliability(record.fit),
    }
    return {name: svg for name, svg in found.items() if svg}


def all_figures(records: Sequence[Record]) -> dict[str, str]:
    """Those of every run (of several: each under its letter) and a plane for each family."""
    named = name_runs(records)
    found: dict[str, str] = {}
    for run in named:
        prefix = "" if len(named) == 1 else f"{run.letter}-"
        found |= {f"{prefix}{name}": svg for name, svg in run_figures(run.record).items()}
    return found | _planes(families(named))


def write_figures(figures: Mapping[str, str], folder: Path, render: Render) -> list[Path]:
    """Each as .svg and .png; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in figures.items():
        plain = light(svg)
        for path, data in ((folder / f"{name}.svg", plain.encode()), (folder / f"{name}.png", render(plain))):
            atomic_write(path, data)
            written.append(path)
    return written


def light(svg: str) -> str:
    """The drawing on white with its size, and without rules for dark or narrow screens."""
    flat = MEDIA.sub("", svg)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', flat)
    assert found, svg[:200]
    size = f'width="{found[1]}" height="{found[2]}"'
    sized = re.sub(r"<svg [^>]*>", lambda head: SIZE.sub("", head[0]).replace("<svg", f"<svg {size}", 1), flat, count=1)
    return sized.replace("</style>", f'</style><rect {size} fill="{PALETTE["paper"][0]}"/>', 1)


def find_renderer(*, has_system_fonts: bool = True) -> Render:
    """SVG to PNG; a ValueError that says what to install where resvg is not."""
    try:
        import resvg_py
    except ImportError:
        raise ValueError(
            "--figures writes PNG with resvg-py, which is not installed; allowed: with it. pip install 'cgru[figures]'"
        ) from None

    plainly = partial(resvg_py.svg_to_bytes, skip_system_fonts=not has_system_fonts)
    is_known = plainly(svg_string=_sign("−")) != plainly(svg_string=_sign(""))

    def render(svg: str) -> bytes:
        with _spare_font() as spare:
            words = svg if is_known else svg.translate(PLAIN)
            return bytes(plainly(svg_string=words, zoom=ZOOM, font_files=[spare], sans_serif_family=SPARE))

    return render


def _sign(sign: str) -> str:
    """One letter, which shows whether the machine has a font that the drawings ask for."""
    inside = f'<style>{FONT}</style><text y="30">{sign}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40">{inside}</svg>'


@contextmanager
def _spare_font() -> Iterator[str]:
    """The font inside pillow, as a file."""
    font = ImageFont.load_default(size=12)
    assert isinstance(font, ImageFont.FreeTypeFont) and isinstance(font.path, BytesIO), font
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spare.ttf"
        path.write_bytes(font.path.getvalue())
        yield str(path)


def _planes(groups: Sequence[Sequence[Entry]]) -> dict[str, str]:
    drawn = [group for group in groups if plane_spots(group)]
    names = [f"plane-{group[0].evaluation.name.replace('@', '-')}" for group in drawn]
    return {
        f"{name}{f'-{i}' if names.count(name) > 1 else ''}": plane_drawing(group)
        for i, (name, group) in enumerate(zip(names, drawn, strict=True))
    }
