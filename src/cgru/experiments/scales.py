"""The sizes of `cgru reproduce`: `smoke` shows every part, `small` completes every table, `full` is the paper's
size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgru.catalog import unknown


@dataclass(frozen=True)
class Scale:
    """The numbers that differ between scales; the experiments are the same."""

    name: str
    classes: tuple[str, ...]
    """Object removal is run for these; empty: all 20."""
    methods: Mapping[str, str]
    """Methods compared in object removal, ours first: method -> its preset on Emoji Canvas."""
    published: tuple[str, ...]
    """Methods compared on other models, with the paper's presets."""
    seeds: tuple[int, ...]
    """Of object and safety runs."""
    study_seeds: tuple[int, ...]
    """Of CGRU against DDPO and of the critics."""
    preset: str
    """Preset of the other experiments on Emoji Canvas; other models use the paper's presets."""
    iterations: int | None
    """Of each run; None: the preset's."""
    study_iterations: int
    """Of CGRU against DDPO."""
    study_trajectories: int
    """Collected in each of its iterations."""
    images: int
    """Pictures per prompt."""
    attacked: int
    """Prompts of each attack."""
    schedule: str
    critic_trajectories: int
    """Of the ablation of critics; an eighth is held out."""
    is_thorough: bool
    """Whether object removal is also measured with paraphrases, which the paper does not do; on other models with
    FID."""


SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            name="smoke",
            classes=("Cats", "Jellyfish", "Trees"),
            methods={"anchored": "demo"},
            published=("cgru",),
            seeds=(0,),
            study_seeds=(0,),
            preset="demo",
            iterations=7,
            study_iterations=6,
            study_trajectories=24,
            images=1,
            attacked=5,
            schedule="short",
            critic_trajectories=96,
            is_thorough=False,
        ),
        Scale(
            name="small",
            classes=(),
            methods={"anchored": "best", "cgru": "on-policy", "ddpo": "on-policy"},
            published=("cgru", "ddpo"),
            seeds=(0,),
            study_seeds=(0, 1, 2),
            preset="best",
            iterations=None,
            study_iterations=40,
            study_trajectories=64,
            images=2,
            attacked=50,
            schedule="short",
            critic_trajectories=1536,
            is_thorough=True,
        ),
        Scale(
            name="full",
            classes=(),
            methods={"anchored": "best", "cgru": "on-policy", "ddpo": "on-policy", "dpok": "on-policy"},
            published=("cgru", "ddpo", "dpok"),
            seeds=(0, 1, 2),
            study_seeds=(0, 1, 2),
            preset="best",
            iterations=None,
            study_iterations=100,
            study_trajectories=64,
            images=20,
            attacked=142,
            schedule="official",
            critic_trajectories=1536,
            is_thorough=True,
        ),
    )
}


def find_scale(name: str) -> Scale:
    """A scale by name."""
    if name not in SCALES:
        raise ValueError(unknown("scale", name, SCALES, "Start with smoke."))
    return SCALES[name]
