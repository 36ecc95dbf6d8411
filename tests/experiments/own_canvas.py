"""What a user may pass as "own_canvas:load": canvas with two classes, two styles and one step, its judges whole."""

from dataclasses import replace
from pathlib import Path

from cgru.evaluation.assets import ROOT
from cgru.evaluation.base import Sampling
from cgru.evaluation.canvas import Canvas, load_benchmark


def load(images: int, root: Path = ROOT) -> Canvas:
    """2 × 2 prompts."""
    whole = load_benchmark(images, root)
    few = replace(whole.vocabulary, classes=("Cats", "Dogs"), styles=whole.vocabulary.styles[:2])
    return replace(whole, vocabulary=replace(few, sampling=Sampling(1, 3.0, 0.0)))
