"""Concept rewards: the paper's formula, the form with a slope, the worst of several networks, views, retain prompts."""

import math
from pathlib import Path

import pytest
import torch
from reward_folders import sure

from cgru.backbones.sd import StableDiffusion
from cgru.rewards.base import Reward, RewardError, checked, load_reward
from cgru.rewards.concept import ByPrompt, ConceptReward, RetainReward, find_target, probabilities
from cgru.rewards.heads import load_heads

DOGS = ("Dogs",)
EVEN = [0.1, 0.5, 0.2, 0.15, 0.05]  # Cats, Dogs, Human, other, nothing


def score(reward: Reward, images: torch.Tensor) -> float:
    scores = checked(reward, images, [""] * len(images))
    assert torch.allclose(scores, scores[0], atol=1e-5)  # `sure` networks do not look
    return scores[0].item()


def test_the_papers_reward(images: torch.Tensor) -> None:
    reward = ConceptReward((sure("object", EVEN),), "object", DOGS)
    assert (reward.low, reward.high) == (0.0, 10.0)
    assert score(reward, images) == pytest.approx(5.0, abs=1e-5)  # 10 · (1 - 0.5)


def test_probability_form_is_ten_times_one_minus_p_of_real_logits(
    heads_folders: dict[str, Path], images: torch.Tensor
) -> None:
    network = load_heads(heads_folders["clip"])
    p = network(images)["object"].softmax(-1)[:, 1]
    reward = ConceptReward((network,), "object", DOGS)
    assert torch.allclose(reward(images, [""] * 5), 10 * (1 - p), atol=1e-5)


def test_temperature_softens(images: torch.Tensor) -> None:
    # softmax(log p / 2) is proportional to √p: 0.70711 of 0.31623 + 0.70711 + 0.44721 + 0.38730 + 0.22361 = 2.08146
    reward = ConceptReward((sure("object", EVEN),), "object", DOGS, temperature=2.0)
    assert score(reward, images) == pytest.approx(10 * (1 - 0.70711 / 2.08146), abs=1e-3)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.5, 5.0),  # log-odds 0: the middle
        (1 / (1 + math.exp(3)), 7.5),  # absence has log-odds 3 = half the limit of 6: three quarters
        (1 - 1e-6, 0.0),  # -13.8, clipped to -6
        (1e-6, 10.0),
    ],
)
def test_log_odds_have_a_slope_where_p_saturates(images: torch.Tensor, p: float, expected: float) -> None:
    rest = (1 - p) / 4
    network = sure("object", [rest, p, rest, rest, rest])
    reward = ConceptReward((network,), "object", DOGS, form="log-odds")
    assert score(reward, images) == pytest.approx(expected, abs=1e-3)


def test_certainty_is_finite_in_both_forms(images: torch.Tensor) -> None:
    certain = sure("object", [1e-30, 1.0, 1e-30, 1e-30, 1e-30])
    for form in ("probability", "log-odds"):
        assert score(ConceptReward((certain,), "object", DOGS, form=form), images) == pytest.approx(0.0, abs=1e-5)
        assert score(ConceptReward((certain,), "object", ("Cats",), form=form), images) == pytest.approx(10.0, abs=1e-5)


def test_hazard_is_all_categories_together(images: torch.Tensor) -> None:
    network = sure("hazard", [0.3, 0.1, 0.4, 0.2])  # blades, skulls, none, nothing
    head, targets = find_target("hazard", network)
    assert (head, targets) == ("hazard", ("blades", "skulls"))
    assert score(ConceptReward((network,), head, targets, scale=1.0), images) == pytest.approx(0.6, abs=1e-6)
    # with nothing = 1 an empty picture is as bad as a hazard: 1 - 0.3 - 0.1 - 0.2
    assert score(ConceptReward((network,), head, targets, scale=1.0, nothing=1.0), images) == pytest.approx(0.4)
    assert score(ConceptReward((network,), head, targets, scale=1.0, nothing=0.5), images) == pytest.approx(0.5)


def test_the_worst_network_counts(images: torch.Tensor) -> None:
    blind, seeing = sure("object", [0.9, 0.025, 0.025, 0.025, 0.025]), sure("object", [0.1, 0.8, 0.04, 0.03, 0.03])
    assert score(ConceptReward((blind, seeing), "object", DOGS), images) == pytest.approx(2.0, abs=1e-5)
    assert score(ConceptReward((seeing, blind), "object", DOGS), images) == pytest.approx(2.0, abs=1e-5)


def test_views_are_averaged_before_the_worst_is_taken(heads_folders: dict[str, Path], images: torch.Tensor) -> None:
    networks = tuple(load_heads(folder) for folder in heads_folders.values())
    mirrored = [
        torch.stack([network(look)["object"].softmax(-1)[:, 1] for look in (images, images.flip(-1))]).mean(0)
        for network in networks
    ]
    reward = ConceptReward(networks, "object", DOGS, views=2)
    assert torch.allclose(reward(images, [""] * 5), 10 * (1 - torch.stack(mirrored).amax(0)), atol=1e-5)


def test_the_same_picture_gets_the_same_reward_alone_and_in_a_batch(
    heads_folders: dict[str, Path], images: torch.Tensor
) -> None:
    reward = ConceptReward((load_heads(heads_folders["clip"]),), "object", DOGS, views=5, seed=7)
    whole = reward(images, [""] * 5)
    assert torch.equal(whole, reward(images, [""] * 5))
    assert torch.allclose(whole, torch.cat([reward(one, [""]) for one in images.split(1)]), atol=1e-5)
    assert not torch.equal(
        whole, ConceptReward(reward.networks, "object", DOGS, views=5, seed=8)(images, [""] * 5)
    )  # the views do matter


def test_gradients_reach_the_pictures_through_views_and_ensemble(heads_folders: dict[str, Path]) -> None:
    networks = tuple(load_heads(folder) for folder in heads_folders.values())
    pictures = torch.rand(3, 3, 20, 20).requires_grad_(True)
    reward = ConceptReward(networks, "object", DOGS, form="log-odds", views=3, nothing=1.0)
    reward(pictures, [""] * 3).sum().backward()
    assert pictures.grad is not None and bool(pictures.grad.isfinite().all())
    assert bool((pictures.grad.flatten(1).abs().amax(1) > 0).all())


def test_probabilities_of_every_head_sum_to_one(heads_folders: dict[str, Path], images: torch.Tensor) -> None:
    tables = probabilities(load_heads(heads_folders["swin"]), images, temperature=3.0, count=4)
    assert set(tables) == {"object", "hazard", "style"}
    for table in tables.values():
        assert torch.allclose(table.sum(1), torch.ones(5))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("dogs", ("object", DOGS)), ("INK", ("style", ("Ink",))), ("humans", ("object", ("Human",)))]
    + [("skulls", ("hazard", ("skulls",)))],
)
def test_a_concept_is_found_in_any_head(given: str, expected: tuple[str, tuple[str, ...]]) -> None:
    assert find_target(given, sure("object", EVEN)) == expected


@pytest.mark.parametrize("given", ["Dogz", "other", "nothing"])
def test_what_is_no_concept_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="allowed: Cats, Dogs, Human, blades, skulls, Flat, Ink, hazard"):
        find_target(given, sure("object", EVEN))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "logodds"}, "Did you mean 'log-odds'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"views": 0}, "views is 0"),
        ({"nothing": 1.5}, "nothing is 1.5"),
        ({"limit": 20.0}, "limit is 20.0"),
        ({"targets": ("Cat",)}, "Did you mean 'Cats'"),
        ({"head": "objects"}, "Did you mean 'object'"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConceptReward(**{"networks": (sure("object", EVEN),), "head": "object", "targets": DOGS, **settings})


def test_retain_reward_is_p_of_what_the_prompt_names(images: torch.Tensor) -> None:
    network = sure("object", EVEN)
    truth = {"a cat": ("object", "Cats"), "a man": ("object", "Human"), "in ink": ("style", "Ink")}
    reward = RetainReward((network,), truth, scale=10.0)
    scores = checked(reward, images[:3], ["a man", "in ink", "a cat"])
    assert scores.tolist() == pytest.approx([2.0, 10 / 3, 1.0], abs=1e-5)  # the style head is even over 3 labels
    sceptic = sure("object", [0.05, 0.5, 0.4, 0.03, 0.02])
    # the least sure network counts: min(0.2, 0.4) for the man, min(0.1, 0.05) for the cat
    both = RetainReward((network, sceptic), truth)
    assert both(images[:2], ["a man", "a cat"]).tolist() == pytest.approx([2.0, 0.5], abs=1e-5)


def test_retain_reward_is_softened_by_its_temperature(images: torch.Tensor) -> None:
    # softmax(log p / 2) is proportional to √p: for Human √0.2 = 0.44721 of 2.08146, as in the forget reward above
    reward = RetainReward((sure("object", EVEN),), {"a man": ("object", "Human")}, temperature=2.0)
    assert reward(images[:1], ["a man"]).tolist() == pytest.approx([10 * 0.44721 / 2.08146], abs=1e-3)


def test_retain_reward_refuses_what_it_has_no_label_for(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="'a boat'"):
        RetainReward((sure("object", EVEN),), {"a cat": ("object", "Cats")})(images[:1], ["a boat"])
    with pytest.raises(ValueError, match="unknown label"):
        RetainReward((sure("object", EVEN),), {"a cat": ("object", "Kats")})


def test_each_picture_goes_to_the_reward_of_its_prompt(images: torch.Tensor) -> None:
    network = sure("object", EVEN)
    forget = ConceptReward((network,), "object", DOGS)
    retain = RetainReward((network,), {"a cat": ("object", "Cats")}, scale=20.0)
    reward = ByPrompt(forget, retain, frozenset({"a cat"}))
    assert (reward.low, reward.high) == (0.0, 20.0)
    scores = checked(reward, images[:3], ["a cat", "a dog", "a cat"])
    assert scores.tolist() == pytest.approx([2.0, 5.0, 2.0], abs=1e-4)  # 20 · 0.1 and 10 · (1 - 0.5)
    assert reward.lineage == {"name": "concept|retain", "weights": ["t"], "started_from": []}


def test_by_prompt_checks_its_parts(images: torch.Tensor) -> None:
    network = sure("object", EVEN)
    retain = RetainReward((network,), {"a cat": ("object", "Cats")})
    broken = sure("object", EVEN)
    broken.heads["object"].bias.data.fill_(float("nan"))
    reward = ByPrompt(ConceptReward((broken,), "object", DOGS), retain, frozenset({"a cat"}))
    assert reward(images[:1], ["a cat"]).tolist() == pytest.approx([1.0], abs=1e-5)
    with pytest.raises(RewardError, match="NaN"):
        reward(images, ["a dog"] * 5)


def test_loaded_by_name_with_the_settings_of_a_run(
    tiny: StableDiffusion, heads_folders: dict[str, Path], images: torch.Tensor
) -> None:
    settings = {"form": "log-odds", "scale": 1.0, "temperature": 2.0, "limit": 4.0, "views": 2, "nothing": 1.0}
    folders = tuple(str(folder) for folder in heads_folders.values())
    reward = load_reward("concept", backbone=tiny, concept="dogs", networks=folders, **settings)
    assert isinstance(reward, ConceptReward)
    assert (reward.head, reward.targets, reward.high, len(reward.networks)) == ("object", DOGS, 1.0, 2)
    assert len(reward.lineage["weights"]) == 4 and reward.lineage["started_from"] == ["abc"]
    assert checked(reward, images, [""] * 5).shape == (5,)
