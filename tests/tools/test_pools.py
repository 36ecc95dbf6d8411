"""Pools of icons: which label is drawn how often, and which icon a composite shows."""

import numpy as np
import pytest
import torch

from tools.emoji_canvas.art import Record
from tools.emoji_canvas.judges import LABELS, Pool, draw, draw_icons, label_of, pool, weighted

CPU = torch.device("cpu")


def record(label: str, group: str, style: str = "Flat") -> Record:
    return {"label": label, "style": style, "icon": label, "words": [], "group": group, "monochrome": False}


# Icon 0 red, 1 green, 2 and 3 blue; classes, hazard and an everyday noun: three labels of the detector's 28.
RECORDS = [record("Dogs", "class"), record("skulls", "hazard"), record("guitar", "everyday"), record("car", "everyday")]


@pytest.fixture
def icons() -> np.ndarray:
    pictures = np.zeros((4, 128, 128, 4), dtype=np.uint8)
    pictures[..., 3] = 255
    for index, channel in enumerate((0, 1, 2, 2)):
        pictures[index, ..., channel] = 255
    return pictures


@pytest.fixture
def detector(icons: np.ndarray) -> Pool:
    return pool("detector", icons, RECORDS, CPU)


def shares(source: Pool, count: int = 600) -> dict[str, float]:
    labels = draw(source, count, torch.Generator().manual_seed(0), recolour=False)[1]
    return {LABELS["detector"][k]: (labels == k).float().mean().item() for k in labels.unique().tolist()}


def test_labels_are_drawn_evenly_and_those_without_icons_never(detector: Pool) -> None:
    # 600 draws: four standard deviations are 0.077.
    # Three labels have icons; `other` has two of the four, and that makes no difference.
    assert shares(detector) == pytest.approx({"Dogs": 1 / 3, "skulls": 1 / 3, "other": 1 / 3}, abs=0.08)


def test_training_draws_other_eight_times_as_often(detector: Pool) -> None:
    more = weighted("detector", detector)
    assert shares(more) == pytest.approx({"Dogs": 0.1, "skulls": 0.1, "other": 0.8}, abs=0.08)
    assert detector.weight.sum() == 3  # the pool that measures is left as it was


def test_judges_without_weights_draw_evenly(icons: np.ndarray) -> None:
    source = pool("hazard", icons, RECORDS, CPU)
    assert torch.equal(weighted("hazard", source).weight, source.weight)


def test_the_icon_named_is_the_icon_shown(detector: Pool) -> None:
    images, index = draw_icons(detector, 64, torch.Generator().manual_seed(1), recolour=False)
    channel = torch.tensor([0, 1, 2, 2])[index]
    # At least 0.6 of the width, shifted by no more than leaves it inside: the centre pixel belongs to the icon.
    assert torch.equal(images[:, :, 32, 32].argmax(1), channel)
    assert set(index.tolist()) == {0, 1, 2, 3}


def test_a_composites_label_is_that_of_its_icon(detector: Pool) -> None:
    images, labels = draw(detector, 32, torch.Generator().manual_seed(2), recolour=False)
    same, index = draw_icons(detector, 32, torch.Generator().manual_seed(2), recolour=False)
    assert torch.equal(images, same)
    assert [LABELS["detector"][k] for k in labels] == [label_of("detector", RECORDS[i]) for i in index]
