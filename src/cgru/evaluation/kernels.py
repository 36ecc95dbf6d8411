"""KID (arXiv 1801.01401), CMMD (2401.09603) and CLIPScore (2104.08718) from feature vectors, in float64.

Both distances are squared maximum mean discrepancies. KID is the unbiased estimate with the kernel (x·y / d + 1)^3 and
can be slightly negative; CMMD is the biased one (each vector is also compared with itself) with a Gaussian kernel of
width 10 on embeddings of length 1. Both are reported times 1000. Kernel matrices are summed in blocks of rows, since
the full matrix of 30,000 pictures would take 7 GB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps feature vectors (n, d) and (m, d) to the kernel matrix (n, m)."""
ROWS = 1024
BLOCKS = 10
SIGMA = 10.0
SCALE = 1000.0
HESSEL = 2.5


def kid(x: np.ndarray, y: np.ndarray, *, paired: bool = False) -> float:
    """Return the unbiased MMD² × 1000 between feature vectors (n, d) and (m, d) with the cubic kernel.

    Args:
        x: features of the pictures.
        y: features of the reference.
        paired: row i of both comes from the same noise and so is dependent; such pairs are left out.
    """
    _check_shapes(x, y, paired=paired)
    first, second = x.astype(np.float64), y.astype(np.float64)
    n, m = len(first), len(second)
    # MMD² = mean_{i≠j} k(x_i, x_j) + mean_{i≠j} k(y_i, y_j) - 2 mean k(x_i, y_j)
    inside = _off_diagonal(first, cubic) / (n * (n - 1)) + _off_diagonal(second, cubic) / (m * (m - 1))
    total = kernel_sum(first, second, cubic)
    cross = (total - _matched(first, second, cubic)) / (n * (n - 1)) if paired else total / (n * m)
    return SCALE * float(inside - 2 * cross)


def kid_error(x: np.ndarray, y: np.ndarray, *, paired: bool = False, blocks: int = BLOCKS) -> float | None:
    """Return the standard error of `kid` from its values in disjoint random blocks; None with under 2 rows a block."""
    if min(len(x), len(y)) < 2 * blocks:
        return None
    order_x = np.random.default_rng(0).permutation(len(x))
    order_y = order_x if paired else np.random.default_rng(1).permutation(len(y))
    pairs = zip(np.array_split(order_x, blocks), np.array_split(order_y, blocks), strict=True)
    values = [kid(x[i], y[j], paired=paired) for i, j in pairs]
    return float(np.std(values, ddof=1) / math.sqrt(blocks))


def cmmd(x: np.ndarray, y: np.ndarray, *, sigma: float = SIGMA) -> float:
    """Return the biased MMD² × 1000 with a Gaussian kernel of feature vectors scaled to length 1."""
    _check_shapes(x, y)
    first, second = unit(x), unit(y)

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return gaussian(a, b, sigma)

    inside = sum(kernel_sum(rows, rows, kernel) / len(rows) ** 2 for rows in (first, second))
    return SCALE * float(inside - 2 * kernel_sum(first, second, kernel) / (len(first) * len(second)))


def cubic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return KID's kernel, (a·b / d + 1)^3."""
    return np.asarray((a @ b.T / a.shape[1] + 1) ** 3)


def gaussian(a: np.ndarray, b: np.ndarray, sigma: float) -> np.ndarray:
    """Return exp(-|a - b|² / 2 sigma²)."""
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T
    return np.exp(-np.clip(squares, 0, None) / (2 * sigma * sigma))


def kernel_sum(x: np.ndarray, y: np.ndarray, kernel: Kernel) -> float:
    """Return the sum of the kernel over all pairs."""
    return math.fsum(float(kernel(x[i : i + ROWS], y).sum()) for i in range(0, len(x), ROWS))


def unit(features: np.ndarray) -> np.ndarray:
    """Return rows scaled to length 1, in float64; a row of zeros stays zero."""
    exact = features.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return exact / np.where(lengths == 0, 1, lengths)


def cosines(images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return (n,) cosines between each picture's embedding and that of its own text."""
    return np.asarray((unit(images) * unit(texts)).sum(1))


def clipscore(cosine: np.ndarray) -> np.ndarray:
    """Return (n,) 100 · cos, from -100 to 100: the paper's scale, and that of OpenAI's CLIP logits."""
    return 100 * cosine


def clipscore_hessel(cosine: np.ndarray) -> np.ndarray:
    """Return (n,) 2.5 · max(cos, 0), the definition of Hessel et al. (arXiv 2104.08718)."""
    return HESSEL * np.clip(cosine, 0, None)


def mean_over_prompts(values: np.ndarray, prompts: Sequence[str]) -> tuple[float, float | None]:
    """Return the mean of the prompts' means and its standard error over prompts; None with a single prompt."""
    names, index = np.unique(np.asarray(prompts), return_inverse=True)
    means = np.bincount(index, weights=values) / np.bincount(index)
    error = float(means.std(ddof=1) / math.sqrt(len(names))) if len(names) > 1 else None
    return float(means.mean()), error


def _off_diagonal(x: np.ndarray, kernel: Kernel) -> float:
    return kernel_sum(x, x, kernel) - _matched(x, x, kernel)


def _matched(x: np.ndarray, y: np.ndarray, kernel: Kernel) -> float:
    """Return the sum over pairs of equal index."""
    return math.fsum(float(kernel(a[None], b[None])[0, 0]) for a, b in zip(x, y, strict=True))


def _check_shapes(x: np.ndarray, y: np.ndarray, *, paired: bool = False) -> None:
    if min(len(x), len(y)) < 2:
        raise ValueError(f"{len(x)} and {len(y)} feature vectors; a distance needs at least 2 pictures on each side")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"features of {x.shape[1]} and {y.shape[1]} dimensions; both must come from one network")
    if paired and len(x) != len(y):
        raise ValueError(f"{len(x)} and {len(y)} feature vectors; paired ones must be equally many")
