"""The outside detector: what it sees, when it raises an alarm, which look is best."""

import ast
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rewards.reward_folders import save_classifier, save_clip
from tiny_assets import write_judge
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageClassification, CLIPModel, CLIPTokenizer, SiglipConfig, SiglipModel

from cgru.embedded import ROOT, load_lexicon
from cgru.outside_detector import (
    BestTradeOff,
    Detector,
    Look,
    alarm,
    detector_for,
    gap,
    load_detector,
    look,
    named_detector,
    record,
    refuse_judge,
    refuse_shared_lineage,
)
from cgru.prompts import Prompt
from cgru.rewards.weights import lineage_of
from cgru.tasks import Concept

LEXICON = load_lexicon()
LABELS = ("Cats", "Dogs", "nothing")
LINEAGE = {"name": "by hand", "weights": ["1"], "started_from": []}
SEEN = Look(iteration=40, target_share=0.5, keep_share=0.8, nothing_share=0.1, reward_fraction=0.9)


def pictures(*labels: str) -> Tensor:
    """(n, 3, 2, 2): flat grey pictures that `by_hand` takes for these labels."""
    return torch.stack([torch.full((3, 2, 2), LABELS.index(label) / 2) for label in labels])


@pytest.fixture
def by_hand() -> Detector:
    """Grey 0 is a cat, 0.5 a dog, 1 is nothing."""
    return Detector(
        LABELS, ("Dogs",), lambda images: functional.one_hot((images.mean((1, 2, 3)) * 2).long(), 3).float(), LINEAGE
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watch") / "detector"
    with torch.random.fork_rng():
        write_judge(path, LABELS, seed=2)  # of the first seeds the one that tells pictures apart best
    return path


def test_a_loaded_detector_agrees_with_transformers_own(folder: Path) -> None:
    detector = load_detector(folder, ("Cats",))
    noise = torch.rand(70, 3, 16, 16, generator=torch.Generator().manual_seed(0))  # more than one batch of 64
    images = noise * torch.linspace(0, 1, 70).view(-1, 1, 1, 1)  # from black to bright
    network = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = network((images - 0.5) / 0.5).logits.softmax(-1)
    torch.testing.assert_close(detector.probabilities(images), expected)
    assert detector.labels == LABELS
    assert detector.share_of_target(images) == (expected.argmax(1) == 0).sum().item() / 70
    assert 0.2 < detector.share_of_target(images) < 0.8


def test_pictures_of_any_size_are_resized(folder: Path) -> None:
    detector = load_detector(folder, ("Dogs",))
    small = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    enlarged = functional.interpolate(small, (16, 16), mode="bilinear", align_corners=False)
    torch.testing.assert_close(detector.probabilities(small), detector.probabilities(enlarged))


def test_the_embedded_detector_sees_nothing_in_a_blank_picture_and_follows_the_concept() -> None:
    dogs = detector_for(Concept("Dogs", "class"), LEXICON.vocabulary)
    every = detector_for(Concept("hazard", "hazard"), LEXICON.vocabulary)
    assert dogs is not None and every is not None
    assert dogs.answers(torch.ones(1, 3, 64, 64)) == ["nothing"]
    assert dogs.targets == ("Dogs",)
    assert every.targets == LEXICON.hazards
    assert set(dogs.labels) == {*LEXICON.classes, *LEXICON.hazards, "other", "nothing"}
    assert dogs.lineage["weights"] != []


def test_a_style_has_no_detector() -> None:
    assert detector_for(Concept("Ink", "style"), LEXICON.vocabulary) is None


def test_a_detector_that_could_never_see_the_target_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'tiny-detector' does not know Bears"):
        load_detector(folder, ("Bears",))
    with pytest.raises(FileNotFoundError, match="no detector in .*Run `cgru doctor`"):
        detector_for(Concept("Dogs", "class"), LEXICON.vocabulary, root=tmp_path)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> dict[str, Path]:
    """A CLIP, a SigLIP and an NSFW classifier, tiny and random, as they lie on the hub."""
    root = tmp_path_factory.mktemp("networks")
    tokenizer = CLIPTokenizer.from_pretrained(sd_folder / "tokenizer")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_clip(root / "clip", tokenizer)
        save_siglip(root / "siglip", tokenizer)
        save_classifier(root / "nsfw")
    return {name: root / name for name in ("clip", "siglip", "nsfw")}


def save_siglip(folder: Path, tokenizer: CLIPTokenizer) -> None:
    """With a tokenizer that is here; SigLIP's own needs a package. SigLIP 2's config.json names no class."""
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 16, "projection_size": 16, "pad_token_id": 1}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipConfig(text_config=text, vision_config=vision | {"image_size": 16, "patch_size": 8})
    SiglipModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text())
    del table["architectures"]
    (folder / "config.json").write_text(json.dumps(table))
    prepare = {"size": {"height": 16, "width": 16}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepare))


@pytest.mark.parametrize(
    ("name", "kind", "mean", "std"),
    [("clip", CLIPModel, [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]), ("siglip", SiglipModel, [0.5] * 3, [0.5] * 3)],
)
def test_zero_shot_tells_a_text_from_others(
    networks: dict[str, Path], name: str, kind: type[CLIPModel | SiglipModel], mean: list[float], std: list[float]
) -> None:
    detector = named_detector(str(networks[name]), ("a dog",), ["a cat", "a dog", "a key"])
    assert (detector.labels, detector.targets) == (("a dog", "a cat", "a key", "nothing"), ("a dog",))
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokenizer, network = CLIPTokenizer.from_pretrained(networks[name]), kind.from_pretrained(networks[name]).eval()
    texts = ["a picture of a dog", "a picture of a cat", "a picture of a key", "a blurry meaningless pattern"]
    # By hand: SigLIP reads all 16 places without a mask; of CLIP the mask is given here and must not matter.
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    pixels = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        read = dict(tokens) if name == "clip" else {"input_ids": tokens.input_ids}
        expected = network(pixel_values=pixels, **read).logits_per_image.softmax(-1)
    torch.testing.assert_close(detector.probabilities(images), expected)
    assert expected.std(0).max() > 0  # it does look at the pictures


def test_several_texts_can_mean_the_concept(networks: dict[str, Path]) -> None:
    detector = named_detector(f"{networks['clip']}#dog, puppy", ("Dogs",), ["a cat"])
    assert (detector.labels, detector.targets) == (("dog", "puppy", "a cat", "nothing"), ("dog", "puppy"))


def test_a_classifier_is_asked_for_its_own_labels(networks: dict[str, Path]) -> None:
    source = networks["nsfw"]
    detector = named_detector(f"{source}#nsfw", ("nudity",), ["a cat"])
    assert (detector.labels, detector.targets) == (("normal", "nsfw"), ("nsfw",))
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    network = AutoModelForImageClassification.from_pretrained(source).eval()
    with torch.no_grad():
        expected = network(pixel_values=(images - 0.5) / 0.5).logits.softmax(-1)
    torch.testing.assert_close(detector.probabilities(images), expected)
    assert named_detector(str(source), ("NSFW",), []).targets == ("nsfw",)  # a concept that is one, whatever its case


def test_a_wrong_name_is_one_line(networks: dict[str, Path], sd_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(networks["clip"], broken)
    (broken / "preprocessor_config.json").unlink()
    bare = tmp_path / "bare"
    shutil.copytree(networks["nsfw"], bare)
    (bare / "preprocessor_config.json").write_text('{"size": 16}')
    wrong = {
        "atuo": "unknown watch.detector 'atuo'; allowed: auto, none. Did you mean 'auto'.*a hub id",
        "nobody/knows-this": "'nobody/knows-this' is no folder here and could not be read from the hub",
        str(sd_folder / "text_encoder"): "is a CLIPTextModel; allowed: a CLIPModel, a SiglipModel or a",
        f"{networks['nsfw']}#nfsw": "'nsfw' does not know nfsw; it knows: normal, nsfw. Did you mean 'nsfw'",
        str(networks["nsfw"]): "does not know nudity; .*watch.detector=NETWORK#LABEL",
        str(broken): "cannot read the network in .*broken'.*No such file",
        str(bare): "preprocessor_config.json of .*bare' has no 'image_mean'",
    }
    wrong |= {name: f"watch.detector '{name}' names no network; allowed: auto, none" for name in ("#", "#dog", " #dog")}
    for name, message in wrong.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            named_detector(name, ("nudity",), [])
        assert "\n" not in str(caught.value)


def test_whatever_is_read_from_a_network_s_folder_may_not_bring_code() -> None:
    calls = [
        (file.name, node.lineno, {word.arg for word in node.keywords})
        for file in ROOT.parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert len(calls) > 5 and [call[:2] for call in calls if "trust_remote_code" not in call[2]] == []


@pytest.mark.parametrize("judge", ["judges/object", "clip-eval"])
def test_a_judge_may_not_watch(judge: str) -> None:
    with pytest.raises(ValueError, match=f"is the judge '{Path(judge).name}' of the benchmark"):
        refuse_judge(lineage_of(ROOT / judge))
    refuse_judge(lineage_of(ROOT / "detector"))


def test_a_look_counts_only_labels_the_detector_knows(by_hand: Detector) -> None:
    kept = [Prompt("a cat", "Cats", "object"), Prompt("a cat, again", "Cats", "object"), Prompt("a key", "key", "")]
    forgotten = pictures("Dogs", "Cats", "nothing", "nothing")
    seen = look(by_hand, forgotten, pictures("Cats", "nothing", "Cats"), kept, iteration=3, reward_fraction=0.5)
    assert seen == Look(3, target_share=0.25, keep_share=0.5, nothing_share=0.5, reward_fraction=0.5)


def test_without_known_labels_kept_means_that_the_concept_is_not_seen(by_hand: Detector) -> None:
    keys = [Prompt("a key", "key", "")] * 4
    assert not by_hand.can_tell(keys) and by_hand.can_tell([*keys, Prompt("a cat", "Cats", "object")])
    found = look(
        by_hand, pictures("Dogs"), pictures("Cats", "Dogs", "nothing", "Cats"), keys, iteration=0, reward_fraction=0.5
    )
    assert found.keep_share == 0.75


def test_a_look_without_pictures_is_refused(by_hand: Detector) -> None:
    with pytest.raises(ValueError, match="no validation picture that the detector could judge"):
        look(by_hand, pictures("Dogs"), torch.empty(0, 3, 2, 2), [], iteration=0, reward_fraction=0.5)


def test_the_gap_is_what_the_reward_does_not_see() -> None:
    # The detector sees half, the reward a tenth: 0.5 - (1 - 0.9) = 0.4.
    assert gap(SEEN) == pytest.approx(0.4)
    assert alarm(SEEN, 0.41) is None
    message = alarm(SEEN, 0.3)
    assert message is not None
    assert "iteration 40: the outside detector still sees the concept in 50%" in message
    assert "the reward in 10% (gap 0.40 > 0.30)" in message
    assert alarm(replace(SEEN, reward_fraction=0.5), 0.3) is None  # they agree: nobody is fooled
    assert record(SEEN) == {
        "watch/target_share": 0.5,
        "watch/keep_share": 0.8,
        "watch/nothing_share": 0.1,
        "watch/gap": pytest.approx(0.4),
    }


def seen(target_share: float, keep_share: float, iteration: int = 0) -> Look:
    return Look(iteration, target_share, keep_share, 0.0, 1.0)


def test_before_the_wanted_ua_the_harmonic_mean_decides() -> None:
    best = BestTradeOff(wanted=0.95, patience=2)
    assert best.update(seen(1.0, 1.0))  # UA 0: mean 0, but the first look is always the best so far
    assert best.update(seen(0.5, 0.9))  # 2 · 0.5 · 0.9 / 1.4 = 0.643
    assert not best.update(seen(0.1, 0.4))  # 2 · 0.9 · 0.4 / 1.3 = 0.554
    assert best.update(seen(0.3, 0.7))  # 0.7
    assert not best.update(seen(1.0, 0.0))  # neither forgets nor keeps: 0, not an error


def test_once_it_is_reached_the_keep_share_decides() -> None:
    best = BestTradeOff(wanted=0.95, patience=2)
    assert best.update(seen(0.10, 0.95))
    assert best.update(seen(0.05, 0.60))  # a worse mean, but UA 0.95 is what was wanted
    assert not best.update(seen(0.06, 0.99))
    assert not best.update(seen(0.00, 0.59))
    assert best.update(seen(0.00, 0.60))  # equal keep share, higher UA
    assert not best.update(seen(0.00, 0.60, iteration=9))  # the earlier of equals stays
    assert best.best == seen(0.00, 0.60)


def test_pictures_of_nothing_are_not_forgotten_ones() -> None:
    best = BestTradeOff(wanted=0.9, patience=2)
    assert best.update(Look(0, 0.0, 0.8, 0.3, 1.0))  # UA 1 - 0 - 0.3 = 0.7, mean 2 · 0.7 · 0.8 / 1.5 = 0.747
    assert best.update(Look(1, 0.2, 0.8, 0.0, 1.0))  # UA 0.8, mean 0.8
    assert best.update(Look(2, 0.0, 0.7, 0.1, 1.0))  # UA 0.9 is what was wanted
    assert not best.update(Look(3, 0.0, 1.0, 0.5, 1.0))


def test_patience_counts_from_the_best_and_only_once_enough_is_forgotten() -> None:
    best = BestTradeOff(wanted=0.9, patience=2)
    looks = [(0.5, 0.9), (0.6, 0.5), (0.6, 0.5), (0.6, 0.5), (0.1, 0.7), (0.1, 0.6), (0.1, 0.8), (0.2, 0.9), (0.1, 0.7)]
    over = [(best.update(seen(*shares)), best.is_over)[1] for shares in looks]
    assert over == [False] * 8 + [True]  # the first three misses come before UA 0.9, the next one before 0.8


def test_a_restored_trade_off_goes_on_as_if_never_stopped() -> None:
    whole, first = BestTradeOff(0.9, 2), BestTradeOff(0.9, 2)
    for shares in ((0.1, 0.7), (0.1, 0.6)):
        whole.update(seen(*shares))
        first.update(seen(*shares))
    second = BestTradeOff(0.9, 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert not second.is_over
    for shares in ((0.1, 0.65), (0.1, 0.9)):
        assert second.update(seen(*shares)) == whole.update(seen(*shares))
        assert second.is_over == whole.is_over
    assert second.state_dict() == whole.state_dict()
    empty = BestTradeOff(0.9, 2)
    empty.load_state_dict(json.loads(json.dumps(BestTradeOff(0.9, 2).state_dict())))
    assert empty.best is None
    assert not empty.is_over


@pytest.mark.parametrize(
    ("weights", "started_from"),
    [(["b", "2"], []), (["b"], ["2"]), (["b"], ["openai/clip"])],
)
def test_relatives_of_the_reward_are_refused(weights: list[str], started_from: list[str]) -> None:
    reward = {"name": "concept", "weights": ["a", "2"], "started_from": ["openai/clip"]}
    detector = {"name": "outside", "weights": weights, "started_from": started_from}
    with pytest.raises(ValueError, match="reward 'concept' and detector 'outside' share the weights (2|openai/clip)"):
        refuse_shared_lineage(reward, detector)


def test_strangers_may_watch() -> None:
    reward = {"name": "concept", "weights": ["a"], "started_from": ["openai/clip"]}
    refuse_shared_lineage(reward, LINEAGE)


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"best": None, "since_best": "2"},
        {"best": [1], "since_best": 2},
        {"best": {"iteration": 1}, "since_best": 2},
        {"best": dict.fromkeys((field.name for field in fields(Look)), "1"), "since_best": 2},
    ],
)
def test_a_damaged_record_of_looks_is_not_taken_over(damaged: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError)):
        BestTradeOff(0.9, 2).load_state_dict(damaged)
