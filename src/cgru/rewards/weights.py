"""Networks under rewards, read from a folder or the hub: whole and frozen in float32, or an error of one line.

transformers fills missing tensors with random numbers and a warning; a reward with random weights would train a policy
to nothing, so here that is an error. Every origin also gives the hashes of its files, for the lineage.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import cached_file, logging

from cgru.atomic_io import json_table
from cgru.backbones.base import one_line
from cgru.backbones.foreign_code import refuse_code
from cgru.backbones.hub import check_reachable
from cgru.backbones.loading import no_progress_bars
from cgru.embedded import sha256_of
from cgru.lineage import HUB_ANCESTORS

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
ALLOWED = "a folder in the transformers layout or a hub id 'owner/name'"


def origin_of(source: str | Path) -> Path | str:
    """Return `source` as a folder that exists, or as a hub id."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    # `runs/heads` beside a folder `runs` is a mistyped path, not worth the hub's 30 s of retries.
    if isinstance(source, str) and HUB_ID.fullmatch(source) and not folder.parent.is_dir():
        return source
    raise FileNotFoundError(f"no network {str(source)!r}; allowed: {ALLOWED}. Check the spelling.")


def load_network(kind: Any, origin: Path | str, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401 - untyped
    """Load a transformers class, frozen and in eval mode, on the CPU; code in its folder is refused, never run."""
    refuse_code_of(origin)
    with reading(origin), _no_report(), no_progress_bars() if isinstance(origin, Path) else nullcontext():
        # With wrong shapes ignored they are listed, as missing tensors are; both are errors below.
        network, found = kind.from_pretrained(
            origin,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    names = network.state_dict().keys()  # without buffers that are computed: no file needs them
    broken = sorted(names & set(found["missing_keys"])) + sorted(name for name, *_ in found["mismatched_keys"])
    if broken:
        raise ValueError(
            f"{str(origin)!r} lacks {len(broken)} of the {len(names)} tensors of a {kind.__name__} or has them in "
            f"another shape, first {broken[0]!r}; give a complete network of that kind."
        )
    return network.requires_grad_(False).eval()


def refuse_code_of(origin: Path | str) -> None:
    """Refuse a folder or hub id whose configs name Python code of their own."""
    with reading(origin):
        folder = find(origin, "config.json").parent
    refuse_code(folder, origin)


@contextmanager
def _no_report() -> Iterator[None]:
    # A vision tower read from a whole CLIP makes transformers list the text tower as left over, 22 lines of it.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def read_json(origin: Path | str, file: str) -> dict[str, Any]:
    """Read the table that a JSON file of a folder or a hub id holds."""
    with reading(origin):
        return json_table(find(origin, file).read_bytes(), file)


def find(origin: Path | str, file: str) -> Path:
    """Where a file of a folder or a hub id lies on this disk; downloads it if need be."""
    if isinstance(origin, Path):
        return origin / file
    check_reachable(origin, file)
    return Path(cached_file(origin, file))


def lineage_of(origin: Path | str) -> dict[str, Any]:
    """Name, hashes of the weight files, and what they were started from: lineage.json, or the hub id itself."""
    with reading(origin):
        folder = find(origin, "config.json").parent
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    stored = read_json(origin, "lineage.json") if (folder / "lineage.json").is_file() else {}
    hub = [origin, *HUB_ANCESTORS.get(origin, ())] if isinstance(origin, str) else []
    return {
        "name": stored.get("name", folder.name if isinstance(origin, Path) else origin),
        "weights": [sha256_of(path) for path in files],
        "started_from": [*hub, *stored.get("started_from", [])],
    }


@contextmanager
def reading(origin: Path | str) -> Iterator[None]:
    """Turn whatever the libraries raise on a missing or broken file into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FileNotFoundError(_failure(origin, one_line(error).rstrip("."))) from error
    except Exception as error:  # on files that contradict each other the libraries raise almost any type
        raise ValueError(_failure(origin, one_line(error).rstrip("."))) from error


def _failure(origin: Path | str, reason: str) -> str:
    if isinstance(origin, Path):
        return f"cannot read the network in {str(origin)!r}: {reason}. Save or download it again."
    return (
        f"{origin!r} is no folder here and could not be read from the hub ({reason}); allowed: {ALLOWED}. "
        "Check the spelling and the network, or download it where there is one and give the folder."
    )
