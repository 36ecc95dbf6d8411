"""The reward for what is drawn instead: sure networks that agree on another label, and nothing for anything else."""

import math
from pathlib import Path

import pytest
import torch
from reward_folders import sure

from cgru.backbones.sd import StableDiffusion
from cgru.rewards.base import checked, load_reward
from cgru.rewards.replaced import ReplacedReward

OTHERS = ("Cats", "Human")
"""Of Cats, Dogs, Human, other, nothing, what may replace Dogs."""


def score(reward: ReplacedReward, images: torch.Tensor) -> float:
    scores = checked(reward, images, [""] * len(images))
    assert torch.allclose(scores, scores[0], atol=1e-5)  # `sure` networks do not look
    return scores[0].item()


def test_the_likeliest_other_label_counts(images: torch.Tensor) -> None:
    reward = ReplacedReward((sure("object", [0.3, 0.1, 0.4, 0.15, 0.05]),), "object", OTHERS)
    assert (reward.low, reward.high) == (0.0, 10.0)
    assert score(reward, images) == pytest.approx(4.0, abs=1e-5)  # Human; not 0.3 + 0.4


@pytest.mark.parametrize("row", [0, 1, 2], ids=["the concept", "other", "nothing"])
def test_concept_other_and_nothing_pay_nothing(images: torch.Tensor, row: int) -> None:
    p = [0.001, 0.001, 0.001, 0.001, 0.001]
    p[(1, 3, 4)[row]] = 0.996
    assert score(ReplacedReward((sure("object", p),), "object", OTHERS), images) == pytest.approx(0.01, abs=1e-4)


def test_networks_must_agree_on_one_label(images: torch.Tensor) -> None:
    one = sure("object", [0.9, 0.01, 0.07, 0.01, 0.01])
    two = sure("object", [0.2, 0.01, 0.77, 0.01, 0.01])
    # Both are sure of something: the least for Cats is 0.2, for Human 0.07.
    assert score(ReplacedReward((one, two), "object", OTHERS), images) == pytest.approx(2.0, abs=1e-5)


def test_log_odds_rise_with_p(images: torch.Tensor) -> None:
    reward = ReplacedReward((sure("object", [0.9, 0.04, 0.02, 0.02, 0.02]),), "object", OTHERS, form="log-odds")
    assert score(reward, images) == pytest.approx(10 * (math.log(9) + 6) / 12, abs=1e-4)


def test_a_class_gives_way_to_classes_and_a_hazard_to_classes(
    tiny: StableDiffusion, heads_folders: dict[str, Path]
) -> None:
    def labels(concept: str) -> tuple[str, tuple[str, ...]]:
        reward = load_reward("replaced", backbone=tiny, concept=concept, networks=[heads_folders["clip"]])
        assert isinstance(reward, ReplacedReward)
        return reward.head, reward.labels

    assert labels("Dogs") == ("object", ("Cats", "Human"))
    assert labels("skulls") == labels("hazard") == ("object", ("Cats", "Dogs", "Human"))
    assert labels("Ink") == ("style", ("Flat",))


def test_it_is_of_its_networks_and_can_be_a_term_of_a_sum(
    tiny: StableDiffusion, heads_folders: dict[str, Path], images: torch.Tensor
) -> None:
    spec, folders = "0.5*concept+0.5*replaced", list(heads_folders.values())
    reward = load_reward(spec, backbone=tiny, concept="Dogs", networks=folders, views=2, nothing=1.0)
    alone = load_reward("replaced", backbone=tiny, concept="Dogs", networks=folders)
    assert set(alone.lineage["weights"]) == set(reward.lineage["weights"]) != set()
    scores = checked(reward, images, [""] * 5)
    assert len(scores.unique()) == 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"form": "odds"}, "unknown form of a reward 'odds'"),
        ({"limit": 20.0}, "limit is 20.0; log-odds"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"labels": ()}, "the object head has no label to replace the concept by; allowed: networks with another"),
        ({"labels": ("Fishes",)}, "unknown label of the object head 'Fishes'"),
    ],
)
def test_wrong_settings_are_told_in_one_line(change: dict[str, object], told: str) -> None:
    settings = {"labels": OTHERS, **change}
    with pytest.raises(ValueError, match=told) as error:
        ReplacedReward((sure("object", [0.2] * 5),), "object", **settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
