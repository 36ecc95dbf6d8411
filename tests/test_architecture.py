"""Reads the imports of the package and fails on a wrong arrow.

Modules import from their own tier or a lower one, never in a cycle. A new top-level module needs a row in TIERS.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

# The longest matching prefix counts. `cgru` itself is the public API, which only the command line may import.
TIERS = {
    "cgru": 6,
    "cgru.tasks": 0,
    "cgru.attributes": 0,
    "cgru.config": 0,
    "cgru.catalog": 0,
    "cgru.runs": 0,
    "cgru.atomic_io": 0,
    "cgru.image_files": 0,
    "cgru.distributed": 0,
    "cgru.lineage": 0,
    "cgru.embedded": 0,
    "cgru.prompts": 0,
    "cgru.prompts.llava": 2,
    "cgru.quiet": 0,
    "cgru.interrupt": 0,
    "cgru.method": 3,
    "cgru.seeds": 0,
    "cgru.mdp": 1,
    "cgru.rl": 4,
    "cgru.rl.objective": 1,
    "cgru.rl.batches": 1,
    "cgru.rl.advantage": 1,
    "cgru.backbones": 2,
    "cgru.backbones.base": 1,
    "cgru.backbones.offload": 1,
    "cgru.lora": 2,
    "cgru.fast": 2,
    "cgru.edit_folder": 0,
    "cgru.edits": 2,
    "cgru.rewards": 2,
    "cgru.critic": 3,
    "cgru.critic.film": 2,
    "cgru.critic.frozen": 2,
    "cgru.critic.latent": 2,
    "cgru.critic.tower": 2,
    "cgru.critic.views": 2,
    "cgru.critic.measures": 2,
    "cgru.outside_detector": 3,
    "cgru.methods": 4,
    "cgru.evaluation": 4,
    "cgru.evaluation.base": 3,
    "cgru.evaluation.distances": 3,
    "cgru.evaluation.intervals": 3,
    "cgru.attacks": 5,
    "cgru.attacks.simplex": 3,
    "cgru.attacks.unlearndiffatk": 3,
    "cgru.pipeline": 5,
    "cgru.presets": 5,
    "cgru.experiments": 6,
    "cgru.report": 6,
    "cgru.web": 6,
    "cgru.cli": 6,
    "cgru.__main__": 6,
}
MAY_IMPORT_DIFFUSERS = ("cgru.backbones", "cgru.lora", "cgru.fast")


def module_name(path: Path, source: Path) -> str:
    """`src/cgru/mdp/__init__.py` is cgru.mdp."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, name: str, modules: set[str]) -> Iterator[str]:
    """Every module that a file imports, also inside functions and under TYPE_CHECKING.

    `from cgru.mdp import rollout` is cgru.mdp.rollout if that is a module, else cgru.mdp.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (full if (full := f"{base}.{a.name}") in modules else base for a in node.names)


def import_graph(source: Path) -> dict[str, set[str]]:
    """Module -> everything it imports, ours and others'."""
    paths = {module_name(path, source): path for path in sorted(source.rglob("*.py"))}
    return {name: set(imports(path, name, set(paths))) for name, path in paths.items()}


GRAPH = import_graph(SOURCE)
OURS = {name: {other for other in found if other in GRAPH} for name, found in GRAPH.items()}


def tier(module: str) -> int:
    """The tier of the longest prefix in the table."""
    prefixes = [p for p in TIERS if module == p or (p != "cgru" and module.startswith(p + "."))]
    assert prefixes, f"{module} has no tier: add it to TIERS in {Path(__file__).name}"
    return TIERS[max(prefixes, key=len)]


def is_in(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it."""
    return module == package or module.startswith(package + ".")


def importers(package: str, graph: dict[str, set[str]]) -> list[str]:
    """The modules that import a package or a part of it."""
    return sorted(name for name, found in graph.items() if any(is_in(other, package) for other in found))


def wrong_arrows(graph: dict[str, set[str]]) -> list[str]:
    """Imports that go up."""
    arrows = ((name, other) for name, found in graph.items() for other in found if tier(other) > tier(name))
    return sorted(f"{name} (L{tier(name)}) imports {other} (L{tier(other)})" for name, other in arrows)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that importing `start` brings in."""
    seen, todo = set[str](), [start]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def test_imports_go_down_or_stay_in_a_tier() -> None:
    assert wrong_arrows(OURS) == []


def test_there_is_no_cycle() -> None:
    TopologicalSorter(OURS).prepare()


def packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """First-level package -> the first-level packages it imports; `cgru` alone is the public API."""
    found: dict[str, set[str]] = {}
    for name, imported in graph.items():
        own = ".".join(name.split(".")[:2])
        others = {".".join(other.split(".")[:2]) for other in imported}
        found[own] = found.get(own, set()) | others - {own}
    return found


def test_there_is_no_cycle_of_packages() -> None:
    """Modules may be free of cycles while their packages depend on each other both ways."""
    TopologicalSorter(packages(OURS)).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(packages({"cgru.a.x": {"cgru.b.y"}, "cgru.b.z": {"cgru.a.w"}})).prepare()


def test_only_the_program_imports_the_command_line() -> None:
    outside = [name for name in importers("cgru.cli", OURS) if not is_in(name, "cgru.cli")]
    assert outside == ["cgru.__main__"]


def test_methods_know_neither_each_other_nor_the_evaluation() -> None:
    for name in (name for name in OURS if name.startswith("cgru.methods.")):
        forbidden = [other for other in OURS[name] if is_in(other, "cgru.methods") or is_in(other, "cgru.evaluation")]
        assert forbidden == [], name


def test_reports_never_bring_in_torch() -> None:
    heavy = set(importers("torch", GRAPH))
    for name in (name for name in OURS if is_in(name, "cgru.report")):
        assert not reachable(OURS, name) & heavy, name


def test_diffusers_only_where_networks_are_loaded_or_changed() -> None:
    allowed = MAY_IMPORT_DIFFUSERS
    assert [name for name in importers("diffusers", GRAPH) if not any(is_in(name, part) for part in allowed)] == []


def test_ray_in_one_place() -> None:
    assert importers("ray", GRAPH) == ["cgru.experiments.cluster"]


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "benchmarks"])
def test_torchvision_nowhere(folder: str) -> None:
    assert importers("torchvision", import_graph(ROOT / folder)) == []


def test_the_reader_sees_every_kind_of_import(tmp_path: Path) -> None:
    """The checks above can fail: a small package with an upward import, a lazy one and a cycle."""
    files = {
        "cgru/__init__.py": "",
        "cgru/tasks.py": "from . import runs\n",
        "cgru/runs.py": "def f():\n    from cgru.tasks import x\n    import cgru.cli\n",
        "cgru/cli.py": "from .mdp import kernel, y\nimport torchvision.ops as ops\n",
        "cgru/mdp/__init__.py": "",
        "cgru/mdp/kernel.py": "",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    graph = import_graph(tmp_path)
    assert graph["cgru.cli"] == {"cgru.mdp.kernel", "cgru.mdp", "torchvision.ops"}
    assert importers("torchvision", graph) == ["cgru.cli"]
    ours = {name: found & set(graph) for name, found in graph.items()}
    assert wrong_arrows(ours) == ["cgru.runs (L0) imports cgru.cli (L6)"]
    with pytest.raises(CycleError, match="cgru.tasks"):
        TopologicalSorter(ours).prepare()
