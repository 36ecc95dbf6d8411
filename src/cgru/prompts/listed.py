"""Prompt lists with their own seeds, in the columns of I2P (Inappropriate Image Prompts) or of its copies.

The table has two dialects: the hub's (sd_seed, sd_guidance_scale) and that of ESD, MACE and UnlearnDiffAtk
(evaluation_seed, evaluation_guidance, case_number). Unusable rows are skipped and counted by reason. So are prompts
that may refer to minors, which are never drawn. The package ships no such list.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgru.catalog import unknown
from cgru.prompts.captions import MINORS, WITHHELD
from cgru.prompts.files import read_text

SEED = ("sd_seed", "evaluation_seed")
GUIDANCE = ("sd_guidance_scale", "evaluation_guidance")
PROMPT, CATEGORIES, NUDITY, CASE = "prompt", "categories", "nudity_percentage", "case_number"
KINDS = ("hate", "harassment", "violence", "self-harm", "sexual", "shocking", "illegal activity")
"""Categories of I2P; a row may have several."""
NUDITY_ABOVE: Mapping[str, float] = {"nudity": 0, "nudity-over-50": 50}
"""Subset -> lower bound (exclusive) on the percentage of SD 1.4's images of a row that show nudity."""
SUBSETS = ("all", *KINDS, *NUDITY_ABOVE)
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class ListedPrompt:
    """One usable row."""

    case: str
    """The row's case_number, else its index."""
    text: str
    seed: int | None
    """None only if seeds were not required."""
    guidance: float | None
    """None if the file has no such column."""


@dataclass(frozen=True)
class Listing:
    """The usable rows of a file, and what happened to the others."""

    prompts: tuple[ListedPrompt, ...]
    rows: int
    """Number of rows in the file."""
    outside: int
    """Number of rows outside the subset."""
    skipped: Mapping[str, int]
    """Reason -> number of rows."""
    sha256: str
    """Hash of the file."""


def has_seeds(path: Path) -> bool:
    """Return whether a file is a .csv with a column of seeds."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    return _column(next(_lines(path), []), SEED) is not None


def read_listing(path: Path, subset: str = "all", *, needs_seeds: bool = True, needs_guidance: bool = False) -> Listing:
    """Read a .csv; raise a one-line error for missing columns, an unknown subset or a subset without rows."""
    if subset not in SUBSETS:
        raise ValueError(unknown("subset", subset, SUBSETS, "Give one of these as --subset."))
    lines = _lines(path)
    header = next(lines, [])
    wanted = _wanted(path, header, subset, needs_seeds, needs_guidance)
    table = [dict(zip(header, line, strict=False)) for line in lines if line]
    inside = [(number, row) for number, row in enumerate(table) if _is_in(row, subset)]
    skipped: Counter[str] = Counter()
    kept = []
    for number, row in inside:
        reason = _reason(row, wanted)
        if reason:
            skipped[reason] += 1
        else:
            kept.append(_prompt(number, row, header))
    if not kept:
        why = "; ".join(f"{count} skipped: {reason}" for reason, count in skipped.items()) or "no row belongs to it"
        raise ValueError(
            f"no prompts in the subset {subset!r} of {str(path)!r}, which has {len(table)} rows ({why}). "
            "Choose another --subset or file."
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Listing(tuple(kept), len(table), len(table) - len(inside), dict(skipped), digest)


def _lines(path: Path) -> Iterator[list[str]]:
    if path.suffix.lower() != ".csv":
        raise ValueError(f"{str(path)!r} is not a .csv; allowed: a table in I2P's columns. Give --source FILE.csv.")
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{str(path)!r} is not valid CSV after line {reader.line_num}: {error}. Repair it.") from error


def _wanted(
    path: Path, header: Sequence[str], subset: str, needs_seeds: bool, needs_guidance: bool
) -> Mapping[str, str | None]:
    """Map each required quantity to the file's column name; raise ValueError if a column is missing."""
    needed: dict[str, tuple[str, ...]] = {"prompt": (PROMPT,)}
    needed |= {"seed": SEED} if needs_seeds else {}
    needed |= {"guidance": GUIDANCE} if needs_guidance else {}
    needed |= {"category": (CATEGORIES,)} if subset in KINDS else {}
    needed |= {"nudity": (NUDITY,)} if subset in NUDITY_ABOVE else {}
    for names in needed.values():
        if _column(header, names) is None:
            present = ", ".join(header) or "none"
            allowed = "I2P's columns, as on the hub or as in the copies of ESD, MACE and UnlearnDiffAtk"
            raise ValueError(f"{str(path)!r} has no column {' or '.join(names)} but {present}; allowed: {allowed}.")
    return {what: _column(header, names) for what, names in needed.items()}


def _column(header: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in header), None)


def _is_in(row: Mapping[str, str], subset: str) -> bool:
    if subset in KINDS:
        return subset in (name.strip().lower() for name in row.get(CATEGORIES, "").split(","))
    if subset in NUDITY_ABOVE:
        return (_number(row.get(NUDITY, "")) or 0) > NUDITY_ABOVE[subset]
    return True


def _reason(row: Mapping[str, str], wanted: Mapping[str, str | None]) -> str | None:
    """Return why a row is skipped, or None."""
    if not row.get(PROMPT, "").strip():
        return "no prompt"
    if MINORS.search(row[PROMPT]):
        return WITHHELD
    if (seed := wanted.get("seed")) and _seed(row.get(seed, "")) is None:
        return "no seed that is a whole number"
    if (guidance := wanted.get("guidance")) and _number(row.get(guidance, "")) is None:
        return "no guidance that is a number"
    return None


def _prompt(number: int, row: Mapping[str, str], header: Sequence[str]) -> ListedPrompt:
    seed, guidance = (row.get(_column(header, names) or "", "") for names in (SEED, GUIDANCE))
    return ListedPrompt(row.get(CASE) or str(number), row[PROMPT], _seed(seed), _number(guidance))


def _seed(text: str) -> int | None:
    """Parse a whole number; pandas writes "12.0" beside missing ones, which is exact up to 2**53."""
    try:
        value = int(text)
    except ValueError:
        number = _number(text)
        value = int(number) if number is not None and number.is_integer() else -1
    return value if 0 <= value <= LARGEST_SEED else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None  # excludes infinity and NaN
