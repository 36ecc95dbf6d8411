"""KID, CMMD and CLIPScore: small cases by hand, Gaussians with a closed form, symmetries."""

import math

import numpy as np
import pytest

from cgru.evaluation import kernels
from cgru.evaluation.distances import FeatureGaussian, fit_gaussian, frechet_distance
from cgru.evaluation.kernels import clipscore, clipscore_hessel, cmmd, cosines, kid, kid_error, mean_over_prompts


def rotation(size: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def test_frechet_distance_of_rotated_gaussians_has_a_closed_form() -> None:
    """Covariances with common eigenvectors: |shift|² + sum (sd_a - sd_b)², to 1e-9 at Inception's 2048 / 4."""
    generator, size = np.random.default_rng(0), 512
    axes = rotation(size, 1)
    sd_a, sd_b = generator.uniform(0.01, 3, size=(2, size))
    shift = generator.normal(size=size)
    a = FeatureGaussian(np.zeros(size), (axes * sd_a**2) @ axes.T, 9)
    b = FeatureGaussian(shift, (axes * sd_b**2) @ axes.T, 9)
    assert frechet_distance(a, b) == pytest.approx(shift @ shift + ((sd_a - sd_b) ** 2).sum(), rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-9)


def test_frechet_distance_of_samples_with_exact_moments() -> None:
    """Whitened samples have mean and covariance to rounding, so that fit and distance together meet the analytic value.

    N(0, I) against N(mu, 4 I) in 16 dimensions with |mu|² = 16 · 0.25: 4 + 16 · (1 - 2)² = 20.
    """
    noise = np.random.default_rng(2).normal(size=(400, 16))
    fitted = fit_gaussian(noise)
    values, vectors = np.linalg.eigh(fitted.covariance)
    white = (noise - fitted.mean) @ (vectors / np.sqrt(values)) @ vectors.T
    assert frechet_distance(fit_gaussian(white), fit_gaussian(2 * white + 0.5)) == pytest.approx(20, rel=1e-6)


def test_kid_by_hand() -> None:
    """d = 1, x = (0, 1), y = (2, 3), kernel (ab + 1)³.

    Inside x: k(0, 1) = 1. Inside y: k(2, 3) = 343. Across: 1, 1, 27, 64, mean 93 / 4. 1 + 343 - 46.5 = 297.5.
    """
    x, y = np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]])
    assert kid(x, y) == pytest.approx(297_500)
    # Pairs of equal index left out: k(0, 3) = 1 and k(1, 2) = 27, mean 14. 344 - 28 = 316.
    assert kid(x, y, paired=True) == pytest.approx(316_000)


def test_kid_agrees_with_the_polynomial_moments_of_gaussians() -> None:
    """For x ~ N(a, 1), y ~ N(b, 1) in one dimension E (xy + 1)³ = m3 m3' + 3 m2 m2' + 3 m1 m1' + 1, so that
    KID = (Δm3)² + 3 (Δm2)² + 3 (Δm1)². With a = 0, b = 1: m1 = 0, 1; m2 = 1, 2; m3 = 0, 4: 16 + 3 + 3 = 22."""
    generator = np.random.default_rng(3)
    values = [kid(generator.normal(size=(200, 1)), generator.normal(1, 1, size=(200, 1))) / 1000 for _ in range(200)]
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - 22) < 4 * error and error < 1


def test_kid_is_unbiased_and_below_zero_half_the_time_on_equal_sets() -> None:
    generator = np.random.default_rng(4)
    values = np.array([kid(*generator.normal(size=(2, 30, 4))) for _ in range(300)])
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(300)
    assert 0.3 < (values < 0).mean() < 0.8


def test_the_block_error_is_the_spread_of_repeated_samples() -> None:
    generator = np.random.default_rng(5)
    draws = [(generator.normal(size=(400, 2)), generator.normal(1.0, 1, size=(400, 2))) for _ in range(60)]
    spread = np.std([kid(x, y) for x, y in draws], ddof=1)
    errors = [kid_error(x, y) for x, y in draws]
    assert 0.6 < np.mean([error for error in errors if error is not None]) / spread < 1.7
    assert kid_error(*generator.normal(size=(2, 19, 2))) is None


def test_blocks_of_rows_change_nothing() -> None:
    x, y = np.random.default_rng(6).normal(size=(2, kernels.ROWS + 76, 3))  # two blocks, the second one short
    assert kernels.kernel_sum(x, y, kernels.cubic) == pytest.approx(float(kernels.cubic(x, y).sum()), rel=1e-12)


def test_cmmd_by_hand() -> None:
    """Two opposite points against two others at right angles: squared distances 4 inside, 2 across, sigma 1.

    Inside: (1 + e^-2) / 2 each; across e^-1: 1 + e^-2 - 2 e^-1 = (1 - e^-1)².
    """
    x, y = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([[0.0, 5.0], [0.0, -0.1]])  # lengths do not count
    assert cmmd(x, y, sigma=1) == pytest.approx(1000 * (1 - math.exp(-1)) ** 2, rel=1e-12)
    # The published width: gamma = 1 / 200, squared distances 4 and 2.
    assert cmmd(x, y) == pytest.approx(1000 * (1 - math.exp(-2 / 200)) ** 2, rel=1e-9)


def test_distances_are_symmetric_and_do_not_see_rotation_or_order() -> None:
    generator = np.random.default_rng(7)
    x, y, turn = generator.normal(size=(40, 8)), generator.normal(0.3, 1, size=(60, 8)), rotation(8, 8)
    for distance in (kid, cmmd):
        assert distance(x, y) == pytest.approx(distance(y, x), rel=1e-9)
        assert distance(x @ turn, y @ turn) == pytest.approx(distance(x, y), rel=1e-9)
        assert distance(x[::-1], y[generator.permutation(60)]) == pytest.approx(distance(x, y), rel=1e-9)
    assert cmmd(x, x) == pytest.approx(0, abs=1e-9)
    assert cmmd(3 * x, y) == pytest.approx(cmmd(x, y), rel=1e-9)


def test_single_precision_features_are_summed_in_double() -> None:
    x, y = np.random.default_rng(9).normal(size=(2, 64, 16)).astype(np.float32)
    for distance in (kid, cmmd):
        assert distance(x, y) == distance(x.astype(np.float64), y.astype(np.float64))


def test_clipscore_and_its_variants() -> None:
    images, texts = np.array([[2.0, 0.0], [3.0, 4.0], [-1.0, 0.0]]), np.array([[7.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    cosine = cosines(images, texts)
    np.testing.assert_allclose(cosine, [1, 0.6, -1])
    np.testing.assert_allclose(clipscore(cosine), [100, 60, -100])
    np.testing.assert_allclose(clipscore_hessel(cosine), [2.5, 1.5, 0])


def test_the_mean_is_of_prompts_and_so_is_its_error() -> None:
    # Prompt means 1 and 3: mean 2, standard deviation √2 over 2 prompts: error 1.
    assert mean_over_prompts(np.array([0.0, 2.0, 3.0]), ["a", "a", "b"]) == (2.0, pytest.approx(1.0))
    assert mean_over_prompts(np.array([1.0, 2.0]), ["a", "a"]) == (1.5, None)


@pytest.mark.parametrize("distance", [kid, cmmd])
def test_what_cannot_be_compared_is_refused(distance: type) -> None:
    with pytest.raises(ValueError, match="1 and 5 feature vectors"):
        distance(np.zeros((1, 3)), np.zeros((5, 3)))
    with pytest.raises(ValueError, match="3 and 4 dimensions"):
        distance(np.zeros((5, 3)), np.zeros((5, 4)))


def test_pairs_need_equally_many() -> None:
    with pytest.raises(ValueError, match="paired ones must be equally many"):
        kid(np.zeros((5, 3)), np.zeros((6, 3)), paired=True)
