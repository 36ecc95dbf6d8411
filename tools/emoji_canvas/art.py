"""Source art: download by package name, then rasterise to 128-pixel RGBA icons with their labels.

Iconify sets come from the npm registry (`npm pack`), openclipart from Debian (`apt-get download`). Both steps skip
what is already in the work folder. Output: `icons-{main,judge,heldout}.npz` and a JSON of records beside each.
"""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.emoji_canvas import judge_art
from tools.emoji_canvas.vocabulary import (
    CLASSES,
    EVERYDAY,
    FX_NAMES,
    HAZARDS,
    HELD_OUT_SET,
    JUDGE_SETS,
    MONOCHROME,
    STYLES,
    Noun,
)

log = logging.getLogger(__name__)
ICON_SIZE = 128
GROUPS: dict[str, tuple[Noun, ...]] = {"class": CLASSES, "hazard": HAZARDS, "everyday": EVERYDAY}
Record = dict[str, Any]


def download(work: Path) -> None:
    """Fetch every icon set and openclipart into `work/art`; skip what is there."""
    folder = work / "art"
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*STYLES.values(), *JUDGE_SETS, HELD_OUT_SET]:
        if not list(folder.glob(f"iconify-json-{name}-[0-9]*.tgz")):
            log.info("art: %s", name)
            subprocess.run(["npm", "pack", "--silent", f"@iconify-json/{name}"], cwd=folder, check=True)
    if not (folder / "openclipart").exists():
        log.info("art: openclipart")
        subprocess.run(["apt-get", "download", "-qq", "openclipart-svg"], cwd=folder, check=True)
        package = next(folder.glob("openclipart-svg_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package.name, "openclipart"], cwd=folder, check=True)


class IconSet:
    """One Iconify set: icon names (aliases followed) to SVG text."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read `icons.json` and `info.json` out of the set's npm archive."""
        self.archive = next(folder.glob(f"iconify-json-{name}-[0-9]*.tgz"))
        with tarfile.open(self.archive) as archive:
            self.data = _member(archive, "package/icons.json")
            self.info = _member(archive, "package/info.json")
        self.name = name
        self.names = [*self.data["icons"], *self.data.get("aliases", {})]

    def svg(self, icon: str) -> str | None:
        """The icon centred in a square view box, or None where the set has no such icon."""
        icon = self.data.get("aliases", {}).get(icon, {}).get("parent", icon)
        if icon not in self.data["icons"]:
            return None
        entry = {"left": 0, "top": 0, "width": 16, "height": 16, **_sizes(self.data), **self.data["icons"][icon]}
        side = max(entry["width"], entry["height"])
        left, top = entry["left"] - (side - entry["width"]) / 2, entry["top"] - (side - entry["height"]) / 2
        space = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        return f'<svg {space} viewBox="{left} {top} {side} {side}">{entry["body"]}</svg>'


def _sizes(data: Record) -> Record:
    return {key: data[key] for key in ("left", "top", "width", "height") if key in data}


def _member(archive: tarfile.TarFile, path: str) -> Record:
    file = archive.extractfile(path)
    assert file is not None, path
    return json.load(file)


def rasterise(work: Path) -> None:
    """Write the three icon collections; skip those that exist."""
    collections = {"main": main_icons, "judge": judge_icons, "heldout": held_out_icons}
    for name, build in collections.items():
        target = work / f"icons-{name}.npz"
        if target.exists():
            continue
        pairs = list(build(work / "art"))
        np.savez_compressed(target, icons=np.stack([pixels for pixels, _ in pairs]))
        target.with_suffix(".json").write_text(json.dumps([record for _, record in pairs], indent=0))
        log.info("icons %s: %d", name, len(pairs))


def main_icons(folder: Path) -> Iterator[tuple[np.ndarray, Record]]:
    """Icons of the eight style sets for every noun; substitutes only where a set has none of its own."""
    for style, name in STYLES.items():
        icons = IconSet(folder, name)
        for group, nouns in GROUPS.items():
            for noun in nouns:
                own = _present(icons, noun.icons)
                for icon, svg, words in own or _present(icons, noun.substitutes):
                    yield raster(svg), _record(name, icon, group, noun.label, style=style, words=words)


def _present(icons: IconSet, table: dict[str, tuple[str, ...]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """(icon, svg, words) for those of `table` that the set has."""
    rows = []
    for icon, words in table.items():
        own = FX_NAMES.get(icon, icon.replace("-", "")) if icons.name == "fxemoji" else icon
        svg = icons.svg(own)
        if svg is not None:
            rows.append((icon, svg, words))
    return rows


def judge_icons(folder: Path) -> Iterator[tuple[np.ndarray, Record]]:
    """Art that only judges see: further Iconify sets and openclipart."""
    for name in JUDGE_SETS:
        yield from _matched_icons(IconSet(folder, name))
    yield from _openclipart(folder / "openclipart/usr/share/openclipart/svg")


def held_out_icons(folder: Path) -> Iterator[tuple[np.ndarray, Record]]:
    """The set that no network sees."""
    yield from _matched_icons(IconSet(folder, HELD_OUT_SET))


def _matched_icons(icons: IconSet) -> Iterator[tuple[np.ndarray, Record]]:
    patterns = {**judge_art.ICONIFY, "other": judge_art.OTHER_ICONIFY}
    for label, pattern in patterns.items():
        for icon in icons.names:
            if re.fullmatch(pattern, icon):
                yield raster(icons.svg(icon) or ""), _record(icons.name, icon, _group(label), label)


def _openclipart(folder: Path) -> Iterator[tuple[np.ndarray, Record]]:
    paths = sorted(path for path in folder.rglob("*.svg") if path.stat().st_size < 300_000)
    patterns = {**judge_art.OPENCLIPART, "other": judge_art.OTHER_OPENCLIPART}
    for label, pattern in patterns.items():
        for path in paths:
            name = str(path.relative_to(folder))
            if re.fullmatch(pattern, name):
                pixels = _try_raster(path)
                if pixels is not None:
                    yield pixels, _record("openclipart", name, _group(label), label)


def _try_raster(path: Path) -> np.ndarray | None:
    """Openclipart holds a few broken files; they are named in the log and left out."""
    try:
        pixels = raster(path.read_text(errors="replace"))
    except ValueError as error:
        log.warning("left out %s: %s", path.name, str(error).splitlines()[0])
        return None
    return pixels if pixels[..., 3].mean() > 8 else None


def _group(label: str) -> str:
    return "other" if label == "other" else "hazard" if label in {noun.label for noun in HAZARDS} else "class"


def _record(source: str, icon: str, group: str, label: str, style: str = "", words: tuple[str, ...] = ()) -> Record:
    return {
        "set": source,
        "icon": icon,
        "group": group,
        "label": label,
        "style": style,
        "words": list(words),
        "monochrome": source in MONOCHROME,
    }


def raster(svg: str) -> np.ndarray:
    """SVG text to a square RGBA picture, uint8, aspect kept."""
    import resvg_py

    data = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=ICON_SIZE * 2, dpi=96.0))
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    image.thumbnail((ICON_SIZE, ICON_SIZE), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (ICON_SIZE, ICON_SIZE))
    canvas.paste(image, ((ICON_SIZE - image.width) // 2, (ICON_SIZE - image.height) // 2))
    return np.asarray(canvas)


def load(work: Path, name: str) -> tuple[np.ndarray, list[Record]]:
    """An icon collection: (n, 128, 128, 4) uint8 and its records."""
    path = work / f"icons-{name}.npz"
    return np.load(path)["icons"], json.loads(path.with_suffix(".json").read_text())
