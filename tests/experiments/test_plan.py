"""The paper's experiments as cells: what each scale holds, what another model needs, and that definitions are exact."""

from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path

import pytest

from cgru.attacks.session import AttackRequest
from cgru.catalog import resolve
from cgru.cli.parse import parse
from cgru.config.reinforcement import as_rl
from cgru.embedded import load_lexicon
from cgru.evaluation.request import Request
from cgru.experiments.cells import Cell, from_record
from cgru.experiments.paper import EXPERIMENTS, plan
from cgru.experiments.scales import SCALES, find_scale
from cgru.experiments.settings import config_of
from cgru.rl.build import resolve_prompts


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
            assert config_of(cell, "cpu").seed == cell.seed


def test_the_compared_methods_differ_in_the_method_alone() -> None:
    ours, theirs = (next(c for c in plan(SCALES["small"]) if c.name == f"ddpo-{m}-s1") for m in ("cgru", "ddpo"))
    assert replace(ours, name="", method="") == replace(theirs, name="", method="")
    assert config_of(ours, "cpu").reward.name == config_of(theirs, "cpu").reward.name == "jpeg"
    assert config_of(theirs, "cpu").critic.kind == "none"


def test_the_base_comes_first_since_the_others_reuse_its_pictures() -> None:
    is_base = [cell.concept is None for cell in plan(SCALES["small"])]
    assert is_base == sorted(is_base, reverse=True)
    assert any(is_base)


def test_commands_can_be_parsed_by_the_command_line() -> None:
    """Words of a cell are options that exist: a renamed option breaks this test, not a user's evening."""
    import shlex

    for cell in plan(SCALES["smoke"]):
        for line in cell.commands(Path("runs/some-run") if cell.concept else None, "cpu"):
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
    assert by_experiment["critic"] == ""  # 20 classes are drawn by the base


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
    # The paper's variant at the paper's size; prompts of a folder have no class of ours, so no target.
    assert ("variant", "paper") in dogs.measures[0].options
    assert [(measure.benchmark, measure.target) for measure in dogs.measures[1:]] == [("fid", None)]


def test_the_requests_of_another_model_are_accepted_by_the_benchmarks(tmp_path: Path) -> None:
    """All of a request but the files' contents: an option that a benchmark does not take would be refused."""
    for name in ("judges", "prompts", "MJHQ-30K"):
        (tmp_path / name).mkdir()
    for name in ("i2p.csv", "nudity.csv", "nsfw.jsonl"):
        (tmp_path / name).touch()
    fields = set(Request.__dataclass_fields__)
    for cell in plan(SCALES["full"], "some/model", tmp_path):
        for measure in cell.measures:
            factory = resolve("benchmark", measure.benchmark)
            options = {key for key, _ in measure.options}
            assert options <= fields & set(signature(factory).parameters), measure
            assert measure.images in (None, 1)
        for assault in cell.assaults:
            assert {key for key, _ in assault.options} <= set(AttackRequest.__dataclass_fields__)


@pytest.mark.parametrize("scale", SCALES)
def test_another_model_has_templates_enough_for_the_ablation_of_critics(scale: str) -> None:
    cells = {cell.name: cell for cell in plan(SCALES[scale], "some/model")}
    _, sets = resolve_prompts(as_rl(config_of(cells["critic-film-s0"], "cpu")))
    assert len(sets.critic) == len(sets.critic_retain) >= 192


def test_prompts_of_a_class_suffice_for_all_parts(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    file = tmp_path / "prompts" / "sd_prompt_Dogs.txt"
    file.write_text("".join(f"a dog number {i}\n" for i in range(80)))  # as many as the paper has
    cells = {cell.name: cell for cell in plan(SCALES["full"], "some/model", tmp_path)}
    config = config_of(cells["objects-dogs-cgru-s0"], "cpu")
    _, sets = resolve_prompts(config)
    assert (len(sets.policy), len(sets.critic), len(sets.validation_forget)) == (60, 20, 0)  # nobody looks there
    file.write_text("a dog\n")
    with pytest.raises(ValueError, match="^1 different forget prompts given, 80 wanted; allowed: 80 or more"):
        resolve_prompts(config)
