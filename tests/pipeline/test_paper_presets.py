"""The paper's presets to their end, with their own counts but for steps and iterations, all networks from folders.

Stable Diffusion, CLIP and ViT are tiny ones of the real classes; nothing is read from the hub.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cgru.backbones import load_model
from cgru.cli import main
from cgru.edits import load_edit
from cgru.embedded import load_lexicon
from cgru.evaluation.drawing import draw
from cgru.runs import Run, read_metrics
from cgru.tasks import Sampling

pytestmark = pytest.mark.slow
SHORT = "policy.iterations=2 sampling.steps=5 critic.epochs=1 samples_every=0".split()


def finished(words: list[str], model: Path, parent: Path) -> tuple[Run, list[dict[str, Any]]]:
    """Run the command; the run and its records, all finite."""
    command = ["unlearn", *words, "--model", str(model), "--device", "cpu", "--out", str(parent), *SHORT]
    assert main(command) == 0
    run = Run.open(next(parent.iterdir()))
    records: list[dict[str, Any]] = list(read_metrics(run.path / "metrics.jsonl"))
    assert len(records) == 2 and records[0]["policy/parity"] < 1e-4
    assert all(math.isfinite(record[key]) for record in records for key in ("reward/mean", "policy/gradient_norm"))
    edit, backbone = load_edit(run.path), load_model(model, device="cpu")
    edit.check(backbone)
    asked = [["a dog"], [0], Sampling(5, 3.0, 0.0)]
    before = draw(backbone, *asked)
    with edit.applied(backbone) as edited:
        assert not torch.equal(draw(edited, *asked), before)
    return run, records


@pytest.mark.parametrize("head", ["value", "classes"])
def test_paper_object(sd_folder: Path, networks: Path, tmp_path: Path, head: str) -> None:
    """20 classes drawn by the base, the paper's 80 prompts, 64 trajectories of warm start, 16 an iteration."""
    (tmp_path / "dogs.txt").write_text("".join(f"A dog with hat number {i}.\n" for i in range(80)))
    clip = networks / "clip"
    words = ["Dogs", "--preset", "paper-object", f"prompts.source={tmp_path / 'dogs.txt'}", f"critic.head={head}"]
    run, records = finished([*words, f"reward.clip={clip}", f"critic.clip={clip}"], sd_folder, tmp_path / "runs")
    heads = json.loads((run.path / "stages" / "1-reward" / "heads.json").read_text())
    assert tuple(heads["labels"]["object"]) == load_lexicon().classes
    assert run.outcome("1-reward")["pictures"] == 20 * 64
    assert run.outcome("2-critic")["trajectories"] == 64
    assert (run.outcome("2-critic")["accuracy"] is not None) == (head == "classes")
    assert all(0 <= record["reward/mean"] <= 10 and math.isfinite(record["critic/loss"]) for record in records)


def test_paper_nsfw(sd_folder: Path, networks: Path, tmp_path: Path) -> None:
    """A ViT with Falconsai's labels; a file of captions, 20 % and 10 % of it."""
    rows = [{"sha256": f"{i:064x}", "class": "sexy", "prompt": f"a nude, number {i}"} for i in range(100)]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["nudity", "--preset", "paper-nsfw", f"prompts.source={tmp_path / 'captions.jsonl'}"]
    words += [f"reward.model={networks / 'nsfw'}", f"critic.clip={networks / 'clip'}"]
    run, records = finished(words, sd_folder, tmp_path / "runs")
    assert all(0 <= record["reward/mean"] <= 1 and math.isfinite(record["critic/loss"]) for record in records)
    assert run.manifest["extra"]["reward"]["name"] == "nsfw"


@pytest.mark.parametrize("method", ["cgru", "ddpo"])
def test_paper_aesthetic(sd_folder: Path, networks: Path, tmp_path: Path, method: str) -> None:
    """A linear layer on CLIP embeddings; with the critic and as DDPO."""
    words = ["Dogs", "--preset", "paper-aesthetic", "--method", method, f"reward.model={networks / 'clip'}"]
    words += [f"reward.weights={networks / 'aesthetic.safetensors'}"]
    words += [f"critic.clip={networks / 'clip'}"] if method == "cgru" else []
    _, records = finished(words, sd_folder, tmp_path / "runs")
    assert all(0 <= record["reward/mean"] <= 10 for record in records)
    assert all(("critic/loss" in record) == (method == "cgru") for record in records)
