"""`cgru prompts caption` turns pictures into prompts; `cgru prompts split` divides prompts into disjoint sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru.cli.options import Caption, Split
from cgru.cli.terminal import progress_bar, show
from cgru.quiet import quiet_libraries

if TYPE_CHECKING:
    from cgru.prompts.captions import Captioner, CaptionFile
    from cgru.prompts.pictures import Picture

BATCH = 8


def prepare_caption(options: Caption, root: Path) -> Callable[[], int]:
    """Check the options, hash the pictures, and load LLaVA if any picture has no caption yet."""
    _check_caption(options)
    from cgru.evaluation.store import check_writable
    from cgru.prompts.captions import CaptionFile
    from cgru.prompts.pictures import opened, pictures_in

    check_writable(options.out.absolute().parent)
    pictures, copies = pictures_in(options.folder)
    file = CaptionFile(options.out, _key(options))
    known = file.read()
    missing = [picture for picture in pictures if picture.sha256 not in known]
    has_new = any(opened(picture) for picture in missing)
    if not has_new and len(missing) == len(pictures):
        raise ValueError(f"none of the {len(pictures)} pictures can be read; allowed: whole pictures. Check them.")
    captioner = _captioner(options) if has_new else None
    return lambda: _caption(options, pictures, copies, file, captioner)


def _check_caption(options: Caption) -> None:
    if options.out.suffix != ".jsonl" or options.out.is_dir():
        raise ValueError(f"--out {str(options.out)!r}; allowed: a file FILE.jsonl. Choose another name.")
    for option, given in (("--batch-size", options.batch_size), ("--tokens", options.tokens)):
        if given is not None and given < 1:
            raise ValueError(f"{option} {given}; allowed: 1 or more. Give a positive number.")
    if options.instruction is not None and not options.instruction.strip():
        raise ValueError("--instruction is empty; allowed: any text. Leave it out for the paper's.")


def _settings(options: Caption) -> dict[str, Any]:
    from cgru.prompts.captions import INSTRUCTION, MODEL

    instruction = INSTRUCTION if options.instruction is None else options.instruction
    return {
        "model": options.model or MODEL,
        "instruction": instruction,
        "tokens": options.tokens,
        "dtype": options.dtype,
    }


def _key(options: Caption) -> str:
    from cgru.prompts.captions import caption_key

    return caption_key(**_settings(options))


def _captioner(options: Caption) -> Captioner:
    quiet_libraries()
    from cgru.prompts.llava import load_llava

    settings = _settings(options)
    return load_llava(settings.pop("model"), device=options.device, **settings)


def _caption(
    options: Caption, pictures: list[Picture], copies: int, file: CaptionFile, captioner: Captioner | None
) -> int:
    from cgru.prompts.captions import caption_all

    size = options.batch_size or BATCH
    options.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with progress_bar(options.json) as progress:
        tally = caption_all(pictures, file, captioner, batch_size=size, copies=copies, progress=progress)
    record = {"file": str(options.out), **asdict(tally), **_settings(options)}
    words = (
        f"{tally.captions} captions ({tally.new} new): {options.out}\n"
        f"skipped: {tally.withheld} captions that may refer to minors, {tally.empty} empty captions, "
        f"{tally.unreadable} unreadable pictures, {tally.copies} duplicates"
    )
    return show(record, options.json, lambda console: console.print(words, soft_wrap=True))


def prepare_split(options: Split, root: Path) -> Callable[[], int]:
    """Read the captions and plan the files; nothing is written if the same split already exists."""
    from cgru.evaluation.store import check_writable
    from cgru.prompts.split import check_place, plan_split

    folder = options.out.absolute()
    files = plan_split(options.file, seed=options.seed, critic=options.critic, policy=options.policy)
    is_there = check_place(folder, files)
    check_writable(folder.parent)
    return lambda: _split(options, folder, files, is_there=is_there)


def _split(options: Split, folder: Path, files: dict[str, bytes], *, is_there: bool) -> int:
    from cgru.prompts.split import MANIFEST, write_split

    if not is_there:
        write_split(folder, files)
    record = {"folder": str(options.out), **json.loads(files[MANIFEST])}
    counts = ", ".join(f"{name} {part['prompts']}" for name, part in record["files"].items())
    return show(record, options.json, lambda console: console.print(f"{counts}: {options.out}", soft_wrap=True))
