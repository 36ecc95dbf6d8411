"""Where scoring networks come from, so that no judge is a relative of what trained the model it judges.

A lineage is a record: "name", "weights" (sha256 of its files) and "started_from" (sha256 or hub ids of what these were
started from, with the ancestors of ancestors, as far as they are recorded). Two networks are relatives when their
ancestries meet. Training data are no part of it: networks that saw the same pictures are not relatives here.

A run keeps the lineages of its reward, its critic's starting tower and its outside detector under "extra" of
manifest.json, None where it had no such network; a model that `cgru export` wrote keeps them in cgru.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.catalog import unknown

Lineage = Mapping[str, Any]
ROLES = ("reward", "critic", "detector")
"""Networks that a training goes by, as a manifest calls them."""
STAMP = "judge_shares_lineage_with"
"""In a protocol: relatives that were asked for by name."""
HUB_ANCESTORS: Mapping[str, tuple[str, ...]] = {
    # One more epoch at 336 pixels on top of ViT-L/14 (arXiv 2103.00020, section 2.5).
    "openai/clip-vit-large-patch14-336": ("openai/clip-vit-large-patch14",),
}
"""What hub ids do not say themselves; a lineage.json beside the weights is read, too."""
NOTE = "cgru.json"
"""Says in an exported model what was forgotten, and by what; diffusers does not read it."""
SHOWN = 12
"""Digits of a hash in a message."""


@dataclass(frozen=True)
class Trainers:
    """What a model was trained by, as far as it says."""

    networks: Mapping[str, Lineage]
    """By role; without those that it had not."""
    notices: tuple[str, ...] = ()
    """What is not recorded, one line each."""


@dataclass(frozen=True)
class Kinship:
    """What a check found, for scores.json."""

    shares: tuple[str, ...] = ()
    """ "JUDGE: ROLE NAME" for each relative that was asked for by name."""
    notices: tuple[str, ...] = ()

    @property
    def stamp(self) -> dict[str, list[str]]:
        """For the protocol; nothing where no judge is a relative."""
        return {STAMP: list(self.shares)} if self.shares else {}


def ancestry(lineage: Lineage) -> frozenset[str]:
    """Hashes of a network's own weights and of those it was started from, and hub ids."""
    return frozenset((*lineage["weights"], *lineage["started_from"]))


def shared(one: Lineage, other: Lineage) -> frozenset[str]:
    """What two networks have in common; empty when they are no relatives."""
    return ancestry(one) & ancestry(other)


def judge_lineage(stored: Lineage, weights_sha256: str) -> dict[str, Any]:
    """The whole record of a judge whose lineage.json may say the name alone."""
    weights = dict.fromkeys((weights_sha256, *stored.get("weights", ())))
    return {"name": stored["name"], "weights": list(weights), "started_from": list(stored.get("started_from", ()))}


def trainers_of(model: str, edit: Path | None) -> Trainers:
    """What a model says of its training.

    Args:
        model: a run folder, a LoRA file, an exported model, or any other model: that one says nothing, as a base.
        edit: the LoRA file that `model` stands for, if it does.
    """
    if edit is None:
        note = Path(model) / NOTE
        return _read(note, f"the model {model!r}", "lineage") if note.is_file() else Trainers({})
    manifest = edit.parent.parent / "manifest.json"
    if edit.parent.name == "edit" and manifest.is_file():
        return _read(manifest, f"the run {str(manifest.parent)!r}", "extra")
    return Trainers({}, (_notice(f"{model!r} is a LoRA without the manifest of its run", ROLES),))


def check_judges(judges: Mapping[str, Lineage | None], trainers: Trainers, allowed: Sequence[str]) -> Kinship:
    """Refuse a judge that is a relative of what trained the model, unless it was asked for by name.

    Args:
        judges: by name; None for one that says nothing of itself, such as a user's function.
        trainers: of the judged model.
        allowed: names of judges that may be relatives.
    """
    for name in allowed:
        if name not in judges:
            raise ValueError(unknown("judge", name, list(judges), "Give one of these as --allow-judge, or leave it."))
    silent = [name for name, lineage in judges.items() if lineage is None and trainers.networks]
    notices = [f"the judge {name!r} has no record of its weights: unknown lineage" for name in silent]
    shares = []
    for name, lineage in judges.items():
        for role, other in trainers.networks.items():
            if lineage is not None and (common := shared(lineage, other)):
                if name not in allowed:
                    raise ValueError(_refusal(name, role, other, common))
                shares.append(f"{name}: {role} {other['name']}")
    return Kinship(tuple(shares), (*trainers.notices, *notices))


def _refusal(judge: str, role: str, other: Lineage, common: frozenset[str]) -> str:
    what = ", ".join(word if "/" in word else word[:SHOWN] for word in sorted(common))
    return (
        f"the judge {judge!r} shares lineage with the {role} {other['name']!r} that trained this model ({what}): its "
        "numbers would prove little; allowed: unrelated judges. Choose another benchmark, or ask for it by name with "
        f"--allow-judge {judge}."
    )


def _read(path: Path, who: str, key: str) -> Trainers:
    try:
        table = json.loads(path.read_text(encoding="utf-8")).get(key, {})
        networks = {role: table[role] for role in ROLES if table.get(role) is not None}
        for lineage in networks.values():
            ancestry(lineage), lineage["name"]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read lineages from {str(path)!r}; allowed: what cgru wrote. Restore it.") from error
    missing = [role for role in ROLES if role not in table]
    return Trainers(networks, (_notice(who, missing),) if missing else ())


def _notice(who: str, missing: Sequence[str]) -> str:
    roles = ", ".join(missing)
    return f"{who} does not say which {roles} trained it: unknown lineage, so no judge was compared with it"
