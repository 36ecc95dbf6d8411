"""The checks of `cgru doctor`: versions, device, memory, extras and the state of the embedded assets."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from cgru import __version__, embedded

LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "pillow",
    "tyro",
    "rich",
)


def examine(root: Path) -> dict[str, Any]:
    """Everything that a bug report should contain; `assets.state` is "ok" or says what to do."""
    versions = {"cgru": __version__, "python": platform.python_version()}
    return {
        "version": versions | {name: installed(name) or "missing" for name in LIBRARIES},
        "platform": platform.platform(),
        "device": devices(),
        "memory": memory(),
        "extra": extras(),
        "assets": asset_state(root),
    }


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices() -> dict[str, str]:
    """The devices that torch can use, and the one that `auto` chooses."""
    import torch

    from cgru.backbones.base import pick_device

    found = {"auto": str(pick_device("auto")), "cpu threads": str(torch.get_num_threads())}
    for i in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(i).total_memory
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {total / 2**30:.1f} GiB"
    return found


def memory() -> dict[str, str]:
    """Main memory in GiB, if the system reports it."""
    try:
        pages, free, size = (os.sysconf(key) for key in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not every system has sysconf, or these names
        return {"total": "unknown"}
    return {"total": f"{pages * size / 2**30:.1f} GiB", "free": f"{free * size / 2**30:.1f} GiB"}


def extras() -> dict[str, str]:
    """Optional dependencies by extra, read from the package's own metadata."""
    try:
        rows = [row for row in requires("cgru") or [] if "extra ==" in row]
    except PackageNotFoundError:
        return {"none": "cgru itself is not installed; run `pip install -e .`"}
    found: dict[str, str] = {}
    for row in rows:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", row)
        if match:
            name, extra = match.groups()
            found[f"{extra}: {name}"] = installed(name) or f"not installed (pip install 'cgru[{extra}]')"
    return found


def asset_state(root: Path) -> dict[str, str]:
    """Checksums of the embedded files against SHA256SUMS."""
    try:
        files = embedded.verify(root)
    except FileNotFoundError as error:
        return {"state": "no checksums", "files": str(error)}
    bad = {name: state for name, state in files.items() if state != "ok"}
    if bad:
        return {"state": "damaged; reinstall cgru", "folder": str(root), **bad}
    return {"state": "ok", "folder": str(root), "files": f"{len(files)} files, all as shipped"}
