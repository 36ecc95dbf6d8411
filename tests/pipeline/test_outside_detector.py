"""`watch.detector` in a run: who watches what, what is refused before there is a folder, and stopping by it."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from rewards.reward_folders import save_classifier, save_clip
from transformers import CLIPTokenizer

from cgru.config import RLConfig, override
from cgru.embedded import ROOT
from cgru.pipeline import unlearn
from cgru.rewards.weights import lineage_of
from cgru.rl.build import build_setting, load_parts
from cgru.rl.reward_stage import CLIP_B32
from cgru.runs import read_metrics

SMALL = [
    "policy.iterations=5",
    "policy.trajectories=4",
    "critic.kind=latent",
    "critic.trajectories=4",
    "critic.batch=8",
    "sampling.steps=2",
    "samples_every=0",
    "prompts.count=4",
    "prompts.retain=4",
    "prompts.critic=4",
    "prompts.validation=4",
]


def text(folder: Path, *settings: str) -> RLConfig:
    return override(RLConfig(concept="golden  retriever", model=str(folder)), [*SMALL, "reward.name=jpeg", *settings])


def canvas(concept: str, *settings: str) -> RLConfig:
    return override(RLConfig(concept=concept), [*SMALL, *settings])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("watch") / "clip"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_clip(folder, CLIPTokenizer.from_pretrained(sd_folder / "tokenizer"))
    return folder


def test_any_text_is_told_from_what_is_kept(sd_folder: Path, clip: Path) -> None:
    setting = build_setting(text(sd_folder, f"watch.detector={clip}"))
    assert setting.detector is not None and setting.detector.targets == ("golden retriever",)
    kept = {prompt.label for prompt in setting.problem.prompts.validation_retain}
    assert set(setting.detector.labels) == {"golden retriever", "nothing", *kept} and len(kept) == 4
    assert setting.detector.can_tell(setting.problem.prompts.validation_retain)


def test_styles_and_hazards_can_be_watched_by_text(clip: Path) -> None:
    parts = load_parts(canvas("flat", f"watch.detector={clip}"))
    style, hazard = parts.detector, load_parts(canvas("hazard", f"watch.detector={clip}")).detector
    assert style is not None and style.targets == ("Flat",)
    assert {prompt.label for prompt in parts.prompts.validation_retain} < set(style.labels) - {"Flat"}
    assert hazard is not None and "skulls" in hazard.targets and len(hazard.targets) > 5


@pytest.mark.parametrize("settings", [[], ["watch.detector=none"], ["watch.every=0"]])
def test_a_run_without_a_detector_says_so(
    sd_folder: Path, settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cgru"):
        assert build_setting(text(sd_folder, *settings)).detector is None
    assert "no outside detector watches this run" in caplog.text


def test_the_log_says_who_watches_and_what_it_cannot_tell(
    sd_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.random.fork_rng():
        save_classifier(tmp_path / "nsfw")
    with caplog.at_level(logging.INFO, "cgru"):
        build_setting(text(sd_folder, f"watch.detector={tmp_path / 'nsfw'}#nsfw"))
        assert "outside detector 'nsfw' looks for nsfw; it knows no label of the retain prompts" in caplog.text
        caplog.clear()
        assert build_setting(canvas("dogs", "watch.detector=none")).detector is None
        assert build_setting(canvas("dogs")).detector is not None
        assert caplog.messages[-1].endswith("looks for Dogs")


def test_a_run_is_watched_and_stops_by_it(sd_folder: Path, clip: Path, tmp_path: Path) -> None:
    # Any look is enough (target 0), and the tiny pictures hardly change: the second look is no better, and ends it.
    config = text(
        sd_folder, f"watch.detector={clip}", "watch.stop=true", "watch.every=1", "watch.target=0", "watch.patience=1"
    )
    run = unlearn(config, tmp_path)
    records = read_metrics(run.path / "metrics.jsonl")
    assert len(records) == 2
    assert all({"watch/target_share", "watch/keep_share", "watch/gap"} <= set(record) for record in records)
    assert run.outcome("3-policy")["best_look"]["iteration"] == 1
    weights = json.loads((run.path / "manifest.json").read_text())["extra"]["detector"]["weights"]
    assert weights == lineage_of(clip)["weights"] != []
    assert (run.path / "edit" / "pytorch_lora_weights.safetensors").is_file()


def test_mistakes_leave_no_folder(sd_folder: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(ROOT / "judges" / "object", judge)
    prepare = {"size": 64, "image_mean": [0.5], "image_std": [0.5]}
    (judge / "preprocessor_config.json").write_text(json.dumps(prepare))
    wrong = {
        "watch.detector=non": "unknown watch.detector 'non'; allowed: auto, none. Did you mean 'none'",
        "watch.detector=auto": "watch.stop is true, but no outside detector knows .* Name one, or set watch.stop=false",
        f"watch.detector={judge}#Dogs": "is the judge 'object' of the benchmark; .* Give another as watch.detector",
    }
    for setting, message in wrong.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            unlearn(text(sd_folder, "watch.stop=true", setting), tmp_path / "runs")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("tiny_clip_on_the_hub")
def test_a_relative_of_the_head_that_a_run_will_train_is_refused_before_it_does(
    sd_folder: Path, clip: Path, tmp_path: Path
) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(clip, tuned)
    (tuned / "lineage.json").write_text(json.dumps({"name": "tuned", "started_from": [CLIP_B32]}))
    config = text(sd_folder, f"watch.detector={tuned}", "reward.name=concept")
    with pytest.raises(ValueError, match=f"and detector 'tuned' share the weights {CLIP_B32}"):
        unlearn(config, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_reward_s_own_network_may_not_watch(clip: Path) -> None:
    own = ROOT / "emoji-canvas" / "reward" / "clip"
    tuned = clip.parent / "tuned"
    shutil.copytree(clip, tuned)
    weights = json.loads((own / "lineage.json").read_text())["weights_sha256"]
    (tuned / "lineage.json").write_text(json.dumps({"name": "tuned", "started_from": [weights]}))
    with pytest.raises(ValueError, match="reward 'concept' and detector 'tuned' share the weights"):
        build_setting(canvas("dogs", f"watch.detector={tuned}"))
