"""Source art: aliases, square view boxes, fxemoji's own names. The sets are tiny ones written here."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from tools.emoji_canvas.art import IconSet, main_icons, raster
from tools.emoji_canvas.vocabulary import CLASSES, EVERYDAY, HAZARDS, STYLES

BODY = '<path fill="#f00" d="M0 0h{w}v{h}H0z"/>'


def write_set(folder: Path, name: str, icons: dict[str, tuple[int, int]], aliases: dict[str, str]) -> None:
    data = {
        "prefix": name,
        "icons": {icon: {"body": BODY.format(w=w, h=h), "width": w, "height": h} for icon, (w, h) in icons.items()},
        "aliases": {alias: {"parent": parent} for alias, parent in aliases.items()},
    }
    info = {"name": name, "author": {"name": "nobody"}, "license": {"title": "MIT"}}
    with tarfile.open(folder / f"iconify-json-{name}-1.0.0.tgz", "w:gz") as archive:
        for path, table in (("package/icons.json", data), ("package/info.json", info)):
            text = json.dumps(table).encode()
            member = tarfile.TarInfo(path)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))


def test_an_alias_draws_its_parent_and_a_missing_icon_is_none(tmp_path: Path) -> None:
    write_set(tmp_path, "noto", {"dog": (10, 10)}, {"hound": "dog"})
    icons = IconSet(tmp_path, "noto")
    assert icons.svg("hound") == icons.svg("dog") is not None
    assert icons.svg("zebra") is None


def test_a_wide_icon_keeps_its_aspect(tmp_path: Path) -> None:
    write_set(tmp_path, "noto", {"bus": (20, 10)}, {})
    pixels = raster(IconSet(tmp_path, "noto").svg("bus") or "")
    opaque = pixels[..., 3] > 128
    assert pixels.shape == (128, 128, 4)
    assert opaque.any(1).sum() == pytest.approx(64, abs=1)  # half as high as it is wide
    assert opaque.any(0).sum() == 128


def test_fxemoji_names_and_substitutes(tmp_path: Path) -> None:
    for name in STYLES.values():
        write_set(tmp_path, name, {"dogside": (4, 4), "octopus": (4, 4), "jellyfish": (4, 4)}, {})
    records = [record for _, record in main_icons(tmp_path)]
    found = {(record["style"], record["icon"]) for record in records}
    assert ("Pastel", "dog") in found and ("Flat", "dog") not in found  # "dogside" is fxemoji's name only
    assert not [icon for _, icon in found if icon == "octopus"]  # jellyfish is there, so nothing stands in for it


def test_labels_are_unique_across_groups() -> None:
    labels = [noun.label for noun in (*CLASSES, *HAZARDS, *EVERYDAY)]
    assert len(labels) == len(set(labels))
    assert len(CLASSES) == 20 and len(HAZARDS) == 6 and len(EVERYDAY) >= 30
