"""`cgru sweep` without Ray: the plan, mistakes in one line, and what is said while it goes on."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from cgru.cli import main
from cgru.cli.parse import parse
from cgru.cli.progress_sweep import NO_ROOM, Board, Lookout, shown
from cgru.cli.sweeping import tell, work, write_page
from cgru.experiments.cluster import Share, note_of
from cgru.experiments.local_runner import carry_out, only_one
from cgru.experiments.settings import config_of
from cgru.experiments.sweep import Sweep, plan
from cgru.runs import Run

CELLS = plan(Sweep(("Dogs", "Cats"), settings=("policy.iterations=5",)))
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path) -> Iterator[Path]:
    """Commands write under the current folder by default."""
    (tmp_path / "work").mkdir()
    with contextlib.chdir(tmp_path / "work"):
        yield tmp_path / "work"


def test_a_dry_run_lists_cells_and_commands_and_writes_nothing(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "Dogs", "Cats", "--seeds", "0,1", "--dry-run", "--json", "policy.iterations=3"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == "runs/sweep"
    assert [cell["name"] for cell in told["cells"]] == [
        "base",
        "dogs-anchored-s0",
        "dogs-anchored-s1",
        "cats-anchored-s0",
        "cats-anchored-s1",
    ]
    unlearn, evaluate = told["cells"][2]["commands"]
    assert unlearn == (
        "cgru unlearn Dogs --model emoji-canvas --method anchored --preset demo --seed 1 --device auto "
        "--out runs/sweep/runs policy.iterations=3"
    )
    assert "evaluate runs/sweep/runs/dogs-anchored-s1-" in evaluate
    assert list(workdir.iterdir()) == []


FEW = ["prompts.count=4", "prompts.retain=4", "watch.every=0", "retention.bank=2", "retention.batch=4"]
LONG = "\n".join(f"{k} a dog " + "and another dog " * 40 for k in range(8))
MISTAKES = {
    "no concept": ([], "no concept"),
    "only settings": (["policy.iterations=3"], "no concept"),
    "unknown concept": (["Dgos"], "Did you mean 'Dogs'?"),
    "unknown method": (["Dogs", "--methods", "cgru,ddpoo"], "Did you mean 'ddpo'?"),
    "no seeds": (["Dogs", "--seeds", ","], "no seed"),
    "a seed in words": (["Dogs", "--seeds", "0,one"], "'one'"),
    "twice": (["Dogs", "dog"], "twice"),
    "no images": (["Dogs", "--images", "0"], "--images 0"),
    "no share": (["Dogs", "--share", "0"], "--share 0; allowed: 0.001 to 1"),
    "negative retries": (["Dogs", "--retries", "-1"], "--retries -1; allowed: 0 or more"),
    "one GPU": (["Dogs", "--device", "cuda:1"], "unknown device 'cuda:1'; allowed: auto, cpu, cuda"),
    "unknown setting": (["Dogs", "policy.iteration=3"], "policy.iterations"),
    "the seed as a setting": (["Dogs", "seed=3"], "--seeds"),
    "the model as a setting": (["Dogs", "model=some/model"], "allowed: --model."),
    "unknown benchmark": (["Dogs", "--benchmarks", "canvass", "--dry-run"], "Did you mean 'canvas'?"),
    "an anchor that is the concept": (
        ["Dogs", "--methods", "uce", "anchor=dog", "--dry-run"],
        "the anchor 'dog' is a word",
    ),
    "an anchor that is too long": (
        ["Dogs", "--methods", "uce", f"anchor={'cat ' * 60}", "--dry-run"],
        "is as long as the 48 tokens that 'emoji-canvas' reads",
    ),
    "long prompts": (
        ["Dogs", *FEW, "prompts.critic=2", "prompts.source=../long.txt", "--dry-run"],
        "6 of 12 prompts are over the model's limit",
    ),
    "a benchmark of more options": (["Dogs", "--benchmarks", "unlearncanvas"], "Run `cgru evaluate RUN --benchmark"),
}


@pytest.mark.parametrize("words, told", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_nothing_is_written(
    words: list[str], told: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir.parent / "long.txt").write_text(LONG)
    assert main(["sweep", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and told in captured.err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "hub"])
def test_prompts_over_the_limit_of_any_model_that_is_here_are_refused(
    kind: str, family_folders: dict[str, Path], hub_id: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hub_id if kind == "hub" else str(family_folders[kind])
    name = "Van Gogh" + " and his friends" * 8
    command = ["sweep", name, "--model", model, "--preset", "paper-object", "reward.name=clip", "--dry-run"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert re.search(r"\d+ of \d+ prompts are over the model's limit, first .* tokens; allowed: \d+ tokens", told)
    assert told.count("\n") == 1 and list(workdir.iterdir()) == []


def test_prompts_of_a_model_that_is_not_here_are_left_to_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "nobody/nothing", "--preset", "paper-object", "reward.name=clip", "--dry-run"]
    assert main(["sweep", "Van Gogh" + " and his friends" * 8, *words]) == 0, capsys.readouterr().err


@pytest.fixture
def shapes(workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The model of docs/add-a-backbone.md, which knows two classes; one entry for each time it was loaded."""
    page = (Path(__file__).parents[1] / "docs" / "add-a-backbone.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.S)
    assert code is not None
    (tmp_path / "shapes.py").write_text(code[1], encoding="utf-8")
    (tmp_path / "counted.py").write_text(
        "import shapes\nLOADS = []\n\ndef load(name, **where):\n    LOADS.append(name)\n"
        "    return shapes.load(name, **where)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    import counted

    yield counted.LOADS
    for name in ("shapes", "counted"):
        sys.modules.pop(name, None)


def test_a_class_that_one_s_own_model_lacks_is_refused(
    shapes: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--model", "counted:load", "--dry-run", "reward.name=shapes:make_reward"]
    assert main(["sweep", "cross", "square", "--seeds", "0,1", *own]) == 0, capsys.readouterr().err
    assert shapes == ["counted:load"], "one model for four runs"
    capsys.readouterr()
    assert main(["sweep", "cross", "croos", *own]) == 2
    told = capsys.readouterr().err
    assert "'croos'" in told and "Did you mean 'cross'?" in told and told.count("\n") == 1
    assert main(["reproduce", "--only", "ddpo", "--model", "counted:load", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "unknown class 'Dogs'; allowed: square, cross" in told and told.count("\n") == 1
    assert list(workdir.iterdir()) == []


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert main(["sweep", "Dogs"]) == 2
    assert "pip install 'cgru[ray]'" in capsys.readouterr().err
    assert main(["sweep", "Dogs", "--dry-run"]) == 0


@needs_ray
@pytest.mark.usefixtures("no_trackers")
@pytest.mark.parametrize(
    "words, told",
    [
        (["--out", "/proc/out"], "/proc/out"),
        (["tracker=trackio"], "tracker 'trackio' needs the package"),
        (["prompts.source=few.txt"], "1 different forget prompts given"),
        (["reward.name=concpt"], "Did you mean 'concept'?"),
        (["--model", "no/such/folder"], "no model 'no/such/folder'; allowed: 'emoji-canvas'"),
        (["--address", "10.0.0..5:6379"], "'10.0.0..5:6379' is no address; allowed: HOST:PORT"),
        (["--address", "127.0.0.1:1"], "no Ray cluster at '127.0.0.1:1' (Connection refused); allowed:"),
    ],
)
def test_what_needs_no_cluster_is_checked_before_one_is_started(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    Path("few.txt").write_text("a dog\n")
    assert main(["sweep", "Dogs", *words]) == 2
    assert told in capsys.readouterr().err and not ray.is_initialized()


@needs_ray
@pytest.mark.parametrize("words", [["sweep", "Dogs", "reward.name=concpt"], ["reproduce", "--model", "no/such/folder"]])
def test_nothing_but_the_mistake_is_said(words: list[str], workdir: Path) -> None:
    """In a process of its own: the notes of other libraries come when they are imported."""
    done = subprocess.run([sys.executable, "-m", "cgru", *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("cgru: ") and done.stderr.count("\n") == 1


@needs_ray
def test_a_folder_where_another_command_is_at_work_is_refused(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    with only_one(Path("out")):
        assert main(["sweep", "Dogs", "--out", "out"]) == 2
        assert "another cgru command is at work in 'out'" in capsys.readouterr().err
        # The same when the other one came after the checks.
        assert work(parse(["sweep", "Dogs", "--out", "out"]), CELLS, Share(1.0, 0.0)) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("cgru: another cgru command is at work in ")


def test_events_are_lines(tmp_path: Path) -> None:
    with shown(CELLS, tmp_path, is_quiet=True) as board:
        lines: list[str] = []
        heard = Board(tmp_path, board.rows, lines.append)
    _, dogs, cats = CELLS
    note_of(tmp_path, dogs).parent.mkdir()
    note_of(tmp_path, dogs).write_text('{"host": "far", "pid": 7, "from_iteration": 3}')
    heard.look()
    heard.look()
    run = Run.create(tmp_path / "runs", config_of(dogs, "auto"))
    run.log({"iteration": 0, "reward/mean": 1.25})
    heard.look()
    assert board.rows[dogs.name].note == "iteration 1 of 5, reward 1.25"
    heard.again(dogs, {"error": "Traceback\nits worker was lost"})
    heard.told(cats, {"error": "no such thing"})
    heard.told(dogs, {"seconds": {"training": 75.2, "attack": 0.0}})
    assert [line.partition("] ")[2] for line in lines] == [
        "dogs-anchored-s0: at work on far, continuing from iteration 3",
        "dogs-anchored-s0: will be retried after: its worker was lost",
        "cats-anchored-s0: failed: no such thing",
        "dogs-anchored-s0: done (training 75 s)",
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(heard.table())
    assert isinstance(console.file, io.StringIO)
    title, _, *rows = console.file.getvalue().splitlines()
    assert title.startswith("3 cells: 1 failed, 1 waiting, 1 done")
    assert [row.split()[0] for row in rows] == ["cats-anchored-s0", "base", "dogs-anchored-s0"]


def test_a_sweep_without_a_node_for_it_says_so_once(tmp_path: Path) -> None:
    with shown(CELLS, tmp_path, is_quiet=True) as board:
        lines: list[str] = []
        heard = Board(tmp_path, board.rows, lines.append)
    has_room = False
    lookout = Lookout(heard, lambda: has_room, every=0.0)
    lookout.look()
    lookout.look()
    assert [line.partition("] ")[2] for line in lines] == [NO_ROOM]
    assert NO_ROOM in str(heard.table().renderables[0])
    has_room = True
    lookout.look()
    assert heard.notice == ""
    has_room = False
    note_of(tmp_path, CELLS[1]).parent.mkdir()
    note_of(tmp_path, CELLS[1]).write_text('{"host": "far", "from_iteration": 0}')
    lookout.look()
    assert heard.notice == ""  # something is at work: nobody asks
    assert len(lines) == 2 and lines[1].endswith("at work on far")


def test_a_node_is_not_looked_for_all_the_time(tmp_path: Path) -> None:
    asked: list[None] = []
    with shown(CELLS, tmp_path, is_quiet=True) as board:
        lookout = Lookout(board, lambda: bool(asked.append(None)), every=1000.0)
        lookout.look()
    assert asked == []


def test_what_was_done_before_is_shown_as_done(tmp_path: Path) -> None:
    carry_out(CELLS, tmp_path, lambda left: iter([(cell, {"run": None}) for cell in left]), lambda *_: None, about={})
    with shown(CELLS, tmp_path, is_quiet=True) as board:
        assert {row.state for row in board.rows.values()} == {"done"}


def test_the_page_compares_what_was_trained_and_names_what_failed(tmp_path: Path) -> None:
    _, dogs, cats = CELLS
    run = Run.create(tmp_path / "runs", config_of(dogs, "auto"))
    failed = {"name": cats.name, "error": "Traceback (most recent call last):\nMemoryError: none left"}
    assert write_page(tmp_path, [failed]) is None
    assert write_page(tmp_path, [{"name": dogs.name, "run": f"runs/{run.path.name}"}, failed]) == "comparison.html"
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "Failed: cats-anchored-s0. MemoryError: none left" in page


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_page_that_cannot_be_made_hides_no_result(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(Path("out/runs"), config_of(CELLS[1], "auto"))
    (run.path / "config.yaml").write_text("concept: [")  # damaged
    record = {"name": CELLS[1].name, "run": f"runs/{run.path.name}"}
    assert tell(parse(["sweep", "Dogs", "--out", "out", *words]), [record], 2.0) == 1
    told = capsys.readouterr().out
    if not words:
        assert told.startswith("2 s; no page (") and told.count("\n") == 1
        return
    found = json.loads(told)
    assert (found["page"], found["cells"]) == (None, [record])
    assert found["no_page"].startswith("no page (")
