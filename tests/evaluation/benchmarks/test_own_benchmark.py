"""A user's own benchmark, "module:load", from the command line: the example of docs/add-a-benchmark.md as it stands."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cgru.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "add-a-benchmark.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def backgrounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's code as an importable module, in a folder that is the working directory."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code is not None
    (tmp_path / "backgrounds.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "backgrounds.py"
    sys.modules.pop("backgrounds", None)


def evaluated(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    """What a command that ends well prints as JSON."""
    assert main([*command, "--device", "cpu", "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_page_s_commands_run_and_find_backgrounds_and_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^python -m cgru (evaluate emoji-canvas .*)$", PAGE, re.M)
    plain, target = (evaluated(capsys, *line.split(), "steps=8")["measurements"] for line in lines)
    assert set(plain) == {"background"} and plain["background"]["n"] == 8  # 2 classes x 4 colours
    assert plain["background"]["value"] >= 0.875
    assert set(target) == {"background_ua", "background_target", "background_others"}
    assert target["background_ua"]["n"] == 4 and target["background_ua"]["value"] <= 0.5  # dogs are still drawn
    low, high = target["background_others"]["low"], target["background_others"]["high"]
    assert low < target["background_others"]["value"] <= high


def test_the_border_decides() -> None:
    import backgrounds  # type: ignore[import-not-found]

    wanted = torch.tensor([*backgrounds.COLOURS.values()])
    pictures = wanted[:, :, None, None].repeat(1, 1, 16, 16)
    pictures[:, :, 4:12, 4:12] = wanted.flip(0)[:, :, None, None]  # the middle has another colour
    chances, border = backgrounds.BorderJudge().look(pictures)
    assert chances.argmax(1).tolist() == [0, 1, 2, 3] and torch.allclose(border, wanted)
    assert chances[:, -1].eq(0).all() and torch.allclose(chances.sum(1), torch.ones(4))


def test_any_model_beside_the_embedded_one(long_sd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(long_sd_folder), "--benchmark", "backgrounds:load", "--images", "1", "--target", "dog"]
    with pytest.raises(AssertionError, match="unknown concept 'dog'; allowed: Dogs, Cats"):
        evaluated(capsys, *command, "classes=Dogs,Cats", "steps=1")
    found = evaluated(capsys, *command[:-1], "Dogs", "classes=Dogs,Cats", "steps=1")
    assert found["protocol"]["target"] == {"name": "Dogs", "kind": "class"}
    assert found["protocol"]["judges"]["border"]["id"] == "border colour, version 1"
    assert found["base"]["measurements"]["background_ua"]["n"] == 4
    assert found["measurements"]["background_ua"]["value"] == 1  # random weights draw no dog


def test_a_setting_that_it_has_not_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "emoji-canvas", "--benchmark", "backgrounds:load"]
    assert main([*command, "colour=red"]) == 2
    told = capsys.readouterr().err
    assert "unknown setting of benchmark 'backgrounds:load' 'colour'; allowed: classes, steps" in told
    assert main([*command, "steps=many"]) == 2
    assert "steps=many; allowed: a whole number" in capsys.readouterr().err
    assert not Path("runs").exists()
