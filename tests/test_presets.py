"""Presets, and the order in which preset, method and the user's own settings win."""

from pathlib import Path

import pytest

from cgru.catalog import METHODS, PRESETS
from cgru.config import diff, dump, from_dict, to_dict
from cgru.presets import default_preset, preset, resolve_config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_config(name: str) -> None:
    config = preset(name, "Dogs")
    assert (config.preset, config.concept, config.method) == (name, "Dogs", "cgru")
    assert from_dict(to_dict(config)) == config


def test_the_papers_table() -> None:
    config = preset("paper-object", "Dogs")
    policy = config.policy
    # 4 batches of 4 make 16 trajectories; batch 2 × accumulation 4 = 8 of them an update, so 2 updates.
    assert (policy.trajectories, policy.updates, config.sampling.steps) == (16, 2, 50)
    assert (policy.learning_rate, policy.clip, policy.gradient_norm) == (3e-4, 1e-4, 1.0)
    assert (config.reward.scale, config.critic.kind, config.critic.view) == (10.0, "film", "noisy")
    assert not any((config.retention.share, config.retention.kl, config.retention.kl_forget))


def test_the_nsfw_reward_goes_from_0_to_1() -> None:
    assert diff(preset("paper-object", "nudity"), preset("paper-nsfw", "nudity")) == [
        "preset: 'paper-object' -> 'paper-nsfw'",
        "reward.name: 'concept' -> 'nsfw'",
        "reward.scale: 10.0 -> 1.0",
    ]


def test_demo_is_best_with_less_work() -> None:
    changed = {line.split(":")[0] for line in diff(preset("best", "Dogs"), preset("demo", "Dogs"))}
    sizes = {"prompts.validation", "policy.iterations", "policy.trajectories", "policy.step_choice"}
    sizes |= {f"retention.{key}" for key in ("kl", "bank", "batch")}
    sizes |= {f"critic.{key}" for key in ("trajectories", "epochs", "batch", "online_updates")}
    assert changed == {"preset", "sampling.steps", "sampling.noisy_steps"} | sizes


@pytest.mark.parametrize("name", ["demo", "best"])
@pytest.mark.parametrize(("concept", "scale"), [("hazard", 1.0), ("Hazards", 1.0), ("smoking", 1.0), ("Dogs", 10.0)])
def test_hazards_get_the_papers_nsfw_style_reward(name: str, concept: str, scale: float) -> None:
    reward = preset(name, concept).reward
    assert reward.scale == scale
    assert (reward.form == "probability") == (scale == 1.0)


def test_the_default_preset_follows_the_model() -> None:
    assert (default_preset("emoji-canvas"), default_preset("owner/sd")) == ("demo", "paper-object")
    assert resolve_config("x", model="owner/sd").preset == "paper-object"
    assert resolve_config("Dogs").model == "emoji-canvas"
    assert resolve_config("x", preset_name="paper-object").model.startswith("stable-diffusion-v1-5/")


def test_the_method_wins_over_the_preset_and_the_user_over_both() -> None:
    config = resolve_config("Dogs", method="ddpo", overrides=["policy.advantage=batch", "policy.iterations=3"])
    assert (config.method, config.critic.kind) == ("ddpo", "none")  # demo's critic is film
    assert (config.policy.advantage, config.policy.iterations) == ("batch", 3)


@pytest.mark.parametrize(
    ("given", "name", "scale"), [("dog", "Dogs", 10), ("ink", "Ink", 10), ("cigarette", "smoking", 1)]
)
def test_a_concept_is_spelled_as_the_vocabulary_does(given: str, name: str, scale: float) -> None:
    config = resolve_config(given, overrides=["policy.iterations=3"])
    assert config == resolve_config(name, overrides=["policy.iterations=3"])
    assert (config.concept, config.reward.scale) == (name, scale)
    assert resolve_config("dog", model="owner/sd").concept == "dog"  # any text there


def test_a_method_sees_the_sizes_the_user_asked_for() -> None:
    config = resolve_config("Dogs", method="dpok", overrides=["policy.trajectories=8", "reward.scale=1"])
    # A window of two rounds; 100 / scale, so that reward_weight · reward stays the same.
    assert (config.policy.window, config.policy.reward_weight) == (16, 100.0)


def test_a_config_file_is_taken_as_it_stands(tmp_path: Path) -> None:
    made = resolve_config("Dogs", method="ddpo", overrides=["policy.rank=3"])
    file = tmp_path / "config.yaml"
    file.write_text(dump(made))
    assert resolve_config("Dogs", config_file=file) == made
    again = resolve_config("Cats", config_file=file, method="cgru")
    assert (again.concept, again.critic.kind, again.policy.advantage, again.policy.rank) == (
        "Cats",
        "film",
        "critic",
        3,
    )
    with pytest.raises(ValueError, match="one of them"):
        resolve_config("Dogs", config_file=file, preset_name="demo")


@pytest.mark.parametrize("setting", ["method=ddpo", "preset=best", "concept=Cats", "model=some/model"])
def test_names_that_others_follow_from_are_options(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        resolve_config("Dogs", overrides=[setting])


@pytest.mark.parametrize("value", ["0", " 0", "-3"])
def test_a_micro_batch_of_nothing_is_refused(value: str) -> None:
    """In a config file 0 stands for what fits; who gives a number means one."""
    with pytest.raises(ValueError, match=r"micro_batch=.*; allowed: 1 pair or more. Leave it out"):
        resolve_config("Dogs", overrides=[f"policy.micro_batch={value}"])
    assert resolve_config("Dogs").policy.micro_batch == 0
    assert resolve_config("Dogs", overrides=["policy.micro_batch=1"]).policy.micro_batch == 1


@pytest.mark.parametrize(("kind", "given", "meant"), [("preset_name", "demmo", "demo"), ("method", "ddop", "ddpo")])
def test_unknown_names_have_a_nearest_one(kind: str, given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        resolve_config("Dogs", **{kind: given})  # type: ignore[arg-type]


def test_the_catalog_lists_what_there_is() -> None:
    assert list(METHODS) == ["cgru", "ddpo", "dpok"]


def test_fast_starts_from_the_model_s_own_preset() -> None:
    options = {"policy.step_fraction", "policy.step_choice", "critic.decode"}
    here = diff(preset("best", "Dogs"), resolve_config("Dogs", preset_name="fast"))
    assert {line.split(":")[0] for line in here} == {"preset"} | options
    elsewhere = resolve_config("a dog", model="owner/sd", preset_name="fast")
    changed = {line.split(":")[0] for line in diff(preset("paper-object", "a dog"), elsewhere)}
    assert changed == {"preset", "model", "dtype", "compile"} | options and elsewhere.model == "owner/sd"


@pytest.mark.parametrize("method", METHODS)
def test_fast_goes_with_every_method(method: str) -> None:
    assert resolve_config("Dogs", preset_name="fast", method=method).preset == "fast"
