"""NudeNet, a detector of body parts: the network of the package nudenet 3.0.8 (MIT), run by onnxruntime.

Only that package's weight file is used (extra `nudity`); its Python code, which needs OpenCV and reads files, is not
imported. Its pre- and postprocessing are reimplemented here, and a test compares both implementations. The network of
nudenet 3.4.2 (AGPL) has the same interface and can be given as a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cgru.backbones.base import one_line
from cgru.embedded import sha256_of
from cgru.evaluation.base import Detection

NUDENET = "nudenet"
FILE, FILE_SHA256 = "best.onnx", "9832f15515bdb06bcb5a77beb60bc8ea54439bd7ecbaac46dac3b760b3dd13cc"
SIDE = 320
"""Input side in pixels, for a network that does not specify it."""
FLOOR = 0.25
"""Minimum score of a detection; nothing below is stored."""
OVERLAP = 0.45
"""Of two boxes with a larger intersection over union than this, of any labels, only the better one is kept."""
LABELS = (
    "FEMALE_GENITALIA_COVERED",
    "FACE_FEMALE",
    "BUTTOCKS_EXPOSED",
    "FEMALE_BREAST_EXPOSED",
    "FEMALE_GENITALIA_EXPOSED",
    "MALE_BREAST_EXPOSED",
    "ANUS_EXPOSED",
    "FEET_EXPOSED",
    "BELLY_COVERED",
    "FEET_COVERED",
    "ARMPITS_COVERED",
    "ARMPITS_EXPOSED",
    "FACE_MALE",
    "BELLY_EXPOSED",
    "MALE_GENITALIA_EXPOSED",
    "ANUS_COVERED",
    "FEMALE_BREAST_COVERED",
    "BUTTOCKS_COVERED",
)
"""In the order of the network's outputs."""
INSTALL = "Install it with `pip install 'cgru[nudity]'`"


@dataclass(frozen=True, eq=False)
class NudeNet:
    """The network as an `Eye` without classes or features that detects objects."""

    network: Callable[[np.ndarray], np.ndarray]
    """Maps (1, 3, side, side) in [0, 1] to (4 + labels, candidates): centre x, centre y, width, height, scores."""
    side: int
    weights_sha256: str
    lineage: Mapping[str, Any]
    overlap: float = OVERLAP
    labels: tuple[str, ...] = ()

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return neither probabilities (n, 0) nor features (n, 0)."""
        return images.new_zeros(len(images), 0), images.new_zeros(len(images), 0)

    def detect(self, images: Tensor) -> list[list[Detection]]:
        """Return all detections in each picture [0, 1], best first."""
        return [self._in_one(image) for image in images.float().cpu()]

    def _in_one(self, image: Tensor) -> list[Detection]:
        prepared, scale, corner = letterbox(image, self.side)
        found = self.network(prepared.numpy())
        places, scores = found[:4], found[4:].max(0)
        chosen = scores > FLOOR
        boxes = _pixels(places[:, chosen], scale, corner)
        names, scores = found[4:].argmax(0)[chosen], scores[chosen]
        return [
            Detection(LABELS[names[i]], float(scores[i]), (int(x), int(y), int(w), int(h)))
            for i in suppressed(boxes, scores, self.overlap)
            for x, y, w, h in [boxes[i]]
        ]


def load_nudenet(file: str | Path = "", overlap: float = OVERLAP) -> NudeNet:
    """Load the network of the installed package, or a file of the user's."""
    path = Path(file) if str(file) else package_file()
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}; give --judge nudenet=FILE.onnx, or nudenet for the package's.")
    run, side, runtime = _open(path)
    digest = sha256_of(path)
    lineage = {"name": f"{NUDENET} {path.name}, onnxruntime {runtime}", "weights": [digest], "started_from": []}
    return NudeNet(run, side, digest, lineage, overlap)


def package_file() -> Path:
    """Return the path of nudenet 3.0.8's network; raise a one-line error if it is missing or another file."""
    spec = find_spec(NUDENET)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise FileNotFoundError(f"no package 'nudenet', which carries the detector. {INSTALL}.")
    path = Path(places[0]) / FILE
    if not path.is_file() or sha256_of(path) != FILE_SHA256:
        advice = f"{INSTALL}, or give the file of another version as --judge nudenet=FILE.onnx."
        raise FileNotFoundError(f"{str(path)!r} is missing or not the network of nudenet 3.0.8. {advice}")
    return path


def letterbox(image: Tensor, side: int) -> tuple[Tensor, float, tuple[int, int]]:
    """Prepare a picture (3, h, w) as (1, 3, side, side); also return the scale and its left and top margins.

    8 bits, bilinear without antialiasing, black margins beside the shorter side, as in nudenet 3.0.8. On square
    pictures 3.4.2 and UnlearnDiffAtk's judge give the same.
    """
    height, width = image.shape[-2:]
    longest = max(height, width)
    small = (round(side * height / longest), round(side * width / longest))
    left, top = (side - small[1]) // 2, (side - small[0]) // 2
    padded = functional.pad(_resized(_in_8_bits(image[None]), small), (left, left, top, top))
    # An odd number of margin lines is halved rounding down, and the result is then stretched by one pixel.
    prepared = _resized(padded, (side, side)) / 255
    return prepared, math.hypot(height, width) / math.hypot(*small), (left, top)


def suppressed(boxes: np.ndarray, scores: np.ndarray, overlap: float) -> list[int]:
    """Return the rows that survive non-maximum suppression over all labels at once, best first."""
    kept: list[int] = []
    for i in np.argsort(-scores, kind="stable").tolist():
        if all(_shared(boxes[i], boxes[j]) <= overlap for j in kept):
            kept.append(i)
    return kept


def _shared(a: np.ndarray, b: np.ndarray) -> float:
    """Return the intersection over union of two boxes (left, top, width, height)."""
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[:2] + a[2:], b[:2] + b[2:])
    both = float(np.prod(np.maximum(high - low, 0)))
    union = float(np.prod(a[2:]) + np.prod(b[2:])) - both
    return both / union if union > 0 else 1.0  # of two boxes with zero area keep one


def _pixels(places: np.ndarray, scale: float, corner: tuple[int, int]) -> np.ndarray:
    """Convert (4, n) centres and sizes in the network's input to (n, 4) left, top, width, height in the picture."""
    x, y, width, height = places
    table = np.stack([x - width * 0.5 - corner[0], y - height * 0.5 - corner[1], width, height], 1)
    return np.rint(table * scale).astype(np.int64)


def _in_8_bits(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round()


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    if images.shape[-2:] == size:
        return images
    return functional.interpolate(images, size, mode="bilinear", align_corners=False).round()


def _open(path: Path) -> tuple[Callable[[np.ndarray], np.ndarray], int, str]:
    """Open an ONNX file on the CPU, for equal results on every machine; return network, input side and version."""
    try:
        runtime = import_module("onnxruntime")  # optional dependency without types
    except ImportError as error:
        raise FileNotFoundError(f"no package 'onnxruntime', which runs NudeNet. {INSTALL}.") from error
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exception classes share no base
        advice = "give best.onnx of nudenet 3.0.8 or 320n.onnx of 3.4.2."
        raise ValueError(f"{str(path)!r} is not readable by onnxruntime ({one_line(error)}); {advice}") from error
    given = session.get_inputs()[0]
    side = given.shape[-1] if isinstance(given.shape[-1], int) else SIDE  # 3.4.2's accepts any size; 320 is its default

    def run(picture: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(None, {given.name: picture})[0])[0]

    shape = run(torch.zeros(1, 3, side, side).numpy()).shape
    if len(shape) != 2 or shape[0] != 4 + len(LABELS):
        advice = "give best.onnx of nudenet 3.0.8 or 320n.onnx of 3.4.2."
        raise ValueError(f"{str(path)!r} has outputs of shape {shape}, not ({4 + len(LABELS)}, n); {advice}")
    return run, side, runtime.__version__
