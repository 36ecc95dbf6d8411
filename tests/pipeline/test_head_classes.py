"""Class heads of many classes on Stable Diffusion: drawn by the base or from a folder, for reward and critic alike."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rewards.reward_folders import clip_vision, save_tower_with_heads

from cgru.cli import main
from cgru.config import RLConfig
from cgru.embedded import load_lexicon
from cgru.pipeline import resume, unlearn
from cgru.presets import preset, resolve_config
from cgru.prompts import words_of
from cgru.rl.build import build_setting, resolve_prompts
from cgru.rl.critic_stage import class_labels, critic_stage, known_classes
from cgru.rl.head_classes import head_classes
from cgru.runs import Run, read_metrics

SMALL = (
    "policy.iterations=1 policy.trajectories=4 critic.trajectories=8 critic.epochs=1 critic.batch=16 "
    "critic.online_updates=1 sampling.steps=2 samples_every=0 prompts.count=4 prompts.retain=4 prompts.critic=6"
).split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of four pictures, named as people name folders."""
    generator = np.random.default_rng(0)
    for label in ("polar_bear", "dogs", "Towers"):
        (tmp_path / "classes" / label).mkdir(parents=True)
        for k in range(4):
            pixels = generator.integers(0, 255, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "classes" / label / f"{k}.png")
    return tmp_path / "classes"


def small(model: Path, concept: str, *settings: str) -> RLConfig:
    config = resolve_config(concept, model=str(model), preset_name="paper-object", overrides=[*SMALL, *settings])
    assert isinstance(config, RLConfig)
    return config


@pytest.mark.parametrize(
    ("concept", "classes"), [("Dogs", "paper"), ("a dog", "paper"), ("humans", "paper"), ("golden retriever", "")]
)
def test_the_papers_classes_are_the_presets_for_its_concepts(concept: str, classes: str) -> None:
    config = preset("paper-object", concept)
    assert isinstance(config, RLConfig) and config.reward.classes == classes
    known = head_classes(config)
    assert known is None or (known.labels, known.folder) == (load_lexicon().classes, None)
    other = preset("paper-aesthetic", concept)
    assert isinstance(other, RLConfig) and other.reward.classes == ""


def test_every_class_has_prompts_to_draw_by_and_the_critic_s_own(sd_folder: Path) -> None:
    _, sets = resolve_prompts(small(sd_folder, "a dog", "critic.head=classes"))
    drawn = {label: [p.text for p in sets.reward if p.label == label] for label in load_lexicon().classes}
    assert {len(texts) for texts in drawn.values()} == {8} and len(sets.reward) == 160
    assert all("dog" in words_of(prompt.text) and prompt.label == "Dogs" for prompt in (*sets.policy, *sets.critic))
    assert all("a horse" in text.lower() for text in drawn["Horses"])
    assert len(sets.critic_retain) == 6 and {p.label for p in sets.critic_retain} < set(drawn) - {"Dogs"}
    assert not {p.text for p in sets.reward} & {p.text for p in (*sets.policy, *sets.critic, *sets.critic_retain)}


def test_reward_and_critic_know_the_classes_of_a_folder(
    sd_folder: Path, folder: Path, tmp_path: Path, tiny_clip_on_the_hub: str
) -> None:
    config = small(sd_folder, "a dog", f"reward.classes={folder}", "critic.head=classes")
    run = unlearn(config, tmp_path / "runs")
    record = run.outcome("1-reward")
    assert record["pictures"] == 12 and record["held_out"] == 3
    heads = run.path / "stages" / "1-reward"
    assert json.loads((heads / "heads.json").read_text())["labels"] == {"object": ["Towers", "dogs", "polar_bear"]}
    setting = build_setting(config, heads=heads)
    assert class_labels(setting.problem, None) == (("Towers", "dogs", "polar_bear"), ("dogs",))
    known = known_classes(setting.problem, None)
    assert set(known.values()) == {"Towers", "dogs", "polar_bear"}
    assert all("polar bear" in text.lower() for text, label in known.items() if label == "polar_bear")
    assert "critic/loss" in read_metrics(run.path / "metrics.jsonl")[0]
    critic = critic_stage(Run.open(run.path), setting)
    assert critic is not None and critic.head.linear.out_features == 3  # type: ignore[union-attr]
    assert run.outcome("2-critic")["accuracy"] is not None
    (run.path / "edit" / "edit.json").unlink()
    resume(run.path)


def test_retain_prompts_are_paid_by_their_own_class(
    sd_folder: Path, folder: Path, tmp_path: Path, tiny_clip_on_the_hub: str
) -> None:
    config = small(sd_folder, "Dogs", f"reward.classes={folder}", "retention.share=0.5", "critic.kind=latent")
    run = unlearn(config, tmp_path / "runs")
    problem = build_setting(config, heads=run.path / "stages" / "1-reward").problem
    kept = {prompt.text for prompt in (*problem.prompts.retain, *problem.prompts.critic_retain)}
    assert problem.rewarded == kept and "reward/retain_mean" in read_metrics(run.path / "metrics.jsonl")[0]


def test_the_reward_for_a_clean_picture_of_something_else_reads_these_heads_too(
    sd_folder: Path, folder: Path, tmp_path: Path, tiny_clip_on_the_hub: str
) -> None:
    both = "reward.name=0.5*concept+0.5*replaced"
    config = small(sd_folder, "polar bear", f"reward.classes={folder}", both, "critic.kind=latent")
    run = unlearn(config, tmp_path / "runs")
    reward = build_setting(config, heads=run.path / "stages" / "1-reward").problem.reward
    own = json.loads((run.path / "stages" / "1-reward" / "lineage.json").read_text())
    assert reward.lineage["weights"] and "emoji" not in json.dumps(dict(reward.lineage))
    assert reward.lineage["started_from"] == own["started_from"]


@pytest.fixture
def broken(folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder with one fault."""
    fault = request.param
    if fault == "one class":
        for label in ("dogs", "Towers"):
            for file in (folder / label).iterdir():
                file.unlink()
            (folder / label).rmdir()
    elif fault == "unreadable":
        (folder / "Towers" / "2.png").write_bytes(b"no picture")
    elif fault == "cut":
        file = folder / "Towers" / "2.png"
        file.write_bytes(file.read_bytes()[:200])
    elif fault == "one picture":
        for k in (1, 2, 3):
            (folder / "Towers" / f"{k}.png").unlink()
    yield folder


@pytest.mark.parametrize(
    ("broken", "concept", "settings", "told"),
    [
        ("one class", "Dogs", [], "has class folders ['polar_bear']; allowed: 2 or more"),
        ("one picture", "Dogs", [], "has 1 pictures; allowed: 2 or more"),
        ("unreadable", "Dogs", [], "2.png' (not one of PNG"),
        ("cut", "Dogs", [], "2.png' ("),
        ("none", "Cats", [], "unknown concept 'Cats'; allowed: Towers, dogs, polar_bear"),
        ("none", "Dogs", ["reward.nothing=1"], "reward.nothing is 1, but the heads"),
        ("none", "Dogs", ["reward.name=jpeg"], "but the run trains no class heads"),
        ("none", "Dogs", ["reward.classes=no/folder"], "'no/folder' has class folders []"),
        ("none", "Dogs", ["reward.classes=paper", "reward.name=jpeg", "critic.head=classes"], "needs a vocabulary"),
        ("none", "unicorn", ["reward.classes=paper"], "unknown concept 'unicorn'; allowed: Architectures"),
        ("none", "unicorn", ["reward.classes=", "reward.name=replaced"], "has no label to replace the concept by"),
        ("none", "Dogs", ["reward.form=log-odds", "reward.limit=20"], "allow at most 15"),
        ("none", "Dogs", ["critic.trust=measured", "policy.trajectories=2"], "allowed: 3 or more"),
    ],
    indirect=["broken"],
)
def test_mistakes_are_one_line_and_leave_nothing(
    sd_folder: Path,
    broken: Path,
    tmp_path: Path,
    tiny_clip_on_the_hub: str,
    concept: str,
    settings: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["unlearn", concept, "--model", str(sd_folder), "--preset", "paper-object", "--device", "cpu"]
    classes = [] if "reward.classes" in str(settings) else [f"reward.classes={broken}"]
    words += ["--out", str(tmp_path / "runs"), *SMALL, *classes, *settings]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_heads_of_one_s_own_that_do_not_know_the_concept(
    sd_folder: Path, tmp_path: Path, tiny_clip_on_the_hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tower_with_heads(clip_vision(), tmp_path / "heads", mean=0.5, std=0.5)
    (tmp_path / "heads" / "lineage.json").write_text(json.dumps({"name": "tiny", "started_from": []}))
    words = ["unlearn", "unicorn", "--model", str(sd_folder), "--device", "cpu", "--out", str(tmp_path / "runs")]
    networks = f"reward.networks=[{tmp_path / 'heads'}]"
    assert main([*words, *SMALL, networks]) == 2
    assert "unknown concept 'unicorn'; allowed: Cats, Dogs" in capsys.readouterr().err
    words[1] = "Dogs"  # its prompts name Dogs and nothing that the heads have a label for but "other"
    config = small(sd_folder, "Dogs", networks, "critic.head=classes")
    assert set(known_classes(build_setting(config).problem, None).values()) == {"Dogs", "other"}
