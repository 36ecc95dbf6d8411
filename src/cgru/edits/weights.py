"""Changed weights of the denoiser or the text encoders, stored as differences: W + delta.

They are differences instead of new values, so that edits of several concepts add up and can be applied to a base in
another precision. Parameters that did not change are not stored. The file is float32, with keys such as
`denoiser.mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight`.
"""

from __future__ import annotations

import hashlib
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

from cgru.atomic_io import atomic_write
from cgru.backbones.base import Backbone, networks_of, one_line
from cgru.edit_folder import WEIGHTS_FILE, Kind
from cgru.edits.base import Shapes, check_base, shapes_of

Weights = Mapping[str, Mapping[str, Tensor]]
"""Role of a network ("denoiser", "text_encoder", ...) -> parameter name -> tensor."""


@dataclass(frozen=True, eq=False)
class WeightsEdit:
    """A `weights` edit."""

    deltas: Weights
    """What is added to each parameter."""
    base_fingerprint: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Facts recorded by the method, such as the anchor it chose: JSON values, stored in edit.json."""
    kind: ClassVar[Kind] = "weights"
    merged_reason: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Keep float32 copies on the CPU; an edit without any change, or with a non-finite value, is an error."""
        kept = {role: {name: _stored(delta) for name, delta in own.items()} for role, own in self.deltas.items()}
        object.__setattr__(self, "deltas", {role: own for role, own in kept.items() if own})
        if not self.deltas:
            raise ValueError("the edit changes no parameter; allowed: one or more. Check what the method trained.")
        for role, own in self.deltas.items():
            for name, delta in own.items():
                if not bool(delta.isfinite().all()):
                    raise ValueError(f"the edit of '{role}.{name}' is not finite: it has diverged. Lower its strength.")

    @classmethod
    def between(cls, before: Weights, after: Weights, parameters: Mapping[str, Any] | None = None) -> WeightsEdit:
        """The result of training in place: after - before, for the parameters in both that changed.

        Args:
            before: copies of the trained parameters from before the training (`trained_values`).
            after: the same parameters after the training; additional names are ignored.
            parameters: for edit.json.
        """
        deltas = {
            role: {
                name: after[role][name].detach().float().cpu() - old.detach().float().cpu()
                for name, old in own.items()
                if not torch.equal(after[role][name].detach().cpu(), old.detach().cpu())
            }
            for role, own in before.items()
        }
        return cls(deltas, parameters=dict(parameters or {}))

    @classmethod
    def read(cls, path: Path) -> WeightsEdit:
        """From a weights.safetensors."""
        allowed = f"allowed: a {WEIGHTS_FILE} of cgru, float32, with keys 'network.parameter'"
        try:
            tensors = load(path.read_bytes())
        except SafetensorError as error:
            raise ValueError(f"cannot read {str(path)!r} ({one_line(error)}); {allowed}.") from error
        deltas: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            role, dot, name = key.partition(".")
            if not (role and dot and name) or tensor.dtype != torch.float32:
                raise ValueError(f"{str(path)!r} holds {key!r} as {tensor.dtype}; {allowed}.")
            deltas.setdefault(role, {})[name] = tensor
        return cls(deltas)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the file."""
        return hashlib.sha256(self._data()).hexdigest()

    def check(self, backbone: Backbone) -> None:
        """Check that every parameter exists in its network, with the same shape."""
        check_base(backbone, self.base_fingerprint)
        self._check_networks(networks_of(backbone), backbone.name)

    def misfit(self, backbone: Backbone, shapes: Shapes) -> str | None:
        """The first network that the model does not have, or parameter that its network does not have."""
        return self._misfit(shapes, backbone.name)

    @contextmanager
    def applied(self, backbone: Backbone, *, checked: bool = False) -> Iterator[Backbone]:
        """The same backbone object, its parameters W + delta inside the `with` block, summed in float32."""
        if not checked:
            self.check(backbone)
        networks, kept = networks_of(backbone), list[tuple[nn.Parameter, Tensor]]()
        try:
            for role, own in self.deltas.items():
                parameters = dict(networks[role].named_parameters())
                for name, delta in own.items():
                    parameter = parameters[name]
                    kept.append((parameter, parameter.data))
                    parameter.data = _sum(parameter.data, delta)
            yield backbone
        finally:
            for parameter, old in reversed(kept):
                parameter.data = old.to(parameter.device)  # another device: where the network waits in low-memory mode

    def merge(self, networks: Mapping[str, nn.Module]) -> None:
        """W + delta."""
        self._check_networks(networks, "this")
        for role, own in self.deltas.items():
            parameters = dict(networks[role].named_parameters())
            for name, delta in own.items():
                parameters[name].data = _sum(parameters[name].data, delta)

    def changed(self) -> frozenset[str]:
        """The networks it names."""
        return frozenset(self.deltas)

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write weights.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / WEIGHTS_FILE, self._data())
        return (WEIGHTS_FILE,)

    def _data(self) -> bytes:
        flat = {f"{role}.{name}": delta for role, own in self.deltas.items() for name, delta in own.items()}
        return save(flat)  # sorted by name, so equal edits are equal bytes

    def _check_networks(self, networks: Mapping[str, nn.Module], model: str) -> None:
        if (why := self._misfit(shapes_of(networks), model)) is not None:
            raise ValueError(f"{why}; give its own base.")

    def _misfit(self, shapes: Shapes, model: str) -> str | None:
        if missing := sorted(self.deltas.keys() - shapes.keys()):
            return f"the edit changes the {missing[0]!r} and the model {model!r} has {', '.join(sorted(shapes))}"
        for role, own in self.deltas.items():
            for name, delta in own.items():
                given, found = tuple(delta.shape), shapes[role].get(name)
                if given != found:
                    why = "no such parameter" if found is None else f"the model's is {found}, the edit's {given}"
                    return f"the edit does not fit the model at '{role}.{name}' ({why})"
        return None


def trained_values(networks: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Copies of all parameters that require a gradient, by role and name, for `between`."""
    return {
        role: {name: p.detach().clone() for name, p in network.named_parameters() if p.requires_grad}
        for role, network in networks.items()
    }


def _stored(delta: Tensor) -> Tensor:
    return delta.detach().to("cpu", torch.float32).contiguous()


def _sum(weight: Tensor, delta: Tensor) -> Tensor:
    return (weight.float() + delta.to(weight.device)).to(weight.dtype)
