"""Image files: the supported formats, and the only place that opens them.

Pillow detects the format from a file's bytes, not from its name, and passes EPS to an external program (Ghostscript).
Therefore only formats that Pillow decodes itself are allowed: a stranger's file called dog.png cannot start a program.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes, in lower case, of the formats below."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats by Pillow's names."""


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the picture files of each class of `folder/<class>/*.png|jpg|...`; two classes or more."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if len(classes) < 2:
        found = [path.name for path in classes]
        raise FileNotFoundError(
            f"{str(folder)!r} has class folders {found}; allowed: 2 or more, each with pictures. Give such a folder."
        )
    return {path.name: _picture_files(path) for path in classes}


def _picture_files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if len(files) < 2:
        raise FileNotFoundError(
            f"{str(folder)!r} has {len(files)} pictures; allowed: 2 or more, to train on and to hold out. Put "
            f"{', '.join(IMAGE_SUFFIXES)} files there, or remove the folder."
        )
    return files


def read_rgb(path: Path) -> Image.Image:
    """The first frame of a picture file in RGB; ValueError if the file is broken, truncated or absurdly large."""
    return read_image(path).convert("RGB")


def read_image(path: Path) -> Image.Image:
    """The first frame of a picture file as it is stored, with its `format`; ValueError as with `read_rgb`."""
    if not path.is_file():  # also a pipe, which would be waited for
        raise ValueError(f"cannot read the picture {str(path)!r} (no file); replace or remove it.")
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            with Image.open(path, formats=FORMATS) as file:
                file.load()
                return file
    except UnidentifiedImageError as error:
        raise ValueError(
            f"cannot read the picture {str(path)!r} (not one of {', '.join(FORMATS)}); replace or remove it."
        ) from error
    except Exception as error:  # on damaged files pillow raises almost any type
        raise ValueError(f"cannot read the picture {str(path)!r} ({error}); replace or remove it.") from error
