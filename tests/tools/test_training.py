"""The loop behind every part: a run that was cut off ends where an uninterrupted one does, and time limits anneal."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

from tools.emoji_canvas.training import Recipe, fit, keep, progress, rate, seed_of

CPU = torch.device("cpu")


def train(work: Path, stop_at: int | None = None) -> dict[str, Tensor]:
    """Fit a line; raise in the middle when asked to."""
    torch.manual_seed(0)
    model, step = nn.Linear(3, 1), iter(range(10**6))

    def loss(generator: torch.Generator) -> Tensor:
        if next(step) == stop_at:
            raise KeyboardInterrupt
        x = torch.randn((8, 3), generator=generator)
        return ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()

    recipe = Recipe(steps=30, batch=8, learning_rate=0.05, warmup=3)
    fit("line", model, loss, recipe, work, CPU, save_every=7)
    return model.state_dict()


def test_interrupted_equals_uninterrupted(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", stop_at=17)
    resumed = train(tmp_path / "cut")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_rate_warms_up_and_ends_at_zero() -> None:
    recipe = Recipe(steps=100, batch=1, learning_rate=1.0, warmup=10)
    assert rate(recipe, 0, 0.0) == pytest.approx(0.1)
    assert rate(recipe, 50, 0.5) == pytest.approx(0.5)
    assert rate(recipe, 99, 1.0) == pytest.approx(0.0)


def test_the_clock_can_end_a_schedule_before_its_steps() -> None:
    now = time.time()
    recipe = Recipe(steps=1000, batch=1, learning_rate=1.0, until=now + 1)
    assert progress(recipe, 500, begun=now) == pytest.approx(0.5, abs=0.01)
    assert progress(recipe, 10, begun=now - 1) == pytest.approx(0.5, abs=0.01)  # half of the two seconds are gone


def test_seeds_of_different_purposes_differ() -> None:
    assert seed_of("vae", 1) == seed_of("vae", 1)
    assert len({seed_of("vae", 1), seed_of("vae", 2), seed_of("clip", 1)}) == 3


def test_a_part_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    model = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic"))
    (tmp_path / "part.tmp").mkdir()  # left by a run that was killed while it saved
    (tmp_path / "part.tmp" / "config.json").write_text("{")
    keep(model, tmp_path / "part")
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == ["config.json", "model.safetensors"]
    assert not (tmp_path / "part.tmp").exists()
