"""An edit and its base as one whole model without the concept, which is what one ships: an edit can be dropped."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.backbones import is_own_loader, load_model
from cgru.backbones.base import networks_of, parse_dtype
from cgru.edit_folder import ADVICE, NOTE_FILE, find_edit, is_run, read_note
from cgru.edits import Edit, dtype_of, load_edit, other_base, shapes_of
from cgru.embedded import ROOT, model_source
from cgru.lineage import NOTE, ROLES
from cgru.lora.merge import save_merged
from cgru.runs import Run


@dataclass(frozen=True)
class Export:
    """A checked request: nothing is written yet."""

    source: str
    edit: Edit
    folder: Path
    dtype: str | None
    note: dict[str, Any]


def prepare_export(run: str | Path, folder: str | Path, *, dtype: str | None = None, root: Path = ROOT) -> Export:
    """Check that the edit can be merged into its own base and that the folder is free.

    Args:
        run: a finished run, or the folder of an edit with its edit.json.
        folder: where the model goes; new or empty.
        dtype: fp32, bf16 or fp16; None: as the base is stored.
        root: the asset folder, where Emoji Canvas lies.
    """
    target = Path(folder)
    facts = _facts(run)
    edit = load_edit(run)
    if edit.merged_reason is not None:
        raise ValueError(f"{str(run)!r} cannot be exported: {edit.merged_reason}. Use it as it is.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(folder)!r} is there and not empty; allowed: a new or empty folder. Choose another.")
    if dtype is not None:
        parse_dtype(dtype)
    source = model_source(facts["base"], root)
    if is_own_loader(source):
        raise ValueError(
            f"{str(run)!r} is of the model {source!r}, which is code of its own; allowed: diffusers models, since an "
            "export is a diffusers folder. Use the edit as it is."
        )
    _check_base(run, source, edit)
    lineage = facts.pop("lineage")
    note = {**facts, "edit_sha256": edit.fingerprint, "lineage": lineage}
    return Export(source, edit, target, dtype, note)


def _facts(run: str | Path) -> dict[str, Any]:
    """Concept, method, base and lineage: of a run, or of an edit folder, which does not know its lineage."""
    noted = _noted(run)
    if noted and not is_run(run):
        return {**noted, "lineage": {}}
    opened = Run.open(run)
    config, recorded = opened.config, opened.manifest["extra"]
    facts = {"concept": config.concept, "method": config.method, "base": config.model}
    for key, value in noted.items():
        if value != facts[key]:
            raise ValueError(
                f"the edit of {str(run)!r} has the {key} {value!r} in {NOTE_FILE} and {facts[key]!r} in config.yaml; "
                f"allowed: the same in both. {ADVICE}"
            )
    return {**facts, "lineage": {role: recorded[role] for role in ROLES if role in recorded}}


def _noted(run: str | Path) -> dict[str, str]:
    """What edit.json says; empty for a run without one, whose edit is a LoRA file alone."""
    file = find_edit(str(run)) if Path(run).is_dir() else None
    if file is None or file.name != NOTE_FILE:
        return {}
    note = read_note(file.parent)
    return {"concept": note.concept, "method": note.method, "base": note.base_model}


def _check_base(run: str | Path, source: str, edit: Edit) -> None:
    """Refuse a base that the edit was not made for, loaded as it was then so that fingerprints can be compared."""
    backbone = load_model(source, device="cpu", dtype=dtype_of(edit.base_fingerprint))
    why = other_base(backbone, edit.base_fingerprint) or edit.misfit(backbone, shapes_of(networks_of(backbone)))
    if why is not None:
        raise ValueError(
            f"{str(run)!r} cannot be exported: {why}; allowed: the model that it was made for. Restore that model, or "
            "make the edit again."
        )


def export(request: Export) -> Path:
    """Write the merged model, whole or not at all; returns its folder."""
    target = request.folder.absolute()
    temporary = target.with_name(f".{target.name}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        dtype = None if request.dtype is None else parse_dtype(request.dtype)
        save_merged(request.source, request.edit.merge, temporary, changed=request.edit.changed(), dtype=dtype)
        (temporary / NOTE).write_text(json.dumps(request.note, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()  # empty: checked before, and rmdir refuses others
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return request.folder
