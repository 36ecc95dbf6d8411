"""Reading the asset folder."""

import shutil
from pathlib import Path

import pytest
from tiny_assets import CLASSES, FEATURES, STYLES

from cgru import embedded
from cgru.evaluation import distances
from cgru.tasks import Sampling


def test_vocabulary_is_read_in_order(asset_root: Path) -> None:
    vocabulary = embedded.load_vocabulary(asset_root)
    assert (vocabulary.classes, vocabulary.styles) == (CLASSES, STYLES)
    assert vocabulary.sampling == Sampling(steps=2, guidance=2.0, eta=0.0)
    assert vocabulary.missing_cells == (("Dogs", "pencil"),)


def test_reference_has_its_count(asset_root: Path) -> None:
    reference = distances.load_reference(asset_root)
    assert (reference.mean.shape, reference.covariance.shape, reference.n) == ((FEATURES,), (FEATURES, FEATURES), 1000)


def test_missing_assets_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"canvas.json.*reinstall"):
        embedded.load_vocabulary(tmp_path)


def test_checksums_find_changed_and_missing_files(asset_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(asset_root, tmp_path / "assets")
    assert set(embedded.verify(root).values()) == {"ok"}
    (root / "judges/object/lineage.json").write_text("{}")
    (root / "judges/style/lineage.json").unlink()
    states = embedded.verify(root)
    assert states.pop("judges/object/lineage.json") == "changed"
    assert states.pop("judges/style/lineage.json") == "missing"
    assert set(states.values()) == {"ok"}
