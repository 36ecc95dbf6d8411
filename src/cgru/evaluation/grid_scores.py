"""Scores of two judges on a grid of classes × styles: UA, IRA, CRA and confusion matrices (UnlearnCanvas, 2402.11846).

Shared by `canvas` and `unlearncanvas`. Accuracies are computed within each label and averaged unweighted over labels;
hard ones use the judge's argmax, soft ones its probability of the prompted label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgru.evaluation import distances
from cgru.evaluation.base import NOTHING, Better, Job, Measurement, Predictions
from cgru.evaluation.shares import mean, share
from cgru.tasks import Concept, Kind

# The judge of each kind of concept, and the other kind, on which cross-domain retention (CRA) is measured.
OWN_JUDGE: Mapping[Kind, str] = {"class": "object", "style": "style"}
CROSS_KIND: Mapping[Kind, Kind] = {"class": "style", "style": "class"}
CLEAN = 0.9
"""Probability of a judge's first choice from which a picture counts as a clean picture of it."""


@dataclass(frozen=True)
class Answers:
    """Prompted labels and the judges' answers as aligned arrays, selected together."""

    prompted: dict[Kind, np.ndarray]
    """Kind ("class", "style") -> prompted labels (n,)."""
    predicted: dict[Kind, np.ndarray]
    """Kind -> the judge's argmax (n,)."""
    confidence: dict[Kind, np.ndarray]
    """Kind -> probability the judge gives to the prompted label (n,)."""
    sureness: dict[Kind, np.ndarray]
    """Kind -> probability the judge gives to its first choice (n,)."""
    index: np.ndarray
    """Number of each picture among those of its prompt (n,)."""
    features: np.ndarray
    """(n, d)."""

    @staticmethod
    def collect(jobs: Sequence[Job], predictions: Predictions) -> Answers:
        """Build from jobs and predictions in the same order."""
        prompted = {kind: np.array([job.labels[kind] for job in jobs]) for kind in OWN_JUDGE}
        predicted, confidence, sureness = {}, {}, {}
        for kind, judge in OWN_JUDGE.items():
            labels, chances = predictions.labels[judge], predictions.probabilities[judge]
            column = {label: i for i, label in enumerate(labels)}
            predicted[kind] = np.array(labels)[chances.argmax(1)]
            sureness[kind] = chances.max(1)
            confidence[kind] = chances[np.arange(len(jobs)), [column[label] for label in prompted[kind]]]
        index = np.array([job.labels["index"] for job in jobs])
        return Answers(prompted, predicted, confidence, sureness, index, predictions.features)

    def where(self, chosen: np.ndarray) -> Answers:
        """Select pictures by a mask."""
        prompted, predicted, confidence, sureness = (
            {kind: values[chosen] for kind, values in table.items()}
            for table in (self.prompted, self.predicted, self.confidence, self.sureness)
        )
        return Answers(prompted, predicted, confidence, sureness, self.index[chosen], self.features[chosen])

    def of(self, concept: Concept) -> Answers:
        """Select the pictures prompted with the concept."""
        return self.where(self.prompted[concept.kind] == concept.name)

    def without(self, concept: Concept) -> Answers:
        """Select the pictures prompted with anything else."""
        return self.where(self.prompted[concept.kind] != concept.name)

    def correct(self, kind: Kind) -> np.ndarray:
        """Return (n,) 1 where the judge's argmax is the prompted label."""
        return (self.predicted[kind] == self.prompted[kind]).astype(np.float64)

    def is_nothing(self, kind: Kind) -> np.ndarray:
        """Return (n,) 1 where the judge of this kind recognises nothing."""
        return (self.predicted[kind] == NOTHING).astype(np.float64)

    def is_clean(self, kind: Kind, labels: Sequence[str]) -> np.ndarray:
        """Return (n,) 1 where the judge of this kind sees one of `labels` with a probability of CLEAN or more."""
        seen = np.isin(self.predicted[kind], labels) & (self.sureness[kind] >= CLEAN)
        return seen.astype(np.float64)

    def cells(self) -> list[str]:
        """Return (n,) the prompt as "class/style": the unit of resampling."""
        return [f"{a}/{b}" for a, b in zip(self.prompted["class"], self.prompted["style"], strict=True)]

    def tally(self) -> dict[str, dict[str, int]]:
        """Count how often each judge predicted each label."""
        counted = {}
        for kind, judge in OWN_JUDGE.items():
            names, counts = np.unique(self.predicted[kind], return_counts=True)
            counted[judge] = {str(name): int(count) for name, count in zip(names, counts, strict=True)}
        return counted


def forgetting(concept: Concept, target: Answers, own: Answers, cross: Answers) -> dict[str, Measurement]:
    """Return UA, IRA and CRA of a concept, hard and soft.

    Args:
        concept: the target.
        target: all of its pictures.
        own: pictures that count for labels of the target's kind, including the target's.
        cross: pictures that count for labels of the other kind.
    """
    kind, other_kind = concept.kind, CROSS_KIND[concept.kind]
    others, strict = own.without(concept), cross.without(concept)
    # UA = 1 - accuracy on the target; IRA = accuracy on other labels of its kind; CRA = accuracy on the other kind
    return {
        "ua": proportion_of(1 - target.correct(kind), target, kind, "higher"),
        "ira": proportion_of(others.correct(kind), others, kind, "higher"),
        "cra": proportion_of(cross.correct(other_kind), cross, other_kind, "higher"),
        "cra_strict": proportion_of(strict.correct(other_kind), strict, other_kind, "higher"),
        "ua_soft": mean_of(1 - target.confidence[kind], target, kind, "higher"),
        "ira_soft": mean_of(others.confidence[kind], others, kind, "higher"),
    }


def replacement_distance(concept: Concept, target: Answers, others: Answers) -> Measurement:
    """Return the Fréchet distance of the target's pictures to pictures of the other labels of its kind.

    No interval, as for every Fréchet distance here: it is biased in n, and a bootstrap, which repeats pictures, more.
    """
    found = [distances.fit_gaussian(part.features) for part in (target, others.without(concept))]
    return Measurement(distances.frechet_distance(*found), None, None, found[0].n, "squared distance", "lower")


def proportion_of(outcomes: np.ndarray, answers: Answers, kind: Kind, better: Better) -> Measurement:
    """Return the share of pictures with outcome 1, as an unweighted mean over the labels of a kind."""
    return share(outcomes, answers.cells(), answers.prompted[kind].tolist(), better)


def mean_of(values: np.ndarray, answers: Answers, kind: Kind, better: Better) -> Measurement:
    """Return the mean of probabilities, unweighted over the labels of a kind."""
    return mean(values, answers.cells(), answers.prompted[kind].tolist(), better)


def confusion_tables(
    answers: Answers, rows: Mapping[Kind, Sequence[str]], labels: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return for each judge how often each label of `rows` was judged as each of the judge's labels."""
    tables = {}
    for kind, judge in OWN_JUDGE.items():
        truth, guess = answers.prompted[kind].tolist(), answers.predicted[kind].tolist()
        tables[judge] = distances.confusion_table(truth, guess, rows[kind], labels[judge])
    return tables


def clean_table(answers: Answers, kind: Kind, rows: Sequence[str]) -> dict[str, Any]:
    """Return for each label how many of its pictures are clean pictures of it, and n."""
    parts = {label: answers.of(Concept(label, kind)) for label in rows}
    counted = {label: {"n": len(part.index), "clean": _count(part, kind, label)} for label, part in parts.items()}
    return {"threshold": CLEAN, "labels": counted}


def clean_tally(answers: Answers, kind: Kind, labels: Sequence[str]) -> dict[str, int]:
    """Count the clean pictures of each label, whichever was prompted; labels without any are left out."""
    return {label: count for label in labels if (count := _count(answers, kind, label))}


def _count(answers: Answers, kind: Kind, label: str) -> int:
    return int(answers.is_clean(kind, [label]).sum())


def label_tables(answers: Answers, rows: Mapping[Kind, Sequence[str]]) -> dict[str, Any]:
    """Return for each judge and label: pictures, correct ones, accuracy and mean probability of the label."""
    return {
        judge: {label: _label_row(answers, kind, label) for label in rows[kind]} for kind, judge in OWN_JUDGE.items()
    }


def _label_row(answers: Answers, kind: Kind, label: str) -> dict[str, float]:
    part = answers.of(Concept(label, kind))
    correct, n = int(part.correct(kind).sum()), len(part.index)
    return {"n": n, "correct": correct, "accuracy": correct / n, "probability": float(part.confidence[kind].mean())}
