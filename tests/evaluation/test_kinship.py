"""Refusals around an evaluation and an attack: relatives among the judges, other protocols, damaged files."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rewards.reward_folders import save_clip
from test_edits import write_lora
from transformers import CLIPTokenizer

from cgru.cli import main
from cgru.embedded import sha256_of
from cgru.evaluation.judges.features import load_eye
from cgru.evaluation.request import Request
from cgru.evaluation.session import evaluate, prepare, run
from cgru.lineage import Trainers, check_judges, judge_lineage
from cgru.rewards.clip import load_clip

NOTHING = {"name": "jpeg", "weights": [], "started_from": []}


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def make_run(root: Path, extra: dict[str, Any] | None) -> None:
    """A finished run `run` in the working directory, as far as an evaluation reads it."""
    write_lora(root / "emoji-canvas", Path("run/edit"))
    Path("run/config.yaml").write_text("model: emoji-canvas\n")
    if extra is not None:
        Path("run/manifest.json").write_text(json.dumps({"extra": extra}))


def trained_by(root: Path, role: str, judge: str) -> dict[str, Any]:
    """A manifest in which `judge` had that role."""
    lineage = {"name": "cheat", "weights": [sha256_of(root / "judges" / judge / "model.safetensors")]}
    return {"reward": NOTHING, "critic": None, "detector": None, role: {**lineage, "started_from": []}}


@pytest.mark.parametrize("role", ["reward", "critic", "detector"])
def test_a_judge_that_trained_the_run_is_refused(
    role: str, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(asset_root, trained_by(asset_root, role, "style"))
    capsys.readouterr()  # diffusers' bars
    assert main(["evaluate", "run", "--images", "1"], root=asset_root) == 2
    told = capsys.readouterr().err
    assert f"the judge 'style' shares lineage with the {role} 'cheat'" in told and told.count("\n") == 1
    assert not Path("run/eval").exists()


def test_asked_for_by_name_it_is_stamped_and_said(
    asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(asset_root, trained_by(asset_root, "detector", "object"))
    command = ["evaluate", "run", "--images", "1", "--no-base", "--allow-judge", "object"]
    assert main(command, root=asset_root) == 0
    assert "not independent, accepted by --allow-judge: the judge shares lineage" in capsys.readouterr().out
    scores = json.loads(Path("run/eval/canvas@2/scores.json").read_text())
    assert scores["protocol"]["judge_shares_lineage_with"] == ["object: detector cheat"] and scores["notices"] == []
    assert main([*command[:-1], "objet"], root=asset_root) == 2
    assert "unknown judge 'objet'; allowed: object, style. Did you mean 'object'?" in capsys.readouterr().err


def test_an_attack_is_refused_alike(asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(asset_root, trained_by(asset_root, "critic", "object"))
    assert main(["attack", "run", "--target", "Cats"], root=asset_root) == 2
    assert "the judge 'object' shares lineage with the critic 'cheat'" in capsys.readouterr().err
    # Allowed, it goes on to the next mistake: the tiny model reads 16 tokens only.
    assert main(["attack", "run", "--target", "Cats", "--allow-judge", "object"], root=asset_root) == 2
    assert "--tokens 3; allowed: 0 beside the prompt" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [None, {"reward": NOTHING}])
def test_an_old_run_is_evaluated_with_a_notice(
    extra: dict[str, Any] | None, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(asset_root, extra)
    assert main(["evaluate", "run", "--images", "1", "--no-base"], root=asset_root) == 0
    (notice,) = json.loads(Path("run/eval/canvas@2/scores.json").read_text())["notices"]
    assert "unknown lineage" in notice and notice in capsys.readouterr().out


def test_the_same_hub_network_may_not_train_and_judge(tmp_path: Path, sd_folder: Path) -> None:
    """As openai/clip-vit-large-patch14: the file's hash is found, whatever the folder is called."""
    save_clip(tmp_path / "clip", CLIPTokenizer.from_pretrained(sd_folder / "tokenizer"))
    reward = load_clip(tmp_path / "clip").lineage
    (tmp_path / "clip").rename(tmp_path / "copy")
    seen = load_clip(tmp_path / "copy").lineage
    with pytest.raises(ValueError, match="'clip-l14-336' shares lineage with the reward 'clip'"):
        check_judges({"clip-l14-336": judge_lineage(seen, "one hash of all files")}, Trainers({"reward": reward}), ())


def test_a_judge_s_own_lineage_comes_from_its_weights(asset_root: Path) -> None:
    eye = load_eye("object", root=asset_root)
    file = sha256_of(asset_root / "judges/object/model.safetensors")
    assert judge_lineage(eye.lineage, eye.weights_sha256)["weights"] == [file]


def test_another_protocol_never_takes_the_place_of_a_result(asset_root: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"images": 1, "out": tmp_path / "out", "root": asset_root}
    evaluate("emoji-canvas", **settings)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    others = {"different dtype": {"dtype": "bf16"}, "different target": {"target": "Dogs"}}
    for message, change in others.items():
        with pytest.raises(ValueError, match=f"another protocol .{message}") as caught:
            evaluate("emoji-canvas", **(settings | change))
        assert "\n" not in str(caught.value)
    scores = tmp_path / "out" / "scores.json"
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {"version": 1}))
    with pytest.raises(ValueError, match=r"another protocol \(different version\)"):
        evaluate("emoji-canvas", **settings)
    scores.rename(tmp_path / "out" / "scores.previous.json")  # as a stopped evaluation leaves it
    with pytest.raises(ValueError, match=r"scores.previous.json' holds results of another protocol"):
        evaluate("emoji-canvas", **settings)
    (tmp_path / "out" / "scores.previous.json").write_bytes(before[scores])
    evaluate("emoji-canvas", **settings)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_scores_that_cannot_be_read_are_told(asset_root: Path, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text('{"benchmark": "canv')
    with pytest.raises(ValueError, match="is not a complete scores.json of cgru"):
        prepare(Request("emoji-canvas", images=1, out=tmp_path, root=asset_root))


def test_half_copied_files_are_made_again(asset_root: Path, tmp_path: Path) -> None:
    first = evaluate("emoji-canvas", images=1, out=tmp_path, root=asset_root)
    rows, picture = tmp_path / "predictions.jsonl", next(tmp_path.glob("samples/*/*.png"))
    before = {path: path.read_bytes() for path in (rows, picture)}
    for path in (rows, picture):
        path.write_bytes(before[path][:-20])
    done: list[int] = []
    again = run(
        prepare(Request("emoji-canvas", images=1, out=tmp_path, root=asset_root)),
        lambda what, count, total: done.append(count),
    )
    # 3 classes × 2 styles; the last row is cut, and a picture that may be the same job's.
    assert done[0] in (4, 5) and done[-1] == 6
    assert picture.read_bytes() == before[picture] and again["confusion"] == first["confusion"]
    rows.write_text("something of mine")  # no line of ours: it would be lost
    with pytest.raises(ValueError, match="holds 'something of mine', which is not a prediction of cgru"):
        prepare(Request("emoji-canvas", images=1, out=tmp_path, root=asset_root))
