"""The command line end to end on tiny assets, and every user's mistake in one line."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mishaps import diverged, file_size_limit, interruptible
from PIL import Image
from tiny_assets import CLASSES, STYLES, write_assets

from cgru import __version__
from cgru.catalog import METHODS
from cgru.cli import main
from cgru.evaluation.picture_grid import labelled_grid
from cgru.method import find_method


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    """A tiny asset folder; read only."""
    return write_assets(tmp_path_factory.mktemp("assets"), sd_folder)


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path) -> Iterator[Path]:
    """Commands write under the current folder by default."""
    (tmp_path / "work").mkdir()
    with contextlib.chdir(tmp_path / "work"):
        yield tmp_path / "work"


def machine(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> dict[str, Any]:
    """Run a command with --json: one document on stdout."""
    assert main([*arguments, "--json"], root=root) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def pixels(path: str) -> np.ndarray:
    """A picture's pixels (h, w, 3)."""
    with Image.open(path) as file:
        return np.asarray(file)


def test_generate_writes_each_picture_and_a_grid(root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = machine(
        capsys, root, "generate", "a cat", "a dog", "--images", "2", "--seed", "3", "--out", "new/pictures"
    )
    assert [(row["prompt"], row["seed"]) for row in record["pictures"]] == [
        ("a cat", 3),
        ("a cat", 4),
        ("a dog", 3),
        ("a dog", 4),
    ]
    assert record["sampling"] == {"steps": 2, "guidance": 2.0, "eta": 0.0}
    written = sorted(path.name for path in (workdir / "new/pictures").iterdir())
    assert written == sorted([Path(name).name for name in record["images"]] + ["grid.png"])
    pictures = [pixels(name) for name in record["images"]]
    assert {picture.shape for picture in pictures} == {(16, 16, 3)}
    assert (pictures[0] != pictures[1]).any()  # another seed
    assert (pictures[0] != pictures[2]).any()  # another prompt


def test_generate_is_reproducible_and_one_file_is_the_picture(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine(capsys, root, "generate", "a cat", "--seed", "3", "--out", "folder")
    machine(capsys, root, "generate", "a cat", "--seed", "3", "--out", "cat.png")
    np.testing.assert_array_equal(pixels("cat.png"), pixels("folder/000-a-cat-s3.png"))


def test_steps_guidance_and_eta_matter(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = []
    for extra in ([], ["--steps", "3"], ["--guidance", "6"], ["--eta", "1"]):
        machine(capsys, root, "generate", "a cat", *extra, "--out", "cat.png")
        pictures.append(pixels("cat.png").tobytes())
    assert len(set(pictures)) == 4


def test_generate_for_people_says_where_to_look(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a cat"], root=root) == 0
    captured = capsys.readouterr()
    place = Path(captured.out.rsplit(": ", 1)[1].strip())
    assert place.is_file()
    assert place.name == "grid.png"
    assert captured.err == ""  # quiet when piped


def test_evaluate_prints_scores_and_draws_the_grid(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = machine(capsys, root, "evaluate", "emoji-canvas", "--images", "1", "--target", "cats", "--out", "out")
    on_disk = json.loads(Path("out/scores.json").read_text())
    assert on_disk == {name: value for name, value in record.items() if name in on_disk}
    assert {"ua", "ira", "cra", "object_accuracy"} <= record["measurements"].keys()
    grid = pixels(record["grid"])
    # A row per style, a column per class, each 16 pixels and a gap: as of pictures made here, and not the other way.
    cells = {(style, label): Image.new("RGB", (16, 16)) for style in STYLES for label in CLASSES}
    assert grid.shape == np.asarray(labelled_grid(STYLES, CLASSES, cells)).shape
    assert grid.shape != np.asarray(labelled_grid(CLASSES, STYLES, {})).shape


def test_evaluate_for_people_shows_every_measurement(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "emoji-canvas", "--images", "1"], root=root) == 0
    captured = capsys.readouterr()
    for name in ("object_accuracy", "style_accuracy", "frechet_judge", "nothing_share"):
        assert name in captured.out
    folder = Path(captured.out.rsplit(": ", 1)[1].strip())
    assert (folder / "scores.json").is_file()
    assert captured.err == ""


def test_another_model_is_shown_beside_emoji_canvas(
    root: Path, sd_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(sd_folders["v_prediction"])
    record = machine(capsys, root, "evaluate", model, "--images", "1", "--target", "flat", "--out", "out")
    assert record["base"]["measurements"]["ua"]["n"] == record["measurements"]["ua"]["n"]
    assert Path("out/base/grid.png").is_file()
    again = ["evaluate", model, "--images", "1", "--target", "flat", "--no-base", "--out", "out"]
    assert machine(capsys, root, *again)["base"] is None


def test_a_diverged_model_is_said_in_one_line(
    root: Path, sd_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = diverged(sd_folder, tmp_path / "model")
    assert main(["evaluate", str(model), "--images", "1", "--no-base"], root=root) == 0
    assert "6 pictures judged 'nothing' and left blank: not finite numbers" in capsys.readouterr().out
    assert main(["generate", "a cat", "--model", str(model), "--steps", "1"], root=root) == 0
    assert "1 of them left blank: not finite numbers" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["a[/b]", "a[red]b", "a:cat:b", "[bold]x[/bold]"])
def test_paths_are_printed_as_they_are(folder: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a cat", "--out", folder], root=root) == 0
    assert capsys.readouterr().out == f"1 picture: {folder}/grid.png\n"
    shutil.copytree(root / "emoji-canvas", folder, dirs_exist_ok=True)
    assert main(["evaluate", folder, "--images", "1", "--no-base", "--out", f"out {folder}"], root=root) == 0
    told = capsys.readouterr().out
    assert f"{folder} on canvas@2" in told
    assert f"pictures: out {folder}/grid.png\n" in told


def test_the_embedded_model_by_path_is_sampled_like_the_named_one(
    root: Path, sd_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("link").symlink_to(root / "emoji-canvas")
    own = machine(capsys, root, "generate", "a", "--model", "link")["sampling"]
    other = machine(capsys, root, "generate", "a", "--model", str(sd_folders["v_prediction"]))["sampling"]
    assert own == {"steps": 2, "guidance": 2.0, "eta": 0.0}
    assert other == {"steps": 50, "guidance": 7.5, "eta": 0.0}


def test_a_full_disk_is_one_line_and_the_same_command_continues(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine(capsys, root, "evaluate", "emoji-canvas", "--images", "1", "--out", "out")
    before = {name: Path("out", name).read_bytes() for name in ("jobs.jsonl", "predictions.jsonl", "scores.json")}
    command = ["evaluate", "emoji-canvas", "--images", "2", "--out", "out"]
    with file_size_limit(1500):  # a sample has fewer bytes, predictions.partial.jsonl has more
        assert main(command, root=root) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("cgru: File too large")
    assert "same command again" in message
    after = {name: Path("out", name).read_bytes() for name in ("jobs.jsonl", "predictions.jsonl")}
    assert after | {"scores.json": Path("out/scores.previous.json").read_bytes()} == before
    assert not list(Path("out").rglob("*.tmp"))
    assert machine(capsys, root, *command)["measurements"]["object_accuracy"]["n"] == 12


def test_libraries_leave_the_message_to_us(root: Path) -> None:
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    assert main(["generate", "a", "--model", "nobody/nothing"], root=root) == 2
    retries = logging.getLogger("huggingface_hub.utils._http")  # warns at each try without a network
    assert not retries.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(("what", "expected"), [("classes", list(CLASSES)), ("styles", list(STYLES))])
def test_list(what: str, expected: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine(capsys, root, "list", what) == {what: expected}
    assert main(["list", what], root=root) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_list_methods_says_what_each_one_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine(capsys, root, "list", "methods") == {"methods": list(METHODS)}
    assert main(["list", "methods"], root=root) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert lines == [[name, find_method(name).summary] for name in METHODS]


def test_doctor_reports_a_damaged_file_by_its_exit_code(
    root: Path, sd_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    health = machine(capsys, root, "doctor")
    assert health["assets"]["state"] == "ok"
    assert health["version"]["torch"]
    assert health["device"]["auto"] in ("cpu", "cuda")
    damaged = write_assets(tmp_path / "damaged", sd_folder)
    (damaged / "emoji-canvas/canvas.json").write_text("{}")
    assert main(["doctor", "--json"], root=damaged) == 1
    assert json.loads(capsys.readouterr().out)["assets"]["emoji-canvas/canvas.json"] == "changed"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code
    assert capsys.readouterr().out.strip() == f"cgru {__version__}"


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["evaluate"], ["attack"], ["reproduce"], ["sweep"], ["list"], ["doctor"]]
)
def test_help_shows_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert "usage: cgru" in text
    assert "Examples:" in text


MISTAKES = {
    "no such command": (["genrate", "a cat"], "'genrate'", "generate"),
    "no prompt": (["generate"], "no prompt", "one text"),
    "empty prompt": (["generate", " "], "empty", "one text"),
    "unknown model": (["generate", "a", "--model", "emoji-canvs"], "'emoji-canvs'", "'emoji-canvas'"),
    "evaluate unknown model": (["evaluate", "emoji-canvs"], "'emoji-canvs'", "'emoji-canvas'"),
    "no such hub model": (["evaluate", "nobody/nothing"], "'nobody/nothing'", "allowed"),
    "zero images": (["generate", "a", "--images", "0"], "--images 0", "allowed: 1"),
    "negative images": (["evaluate", "emoji-canvas", "--images", "-2"], "--images -2", "allowed: 1"),
    "zero batch": (["evaluate", "emoji-canvas", "--batch-size", "0"], "--batch-size 0", "allowed: 1"),
    "zero steps": (["generate", "a", "--steps", "0"], "--steps 0", "allowed: 1"),
    "too many steps": (["generate", "a", "--steps", "5000"], "--steps 5000", "allowed: 1 to 1000"),
    "negative eta": (["generate", "a", "--eta", "-1"], "--eta -1", "allowed: 0 to 1"),
    "words for numbers": (["generate", "a", "--steps", "many"], "'many'", "whole number"),
    "unknown option": (["generate", "a", "--stps", "3"], "--stps", "--steps"),
    "unknown dtype": (["generate", "a", "--dtype", "fp8"], "fp8", "bf16"),
    "unknown device": (["generate", "a", "--device", "tpu"], "tpu", "cpu"),
    "unknown benchmark": (["evaluate", "emoji-canvas", "--benchmark", "canvass"], "'canvass'", "'canvas'"),
    "unknown target": (["evaluate", "emoji-canvas", "--target", "dog"], "'dog'", "'Dogs'"),
    "hazard as target": (["evaluate", "emoji-canvas", "--target", "skulls"], "'skulls'", "Cats, Dogs, Human, flat"),
    "unwritable folder": (["evaluate", "emoji-canvas", "--out", "/proc/out"], "/proc/out", "--out"),
    "unwritable file": (["generate", "a", "--out", "/proc/no/a.png"], "/proc/no", "--out"),
    "another picture format": (["generate", "a", "--out", "x.jpg"], "'x.jpg'", "FILE.png"),
    "a picture as folder": (["evaluate", "emoji-canvas", "--out", "x.png"], "'x.png'", "a folder"),
    "empty path": (["generate", "a", "--out", ""], "''", "Give '.'"),
    "empty folder": (["evaluate", "emoji-canvas", "--out", ""], "''", "Give '.'"),
    "seed of 33 bits": (["generate", "a", "--seed", "4294967296"], "--seed 4294967296", "0 to 4294967295"),
    "last seed": (["generate", "a", "--images", "2", "--seed", "4294967295"], "4294967295", "0 to 4294967294"),
    "not UTF-8": (["generate", "a\udcff"], r"'a\udcff'", "UTF-8"),
    "no factory": (["evaluate", "emoji-canvas", "--benchmark", "math:gcd"], "'math:gcd'", "correct its code"),
    "no function": (["evaluate", "emoji-canvas", "--benchmark", "math:pi"], "'math:pi'", "cgru list benchmarks"),
    "no benchmark": (["evaluate", "emoji-canvas", "--benchmark", "operator:is_"], "a bool", "that returns one"),
    "relative module": (["evaluate", "emoji-canvas", "--benchmark", ".a:b"], "'.a:b'", "a module and a name in it"),
    "absent LoRA": (["evaluate", "no.safetensors"], "'no.safetensors'", "path"),
    "base of a model": (["evaluate", "emoji-canvas", "--model", "emoji-canvas"], "--model", "Leave --model out"),
    "unknown scale": (["reproduce", "--scale", "smal"], "'smal'", "Did you mean 'small'?"),
    "unknown experiment": (["reproduce", "--only", "objets"], "'objets'", "'objects'"),
    "no workers": (["reproduce", "--workers", "0"], "--workers 0", "allowed: 1"),
    "no data folder": (["reproduce", "--model", "a/b", "--data", "nowhere"], "'nowhere'", "docs/reproduce.md"),
    "unwritable reproduction": (["reproduce", "--out", "/proc/out"], "/proc/out", "--out"),
    "unknown list": (["list", "class"], "'class'", "'classes'"),
    "missing argument": (["evaluate"], "MODEL", "--help"),
}


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("{} list benchmarks | true; exit ${{PIPESTATUS[0]}}", (0, 1)),  # 0: it was written before `true` ended
        ("{} --help | true; exit ${{PIPESTATUS[0]}}", (0, 1)),
        ("{} --version | true; exit ${{PIPESTATUS[0]}}", (0, 1)),
        ("{} unlearn --help | head -1 > /dev/null; exit ${{PIPESTATUS[0]}}", (0, 1)),
        ("{} list benchmarks >&-", (0,)),
        ("{} list benchmarks 2>&-", (0,)),
        ("{} list benchmarks > /dev/full", (1,)),
        ("{} unlearn --help > /dev/full", (1,)),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stdout_that_nobody_reads_is_no_failure_of_ours(shell: str, code: tuple[int, ...], unbuffered: str) -> None:
    command, environment = shell.format(f"{sys.executable} -m cgru"), {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode in code, done.stderr
    assert "Traceback" not in done.stderr and "code that you named" not in done.stderr
    assert done.stderr.count("\n") == ("full" in shell)


@pytest.mark.parametrize("columns", ["1", "20"])
def test_help_in_a_narrow_window_has_whole_words(columns: str) -> None:
    command, environment = [sys.executable, "-m", "cgru", "--help"], {**os.environ, "COLUMNS": columns}
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True).stdout
    assert "Make a model forget a concept" in page and page.count("\n") < 150


@pytest.mark.parametrize("arguments, given, advice", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments: list[str], given: str, advice: str, root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, root=root) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("cgru: ")
    assert given in captured.err
    assert advice in captured.err
    assert list(workdir.iterdir()) == []


def breaking(images: int, root: Path) -> object:
    """A benchmark that finds out too late what it lacks."""
    from cgru.evaluation.benchmarks.canvas import load_benchmark

    class Breaking:
        def __getattr__(self, name: str) -> object:
            return getattr(load_benchmark(images, root), name)

        def jobs(self, task: object) -> list[object]:
            return [{}["prompts"]]

    return Breaking()


def test_what_one_s_own_code_raises_is_one_line_with_its_place(
    root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "emoji-canvas", "--images", "1", "--benchmark", f"{__name__}:breaking"]
    assert main(arguments, root=root) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(r"cgru: your code fails \(KeyError: 'prompts', test_cli.py line \d+\); correct it\.\n", told)
    assert list(workdir.iterdir()) == []


def test_what_cgru_raises_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr("cgru.cli.PREPARE", {})
    with pytest.raises(KeyError):
        main(["list", "classes"], root=root)


@pytest.mark.parametrize("name", ["samples", "base", "scores.json", "predictions.jsonl", "base/predictions.jsonl"])
def test_a_folder_of_someone_else_is_left_alone(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("out", name)
    path.parent.mkdir(parents=True)
    path.mkdir() if name == "scores.json" else path.write_text('{"text": "mine"}\n')
    before = sorted(Path("out").rglob("*"))
    assert main(["evaluate", "emoji-canvas", "--images", "1", "--out", "out"], root=root) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"'out/{name}'" in message
    assert sorted(Path("out").rglob("*")) == before


def test_a_folder_where_a_picture_goes_is_said_before_drawing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/grid.png").mkdir(parents=True)
    assert main(["generate", "a cat", "--out", "out"], root=root) == 2
    assert "'out/grid.png' is a folder" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["grid.png"]


def test_folder_without_a_component(
    root: Path, sd_folder: Path, tmp_path: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    (broken / "unet").mkdir(parents=True)
    (broken / "model_index.json").write_text((sd_folder / "model_index.json").read_text())
    assert main(["evaluate", str(broken)], root=root) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "vae" in message
    assert list(workdir.iterdir()) == []


def test_a_broken_lora_is_one_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pytorch_lora_weights.safetensors"
    file.write_bytes(b"nothing")
    assert main(["evaluate", str(file)], root=root) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "LoRA" in message


def test_listing_and_help_need_no_torch() -> None:
    code = (
        "import sys, cgru.cli.options, cgru.catalog; from cgru.cli import main; main(['list', 'models']);"
        "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "emoji-canvas\n[]\n"


def test_ctrl_c_is_one_line_and_leaves_what_is_done(root: Path, workdir: Path) -> None:
    arguments = ["evaluate", "emoji-canvas", "--images", "5000", "--out", str(workdir / "out")]
    code = (
        f"import sys, pathlib; from cgru.cli import main; sys.exit(main({arguments}, root=pathlib.Path({str(root)!r})))"
    )
    process = interruptible([sys.executable, "-c", code])
    partial = workdir / "out/predictions.partial.jsonl"
    deadline = time.monotonic() + 60
    while not partial.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("cgru: interrupted")
    assert partial.stat().st_size > 0
    assert not (workdir / "out/scores.json").exists()
