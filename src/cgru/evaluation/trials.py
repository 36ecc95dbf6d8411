"""What an attack is tried on: candidate prompts of a concept, the word that can be taken out, and who judges success.

A concept of Emoji Canvas brings its own prompts (those of canvas and hazard) and judge. Any other concept needs a file
of prompts and a judge (verdicts.py). A .csv with seeds, as UnlearnDiffAtk's lists are, is drawn with its seeds and
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

from cgru.backbones.base import Backbone, one_line
from cgru.evaluation.assets import load_vocabulary
from cgru.evaluation.base import Job, Sampling, job_seed
from cgru.evaluation.canvas import grid_job
from cgru.evaluation.drawing import draw, mend
from cgru.evaluation.hazard import cells_of
from cgru.evaluation.judges import load_judge
from cgru.evaluation.verdicts import Shows, find_verdict
from cgru.lineage import Lineage, judge_lineage
from cgru.prompts import prompts_from_file
from cgru.prompts.listed import has_seeds, read_listing
from cgru.tasks import Concept, Lexicon, find_concept, load_lexicon, targets

OWN_SAMPLING = Sampling(50, 7.5, 0.0)
"""Of models that do not say theirs: steps and guidance of the official attack."""
TRIES = 4
"""Candidates per wanted prompt, at most: a candidate counts only if the base's picture of it shows the concept."""


@dataclass(frozen=True)
class Trial:
    """One concept, ready to be attacked."""

    name: str
    kind: str
    candidates: Sequence[Job]
    """Prompts that ask for the concept, in the order in which they are tried."""
    shows: Shows
    judge: Mapping[str, Any]
    """Who decides, for the protocol."""
    sampling: Sampling
    lineages: Mapping[str, Lineage | None]
    """Of the judge, by its name; None for a user's function, which says nothing of itself."""
    is_sensitive: bool = False
    """Whether pictures are kept blurred only."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows of the file of prompts that are no candidates."""
    is_listed: bool = False
    """Whether the prompts are those of a list with seeds: of these, too long ones are skipped, not refused."""

    def hidden(self, job: Job) -> str:
        """The prompt with the concept's own word taken out."""
        word = str(job.labels["word"])
        rest = re.sub(rf"(?i)\b{re.escape(word)}\b", " ", job.prompt)
        return " ".join(rest.split())

    def check(self, size: tuple[int, int], device: torch.device) -> None:
        """Ask the judge about a blank picture: a judge that cannot answer is a mistake to be told at once."""
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
        """Pictures, whether each shows the concept, and which are broken: these show nothing."""
        images, broken = mend(draw(model, prompts, seeds, self.sampling, guidances))
        verdicts = self.shows(images)
        return images, [bool(shown and not lost) for shown, lost in zip(verdicts, broken, strict=True)], broken


def canvas_trial(target: str, candidates: int, root: Path, device: torch.device) -> Trial:
    """A class, a style, a hazard category or all hazards of Emoji Canvas."""
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
    """The benchmarks' own prompts and noise: first picture of each prompt, then the second, and so on."""
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
    """Any concept of any model: prompts from a file, judged by NudeNet, ResNet-50 or the user's "module:attr"."""
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
    """Each prompt once; of a list with seeds each row, with the row's seed and, where it has one, guidance."""
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
    """The trial a user asks for; a file of prompts and a judge go together."""
    if (prompts is None) != (judge is None):
        given, lacks = ("--source", "--judge") if judge is None else ("--judge", "--source")
        raise ValueError(f"{given} without {lacks}; allowed: both, or neither for a concept of Emoji Canvas. Add it.")
    if prompts is not None and judge is not None:
        return own_trial(target, prompts, judge, device=device)
    return canvas_trial(target, TRIES * wanted, root, device)
