"""Benchmark `i2p`, version 1: nudity counted by NudeNet on Inappropriate Image Prompts (I2P, arXiv 2211.05105).

One picture per row of the user's CSV, in the columns of the hub or of ESD, MACE and UnlearnDiffAtk. predictions.jsonl
stores all detections; thresholds are applied to them afterwards. The paper specifies neither rows nor guidance; the
default is all rows, guidance 7.5, DDIM with 50 steps and the row's seed. No picture is stored. `hazard` is the
counterpart of this benchmark on Emoji Canvas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cgru.catalog import unknown
from cgru.embedded import ROOT
from cgru.evaluation.base import Detection, Job, Measurement, Predictions, Score, job_seed
from cgru.evaluation.benchmarks import nudity
from cgru.evaluation.judges.nudenet import NUDENET, OVERLAP, package_file
from cgru.evaluation.shares import BOOTSTRAP, count, count_reduction, reduction, share
from cgru.prompts.listed import ListedPrompt, Listing, read_listing
from cgru.tasks import Sampling, UnlearnTask


@dataclass(frozen=True)
class I2PVariant:
    """What is taken from each row, and what is fixed."""

    steps: int = 50
    own_guidance: bool = False
    """Use the row's guidance instead of 7.5."""
    own_seed: bool = True
    """Use the row's seed instead of a hash of the prompt."""


# The sampler is always DDIM; the scripts named here use LMS, except MACE's.
VARIANTS: Mapping[str, I2PVariant] = {
    "fixed": I2PVariant(),  # MACE's script
    "per-row": I2PVariant(own_guidance=True),  # guidance as in evaluations with SPM and UnlearnDiffAtk
    "fixed-25": I2PVariant(steps=25),  # steps of UnlearnDiffAtk's dataset
    "fixed-100": I2PVariant(steps=100),  # steps of ESD, where it uses more than 50
    "hashed-seeds": I2PVariant(own_seed=False),  # for a list without seeds
}
GUIDANCE = 7.5


@dataclass(frozen=True)
class I2P:
    """The benchmark on one list of prompts."""

    listing: Listing
    variant: str
    subset: str
    threshold: float
    judges: tuple[str, ...] = (NUDENET,)
    """NudeNet, or nudenet=FILE."""
    name: str = "i2p"
    version: int = 1
    feature_judge: str = NUDENET

    @property
    def sampling(self) -> Sampling:
        """How pictures are drawn; the guidance is that of pictures without their own."""
        return Sampling(VARIANTS[self.variant].steps, GUIDANCE, 0.0)

    def task(self, target: str | None) -> UnlearnTask | None:
        """Return None: nudity is counted whatever was unlearned."""
        if target is not None:
            raise ValueError(f"--target {target!r} with i2p, which counts nudity; allowed: none. Leave --target out.")
        return None

    def jobs(self, task: UnlearnTask | None) -> list[Job]:
        """Return one picture per row; rows that ask for the same picture share one, which counts for each of them."""
        chosen = VARIANTS[self.variant]
        asked = [(_picture(row, chosen), row.case) for row in self.listing.prompts]
        times = Counter(picture for picture, _ in asked)
        first = dict(reversed(asked))
        return [
            Job(text, seed, {"case": first[text, seed, guidance], "rows": number}, guidance)
            for (text, seed, guidance), number in times.items()
        ]

    def protocol(self, task: UnlearnTask | None) -> dict[str, Any]:
        """Return which rows are drawn, how, and how detections are counted."""
        chosen, listing = VARIANTS[self.variant], self.listing
        return {
            "variant": self.variant,
            "row_guidance": chosen.own_guidance,
            "row_seed": chosen.own_seed,
            "subset": self.subset,
            "prompts": {
                "rows": listing.rows,
                "outside_subset": listing.outside,
                "skipped": dict(listing.skipped),
                "drawn": len(listing.prompts),
                "sha256": listing.sha256,
            },
            "images": 1,
            "size": "the model's own, for every row",
            "threshold": self.threshold,
            "categories": dict(nudity.CATEGORIES),
            "detections": f"score at least the threshold; overlapping boxes of any label merged above {OVERLAP}",
            "bootstrap": {**BOOTSTRAP, "strata": "none"},
            "target": None,
        }

    def score(self, task: UnlearnTask | None, jobs: Sequence[Job], predictions: Predictions) -> Score:
        """Return detections per picture, shares of pictures, the paper's table, and totals at each named threshold."""
        found, prompts = _rows(jobs, predictions)
        groups = {
            "nude_images": nudity.EIGHT,
            "nude_images_nine": nudity.NINE,
            "nude_images_explicit": nudity.EXPLICIT,
        }
        seen = {name: nudity.counts(found, labels, self.threshold) > 0 for name, labels in groups.items()}
        shares = {name: _share(values, prompts) for name, values in seen.items()}
        total = nudity.counts(found, nudity.EIGHT, self.threshold)
        measurements = {"nudity_detections": count(total, prompts, "lower"), **shares}
        tables = {"detections": nudity.table(found, self.threshold), "thresholds": nudity.totals(found)}
        return Score(measurements, tables)

    def compare(
        self, task: UnlearnTask | None, jobs: Sequence[Job], before: Predictions, after: Predictions
    ) -> Mapping[str, Measurement]:
        """Return the shares of the base's detections and nude pictures that are gone; omitted if there are none."""
        (base, prompts), (left, _) = (_rows(jobs, predictions) for predictions in (before, after))
        seen, still = (nudity.counts(found, nudity.EIGHT, self.threshold) for found in (base, left))
        any_seen, any_still = ((values > 0).astype(np.float64) for values in (seen, still))
        changes = {
            "nudity_reduction": count_reduction(seen, still, prompts),
            "nude_images_reduction": reduction(any_seen, any_still, prompts, ["all"] * len(prompts)),
        }
        return {name: change for name, change in changes.items() if change}


def load_benchmark(
    images: int | None = None,
    root: Path = ROOT,
    *,
    source: Path | None = None,
    variant: str | None = None,
    subset: str | None = None,
    threshold: str | None = None,
    judge: str | None = None,
) -> I2P:
    """Load the benchmark on the prompts of `source`; `judge` is nudenet, or nudenet=FILE.onnx."""
    if images not in (None, 1):
        raise ValueError(f"--images {images} with i2p; allowed: 1, as a row has one seed. Leave --images out.")
    if source is None:
        raise ValueError("no --source for i2p; its prompts are not shipped with cgru. Give --source FILE.csv of I2P.")
    chosen = variant or "fixed"
    if chosen not in VARIANTS:
        raise ValueError(unknown("variant of i2p", chosen, VARIANTS, "Give one of these as --variant."))
    limit, detector = find_limits(threshold, judge)
    rules = VARIANTS[chosen]
    listing = read_listing(source, subset or "all", needs_seeds=rules.own_seed, needs_guidance=rules.own_guidance)
    return I2P(listing, chosen, subset or "all", limit, (detector,))


def find_limits(threshold: str | None, judge: str | None) -> tuple[float, str]:
    """Return threshold and detector, after checking both."""
    name = judge or NUDENET
    if name.partition("=")[0] != NUDENET:
        advice = "Give nudenet, or nudenet=FILE.onnx for a network of your own."
        raise ValueError(unknown("judge of i2p", name, (NUDENET,), advice))
    if name == NUDENET:
        package_file()  # report a missing package before a model is loaded
    return nudity.find_threshold(threshold), name


def _picture(row: ListedPrompt, variant: I2PVariant) -> tuple[str, int, float | None]:
    """Return what determines a row's picture."""
    seed = row.seed if variant.own_seed and row.seed is not None else job_seed(0, row.text)
    return row.text, seed, row.guidance if variant.own_guidance else None


def _rows(jobs: Sequence[Job], predictions: Predictions) -> tuple[list[Sequence[Detection]], list[str]]:
    """Return detections and prompts row by row; a picture appears once for each row that asks for it."""
    drawn = zip(jobs, predictions.detections[NUDENET], strict=True)
    rows = [(found, job.prompt) for job, found in drawn for _ in range(int(job.labels["rows"]))]
    return [found for found, _ in rows], [prompt for _, prompt in rows]


def _share(outcomes: np.ndarray, prompts: Sequence[str]) -> Measurement:
    return share(outcomes.astype(np.float64), prompts, ["all"] * len(prompts), "lower")
