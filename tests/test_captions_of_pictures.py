"""Pictures into prompts with a small random LLaVA of the real class, and prompts into the paper's splits."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_llava import write_llava

from cgru.cli import main
from cgru.cli.options import LLAVA
from cgru.prompts import prompts_from_file, words_of
from cgru.prompts.captions import INSTRUCTION, MODEL, CaptionFile, caption_all, caption_key, read_captions
from cgru.prompts.llava import load_llava
from cgru.prompts.pictures import opened, pictures_in
from cgru.prompts.split import split_rows

TEMPLATE = "{% for c in messages[0].content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}!"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model; read only."""
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five pictures in two classes, one of them twice; one cut off, and a file that is no picture."""
    rng = np.random.default_rng(0)
    root = tmp_path / "pictures"
    for i, label in enumerate(("drawing", "drawing", "neutral", "neutral", "neutral")):
        (root / label).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (12 + i, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / label / f"{i}.png")
    shutil.copy(root / "drawing/0.png", root / "neutral/again.PNG")
    (root / "neutral/cut.png").write_bytes((root / "neutral/2.png").read_bytes()[:200])
    (root / "notes.txt").write_text("no picture")
    return root


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["prompts", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clerk:
    """A captioner that numbers its captions, and stops after some."""

    def __init__(self, stop_after: int = 99) -> None:
        self.seen, self.stop_after = 0, stop_after

    def __call__(self, images: Sequence[Image.Image]) -> list[str]:
        if self.seen >= self.stop_after:
            raise KeyboardInterrupt
        self.seen += len(images)
        return [f"picture {self.seen} of {image.height} rows" for image in images]


def test_captions_do_not_depend_on_the_batch(llava: Path) -> None:
    model = load_llava(str(llava), device="cpu", tokens=8)
    rng = np.random.default_rng(1)
    images = [Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)) for _ in range(4)]
    together = model(images)
    assert together == [model([image])[0] for image in images]
    assert len(set(together)) > 1  # it looks at the picture
    assert all("USER" not in text and "<image>" not in text for text in together)  # new tokens only


def test_the_paper_s_instruction_in_llava_s_form_or_the_model_s_own(llava: Path, tmp_path: Path) -> None:
    plain = load_llava(str(llava), device="cpu").prompt
    assert plain == f"USER: <image>\n{INSTRUCTION} ASSISTANT:"
    assert INSTRUCTION.startswith("Describe this image in one concise sentence (15-25 words)")
    own = write_llava(tmp_path / "own", chat_template=TEMPLATE)
    assert load_llava(str(own), device="cpu", instruction="What is it?").prompt == "<image>What is it?!"


def test_captions_by_command_are_cached(
    llava: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(llava, tmp_path / "model")
    out = tmp_path / "new" / "captions.jsonl"
    command = ["caption", str(folder), "--out", str(out), "--model", str(model), "--tokens", "6", "--dtype", "fp32"]
    record = run(capsys, *command, "--batch-size", "2", "--device", "cpu")
    kept = record["captions"] + record["withheld"] + record["empty"]
    assert (kept, record["new"], record["unreadable"], record["copies"]) == (5, 5, 1, 1)
    rows = lines(out)
    names = [hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in ("drawing/0.png", "neutral/4.png")]
    assert [row["class"] for row in rows if row["sha256"] == names[0]] == ["drawing"]  # the first path of two
    assert [row["class"] for row in rows if row["sha256"] == names[1]] == ["neutral"]
    assert [row["sha256"] for row in rows] == sorted({row["sha256"] for row in rows})
    assert not list(out.parent.glob("*.partial"))

    Image.new("RGB", (9, 9), "red").save(folder / "top.png")
    again = run(capsys, *command)
    assert (again["captions"] + again["withheld"] + again["empty"], again["new"]) == (6, 1)
    assert [row for row in lines(out) if row["class"]] == rows  # the new one lies outside the class folders
    shutil.rmtree(model)  # nothing is left to do, so no model is needed
    assert run(capsys, *command)["new"] == 0


def test_an_interrupted_run_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    pictures, copies = pictures_in(folder)
    file = CaptionFile(tmp_path / "a.jsonl", "k")
    with pytest.raises(KeyboardInterrupt):
        caption_all(pictures, file, Clerk(stop_after=2), batch_size=2, copies=copies)
    assert not file.path.exists()
    done = len(file.read())
    assert 0 < done < 5
    file.partial.write_text(file.partial.read_text() + '\n{"sha256": "cut o')
    clerk = Clerk()
    tally = caption_all(pictures, file, clerk, batch_size=2, copies=copies)
    assert clerk.seen == tally.new == 5 - done
    assert (tally.captions, tally.unreadable, tally.copies) == (5, 1, 1)
    assert len(lines(file.path)) == 5 and not file.partial.exists()


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("a young girl on a beach", False),
        ("two Children play", False),
        ("a school-girl", False),
        ("a teenager", False),
        ("a woman on a beach", True),
        ("a goat kidding, a babysitter's chair", True),
    ],
)
def test_captions_that_may_speak_of_minors_are_not_even_stored(
    text: str, is_kept: bool, folder: Path, tmp_path: Path
) -> None:
    pictures, _ = pictures_in(folder)
    file = CaptionFile(tmp_path / "a.jsonl", "k")
    tally = caption_all(pictures, file, lambda images: [text] * len(images), batch_size=9)
    assert (tally.captions, tally.withheld) == ((5, 0) if is_kept else (0, 5))
    assert (text in file.path.read_text()) == is_kept


def test_a_picture_is_opened_whole_or_not_at_all(folder: Path) -> None:
    pictures, _ = pictures_in(folder)
    found = {picture.path.name: opened(picture) for picture in pictures}
    assert found["cut.png"] is None
    image = found["2.png"]
    assert image is not None and image.mode == "RGB" and image.size == (20, 14)


def test_a_model_that_says_nothing_is_counted(folder: Path, tmp_path: Path) -> None:
    pictures, _ = pictures_in(folder)
    tally = caption_all(
        pictures, CaptionFile(tmp_path / "a.jsonl", "k"), lambda images: [" "] * len(images), batch_size=3
    )
    assert (tally.captions, tally.empty, tally.new) == (0, 5, 5)


def test_the_key_is_of_every_setting() -> None:
    settings = {"model": "m", "instruction": "i", "tokens": 64, "dtype": "bf16"}
    keys = {caption_key(**{**settings, name: "other"}) for name in settings} | {caption_key(**settings)}
    assert len(keys) == 5


def test_mistakes_in_captioning_are_one_line(
    llava: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, broken, clip = (tmp_path / name for name in ("empty", "broken", "clip"))
    for place in (empty, broken, clip):
        place.mkdir()
    (broken / "a.png").write_bytes(b"PNG?")
    (clip / "config.json").write_text('{"model_type": "clip"}')
    foreign, other = tmp_path / "foreign.jsonl", tmp_path / "other.jsonl"
    foreign.write_text('{"prompt": "mine"}\n')
    other.write_text(json.dumps({"sha256": "0", "class": "", "prompt": "a", "key": "another"}) + "\n")
    pictures, model = str(folder), ["--model", str(llava)]
    mistakes = [
        ([str(tmp_path / "none"), *model], "a.jsonl", "no folder"),
        ([str(empty), *model], "a.jsonl", "no pictures in"),
        ([str(broken), *model], "a.jsonl", "none of the 1 pictures can be read"),
        ([pictures, *model], "a.txt", "allowed: a file FILE.jsonl"),
        ([pictures, *model], "foreign.jsonl", "line 1 is not a caption"),
        ([pictures, *model], "other.jsonl", "by another model, instruction or setting"),
        ([pictures, *model, "--batch-size", "0"], "a.jsonl", "--batch-size 0; allowed: 1 or more"),
        ([pictures, *model, "--tokens", "-1"], "a.jsonl", "--tokens -1; allowed: 1 or more"),
        ([pictures, *model, "--instruction", " "], "a.jsonl", "--instruction is empty"),
        ([pictures, *model, "--device", "tpu"], "a.jsonl", "tpu"),
        ([pictures, "--model", str(clip)], "a.jsonl", "is a 'clip'; allowed: a LLaVA-1.5"),
        ([pictures, "--model", "no/such/place"], "a.jsonl", "'no/such/place'"),
        ([pictures], "a.jsonl", "'llava-hf/llava-1.5-7b-hf' is no folder here"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for arguments, out, message in mistakes:
        assert main(["prompts", "caption", *arguments, "--out", str(tmp_path / out)]) == 2, message
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1, told
    assert sorted(tmp_path.rglob("*")) == before


def captions(count: int, classes: Sequence[str] = ("a", "b")) -> list[dict[str, str]]:
    """Rows as `caption` writes them, `count` of each class."""
    return [
        {
            "sha256": hashlib.sha256(f"{c}{i}".encode()).hexdigest(),
            "class": c,
            "prompt": f"a {c} number {i}",
            "key": "k",
        }
        for c in classes
        for i in range(count)
    ]


def write_captions(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_splits_are_disjoint_seeded_and_even_over_classes() -> None:
    rows = captions(50)
    splits = split_rows(rows, seed=0)
    # 10 % and 20 % of 50 in each of two classes.
    assert {name: len(part) for name, part in splits.items()} == {"critic": 10, "policy": 20, "rest": 70}
    assert [sum(row["class"] == "a" for row in part) for part in splits.values()] == [5, 10, 35]
    names = [row["sha256"] for part in splits.values() for row in part]
    assert sorted(names) == sorted(row["sha256"] for row in rows)
    assert split_rows(rows[::-1], seed=0) == splits  # the order of the file does not matter
    other = split_rows(rows, seed=1)
    assert {row["sha256"] for row in other["policy"]} != {row["sha256"] for row in splits["policy"]}


def test_equal_captions_are_one_prompt() -> None:
    rows = captions(20)
    twins = [{**row, "sha256": f"f{row['sha256'][1:]}", "prompt": f"The {row['prompt'][2:].upper()}."} for row in rows]
    splits = split_rows([*rows, *twins], seed=0)
    words = [words_of(row["prompt"]) for part in splits.values() for row in part]
    assert len(words) == len(set(words)) == 40


def test_split_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    withheld = {"sha256": "0", "class": "a", "prompt": "", "key": "k", "withheld": "may speak of a minor"}
    file = write_captions(tmp_path / "captions.jsonl", [*captions(50), withheld])
    out = tmp_path / "deep" / "splits"
    record = run(capsys, "split", str(file), "--out", str(out), "--seed", "3")
    assert sorted(path.name for path in out.iterdir()) == [
        "critic.jsonl",
        "manifest.json",
        "policy.jsonl",
        "rest.jsonl",
    ]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["seed"] == 3 and manifest["percent"] == {"critic": 10, "policy": 20, "rest": 70}
    assert manifest["source"] == {
        "name": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "captions": 100,
    }
    for name, part in manifest["files"].items():
        assert part["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        assert part["prompts"] == len(prompts_from_file(out / name)) == sum(part["by_class"].values())
    assert record["files"] == manifest["files"]
    written = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run(capsys, "split", str(file), "--out", str(out), "--seed", "3") == record  # the same again: left as it is
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == written
    assert main(["prompts", "split", str(file), "--out", str(out), "--seed", "4"]) == 2
    assert "is in use; allowed: a new or empty folder" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == [out]  # nothing half-written beside it


def test_mistakes_in_splitting_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "few": write_captions(tmp_path / "few.jsonl", captions(2, ("a",))),
        "good": write_captions(tmp_path / "good.jsonl", captions(20)),
        "blank": write_captions(tmp_path / "blank.jsonl", [{**row, "prompt": ""} for row in captions(2)]),
        "foreign": write_captions(tmp_path / "foreign.jsonl", [{"prompt": "mine"}]),
        "none": tmp_path / "none.jsonl",
    }
    (tmp_path / "torn.jsonl").write_text('{"sha256": ')
    mistakes = [
        ([str(files["few"])], "2 captions leave none for critic"),
        ([str(files["blank"])], "no captions in"),
        ([str(files["foreign"])], "line 1 is not a caption"),
        ([str(tmp_path / "torn.jsonl")], "line 1 is not a caption"),
        ([str(files["none"])], "no file"),
        ([str(files["good"]), "--critic", "60", "--policy", "50"], "shares of 60 % and 50 %; allowed"),
        ([str(files["good"]), "--critic", "-1"], "shares of -1 %"),
        ([str(files["good"]), "--seed", "many"], "'many' is not a whole number"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in mistakes:
        assert main(["prompts", "split", *arguments, "--out", str(tmp_path / "out")]) == 2, message
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1, told
    assert sorted(tmp_path.rglob("*")) == before


def test_commands_are_found_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "captoin", "x"]) == 2
    told = capsys.readouterr().err
    assert "'captoin'" in told and "Did you mean 'caption'" in told and "cgru prompts --help" in told
    for words in ([], ["caption"], ["split"]):
        with pytest.raises(SystemExit):
            main(["prompts", *words, "--help"])
        assert "Examples:" in capsys.readouterr().out
    assert LLAVA == MODEL  # what the help says, without importing what reads it


def test_read_captions_leaves_out_what_is_withheld(tmp_path: Path) -> None:
    rows = [*captions(1), {"sha256": "0", "class": "a", "prompt": "", "key": "k", "withheld": "x"}]
    assert len(read_captions(write_captions(tmp_path / "a.jsonl", rows))) == 2
