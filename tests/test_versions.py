"""The version files agree: pyproject.toml, the tested versions, the lowest versions, the citation."""

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from cgru import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_AT_ITS_LOWEST = {"torch": "2.13.0"}  # the one CPU build that these tests have; constraints-lowest.txt says why


def pinned(name: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pairs}


def ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    return {canonicalize_name((parsed := Requirement(line)).name): parsed.specifier for line in lines}


def lowest(allowed: SpecifierSet) -> str:
    """The version after `>=`; each range has one."""
    (version,) = [part.version for part in allowed if part.operator == ">="]
    return version


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    wanted = ranges([*PROJECT["dependencies"], *EXTRAS["test"]])
    found = pinned("constraints-lowest.txt")
    assert found.keys() == wanted.keys()
    for package, allowed in wanted.items():
        expected = NOT_AT_ITS_LOWEST.get(package, lowest(allowed))
        assert Version(found[package]) == Version(expected), f"{package}{allowed}, but {found[package]} is tested"


def test_the_tested_versions_are_allowed_and_none_is_left_open() -> None:
    extras = [line for name, lines in EXTRAS.items() if name not in ("dev", "fid") for line in lines]
    wanted, found = ranges([*PROJECT["dependencies"], *extras]), pinned("constraints.txt")
    assert wanted.keys() <= found.keys()
    for package, allowed in wanted.items():
        assert found[package] in allowed, f"{package}=={found[package]} is not in {allowed}"


def test_the_citation_is_of_this_version_and_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "type", "license", "preferred-citation"}
    assert citation["version"] == PROJECT["version"] == __version__
    assert (citation["license"], citation["type"]) == (PROJECT["license"], "software")
    paper = citation["preferred-citation"]
    names = [author["family-names"] for author in paper["authors"]]
    header = (ROOT / "src/cgru/methods/cgru.py").read_text().split('"""')[1]
    assert f"{paper['title']} ({', '.join(names)})" in header
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"*{paper['title']}*" in readme and str(paper["year"]) in readme


@pytest.mark.parametrize("tool", ["ruff check", "ruff format --check", "mypy"])
def test_pre_commit_runs_the_checks_of_make_without_a_download(tool: str) -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    entries = {hook["entry"]: hook["language"] for hook in repository["hooks"]}
    assert [kind for entry, kind in entries.items() if entry.startswith(f".venv/bin/{tool}")] == ["system"]
    assert f"$(BIN)/{tool}" in (ROOT / "Makefile").read_text()
