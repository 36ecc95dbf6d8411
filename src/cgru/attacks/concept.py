"""What an attack works on: candidate prompts of a concept, the word that can be removed, and the judge of success.

A concept of Emoji Canvas has its own prompts (those of canvas and hazard) and judge. Any other concept needs a file of
prompts and a judge (judge.py). A .csv with seeds, such as UnlearnDiffAtk's lists, is drawn with its own seeds and
guidance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cgru.attacks.judge import Shows, find_verdict
from cgru.backbones.base import Backbone, one_line
from cgru.embedded import load_lexicon, load_vocabulary
from cgru.evaluation.base import Job, job_seed
from cgru.evaluation.benchmarks.canvas import grid_job
from cgru.evaluation.benchmarks.hazard import cells_of
from cgru.evaluation.drawing import draw, mend
from cgru.evaluation.judges.classifiers import load_judge
from cgru.lineage import Lineage, judge_lineage
from cgru.prompts import prompts_from_file
from cgru.prompts.listed import has_seeds, read_listing
from cgru.tasks import Concept, Lexicon, Sampling, find_concept, targets

OWN_SAMPLING = Sampling(50, 7.5, 0.0)
"""Sampling for models that specify none: steps and guidance of the official attack."""
TRIES = 4
"""At most this many candidates per wanted prompt; a candidate counts only if the base's picture shows the concept."""


@dataclass(frozen=True)
class Trial:
    """One concept, ready to be attacked."""

    name: str
    kind: str
    candidates: Sequence[Job]
    """Prompts that ask for the concept, in the order in which to try them."""
    shows: Shows
    judge: Mapping[str, Any]
    """The judge's entry in the protocol."""
    sampling: Sampling
    lineages: Mapping[str, Lineage | None]
    """Lineage of the judge by its name; None for a user's function, whose lineage is unknown."""
    is_sensitive: bool = False
    """Whether pictures are stored only blurred."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows of the prompt file that are not candidates."""
    is_listed: bool = False
    """Whether the prompts come from a list with seeds, in which overlong ones are skipped rather than refused."""

    def hidden(self, job: Job) -> str:
        """Return the prompt with the concept's own word removed."""
        word = str(job.labels["word"])
        rest = re.sub(rf"(?i)\b{re.escape(word)}\b", " ", job.prompt)
        return " ".join(rest.split())

    def check(self, size: tuple[int, int], device: torch.device) -> None:
        """Try the judge on a blank picture, so that a broken one is reported at once."""
        try:
            self.shows(torch.ones(2, 3, *size, device=device))
        except Exception as error:  # whatever a user's function raises
            allowed = "allowed: a function of images (n, 3, h, w) that returns n booleans. Correct it."
            raise ValueError(f"the judge {self.judge['id']!r} fails ({one_line(error)}); {allowed}") from error

    def drawn(
        self,
        model: Backbone,
        prompts: Sequence[str],
        seeds: Sequence[int],
        guidances: Sequence[float | None] = (),
    ) -> tuple[Tensor, list[bool], np.ndarray]:
        """Draw pictures; return them, whether each shows the concept, and which are broken (these show nothing)."""
        images, broken = mend(draw(model, prompts, seeds, self.sampling, guidances))
        verdicts = self.shows(images)
        return images, [bool(shown and not lost) for shown, lost in zip(verdicts, broken, strict=True)], broken


def canvas_trial(target: str, candidates: int, root: Path, device: torch.device) -> Trial:
    """Return the trial for a class, a style, a hazard category or all hazards of Emoji Canvas."""
    lexicon = load_lexicon(root)
    concept = find_concept(target, lexicon.vocabulary, lexicon.aliases)
    judge = load_judge(concept.head, root=root, device=device)
    gone = set(targets(concept, lexicon.vocabulary))

    def shows(images: Tensor) -> list[bool]:
        return [judge.labels[i] in gone for i in judge.look(images)[0].argmax(1).tolist()]

    record = {
        "id": judge.lineage["name"],
        "weights_sha256": judge.weights_sha256,
        "accuracy": judge.lineage["accuracy"],
        "success": f"argmax of the {concept.head} judge is {' or '.join(sorted(gone))}",
    }
    jobs = canvas_candidates(concept, lexicon, candidates)
    lineages = {judge.name: judge_lineage(judge.lineage, judge.weights_sha256)}
    return Trial(concept.name, concept.kind, jobs, shows, record, load_vocabulary(root).sampling, lineages)


def canvas_candidates(concept: Concept, lexicon: Lexicon, number: int) -> list[Job]:
    """Return the benchmarks' own prompts and noise: the first picture of each prompt, then the second, and so on."""
    if concept.kind == "hazard":
        gone = targets(concept, lexicon.vocabulary)
        cells = [cell for cell in cells_of(lexicon) if cell.category in gone]
        jobs = (cell.job(index) for index in count() for cell in cells)
        return list(islice(jobs, number))
    across = lexicon.styles if concept.kind == "class" else lexicon.classes
    pairs = [(concept.name, other) if concept.kind == "class" else (other, concept.name) for other in across]
    grid = (grid_job(pair, index) for index in count() for pair in pairs)
    return [Job(job.prompt, job.seed, {**job.labels, "word": concept.name}) for job in islice(grid, number)]


def own_trial(
    target: str,
    prompts: str | Path,
    judge: str,
    sampling: Sampling = OWN_SAMPLING,
    device: str | torch.device = "cpu",
) -> Trial:
    """Return the trial for any concept of any model, with prompts from a file and any judge of `find_verdict`."""
    verdict = find_verdict(judge, target, device)
    jobs, skipped = _own_candidates(Path(prompts), target)
    return Trial(
        target,
        "own",
        jobs,
        verdict.shows,
        verdict.record,
        sampling,
        {judge.partition("=")[0]: verdict.lineage},
        is_sensitive=verdict.is_sensitive,
        skipped=skipped,
        is_listed=has_seeds(Path(prompts)),
    )


def _own_candidates(path: Path, word: str) -> tuple[list[Job], Mapping[str, int]]:
    """Return each prompt once; for a list with seeds each row, with the row's seed and, if given, guidance."""
    if not has_seeds(path):
        texts = dict.fromkeys(prompts_from_file(path))
        return [Job(text, job_seed(0, text), {"word": word, "index": 0}) for text in texts], {}
    listing = read_listing(path)
    jobs = [
        Job(row.text, row.seed or 0, {"word": word, "index": 0, "case": row.case}, row.guidance)
        for row in listing.prompts
    ]
    return list({job.id: job for job in jobs}.values()), listing.skipped


def find_trial(
    target: str, *, wanted: int, prompts: Path | None, judge: str | None, root: Path, device: torch.device
) -> Trial:
    """Return the trial that a user asks for; a file of prompts and a judge must be given together."""
    if (prompts is None) != (judge is None):
        given, lacks = ("--source", "--judge") if judge is None else ("--judge", "--source")
        raise ValueError(f"{given} without {lacks}; allowed: both, or neither for a concept of Emoji Canvas. Add it.")
    if prompts is not None and judge is not None:
        return own_trial(target, prompts, judge, device=device)
    return canvas_trial(target, TRIES * wanted, root, device)
