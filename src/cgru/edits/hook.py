"""An edit that acts while pictures are drawn: a function around the text embedding or the prediction, with parameters.

The function is not stored but named: by a row of `catalog.HOOKS` or as the user's own "module:attr". A name from
edit.json is only imported if the catalog has it or the user allows it, because importing a module runs its code.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from cgru import catalog
from cgru.atomic_io import atomic_write
from cgru.backbones.base import Backbone, classes_of, one_line
from cgru.edit_folder import HOOK_FILE, Kind, fingerprint_of
from cgru.edits.base import Shapes, check_base
from cgru.mdp.trajectory import Conditioning

Value = float | int | str | bool | list[Any]


@dataclass(frozen=True, eq=False)
class HookEdit:
    """A `hook` edit: `make_hook(backbone, settings, tensors)` returns the backbone that draws without the concept."""

    name: str
    """A row of `catalog.HOOKS`, or "module:attr"."""
    settings: Mapping[str, Value]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    base_fingerprint: str | None = None
    is_allowed: bool = True
    """Whether the name may be imported; False if it comes only from a file."""
    kind: ClassVar[Kind] = "hook"

    def __post_init__(self) -> None:
        """Check that the settings survive being stored in edit.json."""
        for name, value in self.settings.items():
            if not isinstance(name, str) or not _is_plain(value):
                allowed = "allowed: finite numbers, texts, true or false, and lists of these"
                raise ValueError(f"the hook's setting {name!r} is {str(value)[:80]!r}; {allowed}.")
        object.__setattr__(self, "tensors", {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()})

    @classmethod
    def read(cls, path: Path | None, parameters: Mapping[str, Any], allowed: tuple[str, ...] = ()) -> HookEdit:
        """Build the edit from edit.json and the file beside it.

        Args:
            path: of hook.safetensors; None if the hook has no tensors.
            parameters: "hook" (its name) and "settings".
            allowed: names of the user's own hooks ("module:attr") that may be imported.
        """
        name, settings = parameters.get("hook"), parameters.get("settings")
        if parameters.keys() != {"hook", "settings"} or not isinstance(name, str) or not isinstance(settings, dict):
            raise ValueError(f"a hook's parameters are {str(dict(parameters))[:80]!r}; allowed: hook and settings.")
        try:
            tensors = {} if path is None else load(path.read_bytes())
        except SafetensorError as error:
            raise ValueError(f"cannot read {str(path)!r} ({one_line(error)}); restore it.") from error
        return cls(name, settings, tensors, is_allowed=name in (*catalog.HOOKS, *allowed))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The hook's name and settings."""
        return {"hook": self.name, "settings": dict(self.settings)}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of name, settings and tensors."""
        data = self._data()
        files = {} if data is None else {HOOK_FILE: hashlib.sha256(data).hexdigest()}
        return fingerprint_of("hook", files, self.parameters)

    @property
    def merged_reason(self) -> str | None:
        """The reason: a hook changes no weights."""
        return f"the hook {self.name!r} works while pictures are drawn, so there are no weights to merge it into"

    def check(self, backbone: Backbone) -> None:
        """Check that the name stands for a hook, and that the hook accepts this model."""
        check_base(backbone, self.base_fingerprint)
        self._hooked(backbone)

    def misfit(self, backbone: Backbone, shapes: Shapes) -> str | None:
        """Why the hook cannot be made for this model, or what it returns wrongly in the first step of a drawing."""
        try:
            return catalog.call_own("hook", self.name, self._failing, backbone)
        except (ValueError, OSError) as error:
            return str(error)

    @contextmanager
    def applied(self, backbone: Backbone, *, checked: bool = False) -> Iterator[Backbone]:
        """A backbone that wraps the given one, which is not changed."""
        if not checked:
            check_base(backbone, self.base_fingerprint)
        yield self._hooked(backbone)

    def merge(self, networks: Mapping[str, nn.Module]) -> None:
        """Always a ValueError."""
        raise ValueError(f"{self.merged_reason}; use it with `cgru generate` or `cgru evaluate`.")

    def changed(self) -> frozenset[str]:
        """No network."""
        return frozenset()

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write hook.safetensors, if there are tensors."""
        data = self._data()
        if data is None:
            return ()
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / HOOK_FILE, data)
        return (HOOK_FILE,)

    def _data(self) -> bytes | None:
        return save(dict(self.tensors)) if self.tensors else None

    @torch.no_grad()
    def _failing(self, backbone: Backbone) -> str | None:
        hooked = self._hooked(backbone)
        cond = hooked.encode_text([*classes_of(hooked), "a picture"][:1])
        if not isinstance(cond, Conditioning):
            return f"the text embedding of the hook {self.name!r} is a {type(cond).__name__}; allowed: a Conditioning"
        kernel = hooked.kernel(2, eta=0.0)
        x, time = torch.zeros((1, *hooked.latent_shape), device=hooked.device), kernel.timesteps[:1].to(hooked.device)
        found: object = hooked.predict(x, time, cond, guidance=2.0 if cond.unconditional else 1.0)
        if isinstance(found, Tensor) and found.shape == x.shape:
            return None
        given = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        return f"the prediction of the hook {self.name!r} is {given}; allowed: a tensor of shape {tuple(x.shape)}"

    def _hooked(self, backbone: Backbone) -> Backbone:
        if ":" in self.name and not self.is_allowed:
            raise ValueError(
                f"the edit runs the code {self.name!r}, which is not cgru's; allowed: hooks you name yourself. If you "
                f"trust it, add --allow-hook {self.name}."
            )
        make_hook, advice = catalog.resolve("hook", self.name), "allowed: make_hook(backbone, settings, tensors)"
        try:
            hooked = make_hook(backbone, dict(self.settings), dict(self.tensors))
        except TypeError as error:
            raise ValueError(f"the hook {self.name!r} cannot be made ({one_line(error)}); {advice}.") from error
        if not isinstance(hooked, Backbone):
            raise ValueError(f"the hook {self.name!r} returns a {type(hooked).__name__} and no backbone; {advice}.")
        return hooked


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(inner) for inner in value)
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
