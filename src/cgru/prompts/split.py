"""Seeded, disjoint splits of captions: 10 % for the critic and 20 % for the policy, as in the paper (§5, NSFW).

Each class is split separately (the paper does not say). A hash of seed and picture decides the split, so the order of
the file does not matter. Equal captions (ignoring case, punctuation and articles) count as one prompt, that of the
first picture by hash; otherwise a prompt could be in two splits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cgru.atomic_io import atomic_write
from cgru.prompts.captions import Row, read_captions
from cgru.prompts.grammar import words_of
from cgru.prompts.sets import apportioned

CRITIC, POLICY = 10, 20
"""Percentages."""
MANIFEST = "manifest.json"
Splits = dict[str, list[Row]]


def split_rows(rows: Sequence[Row], *, seed: int, critic: int = CRITIC, policy: int = POLICY) -> Splits:
    """Split rows into critic, policy and rest; the percentages are met to within one picture in every class."""
    if min(critic, policy) < 0 or critic + policy > 100 or critic + policy == 0:
        raise ValueError(f"shares of {critic} % and {policy} %; allowed: 0 or more, 1 to 100 together. Give others.")
    splits: Splits = {"critic": [], "policy": [], "rest": []}
    by_class: dict[str, list[Row]] = {}
    for row in _distinct(rows):
        by_class.setdefault(row["class"], []).append(row)
    for label in sorted(by_class):
        shuffled = sorted(by_class[label], key=lambda row: _hash(f"{seed} {row['sha256']}".encode()))
        counts = apportioned(len(shuffled), (critic, policy, 100 - critic - policy))
        for name, count in zip(splits, counts, strict=True):
            splits[name] += shuffled[:count]
            del shuffled[:count]
    return splits


def plan_split(path: Path, *, seed: int, critic: int = CRITIC, policy: int = POLICY) -> dict[str, bytes]:
    """Return the files to write, by name; the manifest has counts and hashes of all files and comes last."""
    rows = read_captions(path)
    splits = split_rows(rows, seed=seed, critic=critic, policy=policy)
    empty = [name for name, share in (("critic", critic), ("policy", policy)) if share and not splits[name]]
    if empty:
        advice = "Caption more pictures, or give larger shares."
        raise ValueError(f"{len(rows)} captions leave none for {empty[0]}; allowed: at least one for each. {advice}")
    files = {f"{name}.jsonl": _lines(part) for name, part in splits.items()}
    kept = sum(len(part) for part in splits.values())
    manifest: Mapping[str, Any] = {
        "source": {"name": path.name, "sha256": _hash(path.read_bytes()), "captions": len(rows)},
        "seed": seed,
        "percent": {"critic": critic, "policy": policy, "rest": 100 - critic - policy},
        "repeated_captions_left_out": len(rows) - kept,
        "files": {
            f"{name}.jsonl": {
                "sha256": _hash(files[f"{name}.jsonl"]),
                "prompts": len(part),
                "by_class": dict(sorted(Counter(row["class"] for row in part).items())),
            }
            for name, part in splits.items()
        },
    }
    return {**files, MANIFEST: (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()}


def check_place(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Return whether the folder already holds the same split; raise ValueError if it holds anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if folder.is_dir() and all(_has(folder / name, data) for name, data in files.items()):
        return True
    advice = "allowed: a new or empty folder, or one with the same split. Choose another --out."
    raise ValueError(f"{str(folder)!r} is in use; {advice}")


def write_split(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the complete folder or nothing: it is created under a temporary name, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        for name, data in files.items():
            atomic_write(temporary / name, data)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["sha256"]):
        found.setdefault(words_of(row["prompt"]), row)
    return list(found.values())


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _has(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
