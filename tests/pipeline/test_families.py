"""`cgru unlearn`, `generate` and `export` to the end on a tiny model of each family beside Stable Diffusion 1.x."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionXLPipeline
from PIL import Image
from torch import Tensor

from cgru.backbones import load_model
from cgru.cli import main
from cgru.edits import load_edit
from cgru.runs import read_metrics

TINY = (
    "policy.iterations=2 policy.trajectories=4 critic.kind=latent critic.trajectories=4 critic.epochs=1 "
    "critic.online_updates=1 sampling.steps=3 sampling.eta=0.7 prompts.count=4 prompts.retain=4 prompts.critic=4 "
    "watch.every=0 samples_every=0 policy.learning_rate=0.01 reward.name=jpeg"
).split()
PIPELINES: dict[str, Any] = {
    "sdxl": StableDiffusionXLPipeline,
    "sd3": StableDiffusion3Pipeline,
}


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path) -> Iterator[Path]:
    """Commands write under the current folder."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module", params=list(PIPELINES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, family_folders: dict[str, Path]) -> Path:
    return family_folders[family]


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; read only."""
    parent = tmp_path_factory.mktemp("runs")
    assert main(["unlearn", "red ball", "--model", str(base), "--device", "cpu", "--out", str(parent), *TINY]) == 0
    return next(parent.iterdir())


def pictures(pipe: Any, channels: int) -> Tensor:  # noqa: ANN401 - untyped library
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn((1, channels, 8, 8), generator=torch.Generator().manual_seed(0))
    found: Tensor = pipe("a ball", latents=noise, num_inference_steps=3, guidance_scale=3.0, output_type="pt").images
    return found


def plain(base: Path, family: str) -> Any:  # noqa: ANN401
    return PIPELINES[family].from_pretrained(base)


def test_the_run_ends_with_an_edit_that_changes_pictures(run: Path, base: Path, family: str) -> None:
    rows = list(read_metrics(run / "metrics.jsonl"))
    first = next(row for row in rows if "policy/parity" in row)
    assert first["policy/parity"] < 1e-4
    load_edit(run).check(load_model(base, device="cpu"))
    channels = 4 if family == "sdxl" else 16
    pipe = plain(base, family)
    before = pictures(pipe, channels)
    pipe.load_lora_weights(run / "edit")
    assert (pictures(pipe, channels) - before).abs().max() > 1e-4


def test_generate_draws_with_it(run: Path) -> None:
    assert main(["generate", "a ball", "--model", str(run), "--steps", "2", "--device", "cpu", "--out", "a.png"]) == 0
    with Image.open("a.png") as picture:
        assert picture.size == (16, 16)


def test_an_export_is_a_plain_pipeline(run: Path, base: Path, family: str) -> None:
    assert main(["export", str(run), "whole"]) == 0
    assert json.loads(Path("whole/cgru.json").read_text())["concept"] == "red ball"
    channels = 4 if family == "sdxl" else 16
    with_lora = plain(base, family)
    with_lora.load_lora_weights(run / "edit")
    merged = pictures(plain(Path("whole"), family), channels)
    torch.testing.assert_close(merged, pictures(with_lora, channels), rtol=0, atol=1e-4)
    load_model("whole", device="cpu")


def test_an_attack_is_refused_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["attack", str(run), "--target", "Dogs", "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "lacks `white_box`" in message
    assert sorted(Path().rglob("*")) == before


def test_a_prompt_that_is_too_long_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"a red ball {i}" for i in range(20)] + ["red ball " + "x" * 120, "red ball " + "y" * 120]
    Path("prompts.txt").write_text("\n".join(texts) + "\n")
    counts = ["prompts.count=9", "prompts.critic=9", "prompts.retain=0", "prompts.source=prompts.txt"]
    words = ["unlearn", "red ball", "--model", str(base), "--device", "cpu", *TINY, *counts]
    assert main(words) == 2
    assert "allowed: 100 tokens, start and end included" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["text_encoder_2", "tokenizer_2"])
def test_a_folder_without_a_part_is_refused(
    base: Path, part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / part)
    assert main(["unlearn", "red ball", "--model", "model", *TINY]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"lacks {part}/" in message
    assert not Path("runs").exists()
