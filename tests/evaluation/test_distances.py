"""Fréchet distances with known answers, and the confusion matrix."""

import numpy as np
import pytest
from scipy.linalg import sqrtm

from cgru.evaluation.distances import FeatureGaussian, confusion, fit_gaussian, frechet_distance


def test_diagonal_gaussians_have_a_closed_form() -> None:
    # Commuting covariances: |mu|^2 + sum (sd_a - sd_b)^2 = (3^2 + 4^2) + (1 - 2)^2 + (3 - 5)^2 = 25 + 1 + 4 = 30.
    a = FeatureGaussian(np.array([0.0, 0.0]), np.diag([1.0, 9.0]), 10)
    b = FeatureGaussian(np.array([3.0, 4.0]), np.diag([4.0, 25.0]), 10)
    assert frechet_distance(a, b) == pytest.approx(30, rel=1e-9)


def test_general_gaussians_agree_with_scipys_matrix_root() -> None:
    generator = np.random.default_rng(0)
    roots = [generator.normal(size=(64, 64)) / 8 for _ in range(2)]
    a, b = (FeatureGaussian(generator.normal(size=64), root @ root.T, 100) for root in roots)
    shift = a.mean - b.mean
    cross = np.trace(sqrtm(a.covariance @ b.covariance)).real
    expected = shift @ shift + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)


def test_scaled_covariance_in_many_dimensions() -> None:
    # S_b = 4 S_a and equal means: Tr(S_a + 4 S_a - 2 * 2 S_a) = Tr(S_a), whatever S_a is.
    root = np.random.default_rng(1).normal(size=(256, 256))
    covariance = root @ root.T
    a, b = FeatureGaussian(np.zeros(256), covariance, 9), FeatureGaussian(np.zeros(256), 4 * covariance, 9)
    assert frechet_distance(a, b) == pytest.approx(np.trace(covariance), rel=1e-6)


def test_fewer_pictures_than_features_is_no_trouble() -> None:
    few = fit_gaussian(np.random.default_rng(2).normal(size=(10, 40)).astype(np.float32))
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-4)
    # Against the unit Gaussian: Tr(S) + d + |mu|^2 - 2 Tr(S^(1/2)).
    unit = FeatureGaussian(np.zeros(40), np.eye(40), 1)
    roots = np.sqrt(np.clip(np.linalg.eigvalsh(few.covariance), 0, None))
    expected = few.mean @ few.mean + np.trace(few.covariance) + 40 - 2 * roots.sum()
    assert frechet_distance(few, unit) == pytest.approx(expected, rel=1e-6)


def test_fit_is_unbiased_and_in_float64() -> None:
    fitted = fit_gaussian(np.array([[1.0, 0.0], [3.0, 4.0]], dtype=np.float32))
    assert fitted.covariance.dtype == np.float64
    np.testing.assert_array_equal(fitted.covariance, [[2, 4], [4, 8]])  # N - 1 = 1: products of deviations, 2 * (1, 2)
    with pytest.raises(ValueError, match="1 feature vector"):
        fit_gaussian(np.zeros((1, 4)))


def test_features_of_two_judges_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 3 dimensions"):
        frechet_distance(FeatureGaussian(np.zeros(2), np.eye(2), 5), FeatureGaussian(np.zeros(3), np.eye(3), 5))


def test_confusion_counts_rows_as_prompted_and_columns_as_judged() -> None:
    counts = confusion(["cat", "cat", "dog"], ["cat", "nothing", "cat"], ["cat", "dog"], ["cat", "dog", "nothing"])
    np.testing.assert_array_equal(counts, [[1, 0, 1], [1, 0, 0]])
