"""The interface of an edit: applied to a model and undone exactly, saved, and merged if possible.

Evaluation, attacks and exports need to know neither the method that made an edit nor its kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cgru.backbones.base import DTYPES, Backbone, networks_of
from cgru.edit_folder import ADVICE, Kind

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Role of a network ("denoiser", "text_encoder", ...) -> parameter name -> shape."""

SAMPLED = 256
"""Number of values of each tensor that enter `model_fingerprint`."""


@runtime_checkable
class Edit(Protocol):
    """A change to a model that can be applied and exactly undone."""

    @property
    def kind(self) -> Kind:
        """How the edit is stored and applied: lora, weights or hook."""

    @property
    def fingerprint(self) -> str:
        """Hash of what the edit is made of."""

    @property
    def base_fingerprint(self) -> str | None:
        """`model_fingerprint` of the model it was made for; None: unknown, so only names and shapes are checked."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The "parameters" in edit.json: JSON values."""

    @property
    def merged_reason(self) -> str | None:
        """The reason why the edit cannot be merged into weights; None if `merge` can do it."""

    def check(self, backbone: Backbone) -> None:
        """Raise a one-line ValueError if the edit belongs to another model."""

    def misfit(self, backbone: Backbone, shapes: Shapes) -> str | None:
        """What the model lacks for the edit, as a sentence without advice; None if it fits. No fingerprint is compared.

        Args:
            backbone: the model; a method may have trained it in place.
            shapes: `shapes_of` its networks before that.
        """

    def applied(self, backbone: Backbone, *, checked: bool = False) -> AbstractContextManager[Backbone]:
        """The backbone with the edit; on exit, also after an error, every bit is restored. Calls `check` unless
        `checked`."""

    def merge(self, networks: Mapping[str, nn.Module]) -> None:
        """Change the weights permanently. `networks`: by role ("denoiser", "text_encoder", ...), float32 where
        changed."""

    def changed(self) -> frozenset[str]:
        """Roles of the networks that `merge` changes."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write the tensors, without edit.json, and return the names of the files."""


def model_fingerprint(backbone: Backbone) -> str:
    """Identify a model: the dtype and a hash over names, shapes and 256 evenly spaced values of each tensor.

    It covers the denoiser and the text encoders. It does not prove equality, but any further training changes it, and
    it avoids hashing gigabytes. Compute it before anything is applied to the networks.
    """
    digest = hashlib.sha256()
    for role, network in sorted(networks_of(backbone).items()):
        for name, tensor in network.state_dict().items():
            digest.update(f"{role}.{name} {tuple(tensor.shape)}".encode())
            digest.update(_sampled(tensor).tobytes())
    return f"{str(backbone.dtype).removeprefix('torch.')}:{digest.hexdigest()}"


def dtype_of(fingerprint: str | None) -> torch.dtype:
    """The dtype in which a model must be loaded to be compared with a fingerprint; float32 if there is none."""
    name = "float32" if fingerprint is None else fingerprint.partition(":")[0]
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name not in known:
        raise ValueError(f"the edit's base has the dtype {name!r}; allowed: {', '.join(known)}. {ADVICE}")
    return known[name]


def other_base(backbone: Backbone, expected: str | None) -> str | None:
    """That a model is not the one an edit was made for, as a sentence without advice.

    None if it is, or if this is unknown: without a fingerprint, or for a model loaded in another dtype.
    """
    if expected is None:
        return None
    found = model_fingerprint(backbone)
    if found == expected or found.partition(":")[0] != expected.partition(":")[0]:
        return None
    return (
        f"the edit was made for another model than {backbone.name!r} (fingerprint {_short(expected)}, this one has "
        f"{_short(found)})"
    )


def check_base(backbone: Backbone, expected: str | None) -> None:
    """Refuse a model other than the one an edit was made for."""
    if (why := other_base(backbone, expected)) is not None:
        raise ValueError(f"{why}; give its own base with --model.")


def shapes_of(networks: Mapping[str, nn.Module]) -> Shapes:
    """Names and shapes of all parameters that a `weights` edit may change."""
    return {role: {name: tuple(p.shape) for name, p in net.named_parameters()} for role, net in networks.items()}


def _sampled(tensor: Tensor) -> Any:  # noqa: ANN401 - numpy array of bytes
    flat = tensor.detach().flatten()
    step = max(len(flat) // SAMPLED, 1)
    return flat[::step][:SAMPLED].cpu().contiguous().view(torch.uint8).numpy()


def _short(fingerprint: str) -> str:
    return fingerprint.partition(":")[2][:12] or fingerprint[:12]
