"""What a model's features are compared with: reference pictures, the base's pictures, or the prompts.

The package ships mean and covariance of the object judge's features of real Emoji Canvas composites, which is enough
for FID. Any other distance needs a folder of reference pictures; without one only the base remains, on the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cgru.evaluation import kernels
from cgru.evaluation.base import BASE_REFERENCE, Better, Job, Measurement, Score
from cgru.evaluation.benchmarks.references import Features, Folder, features_of
from cgru.evaluation.distances import FeatureGaussian, fit_gaussian, frechet_distance
from cgru.evaluation.intervals import Z95
from cgru.evaluation.judges.features import Texts, load_texts

UNITS = {"fid": "squared distance", "kid": "MMD² × 1000, unbiased", "cmmd": "MMD² × 1000"}
FORMULAS: Mapping[str, dict[str, Any]] = {
    "fid": {"covariance": "N - 1", "epsilon": 0},
    "kid": {"kernel": "(x·y / d + 1)^3", "blocks": kernels.BLOCKS},
    "cmmd": {"kernel": "gaussian", "sigma": kernels.SIGMA, "scale": kernels.SCALE},
}
KID_INTERVAL = f"± {Z95} standard errors of {kernels.BLOCKS} blocks"
PROMPT_INTERVAL = f"± {Z95} standard errors over prompts"


@dataclass(frozen=True)
class Distance:
    """FID, KID or CMMD between features and those of a reference."""

    metric: str
    label: str
    """Name of the measurement."""
    network: str
    root: Path
    folder: Folder | None
    shipped: FeatureGaussian | None
    """Mean and covariance of the reference, if its pictures are not available."""

    def protocol(self) -> dict[str, Any]:
        """Return formula and reference."""
        return {"formula": FORMULAS[self.metric], "reference": self._reference()}

    def score(self, jobs: Sequence[Job], features: np.ndarray) -> Score:
        """Return the distance to the reference; empty if the base is the reference."""
        if self.folder is not None:
            seen = features_of(self.folder, self.network, self.root)
            return Score({self.label: self._between(features, seen.rows)}, _reference_table(seen))
        if self.shipped is None:
            return Score({})
        distance = frechet_distance(fit_gaussian(features), self.shipped)
        return Score({self.label: _plain(distance, len(features), self.metric)})

    def compare(self, jobs: Sequence[Job], before: np.ndarray, after: np.ndarray) -> Mapping[str, Measurement]:
        """Return the distance to the base's pictures on the same noise: how far the model has moved."""
        return {f"{self.label}_to_base": self._between(after, before, paired=True)}

    def _between(self, x: np.ndarray, y: np.ndarray, *, paired: bool = False) -> Measurement:
        if self.metric == "fid":
            return _plain(frechet_distance(fit_gaussian(x), fit_gaussian(y)), len(x), "fid")
        if self.metric == "cmmd":
            return _plain(kernels.cmmd(x, y), len(x), "cmmd")
        value, error = kernels.kid(x, y, paired=paired), kernels.kid_error(x, y, paired=paired)
        return spread(value, error, len(x), UNITS["kid"], "lower", KID_INTERVAL)

    def _reference(self) -> dict[str, Any]:
        if self.folder is not None:
            return self.folder.record()
        if self.shipped is not None:
            return {"what": "object-judge features of real composites", "n": self.shipped.n}
        return dict(BASE_REFERENCE)


@dataclass(frozen=True)
class TextFit:
    """CLIPScore: the cosine between a picture and its prompt, in three customary forms."""

    label: str
    network: str
    root: Path

    def protocol(self) -> dict[str, Any]:
        """Return the three formulas."""
        forms = {"": "100 cos", "hessel": "2.5 max(cos, 0)", "torchmetrics": "max(mean of 100 cos, 0)"}
        return {"formula": forms, "reference": None}

    def score(self, jobs: Sequence[Job], features: np.ndarray) -> Score:
        """Return the mean over prompts, and the number of prompts that the text tower truncates."""
        texts, prompts = text_tower(self.network, self.root), [job.prompt for job in jobs]
        cosine = kernels.cosines(features, texts.embed(prompts))
        score = self._mean(kernels.clipscore(cosine), prompts, "100 cos")
        clipped = Measurement(max(score.value, 0.0), None, None, score.n, "100 cos, the mean cut at 0", "higher")
        hessel = self._mean(kernels.clipscore_hessel(cosine), prompts, "2.5 max(cos, 0)")
        found = {self.label: score, f"{self.label}_hessel": hessel, f"{self.label}_torchmetrics": clipped}
        return Score(found, {"prompts_cut": {"cut": texts.cut(prompts), "longest": texts.longest}})

    def compare(self, jobs: Sequence[Job], before: np.ndarray, after: np.ndarray) -> Mapping[str, Measurement]:
        """Return the difference to the base, paired by picture on the same noise."""
        prompts = [job.prompt for job in jobs]
        read = text_tower(self.network, self.root).embed(prompts)
        old, new = (kernels.clipscore(kernels.cosines(features, read)) for features in (before, after))
        return {f"{self.label}_change": self._mean(new - old, prompts, "100 cos")}

    def _mean(self, values: np.ndarray, prompts: Sequence[str], unit: str) -> Measurement:
        value, error = kernels.mean_over_prompts(values, prompts)
        return spread(value, error, len(values), unit, "higher", PROMPT_INTERVAL)


@lru_cache(maxsize=2)
def text_tower(network: str, root: Path) -> Texts:
    """Load a text tower; cached, since base and model use the same texts."""
    return load_texts(network, root=root)


def spread(value: float, error: float | None, n: int, unit: str, better: Better, interval: str) -> Measurement:
    """Return a value with its normal interval, if there is a standard error."""
    if error is None:
        return Measurement(value, None, None, n, unit, better)
    return Measurement(value, value - Z95 * error, value + Z95 * error, n, unit, better, interval)


def _plain(value: float, n: int, metric: str) -> Measurement:
    # No interval: both are biased in n, and a bootstrap of them, which repeats pictures, even more.
    return Measurement(value, None, None, n, UNITS[metric], "lower")


def _reference_table(seen: Features) -> dict[str, Any]:
    return {"reference": {"pictures": len(seen.rows), "unreadable": seen.skipped}}
