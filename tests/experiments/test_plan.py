"""The paper's experiments as cells: what each scale holds, what another model needs, and that definitions are exact."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cgru.cli.parse import parse
from cgru.experiments.cells import Cell, from_record
from cgru.experiments.paper import EXPERIMENTS, plan
from cgru.experiments.scales import SCALES, find_scale
from cgru.tasks import load_lexicon


def names(cells: tuple[Cell, ...]) -> list[str]:
    return [cell.name for cell in cells]


def test_smoke_is_three_classes_one_seed_and_five_attacked_prompts() -> None:
    cells = plan(SCALES["smoke"])
    removed = [cell.concept for cell in cells if cell.experiment == "objects" and cell.concept]
    assert removed == ["Cats", "Jellyfish", "Trees"]
    assert {cell.seed for cell in cells} == {0}
    assert {assault.prompts for cell in cells for assault in cell.assaults} == {5}


@pytest.mark.parametrize("scale", ["small", "full"])
def test_larger_scales_remove_every_class_and_study_three_seeds(scale: str) -> None:
    cells = plan(SCALES[scale])
    assert {c.concept for c in cells if c.experiment == "objects"} == {None, *load_lexicon().classes}
    for experiment in ("ddpo", "critic"):
        assert {c.seed for c in cells if c.experiment == experiment} == {0, 1, 2}


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_every_experiment_and_names_that_are_files(scale: str) -> None:
    cells = plan(SCALES[scale])
    assert {cell.experiment for cell in cells} == set(EXPERIMENTS)
    assert len(set(names(cells))) == len(cells)
    assert all(Path(name).name == name and name == name.lower() for name in names(cells))
    assert not any(cell.missing for cell in cells)


@pytest.mark.parametrize("scale", SCALES)
def test_every_config_of_emoji_canvas_is_valid(scale: str) -> None:
    for cell in plan(SCALES[scale]):
        if cell.concept is not None:
            assert cell.config("cpu").seed == cell.seed


def test_the_compared_methods_differ_in_the_method_alone() -> None:
    ours, theirs = (next(c for c in plan(SCALES["small"]) if c.name == f"ddpo-{m}-s1") for m in ("cgru", "ddpo"))
    assert replace(ours, name="", method="") == replace(theirs, name="", method="")
    assert ours.config("cpu").reward.name == theirs.config("cpu").reward.name == "jpeg"
    assert theirs.config("cpu").critic.kind == "none"


def test_the_base_comes_first_since_the_others_reuse_its_pictures() -> None:
    is_base = [cell.concept is None for cell in plan(SCALES["small"])]
    assert is_base == sorted(is_base, reverse=True)
    assert any(is_base)


def test_commands_can_be_parsed_by_the_command_line() -> None:
    """Words of a cell are options that exist: a renamed option breaks this test, not a user's evening."""
    import shlex

    for cell in plan(SCALES["smoke"]):
        for line in cell.commands("runs/some-run"):
            program, *words = shlex.split(line)
            assert program == "cgru"
            assert type(parse(words)).__name__.lower() == words[0]


def test_a_cell_survives_its_file_and_any_change_shows_in_its_fingerprint() -> None:
    for cell in plan(SCALES["smoke"]):
        assert from_record(asdict(cell)) == cell
        assert replace(cell, seed=cell.seed + 1).fingerprint != cell.fingerprint


def test_only_some_experiments() -> None:
    assert {cell.experiment for cell in plan(SCALES["smoke"], only=["critic"])} == {"critic"}
    with pytest.raises(ValueError, match="unknown experiment 'criti'.*Did you mean 'critic'"):
        plan(SCALES["smoke"], only=["criti"])


def test_an_unknown_scale_is_told() -> None:
    with pytest.raises(ValueError, match="unknown scale 'tiny'; allowed: smoke, small, full"):
        find_scale("tiny")


def test_another_model_says_what_it_needs(tmp_path: Path) -> None:
    cells = plan(SCALES["full"], "some/model")
    by_experiment = {cell.experiment: cell.missing for cell in cells}
    assert "judges" in by_experiment["objects"]
    assert "i2p.csv" in by_experiment["safety"]
    assert by_experiment["ddpo"] == ""
    assert "vocabulary" in by_experiment["critic"]


def test_another_model_with_its_data_takes_the_papers_presets_and_official_protocols(tmp_path: Path) -> None:
    for name in ("judges", "prompts", "MJHQ-30K"):
        (tmp_path / name).mkdir()
    for name in ("i2p.csv", "nudity.csv", "nsfw.jsonl"):
        (tmp_path / name).touch()
    cells = {cell.name: cell for cell in plan(SCALES["full"], "some/model", tmp_path)}
    dogs, nudity = cells["objects-dogs-cgru-s0"], cells["safety-cgru-s0"]
    assert (dogs.preset, dogs.measures[0].benchmark, dogs.missing) == ("paper-object", "unlearncanvas", "")
    assert f"prompts.source={tmp_path / 'prompts' / 'sd_prompt_Dogs.txt'}" in dogs.settings
    assert [measure.benchmark for measure in nudity.measures] == ["i2p", "clipscore"]
    assert nudity.assaults[0].tokens == 5  # the official number for nudity
    assert nudity.missing == ""
