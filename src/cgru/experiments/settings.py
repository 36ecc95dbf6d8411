"""The settings of a cell's run, on the device that trains it. Apart from cells, which reports read as plain data."""

from __future__ import annotations

from cgru.config import RunConfig
from cgru.experiments.cells import Cell
from cgru.presets import resolve_config


def config_of(cell: Cell, device: str) -> RunConfig:
    """The settings of the cell's run; only for a cell with a concept."""
    assert cell.concept is not None
    return resolve_config(
        cell.concept,
        model=cell.model,
        method=cell.method,
        preset_name=cell.preset or None,
        overrides=[f"seed={cell.seed}", f"device={device}", *cell.settings],
    )
