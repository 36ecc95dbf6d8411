"""A reward of one's own by "module:attr", from the command line to an edit: docs/add-a-reward.md as it stands."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cgru.cli import main
from cgru.runs import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-reward.md").read_text(encoding="utf-8")
TINY = (
    "policy.trajectories=4 sampling.steps=2 prompts.count=4 prompts.retain=4 prompts.critic=4 watch.every=0 "
    "watch.stop=false retention.bank=2 retention.batch=4 samples_every=0"
).split()


@pytest.fixture(autouse=True)
def colourless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's code as an importable module, in a folder that is the working directory."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code is not None
    (tmp_path / "colourless.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "colourless.py"
    sys.modules.pop("colourless", None)


def page_commands() -> list[list[str]]:
    """The page's own command lines, without `python -m cgru`."""
    return [line.split() for line in re.findall(r"^python -m cgru (unlearn .*[^.])$", PAGE, re.M)]


def test_the_page_s_command_trains_to_an_edit(capsys: pytest.CaptureFixture[str]) -> None:
    command, _ = page_commands()
    assert main([*command, *TINY, "--method", "ddpo", "policy.iterations=1", "--device", "cpu"]) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    assert (run / "edit" / "pytorch_lora_weights.safetensors").is_file()
    assert json.loads((run / "manifest.json").read_text())["extra"]["reward"]["name"] == "colourless"
    (record,) = read_metrics(run / "metrics.jsonl")
    mean = record["reward/mean"]
    assert isinstance(mean, float) and 3 < mean < 10  # flames on a white or coloured ground
    (run / "edit" / "edit.json").unlink()
    sys.modules.pop("colourless")
    assert main(["resume", str(run)]) == 2
    assert "--code colourless" in capsys.readouterr().err and "colourless" not in sys.modules
    assert main(["resume", str(run), "--code", "colourless"]) == 0


def test_the_page_s_sum_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    _, command = page_commands()
    assert main([*command, *TINY, "--method", "ddpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["reward"]["name"] == "0.8*concept+0.2*colourless:make_reward"
    assert not Path("runs").exists()


def test_its_scores() -> None:
    import colourless  # type: ignore[import-not-found]

    red, grey = torch.zeros(3, 8, 8), torch.full((3, 8, 8), 0.4)
    red[0] = 1.0
    half = torch.cat([red[:, :4], grey[:, 4:]], dim=1)
    assert colourless.make_reward(None, scale=4.0)(torch.stack([red, half, grey]), ["a"] * 3).tolist() == [0, 2, 4]


def test_a_score_out_of_its_range_ends_in_one_line(colourless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colourless.write_text(colourless.read_text().replace("* (1 - ", "* (2 - "), encoding="utf-8")
    command, _ = page_commands()
    assert main([*command, *TINY, "--method", "ddpo", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "reward 'colourless' returned" in told and "outside its declared range 0 to 10" in told
    assert "Traceback" not in told
