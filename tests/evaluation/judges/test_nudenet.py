"""NudeNet run for real (it comes with the extra `nudity`, which `dev` includes), beside the package's own code."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_people import as_images, belly, face
from PIL import Image

from cgru.evaluation.base import Job
from cgru.evaluation.judges.features import ObjectDetector, load_eye
from cgru.evaluation.judges.nudenet import (
    FILE_SHA256,
    LABELS,
    NudeNet,
    letterbox,
    load_nudenet,
    package_file,
    suppressed,
)
from cgru.evaluation.runner import JudgePanel

needs_nudenet = pytest.mark.skipif(find_spec("nudenet") is None, reason="the extra `nudity` is not installed")


@pytest.fixture(scope="module")
def detector() -> NudeNet:
    return load_nudenet()


@needs_nudenet
def test_a_face_a_belly_and_nothing(detector: NudeNet) -> None:
    blank = Image.new("RGB", (512, 512), "white")
    found = detector.detect(as_images(face(), belly(), blank))
    assert [[box.label for box in boxes] for boxes in found] == [["FACE_FEMALE"], ["BELLY_EXPOSED"], []]
    (seen,), (bare,), _ = found
    assert seen.score > 0.8 and 0.6 <= bare.score < 0.75  # the paper's threshold, and that of the list of 142
    x, y, width, height = seen.box
    # The head is drawn from (168, 99) to (344, 351).
    assert 150 < x < 190 and 90 < y < 200 and 150 < width < 220 and 150 < height < 270


@needs_nudenet
@pytest.mark.parametrize("size", [(512, 512), (300, 412), (517, 256), (64, 64)])
def test_the_same_as_the_package_s_own_code(size: tuple[int, int], detector: NudeNet, tmp_path: Path) -> None:
    from nudenet import NudeDetector

    file = tmp_path / "picture.png"
    picture = face().resize(size)
    picture.save(file)
    theirs = NudeDetector(["CPUExecutionProvider"]).detect(str(file))
    (ours,) = detector.detect(as_images(picture))
    assert [box.label for box in ours] == [row["class"] for row in theirs] and theirs
    # OpenCV resizes in whole numbers: a few in a hundred pixels differ by 1 of 255.
    assert [box.score for box in ours] == pytest.approx([row["score"] for row in theirs], abs=5e-3)
    for box, row in zip(ours, theirs, strict=True):
        assert np.abs(np.subtract(box.box, row["box"])).max() <= 1


@needs_nudenet
def test_what_it_is_made_of(detector: NudeNet) -> None:
    assert detector.weights_sha256 == FILE_SHA256 and detector.lineage["weights"] == [FILE_SHA256]
    assert "onnxruntime" in detector.lineage["name"] and isinstance(detector, ObjectDetector)
    assert load_eye(f"nudenet={package_file()}").weights_sha256 == FILE_SHA256
    assert len(set(LABELS)) == 18


@needs_nudenet
def test_a_panel_keeps_all_detections_but_those_of_broken_pictures(detector: NudeNet) -> None:
    panel = JudgePanel({"nudenet": detector}, "nudenet")
    jobs = [Job("a", 1, {}), Job("b", 2, {})]
    rows = panel.rows(jobs, as_images(face(), face()), np.array([False, True]), "key")
    assert [len(row["detections"]["nudenet"]) for row in rows] == [1, 0]
    assert rows[0]["detections"]["nudenet"][0]["label"] == "FACE_FEMALE" and rows[0]["judged"] == {}
    found = panel.collect(rows)
    assert found.broken == 1 and found.detections["nudenet"] == [detector.detect(as_images(face()))[0], []]


def test_black_bars_and_back() -> None:
    """100 × 50 pixels: 320 × 160 in the middle of 320 × 320, so a pixel there is 0.3125 here, 80 black ones above."""
    prepared, scale, corner = letterbox(torch.ones(3, 50, 100), 320)
    assert prepared.shape == (1, 3, 320, 320) and corner == (0, 80) and scale == pytest.approx(100 / 320)
    assert prepared[0, 0, :80].max() == 0 and prepared[0, 0, 80:240].min() == 1 and prepared[0, 0, 240:].max() == 0


def test_of_overlapping_boxes_the_best_stays() -> None:
    # The second lies on the first for 80 of 120 pixels (0.67), the third shares 20 of 180 with it (0.11).
    boxes = np.array([[0, 0, 10, 10], [2, 0, 10, 10], [8, 0, 10, 10]])
    assert suppressed(boxes, np.array([0.5, 0.9, 0.4]), 0.45) == [1, 2]
    assert suppressed(boxes, np.array([0.5, 0.9, 0.4]), 0.7) == [1, 0, 2]


@needs_nudenet
def test_a_file_that_is_no_such_network(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file '.*none.onnx'; give --judge nudenet=FILE.onnx"):
        load_nudenet(tmp_path / "none.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not readable by onnxruntime") as caught:
        load_nudenet(tmp_path / "broken.onnx")
    assert "\n" not in str(caught.value)
