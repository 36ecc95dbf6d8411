"""Prompt lists with seeds: both dialects of I2P, what is skipped and why, subsets, mistakes of one line."""

from pathlib import Path

import pytest

from cgru.prompts.listed import has_seeds, read_listing

HUB = """prompt,categories,hard,nudity_percentage,sd_seed,sd_guidance_scale,sd_image_width,sd_model
"a calm sea, oil",sexual,0,60.0,4290749014,7,512,stable-diffusion-v1-4
 a lamp ,"hate, self-harm",1,0.0,12,255,512,stable-diffusion-v1-4
a tree,illegal activity,0,50.0,13,7,128,stable-diffusion-v1-4
"""
COPY = """,case_number,prompt,evaluation_seed,evaluation_guidance,categories,nudity_percentage
0,5,a calm sea,4290749014,7,sexual,60
1,9,a lamp,12.0,7.5,"hate, self-harm",0
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "list.csv"
    file.write_text(text)
    return file


def test_the_hub_s_columns(tmp_path: Path) -> None:
    found = read_listing(write(tmp_path, HUB))
    assert [(row.case, row.text, row.seed, row.guidance) for row in found.prompts] == [
        ("0", "a calm sea, oil", 4290749014, 7.0),
        ("1", " a lamp ", 12, 255.0),  # as it stands: the official code does not strip either
        ("2", "a tree", 13, 7.0),
    ]
    assert (found.rows, found.outside, found.skipped) == (3, 0, {})


def test_the_columns_of_mace_and_unlearndiffatk(tmp_path: Path) -> None:
    found = read_listing(write(tmp_path, COPY))
    assert [(row.case, row.seed, row.guidance) for row in found.prompts] == [("5", 4290749014, 7.0), ("9", 12, 7.5)]


def test_a_list_of_objects_has_four_columns(tmp_path: Path) -> None:
    text = "case_number,prompt,evaluation_seed,evaluation_guidance\n3,a church,7,7.5\n"
    assert read_listing(write(tmp_path, text), needs_guidance=True).prompts[0].guidance == 7.5


@pytest.mark.parametrize(
    ("subset", "prompts", "outside"),
    [
        ("sexual", ["a calm sea, oil"], 2),
        ("self-harm", [" a lamp "], 2),
        ("illegal activity", ["a tree"], 2),
        ("nudity", ["a calm sea, oil", "a tree"], 1),
        ("nudity-over-50", ["a calm sea, oil"], 2),  # 50 itself is not above
    ],
)
def test_subsets(subset: str, prompts: list[str], outside: int, tmp_path: Path) -> None:
    found = read_listing(write(tmp_path, HUB), subset)
    assert [row.text for row in found.prompts] == prompts and found.outside == outside


def test_rows_that_cannot_be_drawn_are_counted_by_reason(tmp_path: Path) -> None:
    rows = ["a cat,1,7", " ,2,7", "a dog,,7", "a dog,1.5,7", "a dog,-3,7", "a teenager,4,7", "a frog,5,", "a hen,6"]
    file = write(tmp_path, "prompt,sd_seed,sd_guidance_scale\n" + "\n".join(rows) + "\n")
    found = read_listing(file)
    assert [row.text for row in found.prompts] == ["a cat", "a frog", "a hen"]
    assert found.skipped == {"no prompt": 1, "no seed that is a whole number": 3, "may speak of a minor": 1}
    strict = read_listing(file, needs_guidance=True)
    assert [row.text for row in strict.prompts] == ["a cat"] and strict.skipped["no guidance that is a number"] == 2
    assert found.rows == 8 == len(strict.prompts) + sum(strict.skipped.values())


MISTAKES = [
    ("text,sd_seed\na,1\n", "all", "has no column prompt but text, sd_seed"),
    ("prompt,seed\na,1\n", "all", "has no column sd_seed or evaluation_seed but prompt, seed"),
    ("prompt,sd_seed\na,1\n", "sexual", "has no column categories but prompt, sd_seed"),
    ("prompt,sd_seed\na,1\n", "nudity", "has no column nudity_percentage"),
    ("", "all", "has no column prompt but none"),
    (HUB, "shocking", "no prompts in the subset 'shocking' of"),
    (HUB, "sexul", "Did you mean 'sexual'?"),
    ("prompt,sd_seed\n ,1\n", "all", "which has 1 rows (1 skipped: no prompt)"),
    ('prompt,sd_seed\n"a,1\n', "all", "is not valid CSV"),
]


@pytest.mark.parametrize(("text", "subset", "told"), MISTAKES)
def test_mistakes_are_one_line(text: str, subset: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read_listing(write(tmp_path, text), subset)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_seeds_are_only_needed_where_they_are_used(tmp_path: Path) -> None:
    file = write(tmp_path, "prompt\na cat\n")
    assert not has_seeds(file) and read_listing(file, needs_seeds=False).prompts[0].seed is None
    assert has_seeds(write(tmp_path, COPY))
    (tmp_path / "list.txt").write_text("sd_seed\n")
    assert not has_seeds(tmp_path / "list.txt") and not has_seeds(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="is not a .csv"):
        read_listing(tmp_path / "list.txt")
    with pytest.raises(FileNotFoundError, match="no prompt file"):
        read_listing(tmp_path / "none.csv")
