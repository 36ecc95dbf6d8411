"""Run folders: the same settings find the same run, and nothing is lost by a kill at any moment or by a full disk.

Kills are real: a forked child of a small driver sends itself SIGKILL at its n-th change of the file system (seen by
Python's own audit hook, no patching), for every n until it gets through.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from mishaps import file_size_limit

from cgru.atomic_io import atomic_write
from cgru.config import PolicyConfig, RLConfig, dump, load, override
from cgru.edits import base_model
from cgru.runs import Run, commit_of, read_metrics, run_name

DOGS = RLConfig(concept="Dogs")
STAGE = "3-policy"

HOLDER = """
import sys, time
from cgru.runs import Run
with Run.open(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(60)
"""

MAKER = """
import sys
from cgru.config import RLConfig
from cgru.runs import Run
sys.stdin.read()
print(Run.create(sys.argv[1], RLConfig("Dogs")).path)
"""

# Runs work(n) in a child that is killed at its n-th change; in a fresh folder n each, until a child gets through.
DRIVER = """
import os, shutil, signal, sys
from pathlib import Path
from cgru.config import RLConfig
from cgru.runs import Run

ROOT, WORK = Path(sys.argv[1]), sys.argv[2]
ALWAYS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "half"}
CONFIG = RLConfig("Dogs")

def die_at(n):
    seen = 0
    def hook(event, args):
        nonlocal seen
        counts = event in ALWAYS or (event == "open" and str(ROOT) in str(args[0]))
        seen += counts
        if counts and seen == n:  # os.kill is an event, too
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def state(text):  # two files that must stay together; the second is written in two halves
    def halves(file):
        file.write(text[:2].encode()); file.flush()
        sys.audit("half")
        file.write(text[2:].encode())
    return {"lora": text.encode(), "optimiser": halves}

def prepare():
    if WORK == "train":
        run = Run.create(ROOT / "0", CONFIG)
        run.log({"iteration": 0, "reward/mean": 0.5})
        run.checkpoint("3-policy", state("first"), 1)

def create(folder):
    Run.create(folder, CONFIG)

def train(folder):
    run = Run.open(next(folder.iterdir()))
    with run.locked():
        run.log({"iteration": 1, "reward/mean": 0.75})
        run.checkpoint("3-policy", state("second"), 2)
        run.checkpoint("3-policy", state("again"), 2)
        run.save("edit/lora", b"product")
        run.finish("3-policy", {"iterations": 2})

(ROOT / "0").mkdir()
prepare()
n, status = 0, 9
while status == 9:
    n += 1
    folder = shutil.copytree(ROOT / "0", ROOT / str(n))
    if (child := os.fork()) == 0:
        die_at(n)
        {"create": create, "train": train}[WORK](folder)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
print(n, status)
"""


def drive(root: Path, work: str) -> list[Path]:
    """The parent folders of runs killed at each moment; the last is of the one that got through."""
    answer = subprocess.run([sys.executable, "-c", DRIVER, root, work], capture_output=True, text=True, check=True)
    moments, status = map(int, answer.stdout.split())
    assert status == 0, answer.stderr
    return [root / str(n) for n in range(1, moments + 1)]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("lora", "optimiser")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", DOGS)


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill, unlike a power cut, does not ask what fsync did, which is slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as folder:
        yield Path(folder)


# ---- making and opening


def test_a_new_run_says_where_it_comes_from(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "new" / "runs", DOGS, extra={"device": "cpu"})
    assert run.path.name == run_name(DOGS)
    assert names(run.path) == ["config.yaml", "manifest.json", "metrics.jsonl"]
    assert names(run.path.parent) == sorted([run.path.name, *(f"{run.path.name}/{name}" for name in names(run.path))])
    assert {"torch", "diffusers", "transformers", "peft", "cgru"} == run.manifest["versions"].keys()
    assert {"started", "argv", "commit", "python", "platform"} <= run.manifest.keys()
    assert run.manifest["extra"] == {"device": "cpu"}
    run.annotate(micro_batch=8)
    assert run.manifest["extra"] == {"device": "cpu", "micro_batch": 8}


def test_the_config_is_complete_and_can_be_fed_back(run: Run) -> None:
    assert load(run.path / "config.yaml") == Run.open(run.path).config == DOGS
    (run.path / "edit").mkdir()
    (run.path / "edit" / "pytorch_lora_weights.safetensors").touch()
    assert base_model(str(run.path), default="other") == "emoji-canvas"


@pytest.mark.parametrize(
    ("concept", "method", "start"),
    [
        ("Dogs", "cgru", "dogs-cgru-s0-"),
        ("a cat / ../../etc", "cgru.methods.ddpo:METHOD", "a-cat-etc-cgru-methods-ddpo-method-s0-"),
        ("Собаки", "cgru", "собаки-cgru-s0-"),
        ("!?", "cgru", "concept-cgru-s0-"),
        ("x" * 300, "cgru", "x" * 40 + "-cgru-s0-"),
    ],
)
def test_names_are_safe_file_names(concept: str, method: str, start: str, tmp_path: Path) -> None:
    config = RLConfig(concept=concept, method=method)
    assert run_name(config).startswith(start)
    assert len(run_name(config)) == len(start) + 8
    assert Run.create(tmp_path, config).path.parent == tmp_path


def test_the_same_settings_find_the_same_run(run: Run) -> None:
    started = run.manifest
    again = Run.create(run.path.parent, replace(DOGS, device="cpu", checkpoint_every=1))
    assert again.path == run.path
    assert again.manifest == started
    assert again.config.device == "cpu"  # of this process; the file keeps the first start's
    assert Run.open(run.path).config.device == "auto"
    assert Run.create(run.path.parent, replace(DOGS, seed=1)).path != run.path


def test_another_config_in_the_folder_is_refused_with_the_keys(run: Run) -> None:
    other = override(DOGS, ["policy.iterations=60", "critic.kind=plain"])
    (run.path.parent / run_name(other)).symlink_to(run.path)  # as if two hashes were equal
    with pytest.raises(ValueError) as error:
        Run.create(run.path.parent, other)
    assert "critic.kind: 'film' -> 'plain'; policy.iterations: 100 -> 60" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_edited_config_is_refused_with_the_keys(run: Run) -> None:
    (run.path / "config.yaml").write_text(dump(replace(DOGS, policy=PolicyConfig(rank=8), device="cpu")))
    for start in (lambda: Run.open(run.path), lambda: Run.create(run.path.parent, DOGS)):
        with pytest.raises(ValueError, match=r"has a changed config.yaml \(policy.rank: 4 -> 8\); allowed to differ"):
            start()
    (run.path / "config.yaml").write_text(dump(replace(DOGS, device="cpu")))  # a key that changes no result
    assert Run.open(run.path).config.device == "cpu"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run at"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a folder and not a run: it has no config.yaml and no manifest.json"):
        Run.open(tmp_path)
    (tmp_path / "config.yaml").write_text(dump(DOGS))
    with pytest.raises(ValueError, match="not a run: it has no manifest.json"):
        Run.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json' is b'{'; allowed: one JSON table"):
        Run.open(tmp_path)


def test_a_file_in_place_of_the_run_stays(tmp_path: Path) -> None:
    file = tmp_path / run_name(DOGS)
    file.write_text("mine")
    with pytest.raises(ValueError, match="is a file and not a run"):
        Run.create(tmp_path, DOGS)
    assert names(tmp_path) == [file.name]
    assert file.read_text() == "mine"


def test_a_folder_of_someone_else_stays(tmp_path: Path) -> None:
    (tmp_path / run_name(DOGS)).mkdir()
    (tmp_path / run_name(DOGS) / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is a folder and not a run"):
        Run.create(tmp_path, DOGS)
    assert names(tmp_path) == [run_name(DOGS), f"{run_name(DOGS)}/thesis.tex"]


@pytest.mark.parametrize("parent", ["/proc", "/dev/null", "/proc/no/such"])
def test_a_parent_that_cannot_be_written(parent: str) -> None:
    with pytest.raises(
        OSError, match=r"cannot make the run '/(proc|dev).*; allowed: a folder you may write to"
    ) as error:
        Run.create(parent, DOGS)
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_no_half_made_run(tmp_path: Path) -> None:
    with file_size_limit(100), pytest.raises(OSError, match=r"cannot make the run .*File too large"):
        Run.create(tmp_path, DOGS)
    assert names(tmp_path) == []


def test_a_commit_is_told_for_tracked_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "code.py").write_text("1")
    monkeypatch.setenv("CGRU_COMMIT", "abc")
    assert commit_of(tmp_path / "code.py") == "abc"  # a copy, of which someone says what it is
    monkeypatch.delenv("CGRU_COMMIT")
    assert commit_of(tmp_path / "code.py") is None  # no repository
    git("init", "-q")
    assert commit_of(tmp_path / "code.py") is None  # not tracked: installed inside someone's repository
    git("add", "code.py")
    git("commit", "-qm", "start")
    assert commit_of(tmp_path / "code.py") == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path / "code.py") == git("rev-parse", "HEAD") + "-dirty"


# ---- one process at a time


def test_a_second_process_is_refused_until_the_first_is_gone(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, run.path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = names(run.path)
        with pytest.raises(ValueError, match=f"is in use by process {holder.pid} on .*; allowed: one process") as error:
            run.locked().__enter__()
        assert "\n" not in str(error.value)
        assert names(run.path) == before
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.locked():
            assert f"process {os.getpid()} on" in (run.path / ".lock").read_text()


def test_the_lock_holds_within_a_process_and_ends_with_the_block(run: Run) -> None:
    with run.locked(), pytest.raises(ValueError, match="in use"), Run.open(run.path).locked():
        pass
    with run.locked():
        pass


def test_many_processes_may_make_the_same_run_at_once(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    makers = [subprocess.Popen([sys.executable, "-c", MAKER, tmp_path], **pipes) for _ in range(4)]
    for maker in makers:
        maker.stdin.close()  # all start now
        maker.stdin = None
    assert {maker.communicate()[0].strip() for maker in makers} == {str(tmp_path / run_name(DOGS))}
    assert [path.name for path in tmp_path.iterdir()] == [run_name(DOGS)]


# ---- kill -9


def test_a_run_killed_while_made_is_whole_or_absent(fast_disk: Path) -> None:
    parents = drive(fast_disk, "create")
    assert len(parents) > 5  # mkdir, three files, rename at least: else the driver sees nothing
    absent = 0
    for parent in parents:
        absent += not (parent / run_name(DOGS)).exists()
        run = Run.create(parent, DOGS)
        with run.locked():
            assert [path.name for path in parent.iterdir()] == [run_name(DOGS)]
        assert names(run.path) == [".lock", "config.yaml", "manifest.json", "metrics.jsonl"]
    assert 0 < absent < len(parents)


def test_a_run_killed_while_training_keeps_a_whole_checkpoint(fast_disk: Path) -> None:
    outcomes = []
    for parent in drive(fast_disk, "train"):
        run = Run.open(parent / run_name(DOGS))
        found = run.latest(STAGE)
        assert found is not None
        iteration, folder = found
        text = contents(folder)["lora"]
        assert contents(folder) == {"lora": text, "optimiser": text}
        assert text in (["first"] if iteration == 1 else ["second", "again"])
        records = read_metrics(run.path / "metrics.jsonl")
        assert (
            records[:iteration]
            == [{"iteration": 0, "reward/mean": 0.5}, {"iteration": 1, "reward/mean": 0.75}][:iteration]
        )
        if run.is_done(STAGE):
            assert text == "again"
            assert (run.path / "edit/lora").read_bytes() == b"product"
        with run.locked():
            assert [name for name in names(parent) if name.endswith(".tmp")] == []
            assert run.latest(STAGE) == found
            assert [path.name for path in (run.path / "stages" / STAGE).glob("checkpoint*")] == [folder.name]
        outcomes.append((text, run.is_done(STAGE)))
    # Every state on the way was met, in order, and the last child got through.
    assert list(dict.fromkeys(outcomes)) == [("first", False), ("second", False), ("again", False), ("again", True)]


# ---- full disk


def to_full_disk(file: BinaryIO) -> None:
    file.write(b"half")
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"the other half")  # the kernel's own ENOSPC


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")


@needs_dev_full
def test_a_full_disk_loses_no_earlier_checkpoint(run: Run) -> None:
    run.checkpoint(STAGE, {"lora": b"good", "optimiser": b"good"}, 5)
    before = names(run.path)
    for iteration in (5, 10):  # again, and the next
        with pytest.raises(OSError, match=r"cannot write .*checkpoint-\d+' \(No space left on device\)") as error:
            run.checkpoint(STAGE, {"lora": b"bad", "optimiser": to_full_disk}, iteration)
        assert "\n" not in str(error.value)
        assert run.latest(STAGE) == (5, run.path / "stages" / STAGE / "checkpoint-5")
        assert names(run.path) == before
    assert contents(run.path / "stages" / STAGE / "checkpoint-5") == {"lora": "good", "optimiser": "good"}


def test_a_checkpoint_beyond_the_limit_loses_no_earlier_one(run: Run) -> None:
    run.checkpoint(STAGE, {"lora": b"good"}, 5)
    before = names(run.path)
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        run.checkpoint(STAGE, {"lora": bytes(5000)}, 10)
    assert names(run.path) == before
    assert run.latest(STAGE) == (5, run.path / "stages" / STAGE / "checkpoint-5")


@needs_dev_full
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "old")
    with pytest.raises(OSError, match="No space left on device"):
        atomic_write(tmp_path / "a", to_full_disk)
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        atomic_write(tmp_path / "a", b"new" * 10)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_leaves_no_half_record(run: Run) -> None:
    run.log({"iteration": 0})
    with file_size_limit(40), pytest.raises(OSError, match=r"cannot write .*metrics.jsonl' \(File too large\)"):
        run.log({"iteration": 1, "note": "x" * 100})  # 40 - 17 bytes of it fit
    run.log({"iteration": 1})
    assert (run.path / "metrics.jsonl").read_text() == '{"iteration": 0}\n{"iteration": 1}\n'


# ---- stages and checkpoints


def test_a_stage_is_done_when_its_marker_is_there(run: Run) -> None:
    assert not run.is_done("1-reward")
    run.stage("1-reward")
    assert not run.is_done("1-reward")
    run.finish("1-reward", {"accuracy": 0.9, "loss": math.nan})
    assert Run.open(run.path).is_done("1-reward")
    assert run.outcome("1-reward") == {"accuracy": 0.9, "loss": None}
    assert not run.is_done("2-critic")


def test_only_the_newest_checkpoint_is_kept_and_stages_do_not_mix(run: Run) -> None:
    assert run.latest(STAGE) is None
    for iteration in (5, 10, 9, 100):  # 9 < 10: the last one written counts, not the highest
        run.checkpoint(STAGE, {"lora": str(iteration)}, iteration)
        assert run.latest(STAGE) == (iteration, run.path / "stages" / STAGE / f"checkpoint-{iteration}")
    run.checkpoint("2-critic", {"critic": b"c"}, 1)
    assert names(run.path / "stages") == [
        "2-critic",
        "2-critic/checkpoint-1",
        "2-critic/checkpoint-1/checkpoint.json",
        "2-critic/checkpoint-1/critic",
        STAGE,
        f"{STAGE}/checkpoint-100",
        f"{STAGE}/checkpoint-100/checkpoint.json",
        f"{STAGE}/checkpoint-100/lora",
    ]


def test_a_checkpoint_copied_half_is_passed_over(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    folder = run.checkpoint(STAGE, {"lora": b"good"}, 5)
    for name, damage in (("checkpoint-6", "lora"), ("checkpoint-7", "checkpoint.json")):
        newer = folder.with_name(name)
        newer.mkdir()
        for file in folder.iterdir():
            (newer / file.name).write_bytes(file.read_bytes())
        (newer / damage).unlink()
    (folder.with_name("checkpoint-8")).mkdir()
    (folder.with_name("checkpoint-8") / "checkpoint.json").write_text((folder / "checkpoint.json").read_text())
    (folder.with_name("checkpoint-8") / "lora").write_bytes(b"goo")  # a byte short
    (folder.with_name("checkpoint-9")).mkdir()
    (folder.with_name("checkpoint-9") / "checkpoint.json").write_text('{"files')
    assert run.latest(STAGE) == (5, folder)
    assert caplog.text.count("incomplete") == 4
    with run.locked():
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-5"]


def test_the_evaluations_own_temporary_files_are_left_alone(run: Run) -> None:
    for name in ("eval/canvas@1/.scores.json.7.tmp", "edit/.lora.7.tmp", ".config.yaml.7.tmp"):
        run.save(name, b"x")
    with run.locked():
        assert [name for name in names(run.path) if name.endswith(".tmp")] == ["eval/canvas@1/.scores.json.7.tmp"]


# ---- metrics


def test_records_are_flat_lines_and_no_number_is_null(run: Run) -> None:
    record = {"iteration": 0, "reward/mean": 9.5, "critic/loss": math.nan, "kl": -math.inf, "note": "Häkchen\n"}
    run.log(record)
    line = '{"iteration": 0, "reward/mean": 9.5, "critic/loss": null, "kl": null, "note": "Häkchen\\n"}\n'
    assert (run.path / "metrics.jsonl").read_text(encoding="utf-8") == line
    assert read_metrics(run.path / "metrics.jsonl") == [record | {"critic/loss": None, "kl": None}]
    with pytest.raises(ValueError, match="cannot log .reward. = "):
        run.log({"reward": [1.0, 2.0]})


@pytest.mark.parametrize("torn", [b'{"iteration": 2, "rew', b'{"iteration": 2}', b"\xc3", b"\0\0"])
def test_a_torn_last_line_is_passed_over_and_cut_on_resume(run: Run, torn: bytes) -> None:
    for iteration in range(2):
        run.log({"iteration": iteration})
    file = run.path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    assert [record["iteration"] for record in read_metrics(file)] == [0, 1]
    with run.locked():
        assert file.read_bytes() == whole
        run.log({"iteration": 2})
    assert [record["iteration"] for record in read_metrics(file)] == [0, 1, 2]


def test_a_broken_line_elsewhere_is_an_error(run: Run) -> None:
    (run.path / "metrics.jsonl").write_text('{"iteration": 0}\n{"itera\n{"iteration": 1}\n')
    with pytest.raises(ValueError, match="line 2 of "):
        read_metrics(run.path / "metrics.jsonl")
    with pytest.raises(FileNotFoundError, match="no metrics at"):
        read_metrics(run.path / "metrics.json")


def test_records_past_the_checkpoint_are_cut_to_the_byte(run: Run) -> None:
    run.log({"stage": "critic", "epoch": 7})
    for iteration in range(3):
        run.log({"iteration": iteration, "reward/mean": 1 / 3})
    before = (run.path / "metrics.jsonl").read_bytes()
    run.truncate_log(3)
    assert (run.path / "metrics.jsonl").read_bytes() == before
    run.truncate_log(1)
    assert (run.path / "metrics.jsonl").read_bytes() == b"".join(before.splitlines(keepends=True)[:2])
