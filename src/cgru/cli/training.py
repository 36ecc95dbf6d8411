"""`cgru unlearn`, `resume`, `curves` and `export`: check and load everything, then run and report the outcome."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru import distributed
from cgru.atomic_io import atomic_write
from cgru.catalog import own_mistake
from cgru.cli.options import Curves, Export, Resume, Unlearn
from cgru.cli.progress_run import duration, following
from cgru.cli.terminal import names_of, one_line, show
from cgru.config import RunConfig, is_code, named_code, refuse_unnamed_code, to_dict
from cgru.edit_folder import read_note
from cgru.embedded import EMBEDDED, proof_of
from cgru.interrupt import Interrupted
from cgru.presets import resolve_config
from cgru.quiet import quiet_libraries
from cgru.report.draw.curves import CURVES, run_curves
from cgru.runs import Listener, Run, read_metrics, run_name

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

Work = Callable[[], int]
UNITS = {
    "denoise": "denoiser calls",
    "update": "denoiser calls with gradient",
    "decode": "decodes",
    "reward": "pictures scored",
    "value": "critic calls",
    "fit": "critic calls with gradient",
}


def prepare_unlearn(options: Unlearn, root: Path) -> Work:
    """Resolve and check the whole config, load model and prompts; nothing is written."""
    config = asked_config(options)
    quiet_libraries()
    from cgru.backbones.base import exact_float32
    from cgru.evaluation.store import check_writable
    from cgru.pipeline.unlearning import describe_plan, oom_as_message, prepare, unlearn

    check_writable(options.out)
    folder = options.out / run_name(config)
    with exact_float32(), oom_as_message():  # as in the run itself: batch sizes are measured here
        ready = prepare(config)
        if options.dry_run:
            record = describe_plan(ready) | {"run": str(folder), "config": to_dict(config)}
            return lambda: show(record, options.json, lambda console: tell_plan(console, record))
    loaded = [ready]  # passed on and dropped here: resuming an existing run loads its own model, and two may not fit
    del ready

    def work() -> int:
        with _reported(config, folder, options.json) as attempt:
            attempt.run = unlearn(config, options.out, listeners=attempt.listeners, ready=loaded.pop())
        return attempt.code

    return work


def asked_config(options: Unlearn) -> RunConfig:
    """The config that the options name; seed, device and dtype are settings like any other."""
    given = {"seed": options.seed, "device": options.device, "dtype": options.dtype}
    settings = [f"{key}={value}" for key, value in given.items() if value is not None]
    return resolve_config(
        options.concept,
        model=options.model,
        method=options.method,
        preset_name=options.preset,
        config_file=options.config,
        overrides=[*settings, *options.settings],
        code=names_of(options.code),
    )


def prepare_resume(options: Resume, root: Path) -> Work:
    """Open the run; a folder that is not a run, or a changed config, raises here."""
    code = names_of(options.code)
    run = Run.open(options.run, code=code)
    refuse_unnamed_code(run.config, code, f"the run {options.run!r}", "--code")
    quiet_libraries()
    from cgru.pipeline import resume
    from cgru.pipeline.trackers import check_tracker

    check_tracker(run.config.tracker)

    def work() -> int:
        with _reported(run.config, run.path, options.json) as attempt:
            attempt.run = resume(run.path, listeners=attempt.listeners, code=code)
        return attempt.code

    return work


@dataclass
class _Attempt:
    """A run in progress."""

    listeners: tuple[Listener, ...] = ()
    """Called with each record."""
    run: Run | None = None
    """Set when the run is finished."""
    code: int = 0
    """The exit code."""


@contextmanager
def _reported(config: RunConfig, folder: Path, as_json: bool) -> Iterator[_Attempt]:
    """Show the progress of the run in the `with` block and report the outcome; an error becomes the exit code."""
    from cgru.pipeline.trackers import tracking

    attempt = _Attempt()
    if not distributed.is_main():
        with _silently(attempt):
            yield attempt
        return
    try:
        with (
            tracking(config, folder.parent) as trackers,
            following(folder, config.length, is_quiet=as_json) as listener,
        ):
            attempt.listeners = (listener, *trackers)
            yield attempt
    except (Interrupted, KeyboardInterrupt):
        if drawn := _draw(folder):
            print(f"cgru: curves up to here: {drawn}", file=sys.stderr)
        attempt.code = _stopped(config, folder, "interrupted", 130)
    except (ValueError, FileNotFoundError) as error:  # invalid input that could not be detected earlier
        attempt.code = _stopped(config, folder, str(error), 2)
    except OSError as error:
        attempt.code = _stopped(config, folder, str(error), 1)
    except Exception as error:  # raised by the user's own reward or model
        if (told := own_mistake(error)) is None:
            raise
        attempt.code = _stopped(config, folder, told, 2)
    else:
        assert attempt.run is not None
        _draw(attempt.run.path)
        record = outcome(attempt.run)
        attempt.code = show(record, as_json, lambda console: _tell_outcome(console, record))


def _draw(folder: Path) -> Path | None:
    # Without curves the run is still a success: a run without an iteration has none, and the disk may be full.
    try:
        run = Run.open(folder)
        return run.save(CURVES, run_curves(run))
    except (ValueError, FileNotFoundError):
        return None
    except OSError as error:
        logger.warning("no curves: %s", error)
        return None


@contextmanager
def _silently(attempt: _Attempt) -> Iterator[None]:
    """Run as a process other than the main one; print only errors that the main process does not have."""
    try:
        yield
        return
    except (Interrupted, KeyboardInterrupt):
        distributed.defer_to_main()
        attempt.code = 130
        return
    except (ValueError, FileNotFoundError) as error:
        why, attempt.code = str(error), 2
    except OSError as error:
        why, attempt.code = str(error), 1
    except Exception as error:
        if (told := own_mistake(error)) is None:
            raise
        why, attempt.code = told, 2
    distributed.defer_to_main()
    print(distributed.signed(one_line(why)), file=sys.stderr)


def _stopped(config: RunConfig, folder: Path, why: str, code: int) -> int:
    # The folder holds everything up to the last checkpoint. User code must be named again on the command line.
    own = "".join(f" --code {name}" for name in named_code(config))
    way = f" Continue with: cgru resume {shlex.quote(str(folder))}{own}" if (folder / "manifest.json").is_file() else ""
    print(f"cgru: {one_line(why)}{'.' if not why.endswith('.') else ''}{way}", file=sys.stderr)
    return code


def outcome(run: Run) -> dict[str, Any]:
    """A finished run as a JSON record: its files and its last metrics."""
    metrics = read_metrics(run.path / "metrics.jsonl")
    looks = [{key: row[key] for key in row if key.startswith("watch/")} for row in metrics if "watch/gap" in row]
    return {
        "run": str(run.path),
        "edit": str(run.path / "edit"),
        "kind": read_note(run.path / "edit").kind if run.has_edit else None,
        "concept": run.config.concept,
        "model": run.config.model,
        "method": run.config.method,
        "preset": run.config.preset,
        "seed": run.config.seed,
        "iterations": len(metrics),
        "reward": _ends(metrics, "reward/mean"),
        "loss": _ends(metrics, "loss"),
        "outside_look": looks[-1] if looks else None,
        "samples": str(run.path / "samples") if (run.path / "samples").is_dir() else None,
        "curves": str(run.path / CURVES) if (run.path / CURVES).is_file() else None,
    }


def _ends(metrics: Sequence[Mapping[str, Any]], key: str) -> list[Any] | None:
    """The first and the last value of a metric; None if the method does not log it. Texts are refused when logged."""
    found = [row[key] for row in metrics if key in row and not isinstance(row[key], str)]
    return [found[0], found[-1]] if found else None


def _tell_outcome(console: Console, record: Mapping[str, Any]) -> None:
    for figure in ("reward", "loss"):
        first, last = record[figure] or (None, None)
        if first is not None and last is not None:  # null: the mean of no pictures
            way = f"{figure} {first:.3g} → {last:.3g} in {record['iterations']} iterations"
            console.print(f"{record['concept']}: {way}", soft_wrap=True)
    look = record["outside_look"]
    if look:
        seen, kept = (look[f"watch/{name}"] for name in ("target_share", "keep_share"))
        console.print(f"outside detector: concept in {seen:.0%} of validation pictures, others kept {kept:.0%}")
    if record["samples"]:
        console.print(f"samples over training: {record['samples']}", soft_wrap=True)
    if record["curves"]:
        console.print(f"curves of reward, outside detector, critic and policy: {record['curves']}", soft_wrap=True)
    is_for_diffusers = record["kind"] == "lora" and not is_code(record["model"])
    use = ", for diffusers' load_lora_weights" if is_for_diffusers else ""
    console.print(f"the edit ({record['kind']}{use}): {record['edit']}", soft_wrap=True)
    if record["model"] == EMBEDDED:
        console.print(
            f"next: {shlex.join(['cgru', 'evaluate', record['run'], *proof_of(record['concept'])])}", soft_wrap=True
        )
    console.print(record["run"], soft_wrap=True)


def tell_plan(console: Console, record: Mapping[str, Any]) -> None:
    """Print the plan as text."""
    from rich.table import Table

    preset = f", preset {record['preset']}" if record["preset"] else ""
    rows: list[tuple[str, str]] = [
        ("forget", f"{record['concept']} ({record['kind']}) in {record['model']} on {record['device']}"),
        ("method", f"{record['method']}{preset}, seed {record['seed']}"),
    ]
    if "reward" in record:
        low, high = record["reward_range"]
        rows.append(("reward", f"{record['reward']}, {low:g} to {high:g}"))
        rows.append(("outside detector", record["detector"] or "none for this model and concept"))
    rows += record.get("lines", {}).items()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        facts.add_row(*row)
    console.print(facts)
    if "stages" in record:
        _tell_work(console, record)
    console.print(f"nothing was written; the run would be {record['run']}", soft_wrap=True)


def _tell_work(console: Console, record: Mapping[str, Any]) -> None:
    """Print the prompts, counts and estimates of a policy-gradient run (`cgru.rl.estimate`)."""
    from rich.table import Table

    prompts = Table("set", "prompts", "such as", title="prompts", title_justify="left")
    for name, found in record["prompts"].items():
        prompts.add_row(name, str(found["count"]), found["example"])
    console.print(prompts)
    work = Table("what", title="work", title_justify="left")
    for stage in record["stages"]:
        work.add_column(stage, justify="right")
    for kind, words in UNITS.items():
        work.add_row(words, *(str(counts[kind]) for counts in record["stages"].values()))
    work.add_row("time", *(duration(seconds) for seconds in record["seconds"].values()))
    console.print(work)
    console.print(f"{record['trajectories']} trajectories and {record['updates']} updates of the policy")
    console.print(
        f"estimate, from a short measurement on this machine: {duration(record['seconds_in_all'])}, "
        f"{record['memory_gib']:.1f} GiB of memory"
    )


def prepare_curves(options: Curves, root: Path) -> Work:
    """Draw the curves; a folder that is not a run, or a run without an iteration, raises here."""
    from cgru.evaluation.store import check_writable

    run = Run.open(options.run)
    path = run.path / CURVES if options.out is None else options.out
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; allowed: a FILE.svg. Give another --out.")
    svg = run_curves(run)
    check_writable(path.absolute().parent)
    record = {"curves": str(path), "run": str(run.path)}

    def work() -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, svg)
        return show(record, options.json, lambda console: console.print(record["curves"], soft_wrap=True))

    return work


def prepare_export(options: Export, root: Path) -> Work:
    """Check run, folder and base."""
    quiet_libraries()
    from cgru.evaluation.store import check_writable
    from cgru.pipeline import export as exporting

    request = exporting.prepare_export(options.run, options.folder, dtype=options.dtype, root=root)
    check_writable(request.folder.absolute().parent)

    def work() -> int:
        folder = exporting.export(request)
        record = {"folder": str(folder), "run": options.run, **request.note}
        return show(record, options.json, lambda console: _tell_export(console, record))

    return work


def _tell_export(console: Console, record: Mapping[str, Any]) -> None:
    console.print(f"{record['base']} without {record['concept']}, a whole diffusers model", soft_wrap=True)
    console.print(record["folder"], soft_wrap=True)
