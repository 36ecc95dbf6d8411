"""`cgru unlearn`, `resume`, `curves` and `export`: check and load everything first, then run, and say how it ended."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru import processes
from cgru.cli.live import duration, following
from cgru.cli.options import Curves, Export, Resume, Unlearn
from cgru.cli.terminal import quiet_libraries, show
from cgru.config import RunConfig, to_dict
from cgru.disk import atomic_write
from cgru.presets import is_hazard, resolve_config
from cgru.report.curves import CURVES, run_curves
from cgru.runs import Run, read_metrics, run_name

if TYPE_CHECKING:
    from rich.console import Console

    from cgru.pipeline.observer import Listener

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
    from cgru.cli.plan import describe_plan, prepare_parts
    from cgru.cli.trackers import check_tracker
    from cgru.evaluation.store import check_writable
    from cgru.pipeline.stages import memory_in_words, unlearn

    check_tracker(config.tracker)
    check_writable(options.out)
    folder = options.out / run_name(config)
    with exact_float32(), memory_in_words():  # as the run itself: sizes are measured here
        parts = prepare_parts(config)
        if options.dry_run:
            record = describe_plan(parts) | {"run": str(folder), "config": to_dict(config)}
            return lambda: show(record, options.json, lambda console: tell_plan(console, record))
    loaded = [parts]  # given away, so that an existing run, which has sizes of its own, need not keep two models

    def train(listeners: tuple[Listener, ...]) -> Run:
        return unlearn(config, options.out, listeners=listeners, parts=loaded.pop())

    return lambda: _train(config, folder, options.json, train)


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
    )


def prepare_resume(options: Resume, root: Path) -> Work:
    """Open the run: a folder that is none, or a changed config, is said here."""
    run = Run.open(options.run)
    quiet_libraries()
    from cgru.cli.trackers import check_tracker
    from cgru.pipeline import resume

    check_tracker(run.config.tracker)
    return lambda: _train(run.config, run.path, options.json, lambda listeners: resume(run.path, listeners=listeners))


def _train(config: RunConfig, folder: Path, as_json: bool, work: Callable[[tuple[Listener, ...]], Run]) -> int:
    from cgru.cli.trackers import tracking
    from cgru.pipeline.stages import Interrupted

    if not processes.is_main():
        return _train_silently(work)
    try:
        with (
            tracking(config, folder.parent) as trackers,
            following(folder, config.policy.iterations, is_quiet=as_json) as listener,
        ):
            run = work((listener, *trackers))
    except (Interrupted, KeyboardInterrupt):
        if drawn := _draw(folder):
            print(f"cgru: the curves so far: {drawn}", file=sys.stderr)
        return _stopped(folder, "interrupted", 130)
    except (ValueError, FileNotFoundError) as error:  # a user's mistake that shows only now
        return _stopped(folder, str(error), 2)
    except OSError as error:
        return _stopped(folder, str(error), 1)
    _draw(run.path)
    record = outcome(run)
    return show(record, as_json, lambda console: _tell_outcome(console, record))


def _draw(folder: Path) -> Path | None:
    # The run counts, not its picture: without an iteration there is none, and a full disk is no failure of the run.
    try:
        run = Run.open(folder)
        return run.save(CURVES, run_curves(run))
    except (ValueError, FileNotFoundError):
        return None
    except OSError as error:
        logger.warning("no curves: %s", error)
        return None


def _train_silently(work: Callable[[tuple[Listener, ...]], Run]) -> int:
    """Work beside the main process, which shows and tells what there is; an error that it has not is told here."""
    from cgru.pipeline.stages import Interrupted

    try:
        work(())
        return 0
    except (Interrupted, KeyboardInterrupt):
        processes.defer_to_main()
        return 130
    except (ValueError, FileNotFoundError) as error:
        why, code = str(error), 2
    except OSError as error:
        why, code = str(error), 1
    processes.defer_to_main()
    print(processes.signed(" ".join(why.split())), file=sys.stderr)
    return code


def _stopped(folder: Path, why: str, code: int) -> int:
    # What a run has reached is in its folder, whatever ended it.
    way = f" Go on with: cgru resume {folder}" if (folder / "manifest.json").is_file() else ""
    print(f"cgru: {' '.join(why.split())}{'.' if not why.endswith('.') else ''}{way}", file=sys.stderr)
    return code


def outcome(run: Run) -> dict[str, Any]:
    """A finished run for machines: where it is, and what it last measured."""
    metrics = read_metrics(run.path / "metrics.jsonl")
    looks = [{key: row[key] for key in row if key.startswith("watch/")} for row in metrics if "watch/gap" in row]
    return {
        "run": str(run.path),
        "edit": str(run.path / "edit"),
        "concept": run.config.concept,
        "model": run.config.model,
        "method": run.config.method,
        "preset": run.config.preset,
        "seed": run.config.seed,
        "iterations": len(metrics),
        "reward": [metrics[i]["reward/mean"] for i in (0, -1)] if metrics else None,
        "outside_look": looks[-1] if looks else None,
        "samples": str(run.path / "samples"),
        "curves": str(run.path / CURVES) if (run.path / CURVES).is_file() else None,
    }


def _tell_outcome(console: Console, record: Mapping[str, Any]) -> None:
    first, last = record["reward"] or (None, None)
    if first is not None and last is not None:  # null stands for a mean of no pictures
        console.print(
            f"{record['concept']}: reward {first:.2f} → {last:.2f} in {record['iterations']} iterations", soft_wrap=True
        )
    look = record["outside_look"]
    if look:
        seen, kept = (look[f"watch/{name}"] for name in ("target_share", "keep_share"))
        console.print(f"outside detector: concept in {seen:.0%} of validation pictures, others kept {kept:.0%}")
    console.print(f"samples over training: {record['samples']}", soft_wrap=True)
    if record["curves"]:
        console.print(f"curves of reward, outside detector, critic and policy: {record['curves']}", soft_wrap=True)
    console.print(f"the edit, for diffusers' load_lora_weights: {record['edit']}", soft_wrap=True)
    if record["model"] == "emoji-canvas":
        target = "" if is_hazard(record["concept"]) else f" --target {record['concept']!r}"  # the grid has no hazards
        console.print(f"next: cgru evaluate {record['run']}{target}", soft_wrap=True)
    console.print(record["run"], soft_wrap=True)


def tell_plan(console: Console, record: Mapping[str, Any]) -> None:
    """The plan for people."""
    from rich.table import Table

    low, high = record["reward_range"]
    rows: Sequence[tuple[str, str]] = [
        ("forget", f"{record['concept']} ({record['kind']}) in {record['model']} on {record['device']}"),
        ("method", f"{record['method']}, preset {record['preset']}, seed {record['seed']}"),
        ("reward", f"{record['reward']}, {low:g} to {high:g}"),
        ("outside detector", record["detector"] or "none for this model and concept"),
    ]
    facts = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        facts.add_row(*row)
    console.print(facts)
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
        f"estimate, measured for a moment on this machine: {duration(record['seconds_in_all'])}, "
        f"{record['memory_gib']:.1f} GiB of memory"
    )
    console.print(f"nothing was written; the run would be {record['run']}", soft_wrap=True)


def prepare_curves(options: Curves, root: Path) -> Work:
    """Draw: a folder that is no run, or a run without an iteration, is said here."""
    from cgru.evaluation.store import check_writable

    run = Run.open(options.run)
    path = run.path / CURVES if options.out is None else options.out
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, where the picture goes; allowed: a FILE.svg. Give another --out.")
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
