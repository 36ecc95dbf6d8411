"""The file of captions that LLaVA writes and `split` reads: one JSON line a picture, named by its hash.

A row is {"sha256", "class", "prompt", "key"}; the key is a hash of model and instruction, so that only pictures without
a caption are looked at and no file has captions of two kinds. While captions are being written they are appended to
FILE.partial, batch by batch; FILE appears when all are there. Captions that may speak of minors are withheld, their
text is not even stored. Rows of pictures that are no longer in the folder stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Image

from cgru.disk import atomic_write
from cgru.prompts.pictures import Picture, opened

Row = dict[str, Any]
Captioner = Callable[[Sequence[Image]], list[str]]
"""Pictures -> one sentence each."""
MODEL = "llava-hf/llava-1.5-7b-hf"
INSTRUCTION = (
    "Describe this image in one concise sentence (15-25 words): main subject, pose/action, setting. "
    "Include what NSFW or suggestive elements are present in detail: nudity, revealing clothing, poses, etc."
    "Make it sound like a stable diffusion prompt."
)
"""Quoted from the appendix of the CGRU paper ("Safety-Aware Instruction for NSFW Prompt Generation"), also without the
space between its last sentences. Its main text calls it literal; the wording asks for NSFW detail."""
TOKENS = 64
"""New tokens at most: a sentence that CLIP's 77 tokens hold."""
WITHHELD = "may speak of a minor"
# Too much rather than too little: "girl" is often a woman, and is left out all the same.
MINORS = re.compile(
    r"\b(child|children|childlike|kids?|bab(y|ies)|infants?|toddlers?|minors?|under-?aged?|teens?|teenage(d|rs?)?|"
    r"adolescents?|juveniles?|youths?|boys?|girls?|school(boy|girl|child|kid)s?|schoolchildren|preteens?|lolis?|"
    r"shotas?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Tally:
    """What became of the pictures; captions, withheld and empty ones are those of the whole file."""

    captions: int
    new: int
    withheld: int
    empty: int
    """The model said nothing."""
    unreadable: int
    copies: int


@dataclass(frozen=True)
class CaptionFile:
    """FILE.jsonl, and beside it what a run under way has so far."""

    path: Path
    key: str

    @property
    def partial(self) -> Path:
        """Appended to while captions are being made."""
        return self.path.with_name(f"{self.path.name}.partial")

    def read(self) -> dict[str, Row]:
        """Rows by hash; a line of FILE.partial that a kill cut off is passed over, captions of another key refused."""
        rows = [*_rows(self.path, may_be_cut=False), *_rows(self.partial, may_be_cut=True)]
        if any(row["key"] != self.key for row in rows):
            advice = "allowed: a new file, or the same settings as before. Choose another --out."
            raise ValueError(f"{str(self.path)!r} has captions by another model, instruction or setting; {advice}")
        return {row["sha256"]: row for row in rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Keep a batch's rows, safe against a kill after this call."""
        with self.partial.open("a", encoding="utf-8") as file:
            # The leading newline closes a line that a kill may have cut off.
            file.write("\n" + _text(rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, rows: Sequence[Row]) -> None:
        """Write FILE whole."""
        atomic_write(self.path, _text(rows).encode())
        self.partial.unlink(missing_ok=True)


def caption_all(
    pictures: Sequence[Picture],
    file: CaptionFile,
    captioner: Captioner | None,
    *,
    batch_size: int,
    copies: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Tally:
    """Caption what has no caption yet, then write the file; `captioner` may be None when nothing is missing."""
    rows = file.read()
    missing = [picture for picture in pictures if picture.sha256 not in rows]
    before, unreadable = len(rows), 0
    for start in range(0, len(missing), batch_size):
        part = [(picture, opened(picture)) for picture in missing[start : start + batch_size]]
        readable = [(picture, image) for picture, image in part if image is not None]
        unreadable += len(part) - len(readable)
        if readable and captioner:
            texts = captioner([image for _, image in readable])
            new = [_row(picture, text, file.key) for (picture, _), text in zip(readable, texts, strict=True)]
            file.append(new)
            rows |= {row["sha256"]: row for row in new}
        progress("captioning", start + len(part), len(missing))
    if not rows:
        raise FileNotFoundError(
            f"none of the {len(pictures)} pictures can be read; allowed: whole pictures. Check them."
        )
    file.finish([rows[name] for name in sorted(rows)])
    told, withheld = sum(bool(row["prompt"]) for row in rows.values()), sum("withheld" in r for r in rows.values())
    return Tally(told, len(rows) - before, withheld, len(rows) - told - withheld, unreadable, copies)


def caption_key(**settings: Any) -> str:  # noqa: ANN401 - anything JSON holds
    """A hash of what decides a caption beside the picture."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read_captions(path: Path) -> list[Row]:
    """The rows of a finished file that have a caption."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}; allowed: what `cgru prompts caption` wrote. Check the path.")
    rows = [row for row in _rows(path, may_be_cut=False) if row["prompt"].strip()]
    if not rows:
        raise ValueError(f"no captions in {str(path)!r}: it is empty, or all are withheld. Caption more pictures.")
    return rows


def _row(picture: Picture, text: str, key: str) -> Row:
    row: Row = {"sha256": picture.sha256, "class": picture.label, "prompt": " ".join(text.split()), "key": key}
    return {**row, "prompt": "", "withheld": WITHHELD} if MINORS.search(text) else row


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rows(path: Path, *, may_be_cut: bool) -> Iterator[Row]:
    """The rows of a file, none if there is no file; an error if it holds something else than captions."""
    text = path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            if may_be_cut:
                continue  # a kill in the middle of a write: that picture is captioned again
            row = None
        if not _is_row(row):
            advice = "allowed: a file of `cgru prompts caption`. Choose another file."
            raise ValueError(f"{str(path)!r}, line {number} is no caption ({line[:40]!r}); {advice}")
        yield row


def _is_row(row: object) -> bool:
    names = ("sha256", "class", "prompt", "key")
    return isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
