"""The settings that every run has, whatever its method. A method's config extends `RunConfig` with its own fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from cgru.config.rules import OneOf, Seed, Text, check


@dataclass(frozen=True)
class RunConfig:
    """The settings of every run. `device` and `tracker` do not change the result.

    A method's config is a frozen dataclass that inherits from this one: its fields follow these in config.yaml, each
    can be set as key=value, and each is checked by its type (`cgru.config.rules`).
    """

    concept: Text
    """What to forget: a class, a style or `hazard` on Emoji Canvas; any text on another model."""
    model: Text = "emoji-canvas"
    """A hub id, a diffusers folder, emoji-canvas, or your own "module:load"."""
    method: Text = "cgru"
    """A catalog name or your own "module:attr"."""
    preset: str = ""
    """The preset that these settings started from; recorded only, without any effect."""
    seed: Seed = 0
    """Root seed, 32 bits; the seeds for each purpose are derived from it."""
    device: Text = "auto"
    """auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Annotated[str, OneOf(("fp32", "bf16", "fp16"))] = "fp32"
    """Precision of the model; trained parameters are always fp32."""
    tracker: Annotated[str, OneOf(("", "tensorboard", "wandb", "trackio"))] = ""
    """Tracker that receives the metrics in addition to metrics.jsonl; empty: none."""

    @property
    def length(self) -> int:
        """Number of records that the run logs, for the progress display; a closed-form method logs one."""
        return 1

    def __post_init__(self) -> None:
        """Check every field by its type."""
        check(self, "")


@dataclass(frozen=True)
class StoredConfig(RunConfig):
    """The config of a run whose method is user code, read without importing that code."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The method's own keys, unchecked."""

    def __post_init__(self) -> None:
        """Check nothing: the method's own settings are unknown without its code."""
