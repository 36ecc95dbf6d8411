"""What each command does: `prepare_*` checks and loads, and returns the work that is left."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru import catalog, processes
from cgru.cli.attacking import prepare_attack
from cgru.cli.options import (
    Attack,
    Caption,
    Curves,
    Doctor,
    Evaluate,
    Export,
    Generate,
    ListNames,
    Report,
    Reproduce,
    Resume,
    Split,
    Sweep,
    Unlearn,
)
from cgru.cli.prompting import prepare_caption, prepare_split
from cgru.cli.reporting import prepare_report
from cgru.cli.reproducing import prepare_reproduce
from cgru.cli.sweeping import prepare_sweep
from cgru.cli.terminal import names_of, progress_bar, quiet_libraries, save_png, show
from cgru.cli.training import prepare_curves, prepare_export, prepare_resume, prepare_unlearn
from cgru.evaluation import assets
from cgru.evaluation.base import Sampling, stable_hash

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from cgru.backbones.base import Backbone
    from cgru.evaluation.session import Session

BATCH = 16
BROKEN = "not finite numbers, as of a model that has diverged"
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".svg", ".pdf"}
Work = Callable[[], int]
"""The second half of a command; returns the exit code."""


def prepare_generate(options: Generate, root: Path) -> Work:
    """Check the options and load the model."""
    _check_generate(options)
    _check_place(options.out, PICTURES - {".png"}, "a folder or a FILE.png")
    folder = _picture_folder(options)
    from cgru.evaluation.store import check_writable

    check_writable(folder)
    for path in _picture_paths(options, folder):
        if path.is_dir():
            raise ValueError(f"{str(path)!r} is a folder, where a picture goes; allowed: a file or nothing. Move it.")
    backbone = _load_model(options, root)
    sampling = _sampling(options, root)
    backbone.kernel(sampling.steps, eta=sampling.eta)  # too many steps for this model: said now
    return lambda: _generate(options, backbone, sampling, folder)


def _check_generate(options: Generate) -> None:
    if not options.prompts or not all(prompt.strip() for prompt in options.prompts):
        raise ValueError("no prompt or an empty one; allowed: one text or more. Try: cgru generate 'a poodle'")
    limits: list[tuple[str, float | None, float, float]] = [
        ("--images", options.images, 1, 10_000),
        ("--steps", options.steps, 1, 1000),
        ("--seed", options.seed, 0, 2**32 - options.images),  # torch's CPU generator keeps 32 bits of the last one
        ("--guidance", options.guidance, 0, 100),
        ("--eta", options.eta, 0, 1),
    ]
    for option, given, low, high in limits:
        if given is not None and not low <= given <= high:
            raise ValueError(f"{option} {given}; allowed: {low} to {high}. Give a number in that range.")


def _check_place(out: Path | None, refused: set[str], allowed: str) -> None:
    if out is not None and out.suffix.lower() in refused and not out.is_dir():
        raise ValueError(f"--out {str(out)!r} is named like a picture; allowed: {allowed}. Choose another name.")


def _picture_folder(options: Generate) -> Path:
    if options.out is not None:
        return options.out.parent if _is_picture(options.out) else options.out
    settings = {name: value for name, value in asdict(options).items() if name not in ("out", "json")}
    return Path("runs") / "generate" / f"{_slug(options.prompts[0])}-{stable_hash(settings)[:8]}"


def _is_picture(out: Path | None) -> bool:
    return out is not None and out.suffix.lower() == ".png" and not out.is_dir()


def _sampling(options: Generate, root: Path) -> Sampling:
    is_own = assets.is_embedded(options.model, root)
    # Other models: the defaults of diffusers' StableDiffusionPipeline.
    own = assets.load_vocabulary(root).sampling if is_own else Sampling(50, 7.5, 0.0)
    return Sampling(
        own.steps if options.steps is None else options.steps,
        own.guidance if options.guidance is None else options.guidance,
        own.eta if options.eta is None else options.eta,
    )


def _generate(options: Generate, backbone: Backbone, sampling: Sampling, folder: Path) -> int:
    from cgru.evaluation.drawing import draw, mend, to_pictures

    asked = _asked(options)
    pictures: list[Image] = []
    lost = 0
    with progress_bar(options.json) as progress:
        for start in range(0, len(asked), BATCH):
            prompts, seeds = zip(*asked[start : start + BATCH], strict=True)
            images, broken = mend(draw(backbone, prompts, seeds, sampling))
            pictures += to_pictures(images)
            lost += int(broken.sum())
            progress("drawing", len(pictures), len(asked))
    folder.mkdir(parents=True, exist_ok=True)
    files = _save_pictures(options, pictures, folder)
    rows = [{"prompt": prompt, "seed": seed} for prompt, seed in asked]
    record = {"model": options.model, "sampling": asdict(sampling), "pictures": rows, "broken_images": lost, **files}
    return show(record, options.json, lambda console: _tell_pictures(console, record))


def _asked(options: Generate) -> list[tuple[str, int]]:
    """Prompt and seed of every picture."""
    return [(prompt, options.seed + i) for prompt in options.prompts for i in range(options.images)]


def _picture_paths(options: Generate, folder: Path) -> list[Path]:
    """What is going to be written: one PNG each and the grid at the end, or the FILE.png alone."""
    if options.out is not None and _is_picture(options.out):
        return [options.out]
    names = [f"{k:03d}-{_slug(prompt)}-s{seed}.png" for k, (prompt, seed) in enumerate(_asked(options))]
    return [folder / name for name in (*names, "grid.png")]


def _save_pictures(options: Generate, pictures: Sequence[Image], folder: Path) -> dict[str, Any]:
    """One PNG each and a grid; into a FILE.png only the picture, or the grid of several."""
    from cgru.report.grid import captioned_grid

    columns = options.images if options.images > 1 else math.ceil(math.sqrt(len(pictures)))
    grid = captioned_grid(pictures, [f"[{seed}] {prompt}" for prompt, seed in _asked(options)], columns)
    *names, last = _picture_paths(options, folder)
    if not names:
        save_png(last, pictures[0] if len(pictures) == 1 else grid)
        return {"images": [str(last)]} if len(pictures) == 1 else {"grid": str(last)}
    for path, picture in zip((*names, last), (*pictures, grid), strict=True):
        save_png(path, picture)
    return {"grid": str(last), "images": [str(path) for path in names]}


def _tell_pictures(console: Console, record: Mapping[str, Any]) -> None:
    count = len(record["pictures"])
    where = record["grid"] if "grid" in record else record["images"][0]
    console.print(f"{count} picture{'s' if count > 1 else ''}: {where}", soft_wrap=True)
    if lost := record["broken_images"]:
        console.print(f"{lost} of them left blank: {BROKEN}", soft_wrap=True)


def prepare_evaluate(options: Evaluate, root: Path) -> Work:
    """Check the options, load model and judges."""
    _check_place(options.out, PICTURES, "a folder")
    quiet_libraries()
    from cgru.evaluation import session
    from cgru.evaluation.request import Request

    request = Request(
        model=options.subject,
        benchmark=options.benchmark,
        images=options.images,
        target=options.target,
        variant=options.variant,
        reference=options.reference,
        allow_judge=names_of(options.allow_judge),
        judges=options.judges,
        source=options.source,
        subset=options.subset,
        threshold=options.threshold,
        judge=options.judge,
        out=options.out,
        base=options.model,
        with_base=not options.no_base,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch_size,
        compile=options.compile,
        root=root,
    )
    prepared = session.prepare(request)
    return lambda: _evaluate(options, prepared)


def _evaluate(options: Evaluate, prepared: Session) -> int:
    from cgru.evaluation.runner import is_shown
    from cgru.evaluation.session import run
    from cgru.report.grid import before_after, canvas_grid

    with progress_bar(options.json) as progress:
        scores = run(prepared, progress)
    if not processes.is_main():
        return 0
    files = {"folder": str(prepared.out)}
    if any(is_shown(job) for job in prepared.jobs):  # i2p keeps no picture
        files["grid"] = str(prepared.out / "grid.png")
        for folder in [prepared.out, *([prepared.out / "base"] if prepared.base else [])]:
            save_png(folder / "grid.png", canvas_grid(folder))
    if prepared.base and prepared.task:
        files["strip"] = str(prepared.out / "before_after.png")
        save_png(Path(files["strip"]), before_after(prepared.out))
    return show({**scores, **files}, options.json, lambda console: _tell_scores(console, scores, files))


def _tell_scores(console: Console, scores: Mapping[str, Any], files: Mapping[str, str]) -> None:
    from cgru.report.terminal import change_table, detections_table, notices, rows_drawn, scores_table

    console.print(scores_table(scores, is_wide=console.width >= 110))
    if "detections" in scores:
        console.print(detections_table(scores))
    if "subset" in scores["protocol"]:
        console.print(rows_drawn(scores["protocol"]), soft_wrap=True)
    for line in notices(scores):
        console.print(line, soft_wrap=True)
    if "grid" in files:
        console.print(f"pictures: {files['grid']}", soft_wrap=True)
    console.print(f"scores, predictions and jobs: {files['folder']}", soft_wrap=True)
    if "strip" in files:
        console.print(change_table(scores))
        console.print(f"before and after on the same noise: {files['strip']}", soft_wrap=True)


def prepare_list(options: ListNames, root: Path) -> Work:
    """Look the names up."""
    tables = {f"{kind}s": list(table) for kind, table in catalog.TABLES.items()}
    kinds = ("models", "classes", "styles", "hazards", "everyday", "benchmarks", "methods", "rewards", "presets")
    if options.what not in ("all", *kinds):
        raise ValueError(catalog.unknown("list", options.what, kinds, "Try `cgru list` for all of them."))
    chosen = kinds if options.what == "all" else (options.what,)
    if not tables.keys() >= set(chosen):
        known = assets.load_vocabulary(root)
        tables |= {"classes": list(known.classes), "styles": list(known.styles)}
        tables |= {"hazards": list(known.hazard), "everyday": list(known.everyday)}
    found = {kind: tables[kind] for kind in chosen}
    return lambda: show(found, options.json, lambda console: _tell_names(console, found))


def _tell_names(console: Console, found: Mapping[str, Sequence[str]]) -> None:
    from rich.text import Text

    for kind, names in found.items():
        if len(found) == 1:
            console.print("\n".join(names) or f"no {kind} yet", soft_wrap=True)
        else:
            console.print(Text.assemble((kind, "bold"), f": {', '.join(names) or 'none yet'}"))


def prepare_doctor(options: Doctor, root: Path) -> Work:
    """Nothing can be wrong with the options."""
    return lambda: _doctor(options, root)


def _doctor(options: Doctor, root: Path) -> int:
    from cgru.cli.health import examine
    from cgru.report.terminal import doctor_table

    health = examine(root)
    show(health, options.json, lambda console: console.print(doctor_table(health)))
    return 0 if health["assets"]["state"] == "ok" else 1


def _load_model(options: Generate, root: Path) -> Backbone:
    from cgru.backbones import load_model

    quiet_libraries()
    return load_model(assets.model_source(options.model, root), device=options.device, dtype=options.dtype)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "picture"


PREPARE: Mapping[type, Callable[[Any, Path], Work]] = {
    Unlearn: prepare_unlearn,
    Resume: prepare_resume,
    Curves: prepare_curves,
    Export: prepare_export,
    Generate: prepare_generate,
    Evaluate: prepare_evaluate,
    Caption: prepare_caption,
    Split: prepare_split,
    Report: prepare_report,
    Reproduce: prepare_reproduce,
    Sweep: prepare_sweep,
    Attack: prepare_attack,
    ListNames: prepare_list,
    Doctor: prepare_doctor,
}
