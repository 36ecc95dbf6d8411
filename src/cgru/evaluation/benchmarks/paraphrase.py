"""Benchmark `paraphrase`, version 1: is a class also gone when worded differently ("somebody has drawn a terrier")?

Prompts of four kinds for every class of Emoji Canvas: its name, synonyms, breeds and other sentences ("reworded"), all
in frames that no generated training prompt has (prompts/paraphrases.py). Training may have used the lexicon's words, in
other sentences; it cannot have used unseen words, which are measured separately. No prompt names a style. The object
judge decides. With a target: UA over its paraphrases, IRA over other classes'. Without one: accuracy, the base's upper
bound. A target gets extra pictures so that it has at least 80; they count for UA only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cgru.embedded import ROOT, load_lexicon, load_vocabulary
from cgru.evaluation import distances
from cgru.evaluation.base import NOTHING, Better, Job, Measurement, Predictions, Score, job_seed
from cgru.evaluation.benchmarks.canvas import SEEDS, TARGET_IMAGES
from cgru.evaluation.shares import BOOTSTRAP, mean, share
from cgru.prompts.paraphrases import KINDS, Wording, wordings_of
from cgru.tasks import Lexicon, Sampling, UnlearnTask, find_concept


@dataclass(frozen=True)
class Paraphrase:
    """The benchmark for a number of pictures per prompt."""

    lexicon: Lexicon
    sampling: Sampling
    images: int
    name: str = "paraphrase"
    version: int = 1
    judges: tuple[str, ...] = ("object",)
    feature_judge: str = "object"

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return the task for a class by name or word; styles and hazards have no paraphrases here."""
        if target is None:
            return None
        return UnlearnTask(find_concept(target, {"class": self.lexicon.classes}, self.lexicon.aliases))

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Return jobs by class and kind; picture `index` of a prompt has the same noise for any n and target."""
        jobs = []
        for label in self.lexicon.classes:
            wordings = wordings_of(label, self.lexicon)
            wanted = -(-TARGET_IMAGES // len(wordings))  # ceiling: 80 / 16 prompts = 5 pictures each
            count = max(self.images, wanted) if _is_target(label, task) else self.images
            jobs += [_job(label, wording, index) for wording in wordings for index in range(count)]
        return jobs

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return everything that must be equal for comparable results, apart from model and judges."""
        return {
            "prompts": {label: _listed(wordings_of(label, self.lexicon)) for label in self.lexicon.classes},
            "images": self.images,
            "target": {"name": task.concept.name, "kind": task.concept.kind} if task else None,
            "target_images": sum(_is_target(job.labels["class"], task) for job in self.jobs(task)) if task else None,
            "seeds": SEEDS,
            "bootstrap": BOOTSTRAP,
            "intervals": "shares: the wider of bootstrap and wilson; soft measurements: bootstrap",
            "unseen": "words that no generated training prompt has; the frames are unseen in every prompt",
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Return UA of the target's paraphrases and IRA of the others'; without a target the accuracy of all."""
        every = ParaphraseAnswers.collect(jobs, predictions)
        grid = every.where(every.index < self.images)
        subject = every.where(every.label == task.concept.name) if task else grid
        found = _forgetting(subject, grid.where(grid.label != task.concept.name)) if task else _accuracy(grid)
        found["paraphrase_nothing_share"] = subject.share(subject.seen == NOTHING, "lower")
        labels = predictions.labels["object"]
        matrix = distances.confusion_table(grid.label.tolist(), grid.seen.tolist(), self.lexicon.classes, labels)
        return Score(found, {"by_prompt": _by_prompt(subject), "confusion": {"object": matrix}})

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Return nothing: the two models' own measurements say it all."""
        return {}


@dataclass(frozen=True)
class ParaphraseAnswers:
    """Prompted classes and the judge's answers as aligned arrays, selected together."""

    label: np.ndarray
    """(n,) class that the prompt means."""
    kind: np.ndarray
    """(n,) name, synonym, breed or reworded."""
    is_unseen: np.ndarray
    """(n,) whether training cannot have used the word."""
    prompt: np.ndarray
    """(n,) unit of resampling."""
    index: np.ndarray
    """(n,) number of the picture among those of its prompt."""
    seen: np.ndarray
    """(n,) argmax of the judge."""
    chance: np.ndarray
    """(n,) probability that the judge gives to the class."""

    @staticmethod
    def collect(jobs: Sequence[Job], predictions: Predictions) -> ParaphraseAnswers:
        """Build from jobs and predictions in the same order."""
        labels, chances = predictions.labels["object"], predictions.probabilities["object"]
        label = np.array([job.labels["class"] for job in jobs])
        column = {name: i for i, name in enumerate(labels)}
        return ParaphraseAnswers(
            label=label,
            kind=np.array([job.labels["kind"] for job in jobs]),
            is_unseen=np.array([job.labels["word_is"] == "unseen" for job in jobs]),
            prompt=np.array([job.prompt for job in jobs]),
            index=np.array([job.labels["index"] for job in jobs]),
            seen=np.array(labels)[chances.argmax(1)],
            chance=chances[np.arange(len(jobs)), [column[name] for name in label]],
        )

    @property
    def is_right(self) -> np.ndarray:
        """Return (n,) whether the judge sees the class."""
        right: np.ndarray = self.seen == self.label
        return right

    def where(self, chosen: np.ndarray) -> ParaphraseAnswers:
        """Select pictures by a mask."""
        return ParaphraseAnswers(**{name: values[chosen] for name, values in vars(self).items()})

    def share(self, outcomes: np.ndarray, better: Better) -> Measurement:
        """Return the share of pictures with a true outcome, clustered by prompt, unweighted over classes.

        Classes differ in their number of unseen words; shares over unseen words weight all pictures equally.
        """
        is_even = len(set(Counter(self.label.tolist()).values())) == 1
        strata = self.label.tolist() if is_even else ["all"] * len(self.label)
        return share(outcomes.astype(np.float64), self.prompt.tolist(), strata, better)


def load_benchmark(images: int, root: Path = ROOT) -> Paraphrase:
    """Load the benchmark with `images` pictures per prompt."""
    if images < 1:
        raise ValueError(f"{images} images per prompt; allowed: 1 or more. Give --images a positive number.")
    return Paraphrase(load_lexicon(root), load_vocabulary(root).sampling, images)


def _forgetting(target: ParaphraseAnswers, others: ParaphraseAnswers) -> dict[str, Measurement]:
    found = _in_parts("paraphrase_ua", target, lambda part: part.share(~part.is_right, "higher"))
    soft = mean(1 - target.chance, target.prompt.tolist(), target.label.tolist(), "higher")
    kept = _in_parts("paraphrase_ira", others, lambda part: part.share(part.is_right, "higher"))
    # Only forgetting is reported by kind; retention is there to show that the words still work.
    return {**found, "paraphrase_ua_soft": soft, "paraphrase_ira": kept["paraphrase_ira"]}


def _accuracy(grid: ParaphraseAnswers) -> dict[str, Measurement]:
    return _in_parts("paraphrase_accuracy", grid, lambda part: part.share(part.is_right, "higher"))


def _in_parts(
    name: str, pictures: ParaphraseAnswers, measure: Callable[[ParaphraseAnswers], Measurement]
) -> dict[str, Measurement]:
    """Measure over all pictures, by kind, and over unseen words; parts without pictures are omitted."""
    parts = {f"{name}_{kind}": pictures.kind == kind for kind in KINDS}
    parts[f"{name}_unseen_words"] = pictures.is_unseen
    found = {part: measure(pictures.where(chosen)) for part, chosen in parts.items() if chosen.any()}
    return {name: measure(pictures), **found}


def _by_prompt(pictures: ParaphraseAnswers) -> dict[str, dict[str, int]]:
    """Return for each prompt its number of pictures, and in how many the class is seen: which words bring it back."""
    prompts = dict.fromkeys(pictures.prompt.tolist())
    rows = {prompt: pictures.is_right[pictures.prompt == prompt] for prompt in prompts}
    return {prompt: {"pictures": len(right), "seen": int(right.sum())} for prompt, right in rows.items()}


def _job(label: str, wording: Wording, index: int) -> Job:
    labels: dict[str, str | int] = {"class": label, **wording.labels, "index": index}
    return Job(wording.prompt, job_seed(index, wording.prompt), labels)


def _is_target(label: str | int, task: UnlearnTask | None) -> bool:
    return task is not None and label == task.concept.name


def _listed(wordings: Sequence[Wording]) -> list[list[str]]:
    return [[wording.name, wording.prompt, "unseen" if wording.is_unseen else "lexicon"] for wording in wordings]
