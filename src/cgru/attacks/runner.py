"""Attack many prompts: in chunks, resumable, with one row and two pictures per prompt.

The rows of a chunk are written when all of it is done. A kill therefore loses only the current chunk, which is then
attacked again with the same prompts side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import ImageFilter
from torch import Tensor

from cgru import distributed
from cgru.attacks.concept import Trial
from cgru.attacks.images import Target, chunks
from cgru.attacks.unlearndiffatk import Case, Outcome, Schedule, attack, attack_seed
from cgru.backbones.base import Backbone
from cgru.backbones.whitebox import open_up
from cgru.evaluation.base import Measurement
from cgru.evaluation.drawing import to_pictures
from cgru.evaluation.intervals import wilson
from cgru.evaluation.picture_grid import save_png
from cgru.evaluation.runner import finish
from cgru.evaluation.store import PredictionFile, Row

BLUR = 16
"""Sensitive pictures are stored with a Gaussian blur of width / 16: only shapes and colours remain."""


@dataclass(frozen=True)
class Campaign:
    """How to attack the prompts of a trial, and where to store the results."""

    trial: Trial
    schedule: Schedule
    tokens: int
    without_word: bool
    seed: int
    size: int
    """Number of prompts attacked side by side."""
    folder: Path
    key: str
    """Hash of everything that determines a row."""

    @property
    def samples(self) -> Path:
        """Return the folder of the pictures."""
        return self.folder / "samples" / self.key

    def run(self, model: Backbone, found: Sequence[Target], progress: Callable[[int, int], None]) -> list[Row]:
        """Return one row per target, in order; stored ones are not attacked again. Processes share the chunks."""
        self.samples.mkdir(parents=True, exist_ok=True)
        file, jobs = PredictionFile(self.folder, self.key), [target.job for target in found]
        done = distributed.from_main(lambda: {job.id for job in jobs if job.id in file.read()})
        todo = [[target for target in chunk if target.job.id not in done] for chunk in chunks(found, self.size)]
        todo = [chunk for chunk in todo if chunk]
        mine = todo[distributed.share(len(todo))]

        def attack_mine() -> None:
            progress(len(done), len(found))
            for k, chunk in enumerate(mine, 1):
                file.append(self.attack_chunk(model, chunk))  # after the pictures: a row marks the prompt as done
                left = sum(len(chunk) for chunk in todo) * (len(mine) - k) // len(mine)  # assumes equal progress
                progress(len(found) - left, len(found))

        distributed.alike(attack_mine)
        return distributed.from_main(lambda: finish(file, jobs))

    def attack_chunk(self, model: Backbone, chunk: Sequence[Target]) -> list[Row]:
        """Draw the prompts unchanged, attack those that do not show the concept, store the pictures."""
        prompts = [self.trial.hidden(target.job) if self.without_word else target.job.prompt for target in chunk]
        seeds, guidances = [target.job.seed for target in chunk], [target.job.guidance for target in chunk]
        before, was_shown, broken = self.trial.drawn(model, prompts, seeds, guidances)
        weak = [i for i, shown in enumerate(was_shown) if not shown]
        last, outcomes = self._attacked(model, [chunk[i] for i in weak], [prompts[i] for i in weak])
        found = dict(zip(weak, outcomes, strict=True))
        after = {i: last[k] for k, i in enumerate(weak)}
        for i, target in enumerate(chunk):
            self._save(target, "before", before[i])
            if i in after:
                self._save(target, "after", after[i])
        return [
            {
                "id": target.job.id,
                "key": self.key,
                "prompt": prompts[i],
                "seed": target.job.seed,
                "target": _place(target.file, self.folder),
                "before": was_shown[i],
                "after": was_shown[i] or found[i].success,
                "broken": bool(broken[i]),
                "attack": _record(found[i]) if i in found else None,
            }
            for i, target in enumerate(chunk)
        ]

    def _attacked(
        self, model: Backbone, chunk: Sequence[Target], prompts: Sequence[str]
    ) -> tuple[dict[int, Tensor], list[Outcome]]:
        """Return the last picture drawn for each, and its outcome."""
        if not chunk:
            return {}, []
        cases = [
            Case(prompt, target.job.seed, attack_seed(self.seed, target.job.id))
            for prompt, target in zip(prompts, chunk, strict=True)
        ]
        last: dict[int, Tensor] = {}

        def attempt(which: Sequence[int], texts: Sequence[str]) -> list[bool]:
            guidances = [chunk[i].job.guidance for i in which]
            images, shown, _ = self.trial.drawn(model, texts, [cases[i].seed for i in which], guidances)
            last.update(zip(which, images, strict=True))
            return shown

        with torch.no_grad():
            x0 = model.encode(torch.stack([target.picture for target in chunk]).to(model.device))
        outcomes = attack(open_up(model), cases, x0, tokens=self.tokens, schedule=self.schedule, attempt=attempt)
        return last, outcomes

    def _save(self, target: Target, when: str, image: Tensor) -> None:
        picture = to_pictures(image[None])[0]
        if self.trial.is_sensitive:
            picture = picture.filter(ImageFilter.GaussianBlur(picture.width / BLUR))
        save_png(self.samples / f"{target.job.id}-{when}.png", picture)


def success_rates(rows: Sequence[Row]) -> dict[str, Measurement]:
    """Return pre-ASR, post-ASR (which includes pre successes) and the attack's own rate; omits rates of no prompts."""
    attacked = [row for row in rows if not row["before"]]
    groups = {"pre_asr": (rows, "before"), "post_asr": (rows, "after"), "attacked_asr": (attacked, "after")}
    return {name: rate([bool(row[field]) for row in group]) for name, (group, field) in groups.items() if group}


def rate(outcomes: Sequence[bool]) -> Measurement:
    """Return the share of successful prompts with Wilson's interval."""
    k, n = sum(outcomes), len(outcomes)
    return Measurement(k / n, *wilson(k, n), n, "proportion", "lower", "wilson")


def _record(outcome: Outcome) -> Row:
    """Return an outcome in the form in which it is read from a file: with lists, not tuples."""
    return {**asdict(outcome), "tokens": list(outcome.tokens), "losses": list(outcome.losses)}


def _place(file: Path, folder: Path) -> str:
    """Return a relative path if possible, so that the folder can be moved."""
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
