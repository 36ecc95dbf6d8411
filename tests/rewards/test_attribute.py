"""The reward for attributes: its measures on pictures drawn by hand, its forms, and what counts as nothing."""

import math

import pytest
import torch

from cgru.attributes import ATTRIBUTES, TUNED_ON
from cgru.backbones.sd import StableDiffusion
from cgru.cli import main
from cgru.evaluation.judges.attributes import AttributeDetector, AttributeJudge
from cgru.rewards.attribute import AttributeReward
from cgru.rewards.base import Reward, checked, load_reward

RED, BLUE, GREY = (0.9, 0.2, 0.1), (0.1, 0.3, 0.9), (0.2, 0.2, 0.2)


def square(colour: tuple[float, float, float], left: int, top: int, side: int, size: int = 64) -> torch.Tensor:
    """A square on white."""
    picture = torch.ones(3, size, size)
    picture[:, top : top + side, left : left + side] = torch.tensor(colour)[:, None, None]
    return picture


CASES = [
    # attribute, a picture with it, one without it
    ("Colourless", square(GREY, 20, 20, 24), square(RED, 20, 20, 24)),
    ("Warm", square(RED, 20, 20, 24), square(BLUE, 20, 20, 24)),
    ("Rightward", square(RED, 24, 20, 24), square(RED, 16, 20, 24)),
    ("Large", square(RED, 8, 8, 48), square(RED, 20, 20, 24)),
    ("High", square(RED, 20, 12, 24), square(RED, 20, 28, 24)),
]


def test_every_attribute_has_a_case_and_two_are_for_tuning() -> None:
    assert [name for name, _, _ in CASES] == [*ATTRIBUTES]
    assert set(TUNED_ON) < set(ATTRIBUTES) and len(TUNED_ON) == 2


@pytest.mark.parametrize(("name", "there", "gone"), CASES, ids=[name for name, _, _ in CASES])
@pytest.mark.parametrize("scale", [1, 4])
def test_detector_and_judge_tell_it_at_any_size(name: str, there: torch.Tensor, gone: torch.Tensor, scale: int) -> None:
    images = torch.stack([there, gone]).repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    low, high = checked(AttributeReward(name), images, ["", ""]).tolist()
    assert low < 0.5 and high > 9.5
    for judge in (AttributeJudge(name), AttributeDetector(name)):
        assert judge.look(images)[0].tolist() == [[1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("ground", [1.0, 0.0, 0.5])
def test_an_empty_picture_is_no_success(name: str, ground: float) -> None:
    images = torch.full((2, 3, 64, 64), ground)
    images[1, :, 30:32, 30:32] = 1 - ground  # 4 of 4,096 pixels
    assert checked(AttributeReward(name, "log-odds"), images, ["", ""]).tolist() == [0, 0]
    for judge in (AttributeJudge(name), AttributeDetector(name)):
        assert judge.look(images)[0].tolist() == [[0, 0, 1]] * 2


def test_the_margin_is_the_log_odds() -> None:
    # A square of side 40 fills 1600 / 4096 = 0.390625; white, at a difference of 0, is drawn 1 / (1 + e^5) = 0.006693.
    # Together 0.394704, so the margin is (0.394704 - 0.4) / 0.03 = -0.1765.
    images = square(RED, 12, 12, 40)[None]
    p = 1 / (1 + math.exp(0.1765))
    assert AttributeReward("Large", scale=2.0)(images, [""]).item() == pytest.approx(2 * (1 - p), abs=1e-3)
    assert AttributeReward("Large", "log-odds", limit=4.0)(images, [""]).item() == pytest.approx(
        10 * (4 + 0.1765) / 8, abs=1e-3
    )
    assert AttributeReward("Large", "log-odds", limit=0.1)(images, [""]).item() == 10.0  # clipped


def test_the_colour_of_the_ground_does_not_matter() -> None:
    images = torch.stack([square(BLUE, 20, 20, 24), square(RED, 20, 20, 24)])
    on_orange = torch.where(images == 1, torch.tensor([0.9, 0.6, 0.2])[:, None, None], images)
    assert AttributeDetector("Warm").look(on_orange)[0].argmax(1).tolist() == [1, 0]


def test_a_picture_s_score_depends_on_it_alone_and_there_are_no_weights(tiny: StableDiffusion) -> None:
    reward = load_reward("attribute", backbone=tiny, concept="High", scale=1.0)
    assert isinstance(reward, Reward) and (reward.low, reward.high) == (0.0, 1.0)
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([reward(image[None], [""]) for image in images])
    assert torch.equal(reward(images, [""] * 5), alone)
    assert reward.lineage == {"name": "attribute High", "weights": [], "started_from": []}
    grey = images.mean(1, keepdim=True)
    assert torch.equal(reward(grey, [""] * 5), reward(grey.expand(-1, 3, -1, -1), [""] * 5))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["unlearn", "Dogs", "reward.name=attribute"], "unknown attribute 'Dogs'; allowed: Colourless, Warm"),
        (["unlearn", "Hihg", "--dry-run"], "Did you mean 'High'"),
        (["unlearn", "Warm", "watch.stop=true"], "no outside detector knows 'Warm'"),
        (["unlearn", "Warm", "critic.head=classes"], "is no class of pictures; allowed: value"),
        (["evaluate", "emoji-canvas", "--target", "Warm"], "unknown concept 'Warm'; allowed: Architectures"),
        (["evaluate", "emoji-canvas", "--benchmark", "attribute", "--target", "Cats"], "allowed: Colourless, Warm"),
        (["evaluate", "emoji-canvas", "--benchmark", "attribute", "--images", "0"], "--images 0; allowed: 1"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1
