"""The contract of rewards: checks, sums, and what a name can stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import own_rewards
import pytest
import torch
from torch import Tensor

from cgru.backbones.sd import StableDiffusion
from cgru.rewards.base import Reward, RewardError, WeightedSum, checked, load_reward, parse_sum


@dataclass(frozen=True)
class Given:
    """A reward that returns what it was given."""

    scores: Any
    low: float = 0.0
    high: float = 1.0
    lineage: dict[str, Any] = field(default_factory=lambda: {"name": "given"})

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.scores


IMAGES, PROMPTS = torch.zeros(3, 3, 4, 4), ["a", "b", "c"]


def test_good_scores_pass_unchanged_in_float32() -> None:
    # 1 + 5e-5 is rounding; it is within the 1e-4 that is allowed
    scores = torch.tensor([0.0, 0.5, 1 + 5e-5], dtype=torch.float64)
    result = checked(Given(scores), IMAGES, PROMPTS)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([0.0, 0.5, 1.00005])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(3, 1), r"shape \(3, 1\) for 3 pictures"),
        (torch.zeros(2), r"shape \(2,\)"),
        (torch.tensor([0.0, float("nan"), float("inf")]), "2 of 3 pictures"),
        (torch.tensor([0.0, 1.1, 0.5]), "1.1, outside its declared range 0 to 1"),
        (torch.tensor([-0.001, 0.0, 0.5]), "-0.001, outside"),
        ([0.0, 0.5, 1.0], "returned a list"),
    ],
)
def test_a_broken_contract_is_one_line_that_names_the_reward(scores: object, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        checked(Given(scores), IMAGES, PROMPTS)
    assert "'given'" in str(caught.value) and "\n" not in str(caught.value)


def test_a_sum_adds_weights_ranges_and_lineage() -> None:
    first = Given(torch.tensor([0.0, 0.5, 1.0]), lineage={"name": "a", "weights": ["x", "y"], "started_from": ["s"]})
    second = Given(torch.tensor([1.0, 2.0, 4.0]), -2.0, 4.0, {"name": "b", "weights": ["y", "z"]})
    total = WeightedSum(((2.0, first), (-0.5, second)))
    assert isinstance(total, Reward)
    # 2·0..2·1 and -0.5·4..-0.5·(-2): from 0 - 2 to 2 + 1
    assert (total.low, total.high) == (-2.0, 3.0)
    assert total(IMAGES, PROMPTS).tolist() == [-0.5, 0.0, 0.0]
    assert total.lineage == {"name": "2*a+-0.5*b", "weights": ["x", "y", "z"], "started_from": ["s"]}


def test_a_sum_names_the_term_at_fault() -> None:
    with pytest.raises(RewardError, match="'bad'"):
        WeightedSum(((1.0, Given(torch.zeros(3))), (1.0, Given(torch.ones(2), lineage={"name": "bad"}))))(
            IMAGES, PROMPTS
        )


def test_parse_sum() -> None:
    assert parse_sum("0.7*concept+0.3*clip") == [(0.7, "concept"), (0.3, "clip")]
    assert parse_sum(" my.mod:attr + -2 * jpeg ") == [(1.0, "my.mod:attr"), (-2.0, "jpeg")]


@pytest.mark.parametrize("spec", ["", "a+", "x*clip", "nan*clip", "0.5*"])
def test_a_sum_that_cannot_be_read(spec: str) -> None:
    with pytest.raises(ValueError, match="allowed: a name") as caught:
        parse_sum(spec)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_answered_with_the_nearest(tiny: StableDiffusion) -> None:
    with pytest.raises(ValueError, match="Did you mean 'concept'"):
        load_reward("0.5*jpeg+0.5*concpt", backbone=tiny)


def test_ones_own_reward_object_is_taken_as_it_is(tiny: StableDiffusion) -> None:
    assert load_reward("own_rewards:ready", backbone=tiny, scale=3.0) is own_rewards.ready


def test_ones_own_factory_gets_the_settings_it_names(tiny: StableDiffusion) -> None:
    # `concept` is a setting of other rewards; this factory names `scale` only. It is a class that looks like a Reward.
    reward = load_reward("own_rewards:Constant", backbone=tiny, scale=3.0, concept="Dogs")
    assert reward(IMAGES, PROMPTS).tolist() == [3.0] * 3


def test_a_factory_with_keywords_gets_all(tiny: StableDiffusion) -> None:
    reward = load_reward("own_rewards:with_everything", backbone=tiny, scale=1.0, own=2.0)
    assert reward(IMAGES, PROMPTS).tolist() == [3.0] * 3


def test_a_sum_is_loaded_by_its_terms(tiny: StableDiffusion) -> None:
    total = load_reward("0.5*own_rewards:ready+2*own_rewards:Constant", backbone=tiny, scale=3.0)
    assert (total.low, total.high) == (0.0, 10.0)
    assert total(IMAGES, PROMPTS).tolist() == [6.5] * 3
    assert total.lineage["weights"] == ["w"]


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("own_rewards:number", {}, "'own_rewards:number' is a int"),
        ("own_rewards:scores", {}, "needs prompts"),
        ("own_rewards:without_range", {}, "range 4.0 to 4.0"),
        ("own_rewards:Constant", {"scal": 2.0}, "Did you mean 'scale'"),
        ("own_rewards:missing", {}, "cannot import"),
        ("concept", {}, "needs concept"),
    ],
)
def test_mistakes_are_one_line(tiny: StableDiffusion, spec: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(spec, backbone=tiny, **settings)
    assert "\n" not in str(caught.value)
