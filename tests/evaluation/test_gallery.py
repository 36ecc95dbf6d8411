"""Pictures that several benchmarks share: drawn once, never another model's, and no more than memory allows."""

from pathlib import Path

import pytest
import torch

from cgru.backbones.base import Backbone
from cgru.backbones.sd import load_stable_diffusion
from cgru.evaluation.base import Job
from cgru.evaluation.drawing import Gallery, draw_jobs
from cgru.tasks import Sampling

SAMPLING = Sampling(steps=2, guidance=2.0, eta=0.0)
JOBS = [Job(prompt, seed, {"index": 0}) for seed, prompt in enumerate(("a dog", "a cat", "a tree"))]


@pytest.fixture(scope="module")
def backbone(asset_root: Path) -> Backbone:
    return load_stable_diffusion(asset_root / "emoji-canvas", device="cpu", dtype="fp32")


def test_what_is_there_is_not_drawn_again(backbone: Backbone) -> None:
    gallery = Gallery()
    first = gallery.draw(backbone, "model", JOBS[:2], SAMPLING)
    torch.testing.assert_close(first, draw_jobs(backbone, JOBS[:2], SAMPLING))
    stored = next(iter(gallery.kept))
    gallery.kept[stored] = torch.full_like(gallery.kept[stored], 0.5)  # a mark that only a kept picture can carry
    again = gallery.draw(backbone, "model", [JOBS[2], JOBS[0]], SAMPLING)
    assert (again[1] == 0.5).all()
    torch.testing.assert_close(again[:1], draw_jobs(backbone, JOBS[2:], SAMPLING))


def test_another_model_or_sampler_has_pictures_of_its_own(backbone: Backbone) -> None:
    gallery = Gallery()
    gallery.draw(backbone, "model", JOBS[:1], SAMPLING)
    gallery.draw(backbone, "other", JOBS[:1], SAMPLING)
    gallery.draw(backbone, "model", JOBS[:1], Sampling(steps=3, guidance=2.0, eta=0.0))
    assert len(gallery.kept) == 3


def test_the_oldest_go_when_memory_is_spent(backbone: Backbone) -> None:
    size = draw_jobs(backbone, JOBS[:1], SAMPLING)[0].nbytes
    gallery = Gallery(limit=2 * size)
    assert len(gallery.draw(backbone, "model", JOBS, SAMPLING)) == 3  # all are handed out
    newest = list(gallery.kept)
    assert len(newest) == 2
    gallery.draw(backbone, "model", JOBS[1:], SAMPLING)
    assert list(gallery.kept) == newest
