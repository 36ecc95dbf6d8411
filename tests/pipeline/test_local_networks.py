"""Networks from folders: every one by a setting, and one that cannot be read stops a run before it draws anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cgru.cli import main
from cgru.config import RLConfig, override
from cgru.pipeline import unlearn
from cgru.pipeline.unlearning import check
from cgru.presets import resolve_config
from cgru.rewards.detectors import AestheticReward, ClipReward, NsfwReward
from cgru.rl.build import build_setting
from cgru.runs import read_metrics

SMALL = (
    "policy.iterations=1 policy.trajectories=4 critic.trajectories=4 critic.epochs=1 critic.batch=8 "
    "critic.online_updates=1 sampling.steps=2 samples_every=0 prompts.count=4 prompts.retain=4 prompts.critic=4"
).split()


def small(folder: Path, preset: str, *settings: str, method: str | None = None) -> RLConfig:
    config = resolve_config(
        "golden retriever", model=str(folder), preset_name=preset, method=method, overrides=[*SMALL, *settings]
    )
    assert isinstance(config, RLConfig)
    return config


def test_rewards_are_read_from_the_folders_that_are_named(sd_folder: Path, networks: Path) -> None:
    base = override(RLConfig(concept="red ball", model=str(sd_folder)), [*SMALL, "critic.kind=latent"])
    nsfw = override(base, ["reward.name=nsfw", f"reward.model={networks / 'nsfw'}", "reward.label=normal"])
    found = build_setting(nsfw).problem.reward
    assert isinstance(found, NsfwReward) and found.column == 0  # nsfw, the default, is 1
    score = ["reward.name=aesthetic", f"reward.model={networks / 'clip'}"]
    weights = f"reward.weights={networks / 'aesthetic.safetensors'}"
    assert isinstance(build_setting(override(base, [*score, weights])).problem.reward, AestheticReward)
    texts = ["reward.name=clip", f"reward.model={networks / 'clip'}", "reward.negatives=[a cat, a tree]"]
    zero_shot = build_setting(override(base, texts)).problem.reward
    assert isinstance(zero_shot, ClipReward) and len(zero_shot.texts) == 3


def test_heads_and_critic_start_from_the_folders_that_are_named(
    sd_folder: Path, networks: Path, tmp_path: Path
) -> None:
    clip = networks / "clip"
    run = unlearn(small(sd_folder, "paper-object", f"reward.clip={clip}", f"critic.clip={clip}"), tmp_path)
    known = run.manifest["extra"]
    assert known["critic"]["name"] == "clip" and known["critic"]["weights"]
    assert known["critic"]["weights"][0] in known["reward"]["started_from"]
    assert "critic/loss" in read_metrics(run.path / "metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("paper-object", ["reward.clip={clip}"], "openai/clip-vit-base-patch32"),  # the critic's
        ("paper-object", ["critic.clip={clip}"], "openai/clip-vit-base-patch32"),  # the heads'
        ("paper-aesthetic", ["critic.clip={clip}", "reward.model={clip}"], "trl-lib/ddpo-aesthetic-predictor"),
        ("paper-aesthetic", ["reward.model={clip}", "reward.weights={head}"], "openai/clip-vit-base-patch32"),
        ("paper-object", ["reward.name=0.5*concept+0.5*nsfw", "reward.clip={clip}", "critic.clip={clip}"], "Falconsai"),
        ("paper-object", ["reward.clip=no/such/folder"], "no network 'no/such/folder'"),
        ("paper-object", ["critic.clip=no/such/folder"], "no network 'no/such/folder'"),
        ("paper-object", ["reward.clip={clip}", "critic.clip={nsfw}"], "CLIP vision tower"),
        ("paper-object", ["reward.label=nsfw"], "unknown setting of a reward 'label'"),
        ("paper-object", ["reward.name=jpeg", "reward.clip={clip}"], "the run trains no class heads"),
        ("paper-aesthetic", ["reward.model={nsfw}", "reward.weights={head}", "critic.clip={clip}"], "lacks|embeddings"),
    ],
)
def test_what_cannot_be_read_stops_the_run_before_it_draws(
    sd_folder: Path, networks: Path, tmp_path: Path, preset: str, settings: list[str], message: str
) -> None:
    places = {name: networks / name for name in ("clip", "nsfw")} | {"head": networks / "aesthetic.safetensors"}
    config = small(sd_folder, preset, *(text.format(**places) for text in settings))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        unlearn(config, tmp_path / "runs")
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_a_critic_without_pictures_has_no_clip(sd_folder: Path) -> None:
    with pytest.raises(ValueError, match="critic.kind is 'latent' and critic.clip 'my/clip'; allowed without"):
        small(sd_folder, "paper-object", "critic.kind=latent", "critic.clip=my/clip")
    check(replace(small(sd_folder, "paper-object", method="ddpo"), concept="red ball"))


@pytest.mark.parametrize(("concept", "head"), [("Dogs", "classes"), ("golden retriever", "value")])
def test_a_plan_needs_no_other_networks_than_the_run(
    sd_folder: Path, networks: Path, tmp_path: Path, concept: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["unlearn", concept, "--model", str(sd_folder), "--preset", "paper-object", "--device", "cpu", *SMALL]
    words += [f"reward.clip={networks / 'clip'}", f"critic.clip={networks / 'clip'}", f"critic.head={head}"]
    assert main([*words, "--out", str(tmp_path / "runs"), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    drawn = 64 * (20 if concept == "Dogs" else 2)
    assert found["reward_range"] == [0, 10] and found["stages"]["1-reward"]["decode"] == drawn
    assert not (tmp_path / "runs").exists()
