"""A model folder to break, and where the hub's files lie."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copied(sd_folder: Path, tmp_path: Path) -> Path:
    """A model folder that a test may break."""
    return Path(shutil.copytree(sd_folder, tmp_path / "model"))


@pytest.fixture
def hub_cache() -> Path:
    """The hub's cache of this test run."""
    return Path(os.environ["HF_HUB_CACHE"])
