"""Concept rewards from class heads: high when the target is not in the picture (paper §5: 10 · (1 - p_target)).

Beyond the paper: a form with a slope where p saturates (clipped log-odds, temperature), an ensemble of networks in
which the worst counts, augmented views, and p("nothing") counted as if it were the target, so that collapse pays
nothing. With one network, one view, temperature 1 and the form "probability" this is the paper's reward.
Retain prompts have a reward of their own, p(what the prompt names); `ByPrompt` sends each picture to its reward.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgru.backbones.base import Backbone
from cgru.catalog import unknown
from cgru.rewards.base import Reward, checked, merged, name_of
from cgru.rewards.heads import ClassHeads, load_networks
from cgru.rewards.pictures import views
from cgru.tasks import ALIASES

FORMS = ("probability", "log-odds")
NOTHING = "nothing"
FILLERS = ("other", "none", NOTHING)
"""Labels that are no concept."""
LARGEST_LIMIT = 15.0
"""In float32, p and 1 - p cannot say more than log-odds of about 16."""


@dataclass(frozen=True, eq=False)
class ConceptReward:
    """scale · (1 - p), or log-odds of absence mapped to 0..scale; p is the chance that the target is in the picture."""

    networks: tuple[ClassHeads, ...]
    head: str
    targets: tuple[str, ...]
    form: str = "probability"
    """One of FORMS."""
    scale: float = 10.0
    temperature: float = 1.0
    limit: float = 6.0
    views: int = 1
    nothing: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every setting."""
        if self.form not in FORMS:
            raise ValueError(unknown("form of a reward", self.form, FORMS, "The paper's is probability."))
        check_positive(scale=self.scale, temperature=self.temperature, limit=self.limit, views=self.views)
        if self.limit > LARGEST_LIMIT:
            raise ValueError(f"limit is {self.limit}; log-odds in float32 allow at most {LARGEST_LIMIT:g}")
        if not 0 <= self.nothing <= 1:
            raise ValueError(f"nothing is {self.nothing}; it must lie in 0 (ignored) to 1 (counts like the target)")
        for network in self.networks:
            for label in (*self.targets, *([NOTHING] if self.nothing else [])):
                column_of(network, self.head, label)

    @property
    def low(self) -> float:
        """When the target is certainly there."""
        return 0.0

    @property
    def high(self) -> float:
        """When it is certainly not."""
        return self.scale

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of all networks together."""
        return merged("concept", [network.lineage for network in self.networks])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; prompts do not matter. Of the networks, the one most sure of the target counts."""
        p = torch.stack([self._shown(network, images) for network in self.networks]).amax(0).clamp(0, 1)
        if self.form == "probability":
            return self.scale * (1 - p)
        log_odds = -torch.logit(p, eps=1e-7).clamp(-self.limit, self.limit)
        return self.scale * (log_odds + self.limit) / (2 * self.limit)

    def _shown(self, network: ClassHeads, images: Tensor) -> Tensor:
        tables = probabilities(network, images, temperature=self.temperature, count=self.views, seed=self.seed)
        table = tables[self.head]
        p = table[:, [column_of(network, self.head, label) for label in self.targets]].sum(1)
        # Emptied pictures would otherwise score as well as changed ones, and that is the easier way out.
        return p + self.nothing * table[:, column_of(network, self.head, NOTHING)] if self.nothing else p


@dataclass(frozen=True, eq=False)
class RetainReward:
    """scale · p(what the prompt names); of the networks, the least sure one counts."""

    networks: tuple[ClassHeads, ...]
    truth: Mapping[str, tuple[str, str]]
    """Prompt -> (head, label)."""
    scale: float = 10.0
    temperature: float = 1.0
    views: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that every network knows every label."""
        check_positive(scale=self.scale, temperature=self.temperature, views=self.views)
        for network in self.networks:
            for head, label in set(self.truth.values()):
                column_of(network, head, label)

    @property
    def low(self) -> float:
        """When what the prompt names is certainly not there."""
        return 0.0

    @property
    def high(self) -> float:
        """When it certainly is."""
        return self.scale

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of all networks together."""
        return merged("retain", [network.lineage for network in self.networks])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures by their prompts."""
        if strange := [prompt for prompt in prompts if prompt not in self.truth]:
            raise ValueError(f"no label is known for the retain prompt {strange[0]!r}; give (head, label) for each.")
        return self.scale * torch.stack([self._right(network, images, prompts) for network in self.networks]).amin(0)

    def _right(self, network: ClassHeads, images: Tensor, prompts: Sequence[str]) -> Tensor:
        tables = probabilities(network, images, temperature=self.temperature, count=self.views, seed=self.seed)
        places = [(head, column_of(network, head, label)) for head, label in (self.truth[p] for p in prompts)]
        return torch.stack([tables[head][row, column] for row, (head, column) in enumerate(places)])


@dataclass(frozen=True, eq=False)
class ByPrompt:
    """Pictures of retain prompts get the retain reward, all others the forget reward."""

    forget: Reward
    retain: Reward
    is_retain: frozenset[str]
    """The retain prompts."""

    @property
    def low(self) -> float:
        """The lower of the two."""
        return min(self.forget.low, self.retain.low)

    @property
    def high(self) -> float:
        """The higher of the two."""
        return max(self.forget.high, self.retain.high)

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Of both rewards."""
        both = (self.forget, self.retain)
        return merged("|".join(name_of(reward) for reward in both), [reward.lineage for reward in both])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score each picture with its own reward, checked."""
        scores = images.new_zeros(len(images), dtype=torch.float32)
        for reward, is_retain in ((self.forget, False), (self.retain, True)):
            rows = [row for row, prompt in enumerate(prompts) if (prompt in self.is_retain) == is_retain]
            if rows:
                ids = torch.tensor(rows, device=images.device)
                scores = scores.index_put((ids,), checked(reward, images[ids], [prompts[row] for row in rows]))
        return scores


def probabilities(
    network: ClassHeads, images: Float[Tensor, "n c h w"], *, temperature: float = 1.0, count: int = 1, seed: int = 0
) -> dict[str, Float[Tensor, "n _"]]:
    """Head -> softmax(logits / temperature), averaged over `count` augmented views; differentiable."""
    # Views are made at the network's own size: noise on a 512-pixel picture would average out in shrinking.
    looks = [network(view) for view in views(network.tower.resized(images), count, seed)]
    return {head: torch.stack([(look[head] / temperature).softmax(-1) for look in looks]).mean(0) for head in looks[0]}


def find_target(concept: str, network: ClassHeads) -> tuple[str, tuple[str, ...]]:
    """The head and labels a concept stands for: `hazard` is every hazard category together, else it is one label."""
    wanted = _plain(concept)
    if wanted == "hazard" and "hazard" in network.labels:
        return "hazard", tuple(label for label in network.labels["hazard"] if label not in FILLERS)
    known = [(head, label) for head, labels in network.labels.items() for label in labels if label not in FILLERS]
    for head, label in known:
        if _plain(label) == wanted:
            return head, (label,)
    allowed = [label for _, label in known] + (["hazard"] if "hazard" in network.labels else [])
    raise ValueError(unknown("concept", concept, allowed, "Choose one that the reward network has a label for."))


def concept_reward(
    backbone: Backbone,
    *,
    concept: str,
    form: str = "probability",
    scale: float = 10.0,
    temperature: float = 1.0,
    limit: float = 6.0,
    networks: Sequence[str | Path] = ("clip",),
    views: int = 1,
    nothing: float = 0.0,
    seed: int = 0,
) -> ConceptReward:
    """The reward for forgetting a concept that the networks have a label for.

    Args:
        backbone: its device is used.
        concept: a label of the networks, or `hazard`.
        form: `probability`, scale · (1 - p), or `log-odds`, clipped to ±limit and mapped linearly to 0..scale.
        scale: the highest reward.
        temperature: divides the logits; above 1 softens p.
        limit: where log-odds are clipped, 0 to 15.
        networks: `clip`, `swin` or heads folders; the worst counts.
        views: pictures averaged, the picture itself first.
        nothing: weight of p(nothing recognisable), 0 to 1.
        seed: of the augmented views.
    """
    loaded = load_networks(networks, device=backbone.device)
    head, targets = find_target(concept, loaded[0])
    return ConceptReward(loaded, head, targets, form, scale, temperature, limit, views, nothing, seed)


def _plain(name: str) -> str:
    plain = name.strip().lower().replace("_", " ")
    return ALIASES.get(plain, plain)


def column_of(network: ClassHeads, head: str, label: str) -> int:
    """Column of a label in a head's logits; a network without it is refused."""
    if head not in network.labels:
        raise ValueError(unknown("head of a reward network", head, network.labels, "Use a network that has it."))
    if label not in network.labels[head]:
        advice = f"Use networks whose {head} head has this label."
        raise ValueError(unknown(f"label of the {head} head", label, network.labels[head], advice))
    return network.labels[head].index(label)


def check_positive(**settings: float | int) -> None:  # int: the checker of shapes does not take it for a float
    """Refuse settings that are not above 0."""
    for name, value in settings.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
