"""The outside detector: a classifier that watches training, and is neither reward nor judge (issue 3, item 4).

A reward can be fooled without the concept being gone. So every few iterations a network that nothing is trained against
looks at validation pictures; where it still sees what the reward no longer sees, the gap raises an alarm. The same
looks choose the best trade-off of forgetting and keeping. Benchmark prompts and judges have no part in this.
Loading is a second copy of `evaluation/judges.py` (a higher tier); styles have no embedded detector.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageClassification, CLIPModel, CLIPTokenizer

from cgru.backbones.quiet import no_progress_bars
from cgru.prompts import Prompt
from cgru.tasks import ASSETS, Concept, Kind, targets

NOTHING = "nothing"
"""The label of pictures in which nothing can be recognised."""
BATCH = 64
# The normalisation CLIP was trained with (its preprocessor_config.json).
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Detector:
    """A classifier that knows which of its labels are to be forgotten."""

    labels: tuple[str, ...]
    targets: tuple[str, ...]
    classify: Callable[[Tensor], Tensor]
    """(n, 3, h, w) pictures in [0, 1] -> (n, labels) probabilities."""
    lineage: Mapping[str, Any]
    """As a reward's: "name", "weights" (sha256), "started_from"."""

    def __post_init__(self) -> None:
        """Refuse targets the detector could never see: it would report success."""
        if missing := [label for label in self.targets if label not in self.labels]:
            raise ValueError(
                f"the detector {self.lineage['name']!r} does not know {', '.join(missing)}. Watch without it."
            )

    @torch.inference_mode()
    def probabilities(self, images: Tensor) -> Tensor:
        """(n, labels), float32 on the CPU."""
        return torch.cat([self.classify(batch).float().cpu() for batch in images.split(BATCH)])

    def answers(self, images: Tensor) -> list[str]:
        """The most probable label of each picture."""
        return [self.labels[i] for i in self.probabilities(images).argmax(1).tolist()]

    def share_of_target(self, images: Tensor) -> float:
        """The share of pictures in which the detector sees the concept."""
        return _share([answer in self.targets for answer in self.answers(images)])


def detector_for(
    concept: Concept,
    vocabulary: Mapping[Kind, Sequence[str]],
    *,
    root: Path = ASSETS,
    device: str | torch.device = "cpu",
) -> Detector | None:
    """Emoji Canvas' own detector of classes and hazards; None for a style, which it cannot tell."""
    if concept.kind == "style":
        return None
    return load_detector(root / "detector", targets(concept, vocabulary), device=device)


def load_detector(folder: Path, wanted: tuple[str, ...], *, device: str | torch.device = "cpu") -> Detector:
    """A transformers image-classifier folder with preprocessor_config.json (image_size, mean, std) and lineage.json."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no detector in {str(folder)!r}: the embedded assets are incomplete. Run `cgru doctor`."
        )
    with no_progress_bars():
        network = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    network.requires_grad_(False)
    prepare, lineage = (_read(folder / name) for name in ("preprocessor_config.json", "lineage.json"))
    size, mean, std = prepare["image_size"], prepare["mean"], prepare["std"]

    def classify(images: Tensor) -> Tensor:
        prepared = (_resized(images.to(device), size, "bilinear") - mean) / std
        return network(prepared).logits.softmax(-1)

    names = network.config.id2label
    labels = tuple(names[i] for i in range(len(names)))
    return Detector(labels, wanted, classify, _lineage(folder, lineage["name"], lineage["started_from"]))


def zero_shot_detector(
    folder: Path, concept: str, others: Sequence[str], *, device: str | torch.device = "cpu"
) -> Detector:
    """For any model and text: a CLIP that is not the reward's says whether a picture is the concept or one of `others`.

    Args:
        folder: a transformers CLIPModel with its tokenizer.
        concept: what to forget.
        others: texts to tell it from, such as the labels of the retain prompts.
    """
    with no_progress_bars():
        network = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        tokenizer = CLIPTokenizer.from_pretrained(folder)
    network.requires_grad_(False)
    labels = tuple(dict.fromkeys((concept, *others)))
    tokens = tokenizer(list(labels), padding=True, truncation=True, return_tensors="pt").to(device)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    size = network.config.vision_config.image_size

    def classify(images: Tensor) -> Tensor:
        prepared = (_resized(images.to(device), size, "bicubic").clamp(0, 1) - mean) / std
        return network(pixel_values=prepared, **tokens).logits_per_image.softmax(-1)

    return Detector(labels, (concept,), classify, _lineage(folder, folder.name, []))


@dataclass(frozen=True)
class Look:
    """What the detector saw at one iteration; all shares 0..1."""

    iteration: int
    target_share: float
    """Of the validation forget prompts' pictures, those that show the concept."""
    keep_share: float
    """Of the validation retain prompts' pictures with a label the detector knows, those that show it."""
    nothing_share: float
    """Of the validation forget prompts' pictures, those in which nothing can be recognised; 0 without such a label."""
    reward_fraction: float
    """Mean reward of the forget pictures as a share of its scale: 1 where the reward thinks that all is forgotten."""


def look(
    detector: Detector,
    forgotten: Tensor,
    kept: Tensor,
    kept_prompts: Sequence[Prompt],
    *,
    iteration: int,
    reward_fraction: float,
) -> Look:
    """Look at pictures of the validation forget prompts and of the retain prompts, (n, 3, h, w) in [0, 1]."""
    seen = detector.answers(forgotten)
    pairs = zip(detector.answers(kept), (prompt.label for prompt in kept_prompts), strict=True)
    return Look(
        iteration=iteration,
        target_share=_share([answer in detector.targets for answer in seen]),
        keep_share=_share([answer == label for answer, label in pairs if label in detector.labels]),
        nothing_share=_share([answer == NOTHING for answer in seen]),
        reward_fraction=reward_fraction,
    )


def gap(seen: Look) -> float:
    """How much more of the concept the detector sees than the reward would have it; -1..1."""
    return seen.target_share - (1 - seen.reward_fraction)


def alarm(seen: Look, threshold: float) -> str | None:
    """One line when the gap is above the threshold."""
    if gap(seen) <= threshold:
        return None
    return (
        f"iteration {seen.iteration}: the outside detector still sees the concept in {seen.target_share:.0%} of the"
        f" validation pictures, the reward in {1 - seen.reward_fraction:.0%} (gap {gap(seen):.2f} > {threshold:.2f}):"
        " the policy may be fooling the reward."
    )


def record(seen: Look) -> dict[str, float]:
    """Flat keys for metrics.jsonl."""
    shares = {name: value for name, value in asdict(seen).items() if name not in ("iteration", "reward_fraction")}
    return {f"watch/{name}": value for name, value in shares.items()} | {"watch/gap": gap(seen)}


class BestTradeOff:
    """Remembers the best look, and says when waiting for a better one is over.

    Among looks whose UA (1 - target share) is at least `wanted`: the highest keep share. Before there is one: the
    highest harmonic mean of UA and keep share. Equal ones: higher UA, then the earlier.
    """

    def __init__(self, wanted: float, patience: int) -> None:
        """`patience` is how many looks in a row may be no better once `wanted` is reached."""
        self.wanted, self.patience = wanted, patience
        self.best: Look | None = None
        self.since_best = 0

    def update(self, seen: Look) -> bool:
        """Take a look into account; True if it is the best so far, so that its weights should be kept."""
        is_best = self.best is None or self._score(seen) > self._score(self.best)
        self.best = seen if is_best else self.best
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    @property
    def is_over(self) -> bool:
        """Whether to stop: the wanted UA was reached, and patience has run out since the best."""
        return self.best is not None and self._score(self.best)[0] and self.since_best >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"best": asdict(self.best) if self.best else None, "since_best": self.since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; `wanted` and `patience` come from the config."""
        self.best = Look(**state["best"]) if state["best"] else None
        self.since_best = state["since_best"]

    def _score(self, seen: Look) -> tuple[bool, float, float]:
        ua, keep = 1 - seen.target_share, seen.keep_share
        if ua >= self.wanted:
            return True, keep, ua
        return False, 2 * ua * keep / (ua + keep) if ua + keep else 0.0, ua


def refuse_shared_lineage(reward: Mapping[str, Any], detector: Mapping[str, Any]) -> None:
    """A detector with weights of the reward, or started from the same ones, would be fooled along with it."""
    if shared := _origins(reward) & _origins(detector):
        names = f"reward {reward['name']!r} and detector {detector['name']!r}"
        raise ValueError(f"{names} share the weights {', '.join(sorted(shared))}. Watch with an unrelated detector.")


def _origins(lineage: Mapping[str, Any]) -> set[str]:
    return {*lineage["weights"], *lineage["started_from"]}


def _lineage(folder: Path, name: str, started_from: Sequence[str]) -> dict[str, Any]:
    with (folder / "model.safetensors").open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": name, "weights": [sha256], "started_from": list(started_from)}


def _resized(images: Tensor, size: int, mode: str) -> Tensor:
    # antialias matters only when shrinking (512-pixel models).
    return functional.interpolate(images.float(), (size, size), mode=mode, align_corners=False, antialias=True)


def _read(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def _share(outcomes: Sequence[bool]) -> float:
    if not outcomes:
        raise ValueError("no validation picture that the detector could judge. Give more validation prompts.")
    return sum(outcomes) / len(outcomes)
