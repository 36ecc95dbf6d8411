"""Slow tiers: the embedded model under its judges, and the commands from an installed wheel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def cgru(*words: str, site: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line; with `site`, the package comes from there and not from the checkout."""
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    command = [sys.executable, "-m", "cgru", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_judges_recognise_what_emoji_canvas_draws(tmp_path: Path) -> None:
    done = cgru("evaluate", "emoji-canvas", "--images", "1", "--out", "eval", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # quiet when piped: no progress bars, not even the libraries' own
    found = json.loads(done.stdout)["measurements"]
    assert found["object_accuracy"]["value"] >= 0.96
    assert found["style_accuracy"]["value"] >= 0.85
    assert found["nothing_share"]["value"] <= 0.02
    assert found["object_accuracy"]["n"] == 160


def test_a_target_gets_eighty_pictures_and_the_base_forgets_nothing(tmp_path: Path) -> None:
    """UA of the untouched model is the benchmark's floor: its own error on Dogs."""
    done = cgru(
        "evaluate", "emoji-canvas", "--images", "1", "--target", "dogs", "--out", "eval", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measurements"]
    assert found["ua"]["n"] == 80
    assert found["ua"]["value"] <= 0.1 and found["ira"]["value"] >= 0.95
    assert found["target_nothing_share"]["value"] <= 0.02


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a user gets it: built into a wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    wheel = next(folder.glob("cgru-*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_every_command_works_from_a_wheel(site: Path, tmp_path: Path) -> None:
    where = subprocess.run([sys.executable, "-c", "import cgru; print(cgru.__file__)"], capture_output=True, text=True,
                           env=os.environ | {"PYTHONPATH": str(site)}, cwd=tmp_path)  # fmt: skip
    assert where.stdout.startswith(str(site)), where.stdout
    health = cgru("doctor", "--json", site=site, cwd=tmp_path)
    assert health.returncode == 0 and json.loads(health.stdout)["assets"]["state"] == "ok", health.stdout
    assert "Dogs" in cgru("list", "classes", site=site, cwd=tmp_path).stdout.splitlines()
    drawn = cgru("generate", "a frog", "--steps", "2", "--out", "frog.png", site=site, cwd=tmp_path)
    assert drawn.returncode == 0 and (tmp_path / "frog.png").stat().st_size > 1000, drawn.stderr
    wrong = cgru("evaluate", "emoji-canvs", site=site, cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
