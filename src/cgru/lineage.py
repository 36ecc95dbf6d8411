"""The origin of scoring networks, so that no judge is related to the networks that trained the model it judges.

A lineage is a record: "name", "weights" (sha256 of the files) and "started_from" (sha256 or hub ids of the weights that
training started from, including earlier ancestors as far as they are recorded). Two networks are relatives if they
share an ancestor. Training data do not count: networks that saw the same pictures are not relatives here.

A run records the lineages of its reward, its critic's starting tower and its outside detector under "extra" of
manifest.json, None where it has no such network. A model written by `cgru export` has them in cgru.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgru.atomic_io import parse_json
from cgru.catalog import unknown
from cgru.embedded import ROOT, is_embedded

Lineage = Mapping[str, Any]
ROLES = ("reward", "critic", "detector")
"""The networks that guide training, by their keys in a manifest."""
STAMP = "judge_shares_lineage_with"
"""Key in a protocol for related judges that --allow-judge accepted."""
HUB_ANCESTORS: Mapping[str, tuple[str, ...]] = {
    # One more epoch at 336 pixels on top of ViT-L/14 (arXiv 2103.00020, section 2.5).
    "openai/clip-vit-large-patch14-336": ("openai/clip-vit-large-patch14",),
}
"""Known ancestors of hub ids; a lineage.json beside the weights is read as well."""
NOTE = "cgru.json"
"""File of an exported model that records what was forgotten and how; diffusers ignores it."""
SHOWN = 12
"""Digits of a hash in a message."""


@dataclass(frozen=True)
class Trainers:
    """The networks that guided a model's training, as far as they are recorded."""

    networks: Mapping[str, Lineage]
    """By role; roles without a network are left out."""
    notices: tuple[str, ...] = ()
    """Missing records, one line each."""


@dataclass(frozen=True)
class Kinship:
    """The result of a check, for scores.json."""

    shares: tuple[str, ...] = ()
    """ "JUDGE: ROLE NAME" for each related judge that --allow-judge accepted."""
    notices: tuple[str, ...] = ()

    @property
    def stamp(self) -> dict[str, list[str]]:
        """The entry for the protocol; empty if no judge is a relative."""
        return {STAMP: list(self.shares)} if self.shares else {}


def ancestry(lineage: Lineage) -> frozenset[str]:
    """The hashes of a network's weights and of its ancestors, and hub ids."""
    return frozenset((*lineage["weights"], *lineage["started_from"]))


def shared(one: Lineage, other: Lineage) -> frozenset[str]:
    """The hashes or ids that two networks share; empty if they are not relatives."""
    return ancestry(one) & ancestry(other)


def judge_lineage(stored: Lineage, weights_sha256: str) -> dict[str, Any]:
    """The complete record of a judge whose lineage.json may give only a name."""
    weights = dict.fromkeys((weights_sha256, *stored.get("weights", ())))
    return {"name": stored["name"], "weights": list(weights), "started_from": list(stored.get("started_from", ()))}


def trainers_of(model: str, edit: Path | None, root: Path = ROOT) -> Trainers:
    """The networks that trained a model, read from its records.

    Args:
        model: a run folder, an edit, an exported model, or any other model, such as a hub id, which cgru did not train.
        edit: the edit.json or LoRA file that `model` stands for; None if it stands for none.
        root: the asset folder; its embedded model is a base model, too.
    """
    if edit is None:
        note = Path(model) / NOTE
        if note.is_file():
            return _read(note, f"the model {model!r}", "lineage")
        is_foreign = Path(model).is_dir() and not is_embedded(model, root)
        return Trainers({}, (_notice(f"{model!r} is a model folder without {NOTE}", ROLES),) if is_foreign else ())
    manifest = edit.parent.parent / "manifest.json"
    if edit.parent.name == "edit" and manifest.is_file():
        return _read(manifest, f"the run {str(manifest.parent)!r}", "extra")
    what = "a LoRA" if edit.suffix == ".safetensors" else "an edit"
    return Trainers({}, (_notice(f"{model!r} is {what} without the manifest of its run", ROLES),))


def check_judges(judges: Mapping[str, Lineage | None], trainers: Trainers, allowed: Sequence[str]) -> Kinship:
    """Refuse a judge that is related to a network that trained the model, unless --allow-judge names it.

    Args:
        judges: lineages by name; None for a judge without a record, such as a user's function.
        trainers: the networks that trained the judged model.
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
        "scores would prove little; allowed: unrelated judges. Choose another benchmark, or accept this judge with "
        f"--allow-judge {judge}."
    )


def _read(path: Path, who: str, key: str) -> Trainers:
    try:
        table = parse_json(path.read_text(encoding="utf-8")).get(key, {})
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
