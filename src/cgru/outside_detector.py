"""The outside detector: a classifier that monitors training and is neither a reward nor a judge.

A reward can be fooled although the concept is still drawn. Every few iterations, therefore, a network that nothing is
trained against evaluates validation pictures. If it still sees the concept where the reward does not, the gap raises an
alarm. The same checks select the best trade-off of forgetting and keeping. Benchmark prompts and judges are not used.
Emoji Canvas ships a detector for classes and hazards; otherwise the user can name a CLIP, a SigLIP or a classifier.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification, AutoTokenizer, CLIPModel, SiglipModel

from cgru.catalog import nearest, unknown
from cgru.embedded import ROOT
from cgru.lineage import shared
from cgru.prompts import Prompt
from cgru.rewards.pictures import Preprocess, read_preprocess
from cgru.rewards.weights import ALLOWED, lineage_of, load_network, origin_of, read_json, reading
from cgru.tasks import Concept, Kind, targets

AUTO, NONE = "auto", "none"
"""Values that do not name a network: the shipped detector if there is one, and no detector."""
NOTHING = "nothing"
"""The label of pictures in which nothing can be recognised."""
BATCH = 64
LISTED = 20
"""Most labels that a message lists; some classifiers have a thousand."""

# model_type in config.json of networks with both towers, so that any texts can be labels; SigLIP 2 is siglip, too.
ZERO_SHOT: Mapping[str, Any] = {"clip": CLIPModel, "siglip": SiglipModel}
CLASSIFIER = "ForImageClassification"
# Our own texts: a frame without an article, since labels come with and without one ("a bicycle", "golden retriever"),
# and a text for broken pictures, which would otherwise get the label that fits least badly.
TEXT, NOTHING_TEXT = "a picture of {}", "a blurry meaningless pattern"


@dataclass(frozen=True)
class Detector:
    """A classifier with the labels that are to be forgotten."""

    labels: tuple[str, ...]
    targets: tuple[str, ...]
    classify: Callable[[Tensor], Tensor]
    """(n, 3, h, w) pictures in [0, 1] -> (n, labels) probabilities."""
    lineage: Mapping[str, Any]
    """The lineage record: "name", "weights" (sha256), "started_from" (see `cgru.lineage`)."""

    def __post_init__(self) -> None:
        """Refuse targets that the detector cannot recognise: it would always report success."""
        if missing := [label for label in self.targets if label not in self.labels]:
            more = ", ..." if len(self.labels) > LISTED else ""
            close = nearest(missing[0], self.labels)
            guess = f" Did you mean {close!r}?" if close else ""
            raise ValueError(
                f"the detector {self.lineage['name']!r} does not know {', '.join(missing)}; it knows: "
                f"{', '.join(self.labels[:LISTED])}{more}.{guess} Set watch.detector=NETWORK#LABEL, or to none."
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

    def can_tell(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the detector has a label for any of these prompts."""
        return any(prompt.label in self.labels for prompt in prompts)


def detector_for(
    concept: Concept,
    vocabulary: Mapping[Kind, Sequence[str]],
    *,
    root: Path = ROOT,
    device: str | torch.device = "cpu",
) -> Detector | None:
    """The shipped detector of classes and hazards of Emoji Canvas; None for styles and attributes, which it cannot
    recognise."""
    if concept.kind in ("style", "attribute"):
        return None
    return load_detector(root / "detector", targets(concept, vocabulary), device=device)


def load_detector(folder: Path, wanted: tuple[str, ...], *, device: str | torch.device = "cpu") -> Detector:
    """The shipped image classifier: its preprocessor_config.json is ours (image_size, mean, std)."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no detector in {str(folder)!r}: the embedded assets are incomplete. Run `cgru doctor`."
        )
    table = read_json(folder, "preprocessor_config.json")
    size, mean, std = table["image_size"], table["mean"], table["std"]
    return _classifier(folder, wanted, Preprocess((size, size), None, (mean,), (std,), "bilinear"), device)


def named_detector(
    name: str, concept: Sequence[str], others: Sequence[str], *, device: str | torch.device = "cpu"
) -> Detector:
    """The detector that a user names: NETWORK, or NETWORK#LABEL,LABEL if its labels for the concept differ from its
    name.

    Args:
        name: NETWORK is a folder or hub id of a CLIP or SigLIP, whose labels can be any texts, or of an image
            classifier, whose labels are its own.
        concept: the label if none is named.
        others: texts that a CLIP or SigLIP must distinguish from the concept: the labels of the retain prompts.
        device: the device of the network.
    """
    source, _, listed = name.partition("#")
    if not source.strip():
        raise ValueError(
            f"watch.detector {name!r} names no network; allowed: {AUTO}, {NONE}, NETWORK or NETWORK#LABEL. Give "
            f"{ALLOWED}."
        )
    wanted = tuple(label.strip() for label in listed.split(",") if label.strip()) or tuple(concept)
    origin = _origin(source)
    table = read_json(origin, "config.json")
    kind, classes = table.get("model_type", ""), table.get("architectures") or [""]  # SigLIP 2 leaves the class out
    if classes[0].endswith(CLASSIFIER):
        return _classifier(origin, wanted, _preprocess(origin), device)
    if kind in ZERO_SHOT:
        return zero_shot_detector(origin, ZERO_SHOT[kind], wanted, others, device=device)
    raise ValueError(
        f"watch.detector {source!r} is a {classes[0] or kind or 'network of no known kind'}; allowed: a CLIPModel, a "
        f"SiglipModel or a ...{CLASSIFIER}. Give another, or none."
    )


def zero_shot_detector(
    origin: Path | str,
    kind: Any,  # noqa: ANN401 - a class of ZERO_SHOT
    concept: Sequence[str],
    others: Sequence[str],
    *,
    device: str | torch.device = "cpu",
) -> Detector:
    """A zero-shot detector: whether a picture is most similar to the concept, to one of `others`, or to nothing."""
    network = load_network(kind, origin).to(device)
    prepare = _preprocess(origin)
    with reading(origin):
        tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=False)
    labels = tuple(dict.fromkeys((*concept, *others, NOTHING)))
    texts = [NOTHING_TEXT if label == NOTHING else TEXT.format(label) for label in labels]
    # As SigLIP was trained: full length, no mask. CLIP reads up to the end of the text; what follows does not matter.
    longest = network.config.text_config.max_position_embeddings
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=longest, return_tensors="pt").input_ids

    def classify(images: Tensor) -> Tensor:
        found = network(input_ids=tokens.to(device), pixel_values=prepare(images.to(device)))
        return found.logits_per_image.softmax(-1)

    return Detector(labels, tuple(concept), classify, lineage_of(origin))


def _classifier(origin: Path | str, wanted: Sequence[str], prepare: Preprocess, device: str | torch.device) -> Detector:
    network = load_network(AutoModelForImageClassification, origin).to(device)
    names = network.config.id2label
    labels = tuple(names[i] for i in range(len(names)))
    spelt = {label.lower(): label for label in labels}
    own = tuple(spelt.get(label.lower(), label) for label in wanted)
    return Detector(
        labels,
        own,
        lambda images: network(pixel_values=prepare(images.to(device))).logits.softmax(-1),
        lineage_of(origin),
    )


def _preprocess(origin: Path | str) -> Preprocess:
    try:
        return read_preprocess(origin)
    except KeyError as error:
        raise ValueError(
            f"preprocessor_config.json of {str(origin)!r} has no {error}; allowed: what transformers' image processors "
            "save. Use another network."
        ) from error


def _origin(source: str) -> Path | str:
    try:
        return origin_of(source)
    except FileNotFoundError as error:
        advice = f"Or give {ALLOWED}."
        raise FileNotFoundError(unknown("watch.detector", source, (AUTO, NONE), advice)) from error


@dataclass(frozen=True)
class Look:
    """The result of one validation check; all shares are 0..1."""

    iteration: int
    target_share: float
    """Share of the pictures of validation forget prompts that show the concept."""
    keep_share: float
    """Share of the pictures of validation retain prompts that show the prompt's label, among labels the detector knows.
    If it knows none of them: share of pictures without the concept, so that broken pictures count as kept."""
    nothing_share: float
    """Share of the pictures of validation forget prompts in which nothing is recognisable; 0 if there is no such
    label."""
    reward_fraction: float
    """Mean reward of the forget pictures as a share of its scale; 1 means that the reward sees nothing of the
    concept."""


def look(
    detector: Detector,
    forgotten: Tensor,
    kept: Tensor,
    kept_prompts: Sequence[Prompt],
    *,
    iteration: int,
    reward_fraction: float,
) -> Look:
    """Evaluate pictures of the validation forget prompts and retain prompts, (n, 3, h, w) in [0, 1]."""
    seen = detector.answers(forgotten)
    pairs = list(zip(detector.answers(kept), (prompt.label for prompt in kept_prompts), strict=True))
    right = [answer == label for answer, label in pairs if label in detector.labels]
    return Look(
        iteration=iteration,
        target_share=_share([answer in detector.targets for answer in seen]),
        keep_share=_share(right or [answer not in detector.targets for answer, _ in pairs]),
        nothing_share=_share([answer == NOTHING for answer in seen]),
        reward_fraction=reward_fraction,
    )


def gap(seen: Look) -> float:
    """The detector's target share minus the share that the reward implies; -1..1."""
    return seen.target_share - (1 - seen.reward_fraction)


def alarm(seen: Look, threshold: float) -> str | None:
    """A one-line warning if the gap is above the threshold."""
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
    """Early stopping: remembers the best validation check and decides when to stop.

    The best check is the one with the highest keep share among those whose UA is at least `wanted`. As long as there is
    none, it is the one with the highest harmonic mean of UA and keep share. On a tie the higher UA wins, then the
    earlier check. UA is 1 - target share - nothing share here: a picture of nothing is no concept forgotten.
    """

    def __init__(self, wanted: float, patience: int) -> None:
        """`patience`: number of checks in a row that may bring no improvement once `wanted` is reached."""
        self.wanted, self.patience = wanted, patience
        self.best: Look | None = None
        self.since_best = 0

    def update(self, seen: Look) -> bool:
        """Record a check; True if it is the best so far, so that its weights should be kept."""
        is_best = self.best is None or self._score(seen) > self._score(self.best)
        self.best = seen if is_best else self.best
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    @property
    def is_over(self) -> bool:
        """Whether to stop: the wanted UA was reached, and `patience` checks have passed since the best one."""
        return self.best is not None and self._score(self.best)[0] and self.since_best >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"best": asdict(self.best) if self.best else None, "since_best": self.since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; `wanted` and `patience` come from the config."""
        best = state["best"]
        self.best = Look(**{name: best[name] + 0 for name in best}) if best else None  # + 0: numbers, or a TypeError
        self.since_best = operator.index(state["since_best"])

    def _score(self, seen: Look) -> tuple[bool, float, float]:
        ua, keep = max(0.0, 1 - seen.target_share - seen.nothing_share), seen.keep_share
        if ua >= self.wanted:
            return True, keep, ua
        return False, 2 * ua * keep / (ua + keep) if ua + keep else 0.0, ua


def refuse_shared_lineage(reward: Mapping[str, Any], detector: Mapping[str, Any]) -> None:
    """Refuse a detector that shares weights or ancestors with the reward: it would be fooled together with it."""
    if common := shared(reward, detector):
        names = f"reward {reward['name']!r} and detector {detector['name']!r}"
        raise ValueError(f"{names} share the weights {', '.join(sorted(common))}. Watch with an unrelated detector.")


def refuse_judge(detector: Mapping[str, Any], root: Path = ROOT) -> None:
    """Refuse a benchmark's judge as detector: it would judge a model that was selected by its own scores."""
    for folder in sorted(root.glob("judges/*/")) + [root / "clip-eval"]:
        if shared(detector, lineage_of(folder)):
            raise ValueError(
                f"detector {detector['name']!r} is the judge {folder.name!r} of the benchmark; allowed: a network that "
                "judges nothing. Give another as watch.detector, or none."
            )


def _share(outcomes: Sequence[bool]) -> float:
    if not outcomes:
        raise ValueError("no validation picture that the detector could judge. Give more validation prompts.")
    return sum(outcomes) / len(outcomes)
