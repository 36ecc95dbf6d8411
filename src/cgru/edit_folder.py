"""The folder of an edit: its files, and checks that they match edit.json. This file does not need torch.

    edit/edit.json       kind, base model, method, concept, sha256 of the files, parameters; written last
    edit/*.safetensors   the tensors: one file for a `lora` or `weights` edit, at most one for a `hook`

A LoRA file alone, or a run folder with a LoRA file and no edit.json, is also a `lora` edit: the oldest runs have this
form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cgru.atomic_io import read_json
from cgru.config import refuse_unnamed
from cgru.embedded import sha256_of

Kind = Literal["lora", "weights", "hook"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMAT = 1
NOTE_FILE = "edit.json"
LORA_FILE = "pytorch_lora_weights.safetensors"
WEIGHTS_FILE = "weights.safetensors"
HOOK_FILE = "hook.safetensors"
FILES: Mapping[Kind, tuple[str, ...]] = {"lora": (LORA_FILE,), "weights": (WEIGHTS_FILE,), "hook": (HOOK_FILE,)}
"""The tensor file of each kind; a hook may have none."""
SHA256 = re.compile(r"[0-9a-f]{64}")
FINGERPRINT = re.compile(r"b?float\w+:[0-9a-f]{64}")
"""The form of a model's fingerprint. Other text is refused, since it could not be compared with any model."""
ADVICE = "Restore the edit, or make it again."


@dataclass(frozen=True)
class Note:
    """The contents of edit.json."""

    kind: Kind
    base_model: str
    """The model it was made for: a hub id, a folder or "emoji-canvas"."""
    base_fingerprint: str | None
    """Fingerprint of that model's networks (`cgru.edits.model_fingerprint`); None: not recorded."""
    method: str
    concept: str
    files: Mapping[str, str]
    """File name -> sha256."""
    parameters: Mapping[str, Any]
    """For a hook its name and settings; for other kinds, anything that the method recorded."""

    @property
    def fingerprint(self) -> str:
        """Hash of the edit's contents, equal to that of the loaded edit."""
        return fingerprint_of(self.kind, self.files, self.parameters)

    def to_table(self) -> dict[str, Any]:
        """The contents of edit.json."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "base": {"model": self.base_model, "fingerprint": self.base_fingerprint},
            "method": self.method,
            "concept": self.concept,
            "files": dict(self.files),
            "parameters": dict(self.parameters),
        }


def fingerprint_of(kind: Kind, files: Mapping[str, str], parameters: Mapping[str, Any]) -> str:
    """The hash of an edit: for `lora` and `weights` the sha256 of the file; for a hook also of its name and
    settings."""
    if kind != "hook":
        return files[FILES[kind][0]]
    return hashlib.sha256(json.dumps([files, parameters], sort_keys=True).encode()).hexdigest()


def find_edit(name: str) -> Path | None:
    """The edit.json or LoRA file that `name` stands for; None if `name` is a model.

    Args:
        name: a run folder, an edit folder, an edit.json, a LoRA file, or anything else.
    """
    path = Path(name)
    if path.suffix == ".safetensors" or path.name == NOTE_FILE:
        if not path.is_file():
            what = LORA_FILE if path.suffix == ".safetensors" else NOTE_FILE
            raise FileNotFoundError(f"no edit file {name!r}; give the path of an existing {what}.")
        return path
    for folder in (path / "edit", path):
        for file in (folder / NOTE_FILE, folder / LORA_FILE):
            if file.is_file():
                return file
    if (path / "config.yaml").is_file() and not (path / "model_index.json").is_file():
        raise FileNotFoundError(
            f"the run {name!r} has no edit yet: edit/{NOTE_FILE} is not there; finish the run, or give a finished one."
        )
    return None


def is_run(path: str | Path) -> bool:
    """Whether a folder is a run: it has a config and an edit."""
    edit = Path(path) / "edit"
    has_edit = (edit / NOTE_FILE).is_file() or (edit / LORA_FILE).is_file()
    return has_edit and (Path(path) / "config.yaml").is_file()


def base_model(name: str, *, default: str, code: Collection[str] = (), option: str = "--model") -> str:
    """The base model of an edit, from edit.json or else from the run's config.yaml.

    Args:
        name: as in `find_edit`.
        default: the base of a LoRA file alone.
        code: user code ("module:attr") that may be imported; any other that the file names is refused.
        option: the option with which the user allows it.
    """
    found = _base_model(name, default)
    refuse_unnamed(found, code, f"the edit {name!r}", option)
    return found


def _base_model(name: str, default: str) -> str:
    file = find_edit(name)
    if file is not None and file.name == NOTE_FILE:
        return read_note(file.parent).base_model
    if not is_run(name):
        return default
    import yaml

    try:
        config = yaml.safe_load((Path(name) / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(
            f"cannot read {name}/config.yaml as YAML ({why}); correct it, or give the base with --model."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise ValueError(f"{name}/config.yaml names no 'model'; give the run's base with --model.")
    return str(config["model"])


def stored_fingerprint(path: str | Path) -> str | None:
    """The fingerprint of the edit in a run or edit folder, read from its files; None if there is no edit."""
    try:
        file = find_edit(str(path))
    except FileNotFoundError:
        return None
    if file is None:
        return None
    return read_note(file.parent).fingerprint if file.name == NOTE_FILE else sha256_of(file)


def read_note(folder: Path) -> Note:
    """Read edit.json and compare each file that it lists; ValueError where one is not as it says."""
    path = folder / NOTE_FILE
    note = parse_note(read_json(path), repr(str(path)))
    for name, expected in note.files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{str(path)!r} lists {name!r}, which is not there; allowed: all listed files. {ADVICE}")
        if (found := sha256_of(folder / name)) != expected:
            raise ValueError(
                f"{str(folder / name)!r} has sha256 {found[:12]}, but {NOTE_FILE} says {expected[:12]}: it was changed "
                f"after it was made. {ADVICE}"
            )
    return note


def parse_note(table: Mapping[str, Any], where: str) -> Note:
    """The note that a JSON table is; ValueError, naming the key, where it is not one."""
    if (version := table.get("format")) != FORMAT or isinstance(version, bool):
        raise ValueError(f"{where} has format {version!r}; allowed: {FORMAT}. Load it with the cgru that wrote it.")
    kinds = {"base": dict, "method": str, "concept": str, "files": dict, "parameters": dict}
    base = table.get("base")
    wrong = {key: table.get(key) for key, kind in kinds.items() if not isinstance(table.get(key), kind)}
    if isinstance(base, dict):
        wrong |= {} if isinstance(base.get("model"), str) else {"base.model": base.get("model")}
        mark = base.get("fingerprint")
        is_known = mark is None or (isinstance(mark, str) and FINGERPRINT.fullmatch(mark) is not None)
        wrong |= {} if is_known else {"base.fingerprint": mark}
    if table.get("kind") not in KINDS:
        wrong = {"kind": table.get("kind")}
    elif isinstance(files := table.get("files"), dict):
        wrong |= {f"files.{name}": value for name, value in files.items() if not _is_hash(value)}
        wrong |= {} if _fit(table["kind"], files) else {"files": sorted(files)}
    if wrong:
        key, value = next(iter(wrong.items()))
        allowed = f"; allowed: {', '.join(KINDS)}" if key == "kind" else ""
        raise ValueError(f"{where} has {key} = {str(value)[:80]!r}, which no edit has{allowed}. {ADVICE}")
    return Note(
        table["kind"],
        table["base"]["model"],
        table["base"].get("fingerprint"),
        table["method"],
        table["concept"],
        dict(table["files"]),
        dict(table["parameters"]),
    )


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def _fit(kind: Kind, files: Mapping[str, Any]) -> bool:
    """Only the names that the kind uses, so no path leads out of the folder; a hook may have none."""
    return set(files) == set(FILES[kind]) or (kind == "hook" and not files)
