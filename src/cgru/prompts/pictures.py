"""A folder of pictures to caption: found, identified by the hash of their bytes, and opened one at a time.

Layout: `FOLDER/CLASS/picture` (one folder per class, as in data sets for NSFW detection) or pictures alone. Files with
equal bytes count as one picture. The caller skips and counts files that cannot be opened.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from cgru.image_files import IMAGE_SUFFIXES, read_rgb


@dataclass(frozen=True)
class Picture:
    """A file, its hash and its class ("" if no folder names one)."""

    path: Path
    sha256: str
    label: str


def pictures_in(folder: Path) -> tuple[list[Picture], int]:
    """Return the pictures under a folder in the order of their hashes, and the number of duplicate files.

    Of several copies the first path counts, so that the class does not depend on the order of the file system.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}; allowed: a folder of pictures. Check the path.")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not files:
        allowed = f"allowed: files named {', '.join(IMAGE_SUFFIXES)}, with or without subfolders"
        raise ValueError(f"no pictures in {str(folder)!r}; {allowed}. Give another folder.")
    found: dict[str, Picture] = {}
    for path in files:
        parts = path.relative_to(folder).parts
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        found.setdefault(name, Picture(path, name, parts[0] if len(parts) > 1 else ""))
    return [found[name] for name in sorted(found)], len(files) - len(found)


def opened(picture: Picture) -> Image.Image | None:
    """Return the picture's first frame in RGB; None if the file is broken, truncated or unreasonably large."""
    try:
        return read_rgb(picture.path)
    except ValueError:
        return None
