"""The CLIP vision tower that a critic starts from, with the normalisation its pictures need.

A source is a folder or a hub id, either a CLIP vision model or a whole CLIP (`openai/clip-vit-base-patch32`), read in
float32 whatever is stored: the critic trains all of it. Missing tensors are an error: transformers leaves them random.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import CLIPVisionModelWithProjection
from transformers.utils import cached_file, logging

from cgru.backbones.base import one_line
from cgru.backbones.quiet import no_progress_bars

SETTINGS = "preprocessor_config.json"
ALLOWED = "a folder with a CLIP vision model, or a hub id such as 'openai/clip-vit-base-patch32'"

Channels = tuple[float, float, float]


class Tower(NamedTuple):
    """A vision tower, and the mean and standard deviation of each channel that its pictures are normalised with."""

    network: CLIPVisionModelWithProjection
    mean: Channels
    std: Channels


def load_tower(name: str | Path) -> Tower:
    """Load a tower for one critic, float32 on the CPU; a critic owns its tower, so load one for each."""
    is_folder = Path(name).is_dir()
    if isinstance(name, Path) and not is_folder:
        raise FileNotFoundError(f"no folder {str(name)!r}; allowed: {ALLOWED}. Check the path.")
    try:
        with no_progress_bars() if is_folder else nullcontext(), _no_load_report():
            network = _network(name)
        mean, std = _normalisation(name)
    except (OSError, SafetensorError) as error:
        reason = one_line(error).rstrip(".")
        raise FileNotFoundError(
            f"cannot read a CLIP vision tower from {str(name)!r} ({reason}); allowed: {ALLOWED}."
        ) from error
    return Tower(network, mean, std)


@contextmanager
def _no_load_report() -> Iterator[None]:
    # transformers lists every text tensor of a whole CLIP as unexpected; what matters is checked in `_network`.
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _network(name: str | Path) -> CLIPVisionModelWithProjection:
    # With wrong shapes ignored, transformers lists them, as it lists what is missing; both are errors below.
    network, found = CLIPVisionModelWithProjection.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    unusable = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    # The projection is not used, and position ids are computed, so no file holds them.
    needed = {f"vision_model.{key}" for key in network.vision_model.state_dict()}
    if wrong := sorted(needed & unusable):
        raise ValueError(
            f"the CLIP vision tower {str(name)!r} lacks {len(wrong)} of its {len(needed)} tensors, or they have "
            f"another shape than its config says, first {wrong[0]!r}; all must be there. Give {ALLOWED}."
        )
    return network


def _normalisation(name: str | Path) -> tuple[Channels, Channels]:
    folder = Path(name)
    # Towers made by tools/emoji_canvas carry their lineage and no settings: they were trained on pictures in [-1, 1].
    if (folder / "lineage.json").is_file() and not (folder / SETTINGS).is_file():
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    table = json.loads(Path(cached_file(name, SETTINGS)).read_text(encoding="utf-8"))
    return _channels(name, table, "image_mean"), _channels(name, table, "image_std")


def _channels(name: str | Path, table: Mapping[str, Any], key: str) -> Channels:
    values = table.get(key)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(
            f"{SETTINGS} of {str(name)!r} has {key} = {values!r}; it must be three numbers. Save the processor again."
        )
    return (float(values[0]), float(values[1]), float(values[2]))
