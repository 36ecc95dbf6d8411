"""What a user may pass as "own_grid:load": unlearncanvas with few classes, styles and steps, with the whole judges."""

from dataclasses import replace
from pathlib import Path

from cgru.embedded import ROOT
from cgru.evaluation.benchmarks.unlearncanvas import UnlearnCanvas, load_benchmark
from cgru.tasks import Sampling

CLASSES, STYLES = ("Dogs", "Human"), ("Crayon", "Seed_Images", "Van_Gogh")


def load(
    images: int | None = None, root: Path = ROOT, *, variant: str | None = None, judges: str | None = None
) -> UnlearnCanvas:
    """2 classes × 3 styles, 2 steps."""
    whole = load_benchmark(images, root, variant=variant, judges=judges)
    kept = tuple(style for style in STYLES if style in whole.styles)
    return replace(whole, classes=CLASSES, styles=kept, sampling=Sampling(2, 9.0, 0.0))
