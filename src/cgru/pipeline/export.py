"""A finished run as a whole model without the concept, which is what one ships: a LoRA can be dropped."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.backbones.base import parse_dtype
from cgru.backbones.lora import read_lora
from cgru.backbones.merge import save_merged
from cgru.backbones.sd import resolve_source
from cgru.edits import find_edit
from cgru.evaluation.assets import ROOT, model_source, sha256_of
from cgru.lineage import NOTE, ROLES
from cgru.runs import Run


@dataclass(frozen=True)
class Export:
    """A checked request: nothing is written yet."""

    source: str
    edit: Path
    folder: Path
    dtype: str | None
    note: dict[str, Any]


def prepare_export(run: str | Path, folder: str | Path, *, dtype: str | None = None, root: Path = ROOT) -> Export:
    """Check that the run has an edit and that the folder is free.

    Args:
        run: a finished run.
        folder: where the model goes; new or empty.
        dtype: fp32, bf16 or fp16; None: as the base is stored.
        root: the asset folder, where Emoji Canvas lies.
    """
    opened, target = Run.open(run), Path(folder)
    edit = find_edit(str(run))
    assert edit is not None, f"{run} is a run, so it has an edit or find_edit has refused it"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(folder)!r} is there and not empty; allowed: a new or empty folder. Choose another.")
    if dtype is not None:
        parse_dtype(dtype)
    config = opened.config
    source = model_source(config.model, root)
    resolve_source(source)  # a base that is gone is said now
    recorded = opened.manifest["extra"]
    note = {
        "concept": config.concept,
        "method": config.method,
        "base": config.model,
        "edit_sha256": sha256_of(edit),
        "lineage": {role: recorded[role] for role in ROLES if role in recorded},
    }
    return Export(source, edit, target, dtype, note)


def export(request: Export) -> Path:
    """Write the merged model, whole or not at all; returns its folder."""
    target = request.folder.absolute()
    temporary = target.with_name(f".{target.name}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        dtype = None if request.dtype is None else parse_dtype(request.dtype)
        save_merged(request.source, read_lora(request.edit), temporary, dtype=dtype)
        (temporary / NOTE).write_text(json.dumps(request.note, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()  # empty: checked before, and rmdir refuses others
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return request.folder
