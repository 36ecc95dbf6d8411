"""Judges: labels, one pass for probabilities and features, batches and sizes."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from tiny_assets import CLASSES, FEATURES
from torch.nn import functional

from cgru.evaluation.judges.classifiers import Judge, load_judge


@pytest.fixture(scope="module")
def judge(asset_root: Path) -> Judge:
    return load_judge("object", root=asset_root)


def test_labels_lineage_and_precision(judge: Judge) -> None:
    assert judge.labels == (*CLASSES, "other", "nothing")
    assert judge.lineage["name"] == "tiny-object"
    assert next(judge.network.parameters()).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in judge.network.parameters())


def test_one_pass_agrees_with_transformers_own(judge: Judge) -> None:
    images = torch.rand(3, 3, 16, 16)
    probabilities, features = judge.look(images)
    own = judge.network((images - 0.5) / 0.5)
    torch.testing.assert_close(probabilities, own.logits.softmax(-1))
    assert features.shape == (3, FEATURES)
    torch.testing.assert_close(judge.network.classifier(features[:, :, None, None]), own.logits)


def test_pictures_of_any_size_are_resized(judge: Judge) -> None:
    small = torch.rand(2, 3, 8, 8)
    enlarged = functional.interpolate(small, (16, 16), mode="bilinear", align_corners=False)
    torch.testing.assert_close(judge.look(small)[0], judge.look(enlarged)[0])


def test_batches_change_nothing(judge: Judge) -> None:
    images = torch.rand(5, 3, 16, 16)
    torch.testing.assert_close(judge.probabilities(images, batch_size=2), judge.look(images)[0])


def test_a_folder_is_as_good_as_a_name(judge: Judge, asset_root: Path) -> None:
    assert load_judge(asset_root / "judges" / "object").weights_sha256 == judge.weights_sha256


def test_a_name_is_never_a_folder_of_the_working_directory(judge: Judge, asset_root: Path, tmp_path: Path) -> None:
    shutil.copytree(asset_root / "judges" / "style", tmp_path / "object")
    with contextlib.chdir(tmp_path):
        assert load_judge("object", root=asset_root).weights_sha256 == judge.weights_sha256


def test_unknown_judge_names_those_there_are(asset_root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'objects'; allowed: hazard, object, style. Did you mean 'object'"):
        load_judge("objects", root=asset_root)
