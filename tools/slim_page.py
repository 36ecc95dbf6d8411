"""Make a report page small enough to commit: its PNG pictures become WebP, at the same size in pixels.

    python tools/slim_page.py docs/results/reproduce-small.html

Numbers, text and drawings (SVG) stay as they are. WebP loses detail, so measure on the pictures of the run, never on
these. A page without PNG pictures is left alone.
"""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path

from PIL import Image

PNG = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
QUALITY = 85


def as_webp(found: re.Match[str]) -> str:
    """The data URI of the same picture in WebP, or the PNG if that is the smaller one."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(found[1]))) as picture:
        picture.save(buffer, format="WEBP", quality=QUALITY, method=6)
    webp = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    return min(webp, found[0], key=len)


def slim(page: str) -> str:
    """The page with its pictures in WebP."""
    return PNG.sub(as_webp, page)


def main() -> None:
    """Rewrite each page that is named, and print its size before and after."""
    if not sys.argv[1:]:
        sys.exit("usage: python tools/slim_page.py PAGE.html [PAGE.html ...]")
    for path in map(Path, sys.argv[1:]):
        page = path.read_text(encoding="utf-8")
        path.write_text(smaller := slim(page), encoding="utf-8")
        print(f"{path}: {len(page) / 1e6:.2f} MB -> {len(smaller) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
