"""Judges of an attack by name: NudeNet for real, a small random ResNet of the real class; lists with seeds."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_people import as_images, belly, face
from PIL import Image, ImageFilter
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

from cgru.attacks.concept import own_trial
from cgru.attacks.judge import classes_called, find_verdict, imagenet_preprocess
from cgru.attacks.session import AttackRequest, AttackSession, prepare_attack, run_attack
from cgru.attacks.unlearndiffatk import Schedule
from cgru.cli import main
from cgru.cli.attacking import attack_and_tell
from cgru.cli.options import Attack
from cgru.evaluation.drawing import to_pictures
from cgru.evaluation.judges.nudenet import FILE_SHA256
from cgru.tasks import Sampling

needs_nudenet = pytest.mark.skipif(find_spec("nudenet") is None, reason="the extra `nudity` is not installed")
# Of ImageNet-1k, under the numbers 0 to 4.
NAMES = ("tench, Tinca tinca", "church, church building", "garbage truck, dustcart", "parachute, chute", "crane")
CSV = "case_number,prompt,evaluation_seed,evaluation_guidance\n7,a sea,3,5\n8,a sea,4,5\n9,a very very long one,5,7\n"
SETTINGS = {  # as of microsoft/resnet-50
    "crop_pct": 0.875,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "size": {"shortest_edge": 28},
}


def quick(session: AttackSession) -> AttackSession:
    """Two timesteps with an iteration each, pictures in two steps."""
    trial = replace(session.trial, sampling=Sampling(2, 7.5, 0.0))
    return replace(session, schedule=Schedule(timesteps=2, iterations=1), trial=trial)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ResNet whose last layer is spread out, so that different pictures are different things."""
    folder = tmp_path_factory.mktemp("resnet")
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8],
        depths=[1],
        layer_type="basic",
        id2label=dict(enumerate(NAMES)),
        label2id={name: i for i, name in enumerate(NAMES)},
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        network = ResNetForImageClassification(config)
        torch.nn.init.normal_(network.classifier[1].weight, std=5)
    network.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


def test_the_highest_class_is_the_one_that_is_shown(resnet: Path) -> None:
    images = (
        torch.rand(12, 3, 40, 40, generator=torch.Generator().manual_seed(0))
        ** torch.linspace(0.2, 5, 12)[:, None, None, None]
    )
    network = ResNetForImageClassification.from_pretrained(resnet)
    with torch.inference_mode():
        best = network(imagenet_preprocess(SETTINGS)(images)).logits.argmax(-1).tolist()
    assert len(set(best)) > 1
    for number, name in enumerate(("tench", "Church", "garbage_truck", "chute", "crane")):
        verdict = find_verdict(f"resnet50={resnet}", name)
        assert verdict.shows(images) == [seen == number for seen in best]
        assert f"argmax is class {number} (" in verdict.record["success"] and not verdict.is_sensitive
        assert len(verdict.record["weights_sha256"]) == 64


@pytest.mark.parametrize("size", [(64, 64), (100, 80)])
def test_pictures_are_prepared_as_transformers_does(size: tuple[int, int]) -> None:
    picture = face().resize(size)
    theirs = ConvNextImageProcessorPil(**SETTINGS)(picture, return_tensors="pt")["pixel_values"]
    ours = imagenet_preprocess(SETTINGS)(as_images(picture))
    assert ours.shape == theirs.shape == (1, 3, 28, 28)
    # Pillow rounds to 8 bits after each of two passes; 0.03 is under two of 255 steps, divided by the std.
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0)


def test_a_class_is_any_of_its_names_and_may_be_several() -> None:
    names = {**dict(enumerate(NAMES)), 5: "crane"}
    assert classes_called("CRANE", names) == {4, 5}
    assert classes_called("church, church building", names) == {1}
    with pytest.raises(ValueError, match="no class 'churhc'; .* Did you mean 'church'"):
        classes_called("churhc", names)


@needs_nudenet
def test_nudity_is_any_exposed_part_at_the_attack_s_threshold() -> None:
    verdict = find_verdict("nudenet", "nudity")
    blank = Image.new("RGB", (512, 512))
    assert verdict.shows(as_images(belly(), face(), blank)) == [True, False, False]  # a face is no such part
    assert verdict.is_sensitive and verdict.record["threshold"] == 0.5
    assert verdict.record["weights_sha256"] == FILE_SHA256


def test_a_list_brings_seeds_and_guidance(tmp_path: Path, resnet: Path) -> None:
    (tmp_path / "church.csv").write_text(CSV)
    trial = own_trial("church", tmp_path / "church.csv", f"resnet50={resnet}", Sampling(1, 1.0, 0.0))
    asked = [(job.prompt, job.seed, job.guidance, job.labels["case"]) for job in trial.candidates]
    assert asked == [("a sea", 3, 5, "7"), ("a sea", 4, 5, "8"), ("a very very long one", 5, 7, "9")]
    assert trial.is_listed and not trial.is_sensitive


@needs_nudenet
def test_an_attack_judged_by_nudenet_keeps_blurred_pictures_and_no_strip(
    sd_folder: Path, asset_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nudity.csv").write_text(CSV.replace("a sea,4", ",4"))
    (tmp_path / "pictures").mkdir()
    Image.effect_noise((16, 16), 90).convert("RGB").save(tmp_path / "pictures" / "0.png")
    given = {"source": tmp_path / "nudity.csv", "judge": "nudenet", "pictures": tmp_path / "pictures", "tokens": 2}
    request = AttackRequest(str(sd_folder), "nudity", out=tmp_path / "out", root=asset_root, **given)
    options = Attack(str(sd_folder), "nudity", json=True)
    session = quick(prepare_attack(request))
    assert attack_and_tell(options, session) == 0
    scores = json.loads(capsys.readouterr().out)
    targets = scores["protocol"]["targets"]
    # The tiny model reads 16 tokens, one a letter: only "a sea" leaves room for two more.
    assert (targets["found"], targets["skipped"]) == (1, {"no prompt": 1, "too long for 2 more tokens": 1})
    assert scores["protocol"]["judge"]["threshold"] == 0.5 and "strip" not in scores
    assert scores["measurements"]["post_asr"]["value"] == 0  # noise shows nobody
    assert len([*(tmp_path / "out").rglob("*.png")]) == 2  # before and after
    (before,) = (tmp_path / "out").rglob("*-before.png")
    drawn = to_pictures(session.trial.drawn(session.backbone, ["a sea"], [3], [5.0])[0])[0]
    with Image.open(before) as kept:
        sharp, blurred = (np.asarray(picture) for picture in (drawn, drawn.filter(ImageFilter.GaussianBlur(1))))
        assert np.array_equal(np.asarray(kept), blurred) and not np.array_equal(sharp, blurred)


def test_an_attack_judged_by_resnet(sd_folder: Path, asset_root: Path, resnet: Path, tmp_path: Path) -> None:
    (tmp_path / "church.csv").write_text(CSV)
    found = {}
    for name in ("tench", "church", "garbage truck", "parachute", "crane"):
        given = {"source": tmp_path / "church.csv", "judge": f"resnet50={resnet}", "tokens": 1, "prompts": 2}
        given |= {"base": str(sd_folder)}
        session = prepare_attack(AttackRequest(str(sd_folder), name, out=tmp_path / name, root=asset_root, **given))
        found[name] = run_attack(quick(session))["protocol"]["targets"]
    # Each of two pictures shows exactly one of the five classes, so it is a target of one attack.
    assert sum(row["found"] for row in found.values()) == 2
    assert all(row["skipped"] == {"too long for 1 more tokens": 1} for row in found.values())


MISTAKES = {
    "--target nudity --judge nudnet": "Did you mean 'nudenet'?",
    "--target church --judge nudenet": "allowed: nudity or nsfw",
    "--target churhc --judge resnet50={resnet}": "Did you mean 'church'?",
    "--target church --judge resnet50=none/such/folder": "no network 'none/such/folder'",
    "--target church --judge resnet50": "'microsoft/resnet-50' is no folder here and could not be read from the hub",
    "--target church --judge resnet50={resnet} --tokens 12": "none of the prompts leaves room",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(
    mistake: str, sd_folder: Path, asset_root: Path, resnet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.csv").write_text(CSV)
    words = [word.format(resnet=resnet) for word in mistake.split()]
    command = ["attack", str(sd_folder), "--source", str(tmp_path / "list.csv"), *words]
    assert main([*command, "--out", str(tmp_path / "out")], root=asset_root) == 2
    told = capsys.readouterr().err
    assert MISTAKES[mistake] in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()
