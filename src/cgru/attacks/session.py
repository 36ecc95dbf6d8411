"""UnlearnDiffAtk as an evaluation: pre- and post-ASR of a model on one concept, from a request to scores.json.

`prepare_attack` checks and loads everything and writes nothing; `run_attack` finds target pictures (images.py),
attacks (runner.py) and scores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cgru import distributed
from cgru.atomic_io import atomic_write, to_json
from cgru.attacks.concept import Trial, find_trial
from cgru.attacks.images import Found, drawn_targets, given_targets, pictures_hash
from cgru.attacks.runner import Campaign, success_rates
from cgru.attacks.unlearndiffatk import Schedule, find_schedule
from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.backbones.whitebox import open_up
from cgru.edit_folder import base_model, find_edit, is_run
from cgru.edits import Edit, load_edit
from cgru.embedded import EMBEDDED, ROOT, is_embedded, model_source, sha256_of
from cgru.evaluation.base import MOST_PICTURES, stable_hash
from cgru.evaluation.runner import fingerprint
from cgru.evaluation.session import LIBRARIES, Progress
from cgru.evaluation.store import (
    SCORES,
    Row,
    check_contents,
    check_protocol,
    check_writable,
    scores_pending,
)
from cgru.lineage import STAMP, Kinship, check_judges, trainers_of

NAME, VERSION = "unlearndiffatk", 1


@dataclass(frozen=True)
class AttackRequest:
    """What is to be attacked, and how."""

    model: str
    """A run folder, an edit folder, a LoRA file, a hub id, a diffusers folder or "emoji-canvas"."""
    target: str
    """The concept that is meant to be forgotten."""
    prompts: int = 50
    schedule: str = "short"
    tokens: int = 3
    """Adversarial tokens before each prompt: 3 for objects and styles, 5 for nudity (official)."""
    without_word: bool = False
    """Positive control: remove the concept's word from the prompts of a model that has forgotten nothing."""
    source: Path | None = None
    """A file of prompts, for a concept outside Emoji Canvas; needs `judge`."""
    judge: str | None = None
    """nudenet or resnet50, either with =PATH, or "module:attr" of a function: which images show the concept."""
    pictures: Path | None = None
    """A folder of target pictures, one per prompt in the order of their names, instead of the base's."""
    allow_judge: tuple[str, ...] = ()
    """Judges that are accepted although they are related to networks that trained the model; scores.json records it."""
    base: str | None = None
    """The model that draws the target pictures and that an edit belongs to."""
    allow_hooks: tuple[str, ...] = ()
    """The user's own hooks ("module:attr") that an edit may import."""
    seed: int = 0
    """Seed of the attack's random numbers; the noise of pictures is the benchmark's."""
    out: Path | None = None
    device: str = "auto"
    dtype: str = "fp32"
    batch_size: int | None = None
    """Prompts attacked side by side; None: 10 on a CPU, 25 elsewhere."""
    root: Path = ROOT
    """The asset folder."""


@dataclass(frozen=True)
class AttackSession:
    """Everything checked and loaded, nothing written."""

    request: AttackRequest
    schedule: Schedule
    trial: Trial
    backbone: Backbone
    edit: Edit | None
    base: Backbone
    """The model that draws the target pictures: the backbone without its edit, or another model."""
    marks: dict[str, str]
    """Fingerprints of the attacked model and of the source of the target pictures."""
    out: Path
    kinship: Kinship
    """What is known of judge and training networks."""

    @property
    def size(self) -> int:
        """Prompts side by side."""
        return self.request.batch_size or (10 if self.backbone.device.type == "cpu" else 25)

    @property
    def setting(self) -> dict[str, Any]:
        """Everything besides prompt, seed and model that a picture and its verdict depend on."""
        return {
            **asdict(self.trial.sampling),
            "judge": dict(self.trial.judge),
            **({"prompts_sha256": sha256_of(self.request.source)} if self.request.source else {}),
            **({"pictures_sha256": self.marks["targets"]} if self.request.pictures else {}),
            "dtype": self.request.dtype,
            "device": self.backbone.device.type,
            "libraries": {name: version(name) for name in LIBRARIES},
        }

    @property
    def method(self) -> dict[str, Any]:
        """What decides the attack beside these."""
        return {
            "schedule": {"name": self.request.schedule, **asdict(self.schedule)},
            "tokens": self.request.tokens,
            "position": "prefix",
            "optimiser": "Adam (L2 decay) on simplex rows, exact projection, start uniform",
            "special_tokens": "left out of the vocabulary",
            "without_word": self.request.without_word,
            "attack_seed": self.request.seed,
        }

    @property
    def fixed(self) -> dict[str, Any]:
        """The parts of a protocol that must be equal for a result to replace another: all but model and number of
        prompts."""
        target = {"name": self.trial.name, "kind": self.trial.kind}
        facts = {"benchmark": NAME, "version": VERSION, "target": target, STAMP: None}
        return {**facts, **self.method, **self.setting, **self.kinship.stamp}


def prepare_attack(request: AttackRequest) -> AttackSession:
    """Check and load everything, cheap checks first; invalid input raises ValueError or OSError, in all processes."""
    return distributed.alike(lambda: _prepared(request))


def _prepared(request: AttackRequest) -> AttackSession:
    _check_numbers(request)
    schedule = find_schedule(request.schedule)
    edit_file = find_edit(request.model)
    check_writable(request.out or _default_parent(request))
    edit = load_edit(edit_file, allow_hooks=request.allow_hooks) if edit_file else None
    own = request.base or base_model(request.model, default=EMBEDDED) if edit else request.model
    backbone = _load(own, request)
    trial = find_trial(
        request.target,
        wanted=request.prompts,
        prompts=request.source,
        judge=request.judge,
        root=request.root,
        device=backbone.device,
    )
    kinship = check_judges(trial.lineages, trainers_of(request.model, edit_file, request.root), request.allow_judge)
    trial = _with_room(trial, backbone, request.tokens)
    _check_trial(request, trial, backbone, edit)
    base = _base(request, own, backbone, edit)
    drawer = fingerprint(base) if request.pictures is None else pictures_hash(request.pictures)
    marks = {"targets": drawer, "model": fingerprint(backbone)}
    if edit:
        marks["model"] = stable_hash([marks["model"], edit.fingerprint])
    out = request.out or _default_parent(request) / _default_name(request, trial, marks["model"])
    for folder in (out, out / "base"):
        check_contents(folder)
    session = AttackSession(request, schedule, trial, backbone, edit, base, marks, out, kinship)
    check_protocol(out, session.fixed)
    return session


def run_attack(session: AttackSession, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Find targets, attack, score; scores.json is written last.

    With several processes, the main one finds the targets, each attacks its share, and the main one scores and writes.
    """
    with ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(scores_pending(session.out)))
        found, campaign = distributed.from_main(lambda: find_targets(session, progress)), _campaign(session)
        with session.edit.applied(session.backbone) if session.edit else nullcontext(session.backbone) as model:
            rows = campaign.run(model, found.targets, lambda done, total: progress("attacks", done, total))
        scores = _scores(session, found, rows)
        distributed.from_main(lambda: atomic_write(session.out / SCORES, to_json(scores)))
    return scores


def find_targets(session: AttackSession, progress: Progress) -> Found:
    """The prompts to attack, each with its picture."""
    request, trial = session.request, session.trial
    if request.pictures is not None:
        return given_targets(request.pictures, trial, request.prompts, open_up(session.backbone).model.image_size)
    return drawn_targets(
        session.base,
        trial,
        request.prompts,
        size=session.size,
        folder=session.out / "base",
        key=stable_hash([NAME, VERSION, session.setting, session.marks["targets"]])[:16],
        progress=lambda done, total: progress("target pictures", done, total),
    )


def _campaign(session: AttackSession) -> Campaign:
    request = session.request
    decides = [NAME, VERSION, session.trial.name, session.method, session.setting, session.marks]
    return Campaign(
        session.trial,
        session.schedule,
        request.tokens,
        request.without_word,
        request.seed,
        session.size,
        session.out,
        stable_hash(decides)[:16],
    )


def _scores(session: AttackSession, found: Found, rows: Sequence[Row]) -> dict[str, Any]:
    request, trial = session.request, session.trial
    edit = session.edit.fingerprint if session.edit else None
    return {
        "benchmark": NAME,
        "version": VERSION,
        "protocol": {
            "target": {"name": trial.name, "kind": trial.kind},
            "prompts": request.prompts,
            "targets": {
                "from": str(request.pictures or session.base.name),
                "found": len(rows),
                "candidates": found.candidates,
            }
            | ({"skipped": dict(trial.skipped)} if trial.is_listed else {}),
            **({"sensitive": True} if trial.is_sensitive else {}),
            **session.method,
            **session.setting,
            "intervals": "wilson",
            **session.kinship.stamp,
            "model": {
                "name": request.model,
                "base": session.base.name,
                "edit_sha256": edit,
                "fingerprint": session.marks["model"],
            },
        },
        "measurements": {name: share.record() for name, share in success_rates(rows).items()},
        "broken_images": sum(row["broken"] for row in rows),
        "examples": [_example(row) for row in rows],
        "base": None,
        "change": {},
        "notices": list(session.kinship.notices),
    }


def _example(row: Row) -> dict[str, Any]:
    found = row["attack"] or {}
    kept = {"adversarial": found.get("prompt"), "tokens": found.get("tokens"), "time": found.get("time")}
    return {"id": row["id"], "prompt": row["prompt"], "before": row["before"], "after": row["after"], **kept}


def _base(request: AttackRequest, own: str, backbone: Backbone, edit: Edit | None) -> Backbone:
    """The base: for an edit its own model; otherwise the model the user names, else Emoji Canvas for its concepts."""
    if edit is None and request.base is not None:
        return _load(request.base, request)
    if edit is None and request.judge and request.pictures is None and not request.without_word:
        # Otherwise the model's own pictures would be the targets, and every prompt would show the concept unattacked.
        raise ValueError(
            f"no --model for {request.model!r}, so nothing draws target pictures but the attacked model; allowed: the "
            "model it was made from. Give --model NAME, or --pictures FOLDER."
        )
    if edit or request.judge or is_embedded(own, request.root):
        return backbone
    return _load(EMBEDDED, request)


def _load(name: str, request: AttackRequest) -> Backbone:
    return load_model(model_source(name, request.root), device=request.device, dtype=request.dtype)


def _check_numbers(request: AttackRequest) -> None:
    counts = {"--prompts": request.prompts, "--tokens": request.tokens, "--batch-size": request.batch_size}
    for option, number in counts.items():
        if number is not None and not 1 <= number <= MOST_PICTURES:
            raise ValueError(f"{option} {number}; allowed: 1 to {MOST_PICTURES}. Give a number in that range.")


def _with_room(trial: Trial, backbone: Backbone, tokens: int) -> Trial:
    """Skip and count prompts of a list with seeds that are too long for the adversarial tokens."""
    if not trial.is_listed:
        return trial
    box = open_up(backbone)
    fitting = [job for job in trial.candidates if box.room(job.prompt) >= tokens]
    if not fitting:
        raise ValueError(f"--tokens {tokens}; none of the prompts leaves room for them. Give fewer, or other prompts.")
    lost = len(trial.candidates) - len(fitting)
    reasons = {f"too long for {tokens} more tokens": lost} if lost else {}
    return replace(trial, candidates=fitting, skipped={**trial.skipped, **reasons})


def _check_trial(request: AttackRequest, trial: Trial, backbone: Backbone, edit: Edit | None) -> None:
    box = open_up(backbone)
    longest = min(trial.candidates, key=lambda job: box.room(job.prompt)).prompt
    if (room := box.room(longest)) < request.tokens:
        allowed = f"allowed: {max(room, 0)} beside the prompt {longest!r}"
        raise ValueError(f"--tokens {request.tokens}; {allowed}. Give fewer tokens or shorter prompts.")
    if request.without_word and any(trial.hidden(job) == " ".join(job.prompt.split()) for job in trial.candidates):
        raise ValueError(
            f"a prompt does not contain {trial.name!r}; allowed with --without-word: only prompts that do."
        )
    trial.check(box.model.image_size, backbone.device)
    if request.pictures is not None:
        given_targets(request.pictures, trial, request.prompts, box.model.image_size)  # an unreadable one: said now
    if edit:
        with edit.applied(backbone) as edited:
            open_up(edited)  # an edit of another model, or a hook without a gradient, is refused before any writing


def _default_parent(request: AttackRequest) -> Path:
    return Path(request.model) / "eval" if is_run(request.model) else Path("runs") / "eval"


def _default_name(request: AttackRequest, trial: Trial, mark: str) -> str:
    """Default folder: by target and schedule; outside a run also by model."""
    parts = [f"{NAME}@{VERSION}", trial.name, request.schedule, "without-word" if request.without_word else ""]
    if not is_run(request.model):
        model = Path(request.model).resolve().name if Path(request.model).exists() else request.model
        parts = [model.removesuffix(".safetensors"), *parts, mark[:8]]
    return "-".join(re.sub(r"[^a-z0-9@.]+", "-", part.lower()).strip("-") for part in parts if part)
