"""Fréchet distance between the Gaussians of two feature sets, and confusion matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from cgru.embedded import ROOT, existing


@dataclass(frozen=True)
class FeatureGaussian:
    """Mean (d,) and unbiased covariance (d, d) of n feature vectors, in float64."""

    mean: np.ndarray
    covariance: np.ndarray
    n: int


def fit_gaussian(features: np.ndarray) -> FeatureGaussian:
    """Return mean and covariance of feature vectors (n, d); the covariance's divisor is n - 1."""
    if len(features) < 2:
        raise ValueError(f"{len(features)} feature vector(s); a covariance needs at least 2 pictures")
    exact = features.astype(np.float64)
    return FeatureGaussian(exact.mean(0), np.atleast_2d(np.cov(exact, rowvar=False)), len(features))


def frechet_distance(a: FeatureGaussian, b: FeatureGaussian) -> float:
    """Return |mu_a - mu_b|² + Tr(S_a + S_b - 2 (S_a S_b)^(1/2)), the squared Fréchet distance that FID reports.

    The trace of the square root is the sum of the roots of eig(S_a^(1/2) S_b S_a^(1/2)): two symmetric eigenproblems
    without complex numbers. Singular covariances (fewer pictures than features) need no added epsilon: eigenvalues that
    rounding made negative are set to 0.
    """
    if a.mean.shape != b.mean.shape:
        sizes = f"{a.mean.shape[0]} and {b.mean.shape[0]}"
        raise ValueError(f"features of {sizes} dimensions; both must come from one judge")
    root = _psd_root(a.covariance)
    # Tr((S_a S_b)^(1/2)) = Σ √eig(S_a^(1/2) S_b S_a^(1/2))
    inner = root @ b.covariance @ root
    eigenvalues = np.linalg.eigvalsh((inner + inner.T) / 2)
    cross = np.sqrt(np.clip(eigenvalues, 0, None)).sum()
    shift = a.mean - b.mean
    distance = shift @ shift + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross
    return max(float(distance), 0.0)


def _psd_root(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T


def confusion(
    prompted: Sequence[str], predicted: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> np.ndarray:
    """Return counts (rows, columns): how often a picture prompted with a row's label was judged a column's label."""
    row_of = {label: i for i, label in enumerate(rows)}
    column_of = {label: i for i, label in enumerate(columns)}
    counts = np.zeros((len(rows), len(columns)), dtype=np.int64)
    for truth, guess in zip(prompted, predicted, strict=True):
        counts[row_of[truth], column_of[guess]] += 1
    return counts


def confusion_table(
    prompted: Sequence[str], predicted: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> dict[str, Any]:
    """Return `confusion` with its labels, as written to scores.json."""
    counts = confusion(prompted, predicted, rows, columns)
    return {"prompted": list(rows), "judged": list(columns), "counts": counts.tolist()}


def load_reference(root: Path = ROOT) -> FeatureGaussian:
    """Load the object judge's features of real composites, the reference of `frechet_judge`."""
    tensors = load_file(existing(root / "reference" / "canvas.safetensors"))
    mean, covariance = (tensors[key].astype(np.float64) for key in ("mean", "covariance"))
    return FeatureGaussian(mean, covariance, int(tensors["n"].item()))
