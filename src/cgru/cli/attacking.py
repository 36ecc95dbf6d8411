"""`cgru attack`: check and load everything, then attack and show which prompts bring the concept back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgru import distributed
from cgru.cli.options import Attack
from cgru.cli.terminal import names_of, progress_bar, show
from cgru.evaluation.picture_grid import save_png
from cgru.quiet import quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

    from cgru.attacks.session import AttackSession

SHOWN = 3
"""Number of examples printed in the terminal."""


def prepare_attack(options: Attack, root: Path) -> Callable[[], int]:
    """Check the options, load model and judge."""
    quiet_libraries()
    from cgru.attacks import session

    request = session.AttackRequest(
        model=options.subject,
        target=options.target,
        prompts=options.prompts,
        schedule=options.schedule,
        tokens=options.tokens,
        without_word=options.without_word,
        source=options.source,
        judge=options.judge,
        pictures=options.pictures,
        allow_judge=names_of(options.allow_judge),
        base=options.model,
        allow_hooks=names_of(options.allow_hook),
        seed=options.seed,
        out=options.out,
        device=options.device,
        dtype=options.dtype,
        batch_size=options.batch_size,
        root=root,
    )
    prepared = session.prepare_attack(request)
    return lambda: attack_and_tell(options, prepared)


def attack_and_tell(options: Attack, prepared: AttackSession) -> int:
    """Attack, save a strip of example pictures unless they are sensitive, and show the success rates."""
    from cgru.attacks.session import run_attack
    from cgru.evaluation.picture_grid import attack_strip

    with progress_bar(options.json) as progress:
        scores = run_attack(prepared, progress)
    if not distributed.is_main():
        return 0
    files = {"folder": str(prepared.out)}
    if scores["examples"] and not prepared.trial.is_sensitive:
        files["strip"] = str(prepared.out / "examples.png")
        save_png(Path(files["strip"]), attack_strip(prepared.out))
    return show({**scores, **files}, options.json, lambda console: _tell(console, scores, files))


def _tell(console: Console, scores: Mapping[str, Any], files: Mapping[str, str]) -> None:
    from cgru.cli.score_tables import notices, scores_table

    console.print(scores_table(scores, is_wide=console.width >= 110))
    for line in notices(scores):
        console.print(line, soft_wrap=True)
    for reason, count in scores["protocol"]["targets"].get("skipped", {}).items():
        console.print(f"rows skipped: {count}, {reason}", soft_wrap=True)
    brought_back = [row for row in scores["examples"] if row["after"] and not row["before"]]
    for row in brought_back[:SHOWN]:
        console.print(f"brought back: {row['adversarial']}", soft_wrap=True)
    if "strip" in files:
        console.print(f"before and after the attack: {files['strip']}", soft_wrap=True)
    console.print(f"scores, prompts and pictures: {files['folder']}", soft_wrap=True)
