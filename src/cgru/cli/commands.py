"""The commands: each `prepare_*` checks its options, loads what it needs, and returns a function that does the work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru import catalog, distributed, embedded
from cgru.attributes import ATTRIBUTES
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
from cgru.cli.terminal import names_of, progress_bar, show
from cgru.cli.training import prepare_curves, prepare_export, prepare_resume, prepare_unlearn
from cgru.edit_folder import base_model, find_edit
from cgru.evaluation.base import stable_hash
from cgru.evaluation.picture_grid import save_png
from cgru.image_files import IMAGE_SUFFIXES
from cgru.method import find_method
from cgru.quiet import quiet_libraries
from cgru.tasks import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from cgru.backbones.base import Backbone
    from cgru.evaluation.session import Session

BATCH = 16
BROKEN = "not finite numbers; the model has probably diverged"
PICTURES = {*IMAGE_SUFFIXES, ".avif", ".heic", ".svg", ".pdf"}
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
    from cgru.backbones import is_own_loader, load_model
    from cgru.edits import load_edit

    edit = load_edit(options.model, allow_hooks=names_of(options.allow_hook)) if find_edit(options.model) else None
    code = names_of(options.code)
    name = base_model(options.model, default=embedded.EMBEDDED, code=code, option="--code") if edit else options.model
    quiet_libraries()
    backbone = load_model(embedded.model_source(name, root), device=options.device, dtype=options.dtype)
    sampling = _sampling(options, embedded.is_embedded(name, root), root)
    if is_own_loader(name):
        sampling = _own_sampling(options, backbone, sampling)
    backbone.kernel(sampling.steps, eta=sampling.eta)  # raises if this model does not have so many steps
    if edit:
        edit.check(backbone)

    def work() -> int:
        with edit.applied(backbone, checked=True) if edit else nullcontext(backbone) as model:
            return _generate(options, model, sampling, folder)

    return work


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
    settings = {name: value for name, value in asdict(options).items() if name not in ("out", "json", "code")}
    return Path("runs") / "generate" / f"{_slug(options.prompts[0])}-{stable_hash(settings)[:8]}"


def _is_picture(out: Path | None) -> bool:
    return out is not None and out.suffix.lower() == ".png" and not out.is_dir()


def _sampling(options: Generate, is_own: bool, root: Path) -> Sampling:
    # Other models: the defaults of diffusers' StableDiffusionPipeline.
    own = embedded.load_vocabulary(root).sampling if is_own else Sampling(50, 7.5, 0.0)
    return Sampling(
        own.steps if options.steps is None else options.steps,
        own.guidance if options.guidance is None else options.guidance,
        own.eta if options.eta is None else options.eta,
    )


def _own_sampling(options: Generate, backbone: Backbone, sampling: Sampling) -> Sampling:
    """The sampling for the user's own model, which may lack unconditional text; guidance is then 1."""
    if backbone.encode_text(options.prompts).unconditional:
        return sampling
    if (options.guidance or 0) > 1:
        raise ValueError(
            f"--guidance {options.guidance:g}, but {backbone.name!r} has nothing to be guided away from; allowed: at "
            "most 1. Leave it out."
        )
    return replace(sampling, guidance=1.0)


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
    """The files to write: one PNG per picture and then the grid, or FILE.png alone."""
    if options.out is not None and _is_picture(options.out):
        return [options.out]
    names = [f"{k:03d}-{_slug(prompt)}-s{seed}.png" for k, (prompt, seed) in enumerate(_asked(options))]
    return [folder / name for name in (*names, "grid.png")]


def _save_pictures(options: Generate, pictures: Sequence[Image], folder: Path) -> dict[str, Any]:
    """Save one PNG per picture and a grid; with FILE.png only the picture, or the grid of several pictures."""
    from cgru.evaluation.picture_grid import captioned_grid

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
        settings=_pairs(options.settings),
        out=options.out,
        base=options.model,
        allow_hooks=names_of(options.allow_hook),
        with_base=not options.no_base,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch_size,
        compile=options.compile,
        root=root,
    )
    prepared = session.prepare(request)
    return lambda: _evaluate(options, prepared)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as a table."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word!r} is not a setting; allowed: one model, then KEY=VALUE. Leave it out.")
    return dict(word.split("=", 1) for word in words)


def _evaluate(options: Evaluate, prepared: Session) -> int:
    from cgru.evaluation.picture_grid import before_after, canvas_grid
    from cgru.evaluation.runner import is_shown
    from cgru.evaluation.session import run

    with progress_bar(options.json) as progress:
        scores = run(prepared, progress)
    if not distributed.is_main():
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
    from cgru.cli.score_tables import change_table, detections_table, notices, rows_drawn, scores_table

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
    """Look up the names."""
    tables = {f"{kind}s": list(table) for kind, table in catalog.TABLES.items()}
    kinds = (
        "models",
        "classes",
        "styles",
        "hazards",
        "everyday",
        "attributes",
        "benchmarks",
        "methods",
        "rewards",
        "presets",
        "hooks",
    )
    if options.what not in ("all", *kinds):
        raise ValueError(catalog.unknown("list", options.what, kinds, "Try `cgru list` for all of them."))
    tables |= {"attributes": list(ATTRIBUTES)}
    chosen = kinds if options.what == "all" else (options.what,)
    if not tables.keys() >= set(chosen):
        known = embedded.load_vocabulary(root)
        tables |= {"classes": list(known.classes), "styles": list(known.styles)}
        tables |= {"hazards": list(known.hazard), "everyday": list(known.everyday)}
    found = {kind: tables[kind] for kind in chosen}
    return lambda: show(found, options.json, lambda console: _tell_names(console, found))


def _tell_names(console: Console, found: Mapping[str, Sequence[str]]) -> None:
    from rich.text import Text

    for kind, names in found.items():
        if [*found] == ["methods"]:
            for name in names:
                console.print(f"{name:10} {find_method(name).summary}", soft_wrap=True)
        elif len(found) == 1:
            console.print("\n".join(names) or f"no {kind} yet", soft_wrap=True)
        else:
            console.print(Text.assemble((kind, "bold"), f": {', '.join(names) or 'none yet'}"))


def prepare_doctor(options: Doctor, root: Path) -> Work:
    """There is nothing to check."""
    return lambda: _doctor(options, root)


def _doctor(options: Doctor, root: Path) -> int:
    from cgru.cli.health import examine
    from cgru.cli.score_tables import doctor_table

    health = examine(root)
    show(health, options.json, lambda console: console.print(doctor_table(health)))
    return 0 if health["assets"]["state"] == "ok" else 1


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
