"""A LoRA on the denoiser, stored as the file that plain diffusers loads."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from cgru.atomic_io import atomic_write
from cgru.backbones.base import Backbone
from cgru.edit_folder import LORA_FILE, Kind
from cgru.edits.base import Shapes, check_base
from cgru.lora.file import check_fits, fuse_lora, lora_applied, read_lora


@dataclass(frozen=True, eq=False)
class LoraEdit:
    """A `lora` edit; make it with `from_bytes` or `read`."""

    data: bytes = field(repr=False)
    """The file, byte for byte."""
    lora: Mapping[str, Any] = field(repr=False)
    """From `read_lora`."""
    base_fingerprint: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[Kind] = "lora"
    merged_reason: ClassVar[str | None] = None

    @classmethod
    def from_bytes(cls, data: bytes, parameters: Mapping[str, Any] | None = None) -> LoraEdit:
        """From the bytes of a pytorch_lora_weights.safetensors."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / LORA_FILE).write_bytes(data)
            return cls(data, read_lora(Path(folder) / LORA_FILE), parameters=dict(parameters or {}))

    @classmethod
    def read(cls, path: Path) -> LoraEdit:
        """From a LoRA file in any layout that diffusers understands."""
        return cls(path.read_bytes(), read_lora(path))

    @property
    def fingerprint(self) -> str:
        """sha256 of the file."""
        return hashlib.sha256(self.data).hexdigest()

    def check(self, backbone: Backbone) -> None:
        """Check that the denoiser has every layer that the file names, with the same sizes."""
        check_base(backbone, self.base_fingerprint)
        check_fits(backbone.denoiser, self.lora)

    def misfit(self, backbone: Backbone, shapes: Shapes) -> str | None:
        """The first layer that the denoiser does not have, or has in another size; a LoRA that is on it does not
        count."""
        try:
            check_fits(backbone.denoiser, self.lora)
        except ValueError as error:
            return str(error).partition("; give its own base")[0]
        return None

    @contextmanager
    def applied(self, backbone: Backbone, *, checked: bool = False) -> Iterator[Backbone]:
        """The same backbone object, its denoiser changed inside the `with` block."""
        if not checked:
            self.check(backbone)
        with lora_applied(backbone.denoiser, self.lora):
            yield backbone

    def merge(self, networks: Mapping[str, nn.Module]) -> None:
        """W + (alpha / rank) · B · A."""
        fuse_lora(networks["denoiser"], self.lora)

    def changed(self) -> frozenset[str]:
        """The denoiser alone."""
        return frozenset({"denoiser"})

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write the file under diffusers' own name."""
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / LORA_FILE, self.data)
        return (LORA_FILE,)
