"""Read models in the diffusers layout from a folder or the hub, completely or with a one-line error.

diffusers and transformers load an incomplete model with only a warning: missing tensors stay random, and a tokenizer
without its vocabulary knows two tokens. Here each of these is an error, and so is a tensor of another shape. `families`
lists the parts of each model.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, ModelMixin
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from cgru.backbones.base import one_line, parse_dtype, pick_device
from cgru.backbones.families import Family, absent_parts, check_index, check_words, family_of
from cgru.backbones.foreign_code import refuse_code
from cgru.backbones.hub import check_reachable
from cgru.catalog import nearest
from cgru.embedded import EMBEDDED, ROOT

ALLOWED = f"'{EMBEDDED}', a diffusers folder, or a hub id 'owner/name'"

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, eq=False)
class Loaded:
    """The parts of a model, its networks frozen, in eval mode and on their device."""

    name: str
    family: Family
    parts: dict[str, Any]
    """By the name of the component; missing optional components are left out."""
    index: Mapping[str, Any]
    """model_index.json."""
    device: torch.device
    dtype: torch.dtype

    def fields(self) -> dict[str, Any]:
        """The arguments of every backbone: the parts, with the denoiser under that name."""
        others = {part: found for part, found in self.parts.items() if part != self.family.denoiser}
        denoiser = self.parts[self.family.denoiser]
        return {"name": self.name, "device": self.device, "dtype": self.dtype, "denoiser": denoiser, **others}


def load_parts(
    source: str | Path, *, device: str | torch.device, dtype: str | torch.dtype, revision: str | None
) -> Loaded:
    """Load a model of any family.

    Args:
        source: `emoji-canvas`, a folder in the diffusers layout, or a hub id.
        device: as in `pick_device`.
        dtype: `fp32`, `bf16` or `fp16`, for all networks.
        revision: branch, tag or commit of a hub id.
    """
    place, precision = pick_device(device), parse_dtype(dtype)
    origin = resolve_source(source)
    with no_progress_bars() if isinstance(origin, Path) else nullcontext():
        family, index, parts = _read_parts(origin, precision, revision)
    for part in family.networks():
        if part in parts:
            parts[part].requires_grad_(False).eval().to(place)
    return Loaded(str(source), family, parts, index, place, precision)


def resolve_source(source: str | Path) -> Path | str:
    """Return the folder that `source` stands for, checked for completeness, or a hub id unchanged."""
    folder = ROOT / EMBEDDED if str(source) == EMBEDDED else Path(source)
    if folder.is_dir():
        check_folder(folder)
        return folder
    if str(source) == EMBEDDED:
        raise FileNotFoundError(
            f"the embedded model is not at {folder}; reinstall cgru or build it: tools/emoji_canvas"
        )
    if isinstance(source, str) and HUB_ID.fullmatch(source):
        # `models/sd15` beside a folder `models` is a mistyped path, not worth the hub's 30 s of retries
        if folder.parent.is_dir():
            hub = f"For a hub id, run where there is no folder {str(folder.parent)!r}."
            raise FileNotFoundError(f"no folder {source!r}; allowed: {ALLOWED}.{_guess(folder)} {hub}")
        return source
    raise FileNotFoundError(f"no model {str(source)!r}; allowed: {ALLOWED}.{_guess(folder)}")


def _guess(folder: Path) -> str:
    # Neighbours of the missing folder are the likeliest meaning of a mistyped path.
    siblings = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    close = nearest(str(folder), [EMBEDDED, *siblings])
    return f" Did you mean {close!r}?" if close else " Check the spelling, or give a folder with model_index.json."


def check_folder(folder: Path) -> None:
    """Check that all files of a model exist; their contents are checked when they are read."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no model_index.json, so it is not a diffusers model; allowed: {ALLOWED}. "
            "Give the folder that save_pretrained wrote."
        )
    family, absent = _family_in(index)
    missing = []
    for name, part in family.parts.items():
        present = {file.name for file in (folder / name).glob("*")}
        if name in absent:
            continue
        if part.file not in present:
            missing.append(f"{name}/{part.file}")
        if part.role == "network" and not any(file.endswith((".safetensors", ".bin")) for file in present):
            missing.append(f"{name}/*.safetensors")
        if part.vocabularies and not any(files <= present for files in part.vocabularies):
            first, *others = (" and ".join(sorted(files, reverse=True)) for files in part.vocabularies)
            missing.append(f"{name}/{first} (or {', '.join(others)})")
    if missing:
        needed = ", ".join(name for name in family.parts if name not in absent)
        raise FileNotFoundError(
            f"model folder {str(folder)!r} lacks {', '.join(missing)}; it needs {needed}. "
            "Save the whole pipeline again with save_pretrained."
        )


def family_in(folder: Path) -> Family:
    """The family of a model folder."""
    return _family_in(folder / "model_index.json")[0]


def absent_in(folder: Path) -> frozenset[str]:
    """The optional components that a model folder lacks."""
    return _family_in(folder / "model_index.json")[1]


def _family_in(path: Path) -> tuple[Family, frozenset[str]]:
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        index = None  # said on reading
    index = index if isinstance(index, dict) else {}
    return (family := family_of(index)), absent_parts(index, family)


def _read_parts(
    origin: Path | str, dtype: torch.dtype, revision: str | None
) -> tuple[Family, Mapping[str, Any], dict[str, Any]]:
    """Read all components of a folder or a hub id, on the CPU."""
    where = {} if revision is None else {"revision": revision}
    with _reading(origin):
        if isinstance(origin, str):
            check_reachable(origin, "model_index.json", revision=revision)
        index = DiffusionPipeline.load_config(origin, **where)
    family = check_index(str(origin), index)
    _refuse_code(origin, "", "model_index.json", where)
    absent, parts = absent_parts(index, family), dict[str, Any]()
    for name, part in family.parts.items():
        if name in absent:
            continue
        if part.role == "network":
            parts[name] = _network(part.kind, origin, name, dtype, where)
        elif part.role == "tokenizer":
            _refuse_code(origin, name, part.file, where)
            with _reading(origin):
                parts[name] = part.kind.from_pretrained(origin, subfolder=name, trust_remote_code=False, **where)
        else:
            with _reading(origin):
                config = DDIMScheduler.load_config(origin, subfolder=name, **where)
            parts[name] = family.scheduler(config)
    family.check(str(origin), parts)
    check_words(str(origin), parts)
    return family, index, parts


@contextmanager
def _reading(origin: Path | str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FileNotFoundError(_read_failure(origin, one_line(error))) from error
    except Exception as error:  # on files that contradict each other the libraries raise almost any type
        raise ValueError(_read_failure(origin, one_line(error))) from error


def _read_failure(origin: Path | str, reason: str) -> str:
    if isinstance(origin, Path):
        return f"cannot read the model in {str(origin)!r}: {reason.rstrip('.')}. Save or download it again."
    return (
        f"{origin!r} is no folder here and could not be read from the hub ({reason.rstrip('.')}); "
        f"allowed: {ALLOWED}. Check the spelling, the network and, for a gated model, `hf auth login`."
    )


def _refuse_code(origin: Path | str, part: str, file: str, where: Mapping[str, str]) -> None:
    if isinstance(origin, Path):
        return refuse_code(origin / part)
    with _reading(origin):
        folder = Path(cached_file(origin, file, subfolder=part, **where)).parent
    refuse_code(folder, origin)


def _network(
    kind: Any,  # noqa: ANN401 - untyped libraries
    origin: Path | str,
    part: str,
    dtype: torch.dtype,
    where: Mapping[str, str],
) -> Any:  # noqa: ANN401
    _refuse_code(origin, part, "config.json", where)
    # The dtype is given for all networks: by default diffusers casts to float32, but transformers keeps the stored one.
    precision = {"torch_dtype" if issubclass(kind, ModelMixin) else "dtype": dtype}
    with _reading(origin):
        # With wrong shapes ignored, both libraries list them, as they list what is missing; both are errors below.
        network, found = kind.from_pretrained(
            origin,
            subfolder=part,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **precision,
            **where,
        )
    tensors = network.state_dict().keys()  # without buffers that are computed, such as position_ids: no file needs them
    missing = sorted(tensors & set(found["missing_keys"]))
    misshapen = sorted(name for name, *_ in found["mismatched_keys"])
    if missing or misshapen:
        raise ValueError(
            f"the {part} of {str(origin)!r} lacks {len(missing)} of its {len(tensors)} tensors and has "
            f"{len(misshapen)} of another shape than its config.json says, first {(missing + misshapen)[0]!r}; "
            "all must be there. Save or download it again."
        )
    return network


LIBRARIES = (transformers_logging, diffusers_logging)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Show no progress bars inside the `with` block; earlier settings are restored."""
    drawing = [library for library in LIBRARIES if library.is_progress_bar_enabled()]
    for library in drawing:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in drawing:
            library.enable_progress_bar()
