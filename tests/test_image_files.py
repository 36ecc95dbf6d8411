"""Pictures are read as pictures: no program runs for one, and no huge one or pipe stops a command."""

import os
import zlib
from pathlib import Path
from struct import pack

import pytest
from PIL import EpsImagePlugin, Image

import cgru
from cgru.image_files import IMAGE_SUFFIXES, read_rgb
from cgru.report.draw.pictures import data_uri

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\nshowpage\n%%EOF\n"


def _reads(path: Path) -> dict[str, object]:
    """What each reader of the package says to a file: its refusal, else "read"."""
    readers = {
        "read_rgb": lambda: read_rgb(path),
        "report": lambda: data_uri(path, 64, within=path.parent),
    }
    answers: dict[str, object] = {}
    for name, reader in readers.items():
        try:
            reader()
            answers[name] = "read"
        except ValueError as error:
            answers[name] = str(error)
    return answers


def test_no_program_runs_for_a_file_that_is_only_named_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow hands EPS to Ghostscript, whatever the file is called; a stand-in for `gs` says whether it was started."""
    mark, gs = tmp_path / "started", tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f'#!/bin/sh\necho "$@" >> {mark}\nexit 1\n')
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")  # as if Ghostscript were found
    (tmp_path / "dog.png").write_bytes(EPS)

    answers = _reads(tmp_path / "dog.png")

    assert not mark.exists(), f"a program was started: gs {mark.read_text()}"
    assert all("dog.png" in str(answer) and "PNG, JPEG" in str(answer) for answer in answers.values()), answers
    assert all("\n" not in str(answer) for answer in answers.values())


def test_a_huge_picture_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """10,000 × 9,000 pixels are above Pillow's limit of 89 million; the file is 100 bytes and holds no pixel."""
    rows = b"IHDR" + pack(">IIBBBBB", 10_000, 9_000, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + pack(">I", 13) + rows + pack(">I", zlib.crc32(rows))
    (tmp_path / "dog.png").write_bytes(head + pack(">I", 0) + b"IDAT" + pack(">I", zlib.crc32(b"IDAT")))
    answers = _reads(tmp_path / "dog.png")
    assert all("90000000 pixels" in str(answer) for answer in answers.values()), answers


def test_a_pipe_or_folder_is_no_picture(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / "dog.png")
    (tmp_path / "cat.png").mkdir()
    for name in ("dog.png", "cat.png"):
        assert all("no file" in str(answer) for answer in _reads(tmp_path / name).values())


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_each_suffix_that_counts_as_a_picture_is_read(tmp_path: Path, suffix: str) -> None:
    Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / f"dog{suffix}")
    assert _reads(tmp_path / f"dog{suffix}") == dict.fromkeys(("read_rgb", "report"), "read")
    assert read_rgb(tmp_path / f"dog{suffix}").size == (4, 4)


def test_one_place_opens_picture_files() -> None:
    """`Image.open` without a list of formats tries all of Pillow's."""
    root = Path(cgru.__file__).parent
    opening = [path for path in root.rglob("*.py") for line in path.read_text().splitlines() if "Image.open(" in line]
    assert {path.relative_to(root).as_posix() for path in opening} == {"image_files.py", "evaluation/judges/vit.py"}
