"""What a reward is, how its output is checked, weighted sums, and `load_reward`, which builds one from its name.

A reward is a callable (images, prompts) -> (n,) with a fixed range [low, high]; higher is better. Its lineage names the
weights it is made of and those they were started from, so that a judge related to a reward can be refused.
A factory is called with (backbone, **settings) and gets those settings that its signature names: one set of settings
(the reward part of a run's config) serves every term of a sum.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cgru.backbones.base import Backbone
from cgru.catalog import REWARDS, call_own, resolve, unknown

TOLERANCE = 1e-4
"""How far a reward may leave its declared range: rounding, not more."""

SETTINGS = ("concept", "form", "scale", "temperature", "limit", "networks", "views", "nothing", "seed")
"""Settings that any reward may be given and that those without use for them do not see."""


class RewardError(ValueError):
    """A reward that breaks its contract: shape, NaN or range."""


@runtime_checkable
class Reward(Protocol):
    """r(x0, c): images [0, 1] and their prompts -> one score per picture, within [low, high].

    Images are as the model draws them: three channels, or one.
    """

    @property
    def low(self) -> float:
        """The least score there can be."""

    @property
    def high(self) -> float:
        """The highest score there can be."""

    @property
    def lineage(self) -> Mapping[str, Any]:
        """{"name": str, "weights": [sha256, ...], "started_from": [sha256 or hub id, ...]}."""

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; higher is better."""


def checked(reward: Reward, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
    """Score pictures in float32, or say in one line how the reward broke its contract."""
    assert len(images) == len(prompts), f"{len(images)} pictures for {len(prompts)} prompts"
    scores: object = reward(images, prompts)
    name = f"reward {name_of(reward)!r}"
    if not isinstance(scores, Tensor):
        raise RewardError(f"{name} returned a {type(scores).__name__}; it must return a tensor of shape (n,).")
    if scores.shape != (len(images),):
        raise RewardError(f"{name} returned shape {tuple(scores.shape)} for {len(images)} pictures; it must be (n,).")
    scores = scores.float()
    if bad := int((~scores.isfinite()).sum()):
        raise RewardError(f"{name} returned NaN or infinity for {bad} of {len(images)} pictures; check its model.")
    outside = (scores < reward.low - TOLERANCE) | (scores > reward.high + TOLERANCE)
    if bool(outside.any()):
        raise RewardError(
            f"{name} returned {float(scores[outside][0]):g}, outside its declared range "
            f"{reward.low:g} to {reward.high:g}; correct its low and high."
        )
    return scores


def name_of(reward: Reward) -> str:
    """The name a reward goes by in messages."""
    return str(reward.lineage.get("name", type(reward).__name__))


def merged(name: str, lineages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One lineage for something made of several: every hash once, in order."""
    tables = list(lineages)
    parts = {key: [entry for table in tables for entry in table.get(key, ())] for key in ("weights", "started_from")}
    return {"name": name, **{key: list(dict.fromkeys(entries)) for key, entries in parts.items()}}


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """The sum of weight · reward; a negative weight turns a reward round."""

    terms: tuple[tuple[float, Reward], ...]

    @property
    def low(self) -> float:
        """The least sum there can be."""
        return sum(min(weight * reward.low, weight * reward.high) for weight, reward in self.terms)

    @property
    def high(self) -> float:
        """The highest sum there can be."""
        return sum(max(weight * reward.low, weight * reward.high) for weight, reward in self.terms)

    @property
    def lineage(self) -> Mapping[str, Any]:
        """All terms' weights together."""
        name = "+".join(f"{weight:g}*{name_of(reward)}" for weight, reward in self.terms)
        return merged(name, [reward.lineage for _, reward in self.terms])

    def __call__(self, images: Float[Tensor, "n c h w"], prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Score pictures; every term is checked, so that a message names the one at fault."""
        return torch.stack([weight * checked(reward, images, prompts) for weight, reward in self.terms]).sum(0)


def parse_sum(spec: str) -> list[tuple[float, str]]:
    """Read "0.7*concept+0.3*clip" as [(0.7, "concept"), (0.3, "clip")]; a name alone has weight 1."""
    return [_parse_term(term, spec) for term in spec.split("+")]


def _parse_term(term: str, spec: str) -> tuple[float, str]:
    factor, times, name = (part.strip() for part in term.rpartition("*"))
    try:
        weight = float(factor) if times else 1.0
    except ValueError:
        weight = math.nan
    if not name or not weight or not math.isfinite(weight):
        raise ValueError(
            f"cannot read {term.strip()!r} in reward {spec!r}; allowed: a name, 'module:attr' or a sum such as "
            f"'0.7*concept+0.3*clip'; names: {', '.join(REWARDS)}."
        )
    return weight, name


def load_reward(spec: str, *, backbone: Backbone, **settings: Any) -> Reward:  # noqa: ANN401 - each reward has its own
    """Build the reward that `spec` names.

    Args:
        spec: a name of the catalog, one's own "module:attr" (a Reward, or a factory of one), or a weighted sum.
        backbone: the model that is being trained; networks go to its device.
        settings: for the factories; each gets those that its signature names.
    """
    terms = parse_sum(spec)
    targets = [(weight, name, resolve("reward", name)) for weight, name in terms]
    _check_settings(settings, [target for _, _, target in targets if callable(target) and not _is_reward(target)])
    built = tuple((weight, _build(name, target, backbone, settings)) for weight, name, target in targets)
    return built[0][1] if len(built) == 1 and built[0][0] == 1 else WeightedSum(built)


def check_reward(spec: str, settings: Mapping[str, Any]) -> None:
    """Refuse names that stand for nothing and settings that no term of the sum takes, without building anything."""
    targets = [resolve("reward", name) for _, name in parse_sum(spec)]
    _check_settings(settings, [target for target in targets if callable(target) and not _is_reward(target)])


def _is_reward(target: object) -> bool:
    # A class with `low` and `high` looks like a Reward itself, but it is what makes one.
    return isinstance(target, Reward) and not inspect.isclass(target)


def _check_settings(settings: Mapping[str, Any], factories: Sequence[Callable[..., Any]]) -> None:
    parameters = [parameter for factory in factories for parameter in _parameters(factory)]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    allowed = dict.fromkeys([*SETTINGS, *(parameter.name for parameter in parameters)])
    for name in settings:
        if name not in allowed:
            raise ValueError(unknown("setting of a reward", name, allowed, "Correct or leave out the setting."))


def _build(name: str, target: Any, backbone: Backbone, settings: Mapping[str, Any]) -> Reward:  # noqa: ANN401
    is_factory = callable(target) and not _is_reward(target)
    settings = _taken(name, target, settings) if is_factory else {}
    reward = call_own("reward", name, target, backbone, **settings) if is_factory else target
    if not _is_reward(reward):
        raise RewardError(
            f"reward {name!r} is a {type(reward).__name__}; it must be a Reward (a callable with low, high and "
            "lineage) or a factory of one, called with (backbone, **settings)."
        )
    if not -math.inf < reward.low < reward.high < math.inf:
        raise RewardError(f"reward {name!r} declares the range {reward.low} to {reward.high}; give finite low < high.")
    return reward


def _taken(name: str, factory: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    if not _parameters(factory):
        raise RewardError(f"reward {name!r} takes no arguments; a factory is called with (backbone, **settings).")
    rest = _parameters(factory)[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in rest):
        return dict(settings)
    plain = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed := [p.name for p in plain if p.default is p.empty and p.name not in settings]:
        raise RewardError(f"reward {name!r} needs {', '.join(needed)}, which was not given; given: {list(settings)}.")
    return {p.name: settings[p.name] for p in plain if p.name in settings}


def _parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(factory).parameters.values())
