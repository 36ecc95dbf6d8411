"""Edits: the result of a method, stored apart from the model that it changes. edit.json records which kind it is.

`lora`: low-rank factors on the denoiser, loadable by plain diffusers. `weights`: weight differences of the denoiser or
the text encoders. `hook`: a function around the text embedding or the prediction that acts while pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from cgru.atomic_io import atomic_write, to_json
from cgru.backbones.base import Backbone
from cgru.edit_folder import (
    HOOK_FILE,
    LORA_FILE,
    NOTE_FILE,
    WEIGHTS_FILE,
    Kind,
    Note,
    base_model,
    find_edit,
    is_run,
    read_note,
)
from cgru.edits.base import Edit, Shapes, dtype_of, model_fingerprint, other_base, shapes_of
from cgru.edits.hook import HookEdit
from cgru.edits.lora import LoraEdit
from cgru.edits.weights import WeightsEdit, trained_values
from cgru.embedded import sha256_of

__all__ = [
    "Edit",
    "HookEdit",
    "LoraEdit",
    "Shapes",
    "WeightsEdit",
    "base_model",
    "check_made",
    "dtype_of",
    "find_edit",
    "is_run",
    "load_edit",
    "model_fingerprint",
    "other_base",
    "read_note",
    "save_edit",
    "shapes_of",
    "stack",
    "trained_values",
]

ORDER = ("weights", "lora", "hook")
"""A LoRA renames the layers it is put on, and a hook must see the network as it will be."""

CLASSES: Mapping[Kind, type] = {"lora": LoraEdit, "weights": WeightsEdit, "hook": HookEdit}
"""What `load_edit` makes of each kind."""


def load_edit(path: str | Path, *, allow_hooks: Sequence[str] = ()) -> Edit:
    """Read an edit from a run folder, an edit folder, an edit.json or a LoRA file; its files must match their hashes.

    Args:
        path: of the edit.
        allow_hooks: the user's own hooks ("module:attr") that the edit may import; cgru's own are always allowed.
    """
    file = find_edit(str(path))
    if file is None:
        raise FileNotFoundError(f"no edit at {str(path)!r}; allowed: a run folder, an edit folder or a LoRA file.")
    if file.name != NOTE_FILE:
        return LoraEdit.read(file)
    folder, note = file.parent, read_note(file.parent)
    if note.kind == "hook":
        tensors = folder / HOOK_FILE if HOOK_FILE in note.files else None
        hook = HookEdit.read(tensors, note.parameters, tuple(allow_hooks))
        return replace(hook, base_fingerprint=note.base_fingerprint)
    edit: WeightsEdit | LoraEdit
    edit = WeightsEdit.read(folder / WEIGHTS_FILE) if note.kind == "weights" else LoraEdit.read(folder / LORA_FILE)
    return replace(edit, base_fingerprint=note.base_fingerprint, parameters=note.parameters)


def check_made(edit: object, method: str, backbone: Backbone, shapes: Shapes) -> Edit:
    """The edit that a method returned; ValueError, naming the method, if it could not be stored, loaded and applied.

    The model's fingerprint is not compared, because a method may train in place.

    Args:
        edit: what its `run` returned.
        method: its name.
        backbone: the model that it got.
        shapes: `shapes_of` the model's networks before it ran.
    """
    said, advice = f"method {method!r} returned a", "Correct its run function."
    if not isinstance(edit, Edit):
        allowed = "allowed: an Edit (cgru.edits: LoraEdit, WeightsEdit or HookEdit)"
        raise ValueError(f"{said} {type(edit).__name__}; {allowed}. {advice}")
    if edit.kind not in CLASSES or not isinstance(edit, CLASSES[edit.kind]):
        allowed = ", ".join(f"{kind} (a {made.__name__})" for kind, made in CLASSES.items())
        raise ValueError(f"{said} {type(edit).__name__} of kind {edit.kind!r}; allowed: {allowed}. {advice}")
    if (why := edit.misfit(backbone, shapes)) is not None:
        raise ValueError(f"{said} wrong edit: {why.rstrip('.')}. {advice}")
    return edit


def save_edit(edit: Edit, folder: Path, *, base: str, base_fingerprint: str | None, method: str, concept: str) -> Note:
    """Write an edit to a folder: its tensors first, edit.json last, each completely or not at all.

    Args:
        edit: of any kind.
        folder: made if it does not exist.
        base: the model that the edit was made for.
        base_fingerprint: `model_fingerprint` of that model; None: loading checks names and shapes only.
        method: the method that made the edit.
        concept: the concept that the edit removes.
    """
    for key, value in edit.parameters.items():
        try:
            to_json({key: value})
        except TypeError as error:
            allowed = "allowed: what JSON has (numbers, texts, lists). Give float(value)."
            raise ValueError(f"the edit's parameter {key!r} is {value!r:.60}; {allowed}") from error
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: sha256_of(folder / name) for name in edit.save(folder)}
    note = Note(edit.kind, base, base_fingerprint, method, concept, files, dict(edit.parameters))
    atomic_write(folder / NOTE_FILE, to_json(note.to_table()))
    return note


@contextmanager
def stack(edits: Sequence[Edit], backbone: Backbone) -> Iterator[Backbone]:
    """The backbone with several edits applied, all made for this backbone; they are undone in reverse order.

    Each is checked against the bare model. Weights come first, then LoRAs, then hooks in the order given: weights and
    LoRAs add up, also on the same parameter, so their order does not matter; the last hook is the outermost.
    """
    for edit in edits:
        edit.check(backbone)
    with ExitStack() as entered:
        for edit in sorted(edits, key=lambda edit: ORDER.index(edit.kind)):
            # Checked above, because after the first edit the model's fingerprint is another one.
            backbone = entered.enter_context(edit.applied(backbone, checked=True))
        yield backbone
