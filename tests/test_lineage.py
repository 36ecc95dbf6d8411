"""Ancestries by hand: who is a relative, what a run says of itself, what is refused and what is stamped."""

import json
from pathlib import Path

import pytest

from cgru.embedded import ROOT
from cgru.lineage import Trainers, ancestry, check_judges, judge_lineage, shared, trainers_of
from cgru.rewards.weights import lineage_of

REWARD = {"name": "concept", "weights": ["a1", "a2"], "started_from": ["openai/clip"]}
DETECTOR = {"name": "outside", "weights": ["d"], "started_from": []}


def judge(*weights: str, started_from: tuple[str, ...] = ()) -> dict[str, object]:
    return {"name": "a judge", "weights": list(weights), "started_from": list(started_from)}


def test_relatives_share_a_hash_or_a_hub_id() -> None:
    assert ancestry(REWARD) == {"a1", "a2", "openai/clip"}
    assert shared(REWARD, judge("x", "a2")) == {"a2"}  # the same file
    assert shared(REWARD, judge("x", started_from=("a1",))) == {"a1"}  # a child
    assert shared(REWARD, judge("x", started_from=("openai/clip",))) == {"openai/clip"}  # a sister
    assert shared(REWARD, DETECTOR) == frozenset()


def test_what_a_judge_is_made_of() -> None:
    # Its lineage.json may name one file, several or none; what was loaded counts in any case.
    assert judge_lineage({"name": "j"}, "w") == {"name": "j", "weights": ["w"], "started_from": []}
    assert judge_lineage({"name": "j", "weights": ["w", "v"]}, "w")["weights"] == ["w", "v"]


@pytest.mark.parametrize("place", ["judges/object", "judges/style", "judges/hazard", "clip-eval"])
def test_shipped_judges_are_strangers_to_all_that_trains(place: str) -> None:
    trained_by = ["emoji-canvas/clip", "emoji-canvas/reward/clip", "emoji-canvas/reward/swin", "detector"]
    assert not any(shared(lineage_of(ROOT / place), lineage_of(ROOT / other)) for other in trained_by)
    assert shared(lineage_of(ROOT / "emoji-canvas/clip"), lineage_of(ROOT / "emoji-canvas/reward/clip"))


def test_a_hub_model_is_a_relative_of_the_one_it_was_trained_on_from(hub_cache: Path) -> None:
    """CLIP at 336 pixels is CLIP at 224 with one more epoch; other files, and no lineage.json says so."""
    names = ("openai/clip-vit-large-patch14", "openai/clip-vit-large-patch14-336", "openai/clip-vit-base-patch16")
    for name in names:
        folder = hub_cache / f"models--{name.replace('/', '--')}"
        (folder / "snapshots" / "0").mkdir(parents=True)
        (folder / "snapshots" / "0" / "config.json").write_text("{}")
        (folder / "snapshots" / "0" / "model.safetensors").write_text(name)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0")
    small, large, stranger = (lineage_of(name) for name in names)
    assert shared(small, large) == {names[0]} and not shared(small, stranger) and not shared(large, stranger)
    with pytest.raises(ValueError, match=f"shares lineage with the reward .*{names[0]}"):
        check_judges({"clip": large}, Trainers({"reward": small}), ())


def test_a_relative_is_refused_in_one_line_unless_asked_for() -> None:
    trainers, judges = Trainers({"reward": REWARD, "detector": DETECTOR}), {"object": judge("d"), "style": judge("s")}
    with pytest.raises(ValueError, match=r"'object' shares lineage with the detector 'outside' .*\(d\)") as caught:
        check_judges(judges, trainers, ())
    assert "\n" not in str(caught.value) and "--allow-judge object" in str(caught.value)
    with pytest.raises(ValueError, match="'object' shares"):
        check_judges(judges, trainers, ("style",))
    found = check_judges(judges, trainers, ("object",))
    assert found.stamp == {"judge_shares_lineage_with": ["object: detector outside"]} and not found.notices
    assert check_judges({"style": judge("s")}, trainers, ()).stamp == {}
    with pytest.raises(ValueError, match="unknown judge 'objct'; allowed: object, style. Did you mean 'object'"):
        check_judges(judges, trainers, ("objct",))


def test_a_judge_that_says_nothing_is_noticed() -> None:
    assert check_judges({"m:f": None}, Trainers({"reward": REWARD}), ()).notices == (
        "the judge 'm:f' has no record of its weights: unknown lineage",
    )
    assert check_judges({"m:f": None}, Trainers({}), ()).notices == ()  # of a base, nothing has to be known


def write_run(folder: Path, extra: dict[str, object]) -> Path:
    (folder / "edit").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"extra": extra}))
    return folder / "edit" / "pytorch_lora_weights.safetensors"


def test_a_run_says_what_trained_it(tmp_path: Path) -> None:
    edit = write_run(tmp_path / "run", {"reward": REWARD, "critic": None, "detector": DETECTOR, "sizes": {}})
    for name in (tmp_path / "run", edit):  # the folder, or the file in it
        assert trainers_of(str(name), edit) == Trainers({"reward": REWARD, "detector": DETECTOR})
    old = trainers_of("old", write_run(tmp_path / "old", {"reward": REWARD}))
    assert old.networks == {"reward": REWARD} and "does not say which critic, detector trained it" in old.notices[0]
    alone = trainers_of("x.safetensors", tmp_path / "x.safetensors")
    assert alone.networks == {} and "'x.safetensors' is a LoRA without the manifest" in alone.notices[0]
    assert "unknown lineage" in alone.notices[0]


def test_an_exported_model_says_it_too_and_a_base_need_not(tmp_path: Path) -> None:
    (tmp_path / "cgru.json").write_text(json.dumps({"lineage": {"reward": REWARD, "critic": None, "detector": None}}))
    assert trainers_of(str(tmp_path), None) == Trainers({"reward": REWARD})
    assert trainers_of("emoji-canvas", None) == Trainers({})


def test_a_whole_model_of_somebody_else_is_noticed_as_its_lora_is(tmp_path: Path) -> None:
    """A folder without cgru.json may have been trained by anything; the embedded model by its path is a base."""
    (tmp_path / "model_index.json").write_text("{}")
    whole, alone = trainers_of(str(tmp_path), None), trainers_of("x.safetensors", tmp_path / "x.safetensors")
    assert whole.networks == {} and f"{str(tmp_path)!r} is a model folder without cgru.json" in whole.notices[0]
    same = "does not say which reward, critic, detector trained it: unknown lineage"
    assert same in whole.notices[0] and same in alone.notices[0]
    assert check_judges({"object": judge("d")}, whole, ()).notices == whole.notices
    assert trainers_of(str(ROOT / "emoji-canvas"), None) == trainers_of("owner/name", None) == Trainers({})


@pytest.mark.parametrize("text", ["{", "[]", '{"extra": {"reward": {"name": "r"}}}', '{"extra": {"reward": 3}}'])
def test_a_damaged_manifest_is_no_excuse(tmp_path: Path, text: str) -> None:
    edit = write_run(tmp_path / "run", {})
    (tmp_path / "run" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="cannot read lineages from .*manifest.json") as caught:
        trainers_of("run", edit)
    assert "\n" not in str(caught.value)
