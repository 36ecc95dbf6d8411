"""Read a user's own prompts: `.txt` (one prompt per line, verbatim), `.csv` or `.jsonl` (one of its columns).

UTF-8 with or without a byte order mark. Blank prompts are skipped; any other irregularity is a one-line error.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cgru.atomic_io import parse_json
from cgru.catalog import unknown

COLUMN = "prompt"


def prompts_from_file(path: str | Path, column: str = "") -> list[str]:
    """Read prompts; `column` names the column of a .csv or .jsonl, "prompt" if empty."""
    path = Path(path)
    if path.suffix.lower() not in READERS:
        advice = "Give a text file with one prompt per line, or a table with a column of prompts."
        raise ValueError(unknown("kind of prompt file", path.name, READERS, advice))
    found = READERS[path.suffix.lower()](read_text(path), path, column or COLUMN)
    prompts = [prompt for prompt in found if prompt.strip()]
    if not prompts:
        raise ValueError(f"no prompts in {str(path)!r}: it is empty or blank. Write at least one prompt.")
    return prompts


def read_text(path: Path) -> str:
    """Return a file's text; raise a one-line error if it is not text."""
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {str(path)!r}. Give the path of a .txt, .csv or .jsonl file.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    if "\0" in text:
        raise ValueError(f"{str(path)!r} is not text: it has zero bytes. Save it as UTF-8 text.")
    return text


def _from_lines(text: str, path: Path, column: str) -> Iterator[str]:
    yield from (line.removesuffix("\r") for line in text.split("\n"))


def _from_csv(text: str, path: Path, column: str) -> Iterator[str]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if reader.fieldnames and column not in reader.fieldnames:
            raise ValueError(_missing(column, reader.fieldnames, path, 1))
        for row in reader:
            yield _prompt(row, column, path, reader.line_num)
    except csv.Error as error:
        where = f"{str(path)!r} is not valid CSV after line {reader.line_num}"
        raise ValueError(f"{where}: {error}. Repair it.") from error


def _from_json_lines(text: str, path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(
                f"{str(path)!r}, line {number} is not JSON: {error}. Write one object per line."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{str(path)!r}, line {number} is not a JSON object. Write lines as {{{column!r}: ...}}.")
        if column not in row:
            raise ValueError(_missing(column, row, path, number))
        yield _prompt(row, column, path, number)


def _missing(column: str, present: Any, path: Path, number: int) -> str:  # noqa: ANN401 - any collection of names
    message = unknown("column", column, [str(name) for name in present], "Set prompts.column to one of them.")
    return f"{str(path)!r}, line {number}: {message}"


def _prompt(row: Mapping[str, Any], column: str, path: Path, number: int) -> str:
    value = row[column]
    if not isinstance(value, str):  # a CSV row that ends early yields None
        raise ValueError(f"{str(path)!r}, line {number}: {column!r} is {value!r}, not text. Write a prompt there.")
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # JSON can write half a character: "\ud800"
        raise ValueError(f"{str(path)!r}, line {number}: {column!r} is {value!r}, not UTF-8. Write a prompt there.")
    return value


READERS: Mapping[str, Callable[[str, Path, str], Iterator[str]]] = {
    ".txt": _from_lines,
    ".csv": _from_csv,
    ".jsonl": _from_json_lines,
}
