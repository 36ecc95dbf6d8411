"""What two judges answered on a grid of classes × styles, and what is made of it: UA, IRA, CRA, confusion matrices.

Shared by `canvas` and `unlearncanvas` (evals/unlearncanvas.md, section 7): accuracies are means inside a label,
averaged unweighted over labels; hard ones take the judge's argmax, soft ones its probability of the prompted label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgru.evaluation import metrics
from cgru.evaluation.base import NOTHING, Better, Job, Measurement, Predictions
from cgru.evaluation.shares import mean, share
from cgru.tasks import Concept, Kind

# Which judge speaks for a kind of concept, and which for everything across it.
OWN_JUDGE: Mapping[Kind, str] = {"class": "object", "style": "style"}
CROSS_KIND: Mapping[Kind, Kind] = {"class": "style", "style": "class"}


@dataclass(frozen=True)
class Answers:
    """Prompted labels and the judges' answers, as aligned arrays; one call selects from all of them."""

    prompted: dict[Kind, np.ndarray]
    """(n,) label by kind ("class", "style")."""
    predicted: dict[Kind, np.ndarray]
    """(n,) the judge's argmax, by kind."""
    confidence: dict[Kind, np.ndarray]
    """(n,) probability the judge gives the prompted label, by kind."""
    index: np.ndarray
    """(n,) which picture of its prompt."""
    features: np.ndarray
    """(n, d)."""

    @staticmethod
    def collect(jobs: Sequence[Job], predictions: Predictions) -> Answers:
        """From jobs and predictions in the same order."""
        prompted = {kind: np.array([job.labels[kind] for job in jobs]) for kind in OWN_JUDGE}
        predicted, confidence = {}, {}
        for kind, judge in OWN_JUDGE.items():
            labels, chances = predictions.labels[judge], predictions.probabilities[judge]
            column = {label: i for i, label in enumerate(labels)}
            predicted[kind] = np.array(labels)[chances.argmax(1)]
            confidence[kind] = chances[np.arange(len(jobs)), [column[label] for label in prompted[kind]]]
        index = np.array([job.labels["index"] for job in jobs])
        return Answers(prompted, predicted, confidence, index, predictions.features)

    def where(self, chosen: np.ndarray) -> Answers:
        """Those chosen by a mask."""
        prompted, predicted, confidence = (
            {kind: values[chosen] for kind, values in table.items()}
            for table in (self.prompted, self.predicted, self.confidence)
        )
        return Answers(prompted, predicted, confidence, self.index[chosen], self.features[chosen])

    def of(self, concept: Concept) -> Answers:
        """Pictures prompted with the concept."""
        return self.where(self.prompted[concept.kind] == concept.name)

    def without(self, concept: Concept) -> Answers:
        """Pictures prompted with anything else."""
        return self.where(self.prompted[concept.kind] != concept.name)

    def correct(self, kind: Kind) -> np.ndarray:
        """(n,) 1 where the judge's argmax is the prompted label."""
        return (self.predicted[kind] == self.prompted[kind]).astype(np.float64)

    def is_nothing(self, kind: Kind) -> np.ndarray:
        """(n,) 1 where the judge of this kind recognises nothing."""
        return (self.predicted[kind] == NOTHING).astype(np.float64)

    def cells(self) -> list[str]:
        """(n,) the prompt as (class, style): the unit of resampling."""
        return [f"{a}/{b}" for a, b in zip(self.prompted["class"], self.prompted["style"], strict=True)]

    def tally(self) -> dict[str, dict[str, int]]:
        """How often each label was predicted, by judge."""
        counted = {}
        for kind, judge in OWN_JUDGE.items():
            names, counts = np.unique(self.predicted[kind], return_counts=True)
            counted[judge] = {str(name): int(count) for name, count in zip(names, counts, strict=True)}
        return counted


def forgetting(concept: Concept, target: Answers, own: Answers, cross: Answers) -> dict[str, Measurement]:
    """UA, IRA and CRA of a concept, hard and soft.

    Args:
        concept: the target.
        target: all of its pictures.
        own: the pictures whose labels of the target's kind count, the target's among them.
        cross: the pictures whose labels of the other kind count.
    """
    kind, other_kind = concept.kind, CROSS_KIND[concept.kind]
    others, strict = own.without(concept), cross.without(concept)
    return {
        "ua": proportion_of(1 - target.correct(kind), target, kind, "higher"),
        "ira": proportion_of(others.correct(kind), others, kind, "higher"),
        "cra": proportion_of(cross.correct(other_kind), cross, other_kind, "higher"),
        "cra_strict": proportion_of(strict.correct(other_kind), strict, other_kind, "higher"),
        "ua_soft": mean_of(1 - target.confidence[kind], target, kind, "higher"),
        "ira_soft": mean_of(others.confidence[kind], others, kind, "higher"),
    }


def proportion_of(outcomes: np.ndarray, answers: Answers, kind: Kind, better: Better) -> Measurement:
    """The share of pictures with outcome 1, as an unweighted mean over the labels of a kind."""
    return share(outcomes, answers.cells(), answers.prompted[kind].tolist(), better)


def mean_of(values: np.ndarray, answers: Answers, kind: Kind, better: Better) -> Measurement:
    """The mean of probabilities, unweighted over the labels of a kind."""
    return mean(values, answers.cells(), answers.prompted[kind].tolist(), better)


def confusion_tables(
    answers: Answers, rows: Mapping[Kind, Sequence[str]], labels: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Judge -> how often each label of `rows` was judged each of the judge's labels."""
    tables = {}
    for kind, judge in OWN_JUDGE.items():
        truth, guess = answers.prompted[kind].tolist(), answers.predicted[kind].tolist()
        tables[judge] = metrics.confusion_table(truth, guess, rows[kind], labels[judge])
    return tables


def label_tables(answers: Answers, rows: Mapping[Kind, Sequence[str]]) -> dict[str, Any]:
    """Judge -> label -> pictures prompted with it, how many were judged as it, their share, its mean probability."""
    return {
        judge: {label: _label_row(answers, kind, label) for label in rows[kind]} for kind, judge in OWN_JUDGE.items()
    }


def _label_row(answers: Answers, kind: Kind, label: str) -> dict[str, float]:
    part = answers.of(Concept(label, kind))
    correct, n = int(part.correct(kind).sum()), len(part.index)
    return {"n": n, "correct": correct, "accuracy": correct / n, "probability": float(part.confidence[kind].mean())}
