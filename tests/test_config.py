"""Configs: every field explained and checked, YAML there and back, overrides, and the hash that names a run."""

import ast
import itertools
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import yaml

from cgru.config import (
    FREE,
    CriticConfig,
    PolicyConfig,
    RetentionConfig,
    RewardConfig,
    RLConfig,
    SamplingConfig,
    WatchConfig,
    diff,
    dump,
    fingerprint,
    from_dict,
    keys,
    load,
    override,
    schema,
    to_dict,
)

DOGS = RLConfig(concept="Dogs")

# One other allowed value for every key.
OTHERS = {
    "concept": "Cats",
    "model": "tiny/sd",
    "method": "ddpo",
    "preset": "best",
    "seed": "7",
    "device": "cuda:1",
    "dtype": "bf16",
    "compile": "true",
    "memory": "low",
    "checkpoint_every": "2",
    "samples_every": "0",
    "tracker": "wandb",
    "sampling.steps": "50",
    "sampling.guidance": "7.5",
    "sampling.noisy_steps": "6",
    "sampling.eta": "0.5",
    "sampling.explore": "0.5",
    "sampling.explore_credit": "shuffled",
    "sampling.explore_ratio": "own",
    "sampling.merged": "true",
    "sampling.pairs": "true",
    "prompts.source": "my prompts.csv",
    "prompts.column": "caption",
    "prompts.count": "3",
    "prompts.retain": "0",
    "prompts.critic": "1",
    "prompts.policy_share": "0.25",
    "prompts.critic_share": "0.25",
    "prompts.validation": "0",
    "prompts.split_seed": "4294967295",
    "reward.name": "0.7*concept+0.3*clip",
    "reward.form": "log-odds",
    "reward.scale": "1",
    "reward.temperature": "2",
    "reward.limit": "3",
    "reward.networks": "[clip, swin]",
    "reward.views": "4",
    "reward.nothing": "1",
    "reward.model": "my/network",
    "reward.label": "porn",
    "reward.weights": "aesthetic.pth",
    "reward.negatives": "[a cat, a photo]",
    "reward.classes": "paper",
    "reward.clip": "my/clip",
    "reward.retain": "0.5",
    "critic.kind": "latent",
    "critic.trust": "measured",
    "critic.head": "classes",
    "critic.view": "clean",
    "critic.decode": "half",
    "critic.tower": "frozen",
    "critic.clip": "my/clip",
    "critic.trajectories": "0",
    "critic.epochs": "1",
    "critic.batch": "8",
    "critic.learning_rate": "1e-3",
    "critic.online_updates": "0",
    "critic.online_learning_rate": "5e-5",
    "critic.weight_decay": "0",
    "policy.iterations": "60",
    "policy.trajectories": "8",
    "policy.updates": "1",
    "policy.passes": "2",
    "policy.step_fraction": "0.5",
    "policy.step_choice": "shared",
    "policy.step_weights": "balanced",
    "policy.warmup": "5",
    "policy.window": "32",
    "policy.learning_rate": "1e-5",
    "policy.weight_decay": "0",
    "policy.beta1": "0",
    "policy.beta2": "0.99",
    "policy.gradient_norm": ".5",
    "policy.clip": "2e-4",
    "policy.clip_mode": "hard",
    "policy.advantage": "gae",
    "policy.advantage_clamp": "10",
    "policy.normalise": "true",
    "policy.normalise_floor": "0.1",
    "policy.kl_limit": "1e-4",
    "policy.gae_lambda": "1",
    "policy.reward_weight": "10",
    "policy.rank": "8",
    "policy.alpha": "8",
    "policy.targets": r"attn2\.to_[kv]$",
    "policy.average": "0.99",
    "policy.micro_batch": "4",
    "retention.share": "0.25",
    "retention.kl": "0.1",
    "retention.kl_target": "0.01",
    "retention.kl_forget": "0.01",
    "retention.kl_form": "noise",
    "retention.balance": "0.5",
    "retention.bank": "8",
    "retention.batch": "16",
    "watch.detector": "google/siglip-base-patch16-224#a dog,a puppy",
    "watch.every": "5",
    "watch.alarm": "0.2",
    "watch.stop": "true",
    "watch.target": "0.9",
    "watch.patience": "5",
    "diagnostics.every": "10",
    "diagnostics.trajectories": "4",
}


def message(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- fields


WITH = {"policy.normalise_floor": "policy.normalise=true", "retention.kl_target": "retention.kl=1"}
"""Key -> what it cannot be set without."""


def started(key: str) -> RLConfig:
    return override(DOGS, [WITH[key]] if key in WITH else [])


def test_the_table_above_has_every_key() -> None:
    assert tuple(sorted(OTHERS)) == tuple(sorted(keys(RLConfig)))


def test_every_field_has_its_docstring_line() -> None:
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, below in zip(kind.body, kind.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign):
                assert isinstance(below, ast.Expr), f"{kind.name}: line {node.lineno} is not explained"
                assert isinstance(below.value, ast.Constant)


@pytest.mark.parametrize("key", keys(RLConfig))
def test_every_key_can_be_set_and_survives_yaml(key: str, tmp_path: Path) -> None:
    changed = override(started(key), [f"{key}={OTHERS[key]}"])
    assert len(diff(started(key), changed)) == 1
    (tmp_path / "config.yaml").write_text(dump(changed), encoding="utf-8")
    assert load(tmp_path / "config.yaml") == changed
    assert from_dict(to_dict(changed)) == changed


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        DOGS.policy.iterations = 3


def test_whole_numbers_given_for_floats_are_floats() -> None:
    # Else alpha=4 and alpha=4.0 would be two runs.
    config = replace(DOGS, policy=PolicyConfig(alpha=4), reward=RewardConfig(networks=["clip"]))
    assert isinstance(config.policy.alpha, float)
    assert config.reward.networks == ("clip",)
    assert fingerprint(config) == fingerprint(DOGS)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: SamplingConfig(steps=0),
            "sampling.steps is 0; allowed: a whole number, at least 1 and at most 1000000. Give one such as 10",
        ),
        (lambda: SamplingConfig(steps=True), "sampling.steps is True; allowed: a whole number, at least 1"),
        (lambda: SamplingConfig(eta=0), "sampling.eta is 0.0; allowed: a number, above 0 and at most 1."),
        (lambda: SamplingConfig(guidance=float("nan")), "sampling.guidance is nan; allowed: a number, at least 0."),
        (lambda: SamplingConfig(guidance=float("inf")), "sampling.guidance is inf; allowed: a number, at least 0."),
        (lambda: SamplingConfig(guidance=10**400), "allowed: a number, at least 0."),
        (
            lambda: PolicyConfig(step_fraction=1.5),
            "policy.step_fraction is 1.5; allowed: a number, above 0 and at most 1.",
        ),
        (lambda: PolicyConfig(beta2=1), "policy.beta2 is 1.0; allowed: a number, at least 0 and under 1."),
        (lambda: PolicyConfig(normalise=1), "policy.normalise is 1; allowed: true or false. Give one such as false"),
        (lambda: PolicyConfig(targets=" "), "policy.targets is ' '; allowed: a text of one line, not empty."),
        (lambda: PolicyConfig(learning_rate="fast"), "policy.learning_rate is 'fast'; allowed: a number, above 0."),
        (lambda: RLConfig("Dogs", policy=PolicyConfig(advantage="pair")), "and sampling.pairs false; allowed: pairs"),
        (
            lambda: RLConfig("Dogs", sampling=SamplingConfig(pairs=True), policy=PolicyConfig(trajectories=15)),
            "policy.trajectories 15, retention.share 0.0 and sampling.explore 0.0; allowed: an even number",
        ),
        (
            lambda: RLConfig("Dogs", sampling=SamplingConfig(pairs=True), policy=PolicyConfig(step_choice="shared")),
            "policy.step_choice 'shared'; allowed: each",
        ),
        (lambda: RewardConfig(networks=()), "reward.networks is (); allowed: a list of texts, not empty."),
        (lambda: RewardConfig(networks="clip"), "reward.networks is 'clip'; allowed: a list of texts, not empty."),
        (lambda: RetentionConfig(share=1), "retention.share is 1.0; allowed: a number, at least 0 and under 1."),
        (lambda: RLConfig(concept=""), "concept is ''; allowed: a text of one line, not empty. Give one."),
        (lambda: RLConfig(concept="a\nb"), r"concept is 'a\nb'; allowed: a text of one line"),
        (
            lambda: RLConfig("Dogs", seed=2**32),
            "seed is 4294967296; allowed: a whole number, at least 0 and under 4294967296",
        ),
        (lambda: RLConfig("Dogs", policy=CriticConfig()), "allowed: a PolicyConfig."),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(make: object, said: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert said in message(error)


@pytest.mark.parametrize(
    ("make", "given", "near"),
    [
        (lambda: CriticConfig(kind="flim"), "critic.kind 'flim'", "film"),
        (lambda: PolicyConfig(advantage="per_prompt"), "policy.advantage 'per_prompt'", "per-prompt"),
        (lambda: RLConfig("Dogs", dtype="float32"), "dtype 'float32'", "fp32"),
        (lambda: RLConfig("Dogs", tracker="tensor-board"), "tracker 'tensor-board'", "tensorboard"),
    ],
)
def test_a_wrong_choice_is_answered_with_the_nearest(make: object, given: str, near: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert given in message(error)
    assert f"Did you mean {near!r}?" in message(error)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["critic.kind=none"], "policy.advantage is 'critic' and critic.kind 'none'"),
        (["prompts.critic=0"], "critic.trajectories is 64 and prompts.critic 0"),
        (["prompts.retain=0", "retention.kl=1"], "prompts.retain 0"),
        (["retention.kl_target=0.1"], "retention.kl_target is 0.1 and retention.kl 0"),
        (["policy.normalise_floor=0.1"], "policy.normalise_floor is 0.1 and policy.normalise false"),
        (["critic.kind=none", "policy.advantage=batch", "critic.trust=measured"], "critic.trust is 'measured' and"),
        (["watch.stop=true", "prompts.validation=0"], "watch.stop is true, watch.every 10 and prompts.validation 0"),
    ],
)
def test_settings_that_cannot_work_together(settings: list[str], said: str) -> None:
    with pytest.raises(ValueError) as error:
        override(DOGS, settings)
    assert said in message(error)
    assert "allowed" in message(error)


def test_settings_are_judged_together_not_one_by_one() -> None:
    # critic.kind=none alone is refused (above); the second setting makes it right.
    assert override(DOGS, ["critic.kind=none", "policy.advantage=batch"]).critic.kind == "none"


# ---- overrides


def test_override_leaves_the_rest_alone() -> None:
    changed = override(DOGS, ["policy.iterations=60", "watch.stop=true", "policy.iterations=80"])
    assert changed == replace(DOGS, policy=replace(DOGS.policy, iterations=80), watch=WatchConfig(stop=True))
    assert DOGS.policy.iterations == 100


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("policy.iteration=60", "policy.iterations"),
        ("iterations=60", "policy.iterations"),
        ("critc.kind=film", "critic.kind"),
        ("Policy.Rank=8", "policy.rank"),
        ("polcy.step_fracton=0.5", "policy.step_fraction"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_of_all(setting: str, near: str) -> None:
    with pytest.raises(ValueError) as error:
        override(DOGS, [setting])
    assert message(error).startswith(f"unknown key {setting.partition('=')[0]!r}; allowed: ")
    assert f"Did you mean {near!r}?" in message(error)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("policy.iterations=many", "policy.iterations is 'many'; allowed: a whole number, at least 1"),
        (
            "policy.micro_batch=-1",
            "policy.micro_batch is -1; allowed: a whole number, at least 0 and at most 1000000. Give one such as 0",
        ),
        ("policy.micro_batch=1.5", "policy.micro_batch is 1.5; allowed: a whole number, at least 0"),
        ("memory=lwo", "unknown memory 'lwo'; allowed: auto, fast, low. Did you mean 'low'"),
        ("policy.iterations=2.5", "policy.iterations is 2.5; allowed: a whole number, at least 1"),
        ("policy.iterations=", "policy.iterations is None; allowed: a whole number, at least 1"),
        ("policy.iterations=[", "cannot read the value in policy.iterations=["),
        ("policy.iterations=2020-99-99", "cannot read the value in policy.iterations=2020-99-99"),
        ("policy.normalise=maybe", "policy.normalise is 'maybe'; allowed: true or false"),
        ("policy.clip=nan", "policy.clip is 'nan'; allowed: a number, above 0"),
        ("policy.clip=.nan", "policy.clip is nan; allowed: a number, above 0"),
        ("reward.networks=clip", "reward.networks is 'clip'; allowed: a list of texts"),
        ("policy", "'policy' is not key=value"),
        ("policy={rank: 4}", "unknown key 'policy'"),
        ("=4", "unknown key ''"),
    ],
)
def test_a_wrong_override_is_named(setting: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        override(DOGS, [setting])
    assert said in message(error)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("No", "No"),  # YAML's false
        ("1984", "1984"),
        ("[kv] #2: x=y", "[kv] #2: x=y"),
        ("'a: b'", "a: b"),
        ('"No"', "No"),
        ("'", "'"),
    ],
)
def test_texts_are_taken_as_they_are(text: str, value: str, tmp_path: Path) -> None:
    config = override(DOGS, [f"concept={text}"])
    assert config.concept == value
    (tmp_path / "c.yaml").write_text(dump(config))
    assert load(tmp_path / "c.yaml") == config


def test_an_empty_text_is_allowed_where_it_means_something() -> None:
    assert override(replace(DOGS, tracker="wandb"), ["tracker="]).tracker == ""


# ---- tables and YAML


def test_yaml_has_every_key_in_declaration_order() -> None:
    table = yaml.safe_load(dump(DOGS))
    assert list(table) == [field.name for field in fields(RLConfig)]
    assert list(table["policy"]) == [field.name for field in fields(PolicyConfig)]
    assert table["model"] == "emoji-canvas"
    assert table["reward"]["networks"] == ["clip"]


def test_a_table_may_leave_keys_out_but_not_the_concept() -> None:
    assert from_dict({"concept": "Dogs", "policy": {"rank": 8}}) == override(DOGS, ["policy.rank=8"])
    with pytest.raises(ValueError, match="no 'concept'"):
        from_dict({"policy": {"rank": 8}})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"concept": "Dogs", "policy": {"ranks": 8}}, "unknown key 'policy.ranks'; allowed: policy.iterations, "),
        ({"concept": "Dogs", "policy": {"ranks": 8}}, "Did you mean 'policy.rank'?"),
        ({"concept": "Dogs", "polcy": {"rank": 8}}, "unknown key 'polcy'; allowed: concept, model, "),
        ({"concept": "Dogs", 3: 4}, "unknown key '3'"),
        ({"concept": "Dogs", "policy": None}, "policy is None; allowed: a table of keys. Give e.g. policy.iterations="),
        ({"concept": False}, "concept is False; allowed: a text (quoted in YAML)"),
        ({"concept": "Dogs", "policy": {"rank": "8"}}, "policy.rank is '8'; allowed: a whole number, at least 1"),
        ([], "the config is []; allowed: a table of keys"),
    ],
)
def test_a_wrong_table_is_named(table: object, said: str) -> None:
    with pytest.raises(ValueError) as error:
        from_dict(table)
    assert said in message(error)


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-4 as text: there is no dot.
    file = tmp_path / "c.yaml"
    file.write_text("concept: Dogs\npolicy:\n  clip: 1e-4\n")
    assert yaml.safe_load(file.read_text())["policy"]["clip"] == "1e-4"
    assert load(file) == DOGS


# 9^11 values in 400 bytes.
BOMB = "- &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"- &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in itertools.pairwise("abcdefghijk")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("concept: [", "as YAML"),
        ("concept: !!python/name:os.system x", "as YAML"),
        ("concept: Dogs\npolicy: {rank: 4}\npolicy: {alpha: 4}\n", "the key 'policy' is there twice"),
        ("concept: Dogs\npolicy: {rank: 4, rank: 8}\n", "the key 'rank' is there twice"),
        ("concept: Dogs\npolicy: {rang: 4}\n", "Did you mean 'policy.rank'?"),
        ("", "the config is None"),
        ("concept: &name Dogs\nmodel: *name\n", "it refers to another place of itself"),
        (BOMB, "it refers to another place of itself"),
    ],
)
def test_a_wrong_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        load(file)
    assert "my.yaml" in message(error)
    assert said in message(error)


def test_a_file_that_is_not_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00concept")
    with pytest.raises(ValueError, match="as YAML"):
        load(tmp_path / "c.yaml")
    with pytest.raises(FileNotFoundError, match=r"no config at .*nowhere.yaml"):
        load(tmp_path / "nowhere.yaml")


# ---- fingerprint and diff


def test_fingerprint_counts_every_key_that_decides_the_result() -> None:
    changed = {key: override(started(key), [f"{key}={OTHERS[key]}"]) for key in keys(RLConfig)}
    same = {key for key, config in changed.items() if fingerprint(config) == fingerprint(started(key))}
    assert same == set(FREE) == {"device", "memory", "tracker", "checkpoint_every", "samples_every"}


def test_fingerprint_is_8_hex_digits_and_the_same_in_every_process() -> None:
    code = "from cgru.config import *; print(fingerprint(RLConfig('Dogs')))"
    # -R: another seed of Python's own hash
    other = subprocess.run(
        [sys.executable, "-R", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == fingerprint(DOGS)
    assert len(other) == 8
    assert int(other, 16) >= 0


def test_diff_names_the_keys() -> None:
    other = override(DOGS, ["policy.iterations=60", "reward.networks=[swin]", "device=cpu", "concept=Cats"])
    assert diff(DOGS, other) == [
        "concept: 'Dogs' -> 'Cats'",
        "device: 'auto' -> 'cpu'",
        "reward.networks: ['clip'] -> ['swin']",
        "policy.iterations: 100 -> 60",
    ]
    assert diff(other, other) == []


def test_configs_bring_in_no_torch() -> None:
    code = "import sys, cgru.config, cgru.runs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
