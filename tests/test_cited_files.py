"""What README, docs and the package's own texts cite is in the repository: files, folders, modules and their names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MODULES = sorted((ROOT / "src").rglob("*.py"))
CITED = re.compile(r"(?<![\w./:*-])(?:[\w-]+/)*[\w-]+\.(?:py|md|tex|sh|toml)\b")
"""A file of ours by its name; not one of another commit (COMMIT:PATH) or an address."""
FOLDER = re.compile(r"(?<![\w./:-])(?:src/cgru|docs|tests|tools|benchmarks)/[\w-]+(?:/[\w-]+)*(?![\w.*-])")
DOTTED = re.compile(r"(?<![\w./-])cgru(?:\.[a-z]\w*)+(?:\.[A-Z]\w*)?(?![\w.]*[=(]\w)")
EXAMPLES = {"dampen.py", "shapes.py", "backgrounds.py", "colourless.py"}
"""Files that a page tells its reader to write."""
ELSEWHERE = {"train-scripts/train_erase.py", "stat_tracking.py"}
"""Files of other repositories that a method was compared with; its header names the repository."""
LONGEST = 240


@cache
def known() -> frozenset[str]:
    """Every file of the repository, and every end of its path: rl/train.py of src/cgru/rl/train.py."""
    folders = ("src", "docs", "tests", "tools", "benchmarks")
    found = [path for name in folders for path in (ROOT / name).rglob("*")] + list(ROOT.iterdir())
    parts = [path.relative_to(ROOT).parts for path in found if "__pycache__" not in path.parts]
    return frozenset("/".join(part[i:]) for part in parts for i in range(len(part)))


@cache
def prose(path: Path) -> str:
    """A page as it is; of a module its comments and strings that are statements or stand alone: no code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    texts = [node.value.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*texts, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def lost(path: Path) -> Iterator[str]:
    text = prose(path)
    for name in CITED.findall(text):
        if name not in known() | EXAMPLES | ELSEWHERE:
            yield name
    for name in FOLDER.findall(text):
        if name not in known():
            yield name
    yield from (name for name in DOTTED.findall(text) if not is_there(name))


def is_there(name: str) -> bool:
    """Whether cgru.a.b.c is a module, or a module's name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath("src", *parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            rest = parts[count : count + 1]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")) is not None
    return False


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_cited_is_there(path: Path) -> None:
    assert not (names := sorted(set(lost(path)))), f"{path.relative_to(ROOT)} cites what is not there: {names}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_endless_lines(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    assert not [number for number, line in lines if len(line) > LONGEST and not line.startswith("|")]


def test_a_name_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "rl/train.py, docs/lab.md, docs/results/fast, `cgru.rl.train.iterate`, RUN/edit/x.json, https://a.b/c.py, "
        "`1aaf435:docs/gone.md`; but old/file.py, docs/findings.md, docs/gone, `cgru.rl.room`, cgru.rl.train.nowhere",
        encoding="utf-8",
    )
    assert [*lost(page)] == ["old/file.py", "docs/findings.md", "docs/gone", "cgru.rl.room", "cgru.rl.train.nowhere"]
