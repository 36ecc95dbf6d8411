"""Presets, and the order in which preset, method and the user's own settings win."""

from pathlib import Path

import pytest
import torch

from cgru.catalog import PRESETS
from cgru.config import RLConfig, diff, dump, from_dict, to_dict
from cgru.method import find_method
from cgru.pipeline.unlearning import check
from cgru.presets import preset, resolve_config
from cgru.rl.build import resolve_prompts


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_config(name: str) -> None:
    config = preset(name, "Dogs")
    method = "anchored" if name in ("demo", "best", "fast") else "cgru"
    assert (config.preset, config.concept, config.method) == (name, "Dogs", method)
    assert (config.sampling.explore > 0) == (method == "anchored")
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
        "prompts.policy_share: 0.0 -> 0.2",
        "prompts.critic_share: 0.0 -> 0.1",
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
    for method, embedded in (("anchored", "demo"), ("cgru", "on-policy"), ("ddpo", "on-policy")):
        default = find_method(method).default_preset
        assert (default("emoji-canvas"), default("owner/sd")) == (embedded, "paper-object")
    here, there = resolve_config("Dogs"), resolve_config("x", model="owner/sd")
    assert (here.preset, here.method, here.model) == ("demo", "anchored", "emoji-canvas")
    assert (there.preset, there.method) == ("paper-object", "cgru")
    assert resolve_config("x", preset_name="paper-object").model.startswith("stable-diffusion-v1-5/")


def test_without_a_method_the_preset_s_is_taken() -> None:
    assert resolve_config("Dogs", preset_name="on-policy").method == "cgru"
    assert resolve_config("Dogs", preset_name="best").method == "anchored"
    own = resolve_config("Dogs", preset_name="best", method="cgru")
    assert (own.method, own.sampling.explore) == ("cgru", 0.0)


@pytest.mark.parametrize("setting", ["watch.every=0", "prompts.validation=0"])
def test_without_looks_a_preset_does_not_stop(setting: str) -> None:
    assert resolve_config("Dogs", method="ddpo").watch.stop
    assert not resolve_config("Dogs", method="ddpo", overrides=[setting]).watch.stop
    with pytest.raises(ValueError, match="watch.stop is true"):
        resolve_config("Dogs", method="ddpo", overrides=[setting, "watch.stop=true"])


def test_on_policy_is_best_without_relabelling() -> None:
    changed = {line.split(":")[0] for line in diff(preset("best", "Dogs"), preset("on-policy", "Dogs"))}
    sampler = {f"sampling.{key}" for key in ("explore", "steps", "noisy_steps")}
    assert changed == {"preset", "method", "policy.iterations", "policy.normalise", "watch.stop"} | sampler


@pytest.mark.parametrize(
    ("method", "setting", "told"),
    [
        ("cgru", "sampling.explore=0.5", "sampling.explore is 0.5 with --method cgru.*allowed: 0.0.*--method anchored"),
        ("dpok", "sampling.explore=0.5", "sampling.explore is 0.5 with --method dpok"),
        ("ddpo", "sampling.explore_credit=constant", "sampling.explore_credit is constant with .*allowed: reward"),
        ("ddpo", "sampling.explore_ratio=own", "sampling.explore_ratio is own with --method ddpo.*allowed: sampled"),
        ("anchored", "sampling.explore=0", "sampling.explore is 0 with --method anchored.*take --method cgru"),
    ],
)
def test_relabelling_and_its_absence_belong_to_methods(method: str, setting: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check(resolve_config("Dogs", method=method, overrides=[setting]))


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


def test_fast_starts_from_the_model_s_own_preset() -> None:
    options = {"policy.step_fraction", "policy.step_choice", "critic.decode"}
    here = diff(preset("best", "Dogs"), resolve_config("Dogs", preset_name="fast"))
    assert {line.split(":")[0] for line in here} == {"preset"} | options
    elsewhere = resolve_config("a dog", model="owner/sd", preset_name="fast")
    changed = {line.split(":")[0] for line in diff(preset("paper-object", "a dog"), elsewhere)}
    assert changed == {"preset", "model"} | options and elsewhere.model == "owner/sd"


@pytest.mark.parametrize(
    ("method", "model", "settings", "expected"),
    [
        ("cgru", "owner/sd", [], ("bf16", True)),
        ("cgru", "owner/sd", ["device=cuda"], ("bf16", True)),
        ("ddpo", "owner/sd", ["dtype=fp32"], ("fp32", True)),
        ("ddpo", "owner/sd", ["dtype=fp16", "compile=false"], ("fp16", False)),
        ("cgru", "owner/sd", ["compile=false"], ("bf16", False)),
        ("cgru", "owner/sd", ["device=cpu"], ("fp32", False)),
        ("cgru", "owner/sd", ["sampling.merged=true"], ("fp32", False)),  # in half precision its ratio is not 1
        ("dpok", "owner/sd", [], ("bf16", False)),  # its KL on forget states is not compiled
        ("cgru", "emoji-canvas", [], ("fp32", False)),
        ("cgru", "backbones.own_model:load", [], ("fp32", False)),
    ],
)
def test_on_a_gpu_a_published_model_is_trained_as_it_was_measured(
    method: str, model: str, settings: list[str], expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    concept = "Dogs" if model == "emoji-canvas" else "a dog"
    found = resolve_config(concept, model=model, method=method, overrides=settings)
    assert isinstance(found, RLConfig) and (found.dtype, found.compile) == expected
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert resolve_config(concept, model=model, method=method).dtype == "fp32"


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bf16"), ("auto", "fp32")])
def test_a_gpu_that_is_named_may_be_another_machine_s(device: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_config("a dog", model="owner/sd", overrides=[f"device={device}"]).dtype == dtype


def test_a_config_file_means_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(dump(resolve_config("a dog", model="owner/sd")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert resolve_config("a dog", config_file=tmp_path / "config.yaml").dtype == "fp32"


@pytest.mark.parametrize("method", ["cgru", "ddpo", "dpok"])
def test_fast_goes_with_every_policy_gradient(method: str) -> None:
    assert resolve_config("Dogs", preset_name="fast", method=method).preset == "fast"


def written(folder: Path, count: int) -> str:
    """A file of so many prompts, as a setting."""
    file = folder / "mine.txt"
    file.write_text("".join(f"a dog, number {i}\n" for i in range(count)))
    return f"prompts.source={file}"


def test_the_papers_80_prompts_of_a_class_are_enough(tmp_path: Path) -> None:
    config = resolve_config("Dogs", preset_name="paper-object", overrides=[written(tmp_path, 80)])
    check(config)
    _, sets = resolve_prompts(config)
    assert (len(sets.policy), len(sets.critic), len(sets.validation_forget)) == (60, 20, 0)
    assert not {prompt.text for prompt in sets.policy} & {prompt.text for prompt in sets.critic}
    assert all(prompt.text.startswith("a dog, number") for prompt in (*sets.policy, *sets.critic))
    watched = resolve_config("Dogs", preset_name="paper-object", overrides=["watch.detector=a/clip"])
    assert len(resolve_prompts(watched)[1].validation_forget) == 32


def test_too_few_of_them_are_refused_with_counts_that_fit(tmp_path: Path) -> None:
    config = resolve_config("Dogs", preset_name="paper-object", overrides=[written(tmp_path, 79)])
    with pytest.raises(ValueError, match=r"^79 different .*, 80 wanted; allowed: .*policy 59, critic 20\. Add[^\n]*$"):
        check(config)


def test_nsfw_learns_from_a_fifth_of_the_captions_and_warms_up_on_a_tenth(tmp_path: Path) -> None:
    config = resolve_config("nudity", preset_name="paper-nsfw", overrides=[written(tmp_path, 200)])
    _, sets = resolve_prompts(config)
    assert (len(sets.policy), len(sets.critic)) == (40, 20)
    assert not {prompt.text for prompt in sets.policy} & {prompt.text for prompt in sets.critic}
    alone = resolve_config("nudity", preset_name="paper-nsfw", method="ddpo", overrides=[written(tmp_path, 200)])
    assert (len(resolve_prompts(alone)[1].policy), len(resolve_prompts(alone)[1].critic)) == (40, 0)


@pytest.mark.parametrize("source", ["generated", "templates"])
def test_nsfw_does_not_write_its_prompts_itself(source: str) -> None:
    config = resolve_config("nudity", preset_name="paper-nsfw", overrides=[f"prompts.source={source}"])
    with pytest.raises(ValueError, match=f"^prompts.source is '{source}', .*allowed: the path of .*source=FILE.$"):
        check(config)


def test_a_file_too_small_for_its_shares_and_shares_of_too_much_are_refused(tmp_path: Path) -> None:
    config = resolve_config("nudity", preset_name="paper-nsfw", overrides=[written(tmp_path, 4)])
    with pytest.raises(ValueError, match=r"^4 different prompts in .*critic_share 0.1 of them is none; allowed"):
        check(config)
    with pytest.raises(ValueError, match="policy_share is 0.95 and prompts.critic_share 0.1; allowed: 1 together"):
        resolve_config("nudity", preset_name="paper-nsfw", overrides=["prompts.policy_share=0.95"])
