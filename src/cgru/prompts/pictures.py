"""A folder of pictures to caption: found, named by the hash of their bytes, and opened one by one.

Layout: `FOLDER/CLASS/picture` (a folder per class, as data sets of NSFW detection have it) or pictures alone. Files of
equal bytes are one picture. What cannot be opened is left out by the caller, who counts it.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Picture:
    """A file, its name for ever and its class ("" where folders name none)."""

    path: Path
    sha256: str
    label: str


def pictures_in(folder: Path) -> tuple[list[Picture], int]:
    """The pictures under a folder, in the order of their hashes, and how many files were copies of another.

    Of several copies the first path counts, so that the class does not depend on the file system's order.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}; allowed: a folder of pictures. Check the path.")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        allowed = f"allowed: files named {', '.join(SUFFIXES)}, in folders or not"
        raise ValueError(f"no pictures in {str(folder)!r}; {allowed}. Give another folder.")
    found: dict[str, Picture] = {}
    for path in files:
        parts = path.relative_to(folder).parts
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        found.setdefault(name, Picture(path, name, parts[0] if len(parts) > 1 else ""))
    return [found[name] for name in sorted(found)], len(files) - len(found)


def opened(picture: Picture) -> Image.Image | None:
    """The picture in RGB, its first frame; None where the file is broken, cut off or absurdly large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(picture.path) as file:
                return file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
