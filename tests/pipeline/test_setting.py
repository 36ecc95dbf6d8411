"""What a config names: prompts, rewards and critics for Emoji Canvas and for any text; mistakes leave no folder."""

from pathlib import Path

import pytest
import torch

from cgru.config import RLConfig, override
from cgru.embedded import load_lexicon
from cgru.pipeline import resume, unlearn
from cgru.prompts import Prompt, words_of
from cgru.prompts.benchmark_prompts import TEMPLATE
from cgru.rewards.concept import ByPrompt, ConceptReward
from cgru.rl.build import Setting, all_prompts, build_setting, load_parts, resolve_prompts
from cgru.rl.critic_stage import class_labels, class_of, critic_stage, warm_start_trajectories
from cgru.rl.reward_stage import forget_reward, needs_heads
from cgru.runs import Run, read_metrics
from cgru.tasks import Concept

SMALL = [
    "policy.iterations=2",
    "policy.trajectories=4",
    "critic.kind=latent",
    "critic.trajectories=4",
    "critic.batch=8",
    "sampling.steps=2",
    "prompts.count=4",
    "prompts.retain=20",
    "prompts.critic=20",
    "prompts.validation=4",
]


def canvas(concept: str, *settings: str) -> RLConfig:
    return override(RLConfig(concept=concept), [*SMALL, *settings])


def text(folder: Path, *settings: str) -> RLConfig:
    return override(RLConfig(concept="golden  retriever", model=str(folder)), [*SMALL, *settings])


def test_the_reward_gets_every_setting() -> None:
    config = canvas(
        "dogs", "reward.form=log-odds", "reward.scale=4", "reward.temperature=2", "reward.limit=3", "reward.views=2",
        "reward.nothing=0.5", "reward.networks=[swin]", "seed=7",
    )  # fmt: skip
    reward = build_setting(config).problem.reward
    assert isinstance(reward, ConceptReward) and reward.targets == ("Dogs",)
    assert (reward.form, reward.scale, reward.temperature, reward.limit) == ("log-odds", 4.0, 2.0, 3.0)
    assert (reward.views, reward.nothing, reward.seed) == (2, 0.5, 7)


def test_a_sum_s_terms_get_what_they_know() -> None:
    reward = build_setting(canvas("dogs", "reward.name=0.5*concept+0.5*jpeg", "reward.scale=4")).problem.reward
    # `jpeg` knows no scale and takes none; its best score is 0, so the highest sum is 0.5 · 4
    assert reward.lineage["name"] == "0.5*concept+0.5*jpeg" and reward.high == 2.0 and reward.low < 0


def test_retain_prompts_in_a_batch_have_a_reward_of_their_own() -> None:
    config = canvas("dogs", "retention.share=0.5", "reward.retain=2")
    problem = build_setting(config).problem
    assert isinstance(problem.reward, ByPrompt) and problem.reward.high == 20
    assert forget_reward(problem.reward).high == 10
    kept = {prompt.text: prompt for prompt in problem.prompts.retain}
    assert {text for text in kept if not kept[text].head} and not any(
        kept[text].head == "" for text in problem.rewarded & kept.keys()
    )  # everyday things are retain prompts, but no head knows them
    trajectory = warm_start_trajectories(Setting(problem, Concept("Dogs", "class"), None))
    assert sum(prompt in problem.rewarded for prompt in trajectory.cond.prompts) == 2


def test_everything_is_encoded_at_once() -> None:
    problem = build_setting(canvas("dogs")).problem
    sets = problem.prompts
    assert {p.text for p in (*sets.policy, *sets.retain, *sets.critic, *sets.validation_forget)} <= problem.text.keys()


def test_a_critic_of_classes_sees_all_of_them() -> None:
    config = canvas("dogs", "critic.kind=film", "critic.head=classes", "critic.trajectories=12")
    problem = build_setting(config).problem
    concept = Concept("Dogs", "class")
    labels, wanted = class_labels(problem, concept)
    assert len(labels) == 20 and wanted == ("Dogs",)
    trajectory = warm_start_trajectories(Setting(problem, concept, None))
    known = {p.text: class_of(p, concept) for p in (*problem.prompts.critic, *problem.prompts.critic_retain)}
    found = [known[prompt] for prompt in trajectory.cond.prompts]
    # one of twenty labels is the concept's: 12 / 20 rounds to one; the others are classes, never a hazard or a chair
    assert found.count("Dogs") == 1 and set(found) <= set(labels) and len(set(found)) > 6


@pytest.mark.parametrize(
    ("prompt", "concept", "expected"),
    [
        (Prompt("x", "Cats", "object"), Concept("Dogs", "class"), "Cats"),
        (Prompt("x", "skulls", "hazard"), Concept("Dogs", "class"), None),
        (Prompt("x", "chair", ""), Concept("Dogs", "class"), None),
        (Prompt("x", "Cats", "object"), Concept("hazard", "hazard"), "none"),
        (Prompt("x", "skulls", "hazard"), Concept("hazard", "hazard"), "skulls"),
        (Prompt("x", "", "hazard"), Concept("hazard", "hazard"), None),
        (Prompt("x", "Ink", "style"), Concept("Flat", "style"), "Ink"),
    ],
)
def test_what_a_critic_of_classes_is_told(prompt: Prompt, concept: Concept, expected: str | None) -> None:
    assert class_of(prompt, concept) == expected


def test_without_a_warm_start_the_critic_says_the_middle(tmp_path: Path) -> None:
    config = canvas("dogs", "critic.trajectories=0", "watch.every=0")
    run, setting = Run.create(tmp_path, config), build_setting(config)
    critic = critic_stage(run, setting)
    assert critic is not None and run.outcome("2-critic") == {"prior": 5.0, "trajectories": 0}
    again = critic_stage(run, setting)
    assert again is not None
    assert all(
        torch.equal(a, b) for a, b in zip(critic.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_the_watch_looks_and_the_best_look_is_kept(tmp_path: Path) -> None:
    """Emoji Canvas end to end; stops after the first look without a better one, and a resumed run stays stopped."""
    settings = ["watch.every=1", "watch.stop=true", "watch.target=0", "watch.patience=1", "policy.iterations=6"]
    run = unlearn(canvas("dogs", *settings, "prompts.validation=2", "samples_every=0"), tmp_path)
    records = read_metrics(run.path / "metrics.jsonl")
    assert all({"watch/target_share", "watch/keep_share", "watch/gap"} <= record.keys() for record in records)
    done = run.outcome("3-policy")
    assert done["iterations"] == len(records) <= 6 and done["best_look"]["iteration"] <= len(records)
    (run.path / "edit" / "edit.json").unlink()
    edit = run.path / "edit" / "pytorch_lora_weights.safetensors"
    before = edit.read_bytes()
    edit.unlink()
    again = resume(run.path)
    assert len(read_metrics(again.path / "metrics.jsonl")) == len(records) and edit.read_bytes() == before


def test_any_text_trains_heads_of_its_own(sd_folder: Path, tmp_path: Path, tiny_clip_on_the_hub: str) -> None:
    """No class head is shipped for a text: stage 1-reward makes one from the model's own pictures, once."""
    config = text(sd_folder, "retention.share=0.5", "critic.kind=film")
    run = unlearn(config, tmp_path)
    record = run.outcome("1-reward")
    assert 0 <= record["accuracy"] <= 1 and record["pictures"] == 128
    heads = run.path / "stages" / "1-reward" / "heads.json"
    assert '"golden retriever"' in heads.read_text() and '"other"' in heads.read_text()
    assert "reward/retain_mean" in read_metrics(run.path / "metrics.jsonl")[0]
    stamp, edit = heads.stat().st_mtime_ns, run.path / "edit" / "pytorch_lora_weights.safetensors"
    before = edit.read_bytes()
    (run.path / "edit" / "edit.json").unlink()
    edit.unlink()
    resume(run.path)
    assert heads.stat().st_mtime_ns == stamp and edit.read_bytes() == before


def test_which_runs_train_heads(sd_folder: Path) -> None:
    assert needs_heads(text(sd_folder), None)
    assert needs_heads(text(sd_folder, "reward.name=0.5*clip+0.5*concept"), None)
    assert not needs_heads(text(sd_folder, "reward.name=clip"), None)
    assert not needs_heads(text(sd_folder, "reward.networks=[my/heads]"), None)
    assert not needs_heads(canvas("dogs"), Concept("Dogs", "class"))


@pytest.mark.parametrize(
    ("concept", "settings", "message"),
    [
        ("dgos", [], "unknown concept 'dgos'; .* Did you mean 'Dogs'"),
        ("dogs", ["reward.name=concpt"], "unknown reward 'concpt'; .* Did you mean 'concept'"),
        ("dogs", ["reward.name=no_such_module:x"], "cannot import 'no_such_module:x'"),
        ("dogs", ["policy.targets=atention"], "'atention' match no layer"),
        ("dogs", ["prompts.source=templates"], "prompts.source=generated"),
        ("dogs", ["prompts.source=none.txt"], "no prompt file 'none.txt'"),
        ("dogs", ["sampling.steps=5000"], "5000 denoising steps"),
        ("flat", ["watch.stop=true"], "no outside detector knows 'flat' on 'emoji-canvas'; .* watch.stop=false"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(
    tmp_path: Path, concept: str, settings: list[str], message: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        unlearn(canvas(concept, *settings), tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_share_of_retain_prompts_needs_labels(sd_folder: Path) -> None:
    config = text(sd_folder, "retention.share=0.5", "reward.name=jpeg")
    with pytest.raises(ValueError, match="no reward network knows a label of the retain prompts"):
        build_setting(config)


def test_classes_need_a_vocabulary(sd_folder: Path) -> None:
    config = text(sd_folder, "reward.name=jpeg", "critic.kind=film", "critic.head=classes")
    setting = build_setting(config)
    with pytest.raises(ValueError, match="needs a vocabulary, but .* has none; set critic.head=value"):
        class_labels(setting.problem, setting.concept)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policy.updates=5"], "policy.updates is 5 and policy.trajectories 4"),
        (["retention.share=0.05"], "rounds to none or all"),
        (["retention.share=0.5", "reward.retain=0"], "reward.retain 0"),
        (["sampling.explore=0.1"], "sampling.explore is 0.1 of 4 forget trajectories, which rounds to none or all"),
        (["sampling.explore=0.9"], "which rounds to none or all"),
        (["sampling.explore=0.5", "prompts.retain=0"], "sampling.explore 0.5 and prompts.retain 0"),
        (["sampling.explore=0.75", "diagnostics.every=1"], "on 1 trajectory; allowed: at least 2"),
        (["critic.trajectories=1"], "critic.trajectories is 1; allowed: 0, or 2 and more"),
        (["diagnostics.every=1", "diagnostics.trajectories=1"], "at least 2 for a variance"),
    ],
)
def test_combinations_that_cannot_work(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canvas("dogs", *settings)


def test_styles_are_watched_by_no_one_and_prompts_are_the_benchmark_s_never() -> None:
    setting = build_setting(canvas("flat"))
    assert setting.detector is None
    concept, sets = resolve_prompts(canvas("dogs"))
    assert concept == Concept("Dogs", "class")
    benchmark = {words_of(TEMPLATE.format(**{"class": "Dogs", "style": style})) for style in load_lexicon().styles}
    assert len(benchmark) == 8 and not benchmark & {words_of(p.text) for p in all_prompts(sets)}


def test_micro_batches_are_sized_or_given(sd_folder: Path) -> None:
    assert load_parts(text(sd_folder)).sizes.update == 64
    assert load_parts(text(sd_folder, "policy.micro_batch=3")).sizes.update == 3


def test_noise_only_in_the_first_steps(sd_folder: Path) -> None:
    """The last step of this sampler leads to a clean picture; it has noise because alpha_0 is not 1 there."""
    found = [
        build_setting(text(sd_folder, "reward.name=jpeg", "sampling.steps=4", f"sampling.noisy_steps={n}"))
        for n in (0, 2)
    ]
    assert [setting.problem.kernel.stochastic.sum().item() for setting in found] == [4, 2]
