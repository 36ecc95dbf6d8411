"""Fixtures of the evaluation tests."""

from pathlib import Path

import pytest
from tiny_assets import write_assets


@pytest.fixture(scope="session")
def asset_root(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    """A tiny asset folder; read only."""
    return write_assets(tmp_path_factory.mktemp("assets"), sd_folder)
