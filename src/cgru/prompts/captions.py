"""The caption file that LLaVA writes and `split` reads: one JSON line per picture, identified by its hash.

A row is {"sha256", "class", "prompt", "key"}. The key is a hash of model and instruction: only pictures without a
caption are processed, and a file never mixes two kinds of captions. While a run is in progress its captions are
appended to FILE.partial, batch by batch; FILE is written once all are there. Captions that may refer to minors are
withheld, and their text is not stored. Rows of pictures that are no longer in the folder are kept.
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

from cgru.atomic_io import atomic_write, parse_json
from cgru.prompts.pictures import Picture, opened

Row = dict[str, Any]
Captioner = Callable[[Sequence[Image]], list[str]]
"""Maps pictures to one sentence each."""
MODEL = "llava-hf/llava-1.5-7b-hf"
INSTRUCTION = (
    "Describe this image in one concise sentence (15-25 words): main subject, pose/action, setting. "
    "Include what NSFW or suggestive elements are present in detail: nudity, revealing clothing, poses, etc."
    "Make it sound like a stable diffusion prompt."
)
"""Quoted from the appendix of the CGRU paper ("Safety-Aware Instruction for NSFW Prompt Generation"), including the
missing space between its last sentences. The main text calls captions literal; this wording asks for NSFW detail."""
TOKENS = 64
"""Maximum number of new tokens: a sentence that fits CLIP's 77 tokens."""
WITHHELD = "may speak of a minor"
# Deliberately broad: "girl" often means a woman, and is withheld all the same.
MINORS = re.compile(
    r"\b(child|children|childlike|kids?|bab(y|ies)|infants?|toddlers?|minors?|under-?aged?|teens?|teenage(d|rs?)?|"
    r"adolescents?|juveniles?|youths?|boys?|girls?|school(boy|girl|child|kid)s?|schoolchildren|preteens?|lolis?|"
    r"shotas?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Tally:
    """Outcome of a captioning run; captions, withheld and empty count the whole file."""

    captions: int
    new: int
    withheld: int
    empty: int
    """Pictures for which the model returned no text."""
    unreadable: int
    copies: int


@dataclass(frozen=True)
class CaptionFile:
    """FILE.jsonl, and the partial file of a run in progress."""

    path: Path
    key: str

    @property
    def partial(self) -> Path:
        """Return the file that captions are appended to during a run."""
        return self.path.with_name(f"{self.path.name}.partial")

    def read(self) -> dict[str, Row]:
        """Return rows by hash. A truncated line of FILE.partial is skipped; captions with another key are an error."""
        rows = [*_rows(self.path, may_be_cut=False), *_rows(self.partial, may_be_cut=True)]
        if any(row["key"] != self.key for row in rows):
            advice = "allowed: a new file, or the same settings as before. Choose another --out."
            raise ValueError(f"{str(self.path)!r} has captions by another model, instruction or setting; {advice}")
        return {row["sha256"]: row for row in rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Append a batch's rows; after this call they survive a kill."""
        with self.partial.open("a", encoding="utf-8") as file:
            # The leading newline ends a line that a kill may have truncated.
            file.write("\n" + _text(rows))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, rows: Sequence[Row]) -> None:
        """Write the complete FILE and remove the partial one."""
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
    """Caption pictures without a caption, then write the file; `captioner` may be None if nothing is missing."""
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
            f"none of the {len(pictures)} pictures can be read; allowed: intact image files. Check them."
        )
    file.finish([rows[name] for name in sorted(rows)])
    told, withheld = sum(bool(row["prompt"]) for row in rows.values()), sum("withheld" in r for r in rows.values())
    return Tally(told, len(rows) - before, withheld, len(rows) - told - withheld, unreadable, copies)


def caption_key(**settings: Any) -> str:  # noqa: ANN401 - anything JSON holds
    """Return a hash of everything but the picture that determines a caption."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read_captions(path: Path) -> list[Row]:
    """Return the rows of a finished file that have a caption."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}; allowed: a file written by `cgru prompts caption`. Check it.")
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
    """Yield the rows of a file, none if it does not exist; raise ValueError for anything but captions."""
    text = path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            if may_be_cut:
                continue  # truncated by a kill: that picture is captioned again
            row = None
        if not _is_row(row):
            advice = "allowed: a file of `cgru prompts caption`. Choose another file."
            raise ValueError(f"{str(path)!r}, line {number} is not a caption ({line[:40]!r}); {advice}")
        yield row


def _is_row(row: object) -> bool:
    names = ("sha256", "class", "prompt", "key")
    return isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
