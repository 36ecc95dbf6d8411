"""The CLIP vision tower that a critic starts from, and the preprocessing of its input images.

A source is a folder or a hub id, either a CLIP vision model or a complete CLIP (`openai/clip-vit-base-patch32`). It is
always read in float32, since the critic trains all of it. Missing tensors are an error; transformers would initialise
them randomly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import CLIPVisionModelWithProjection
from transformers.utils import cached_file, logging

from cgru.atomic_io import parse_json
from cgru.backbones.base import one_line
from cgru.backbones.foreign_code import refuse_code
from cgru.backbones.hub import check_reachable
from cgru.backbones.loading import no_progress_bars
from cgru.rewards.pictures import Mode, read_preprocess

SETTINGS = "preprocessor_config.json"
ALLOWED = "a folder with a CLIP vision model, or a hub id such as 'openai/clip-vit-base-patch32'"

Channels = tuple[float, float, float]


class Tower(NamedTuple):
    """A vision tower and what its input images go through: resizing, per-channel mean and standard deviation."""

    network: CLIPVisionModelWithProjection
    mean: Channels
    std: Channels
    shortest: int | None = None
    """Images are resized so that their shortest side is this, then cropped; None: straight to the tower's size."""
    mode: Mode = "bilinear"


def load_tower(name: str | Path) -> Tower:
    """Load a tower, float32 on the CPU. A critic owns its tower, so load a separate one for each."""
    is_folder = Path(name).is_dir()
    if isinstance(name, Path) and not is_folder:
        raise FileNotFoundError(f"no folder {str(name)!r}; allowed: {ALLOWED}. Check the path.")
    try:
        if not is_folder:
            check_reachable(str(name), "config.json")
        with no_progress_bars() if is_folder else nullcontext(), _no_load_report():
            network = _network(name)
        preprocess = _preprocess(name)
    except (OSError, SafetensorError) as error:
        reason = one_line(error).rstrip(".")
        raise FileNotFoundError(
            f"cannot read a CLIP vision tower from {str(name)!r} ({reason}); allowed: {ALLOWED}."
        ) from error
    return Tower(network, *preprocess)


@contextmanager
def _no_load_report() -> Iterator[None]:
    # For a complete CLIP, transformers warns about every text tensor; `_network` checks the tensors that matter.
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _network(name: str | Path) -> CLIPVisionModelWithProjection:
    refuse_code(Path(name) if Path(name).is_dir() else Path(cached_file(name, "config.json")).parent, name)
    # With wrong shapes ignored, transformers lists them, as it lists what is missing; both are errors below.
    network, found = CLIPVisionModelWithProjection.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
    )
    unusable = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    # The projection is not used. Position ids are computed, so no file holds them.
    needed = {f"vision_model.{key}" for key in network.vision_model.state_dict()}
    if wrong := sorted(needed & unusable):
        raise ValueError(
            f"the CLIP vision tower {str(name)!r} lacks {len(wrong)} of its {len(needed)} tensors, or they have "
            f"another shape than its config says, first {wrong[0]!r}; all must be there. Give {ALLOWED}."
        )
    return network


def _preprocess(name: str | Path) -> tuple[Channels, Channels, int | None, Mode]:
    folder = Path(name)
    # Towers built by tools/emoji_canvas have a lineage but no processor settings: they were trained on [-1, 1] images.
    if (folder / "lineage.json").is_file() and not (folder / SETTINGS).is_file():
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), None, "bilinear"
    table = parse_json(Path(cached_file(name, SETTINGS)).read_text(encoding="utf-8"))
    mean, std = _channels(name, table, "image_mean"), _channels(name, table, "image_std")
    prepare = read_preprocess(folder if folder.is_dir() else str(name))
    return mean, std, prepare.shortest, prepare.mode


def _channels(name: str | Path, table: Mapping[str, Any], key: str) -> Channels:
    values = table.get(key)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(
            f"{SETTINGS} of {str(name)!r} has {key} = {values!r}; it must be three numbers. Save the processor again."
        )
    return (float(values[0]), float(values[1]), float(values[2]))
