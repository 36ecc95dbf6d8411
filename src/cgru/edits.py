"""Edits: what a method produces, apart from the model it changes.

An edit can be put on a backbone for a while and taken off exactly; evaluation and attacks need not know which method
made it. So far one kind: a LoRA file, alone or in a run folder (edit/pytorch_lora_weights.safetensors, config.yaml).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cgru.backbones.base import Backbone, one_line
from cgru.backbones.lora import LORA_FILE, lora_applied, read_lora


class Edit(Protocol):
    """A change to a model that can be applied and exactly undone."""

    @property
    def fingerprint(self) -> str:
        """Hash of what the edit is made of."""

    def applied(self, backbone: Backbone) -> AbstractContextManager[Backbone]:
        """The backbone with the edit; every bit is restored on exit."""

    def save(self, folder: Path) -> None:
        """Write the edit so that `load_edit(folder)` finds it."""


@dataclass(frozen=True)
class LoraEdit:
    """A LoRA on the denoiser."""

    path: Path
    fingerprint: str
    lora: Mapping[str, Any]

    @contextmanager
    def applied(self, backbone: Backbone) -> Iterator[Backbone]:
        """The same backbone object, its denoiser changed inside the `with` block."""
        with lora_applied(backbone.denoiser, self.lora):
            yield backbone

    def save(self, folder: Path) -> None:
        """Copy the file under diffusers' own name."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.path, folder / LORA_FILE)


def load_edit(path: str | Path) -> Edit:
    """Read an edit from a LoRA file, a folder with one, or a run folder."""
    file = find_edit(str(path))
    if file is None:
        raise FileNotFoundError(f"no edit at {str(path)!r}; allowed: a LoRA file, its folder or a run folder.")
    return LoraEdit(file, hashlib.sha256(file.read_bytes()).hexdigest(), read_lora(file))


def find_edit(name: str) -> Path | None:
    """The LoRA file that `name` stands for, or None when it is a model's name or folder."""
    path = Path(name)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise FileNotFoundError(f"no LoRA file {name!r}; give the path of an existing {LORA_FILE}.")
        return path
    found = [file for file in (path / "edit" / LORA_FILE, path / LORA_FILE) if file.is_file()]
    if not found and (path / "config.yaml").is_file() and not (path / "model_index.json").is_file():
        raise FileNotFoundError(
            f"the run {name!r} has no edit yet: edit/{LORA_FILE} is not there; finish the run, or give a finished one."
        )
    return found[0] if found else None


def is_run(path: str | Path) -> bool:
    """Whether a folder is a run: it has a config and an edit."""
    return (Path(path) / "config.yaml").is_file() and (Path(path) / "edit" / LORA_FILE).is_file()


def base_model(name: str, *, default: str) -> str:
    """The model an edit belongs to: a run says so in its config.yaml; a bare LoRA file does not."""
    if not is_run(name):
        return default
    import yaml

    try:
        config = yaml.safe_load((Path(name) / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read {name}/config.yaml as YAML ({one_line(error)}); correct it, or give the base with --model."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise ValueError(f"{name}/config.yaml names no 'model'; give the run's base with --model.")
    return str(config["model"])
