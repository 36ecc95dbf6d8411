"""Records of the denoising MDP: Conditioning (c), Trajectory (x_T..x_0) and Steps (chosen state-action pairs).

Every per-step field of a trajectory is indexed by one call, `trajectory.steps(sample_ids, step_ids)`, so a plan of
pairs can never pick the state of one step and the log-prob of another. Records are frozen: use `dataclasses.replace`.
Latents are float32: states are stored exactly as they are scored again, so the ratio right after collection is 1.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

EMBEDDINGS, POOLED = "embeddings", "pooled"
"""Names that critics know: what the denoiser cross-attends to, and a summary of the whole prompt."""
Ids = Int[Tensor, " k"]
Record = TypeVar("Record", "Conditioning", "Trajectory", "Steps")


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What prompts become: named tensors for the denoiser, and those of no prompt for classifier-free guidance.

    The names are the model's own, except that a text embedding which the denoiser cross-attends to is `embeddings` and
    a vector that sums up the prompt is `pooled`: critics that see the prompt read these.
    """

    prompts: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    """Name -> (n, ...)."""
    unconditional: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> (m, ...): one row for all samples (m = 1) or one each (m = n). A name that is left out is the same with
    and without a prompt; without any name there is no guidance."""

    def __post_init__(self) -> None:
        """Check that prompts and tensors belong together."""
        n = len(self.prompts)
        for name, tensor in self.tensors.items():
            assert len(tensor) == n, f"{n} prompts for {len(tensor)} {name}"
        for name, tensor in self.unconditional.items():
            assert name in self.tensors, f"unconditional {name!r} beside {', '.join(self.tensors)}"
            assert len(tensor) in (1, n), f"{len(tensor)} unconditional {name} for {n} prompts"

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    @property
    def embeddings(self) -> Float[Tensor, "n l d"]:
        """The text embeddings of a denoiser that cross-attends."""
        return self.tensors[EMBEDDINGS]

    @property
    def empty(self) -> "Conditioning":
        """As many times no prompt: the unconditional tensors in place of the prompts' own."""
        tensors = {name: self.unconditional.get(name, given).expand_as(given) for name, given in self.tensors.items()}
        return Conditioning(("",) * len(self), tensors, self.unconditional)

    def __getitem__(self, ids: slice | Ids) -> "Conditioning":
        """Return the chosen prompts, in the order given; an id may come more than once."""
        order = range(*ids.indices(len(self))) if isinstance(ids, slice) else ids.tolist()

        def chosen(rows: Tensor) -> Tensor:
            # Ids on the CPU go over without waiting for the device; those on it would be read back for the prompts.
            return rows[ids if isinstance(ids, slice) else ids.to(rows.device, non_blocking=True)]

        # A single unconditional row is shared, so it stays as it is (also when there is only one prompt).
        unconditional = {k: rows if len(rows) == 1 else chosen(rows) for k, rows in self.unconditional.items()}
        tensors = {name: chosen(rows) for name, rows in self.tensors.items()}
        return Conditioning(tuple(self.prompts[i] for i in order), tensors, unconditional)

    def to(self, device: torch.device | str) -> "Conditioning":
        """Return the same conditioning on `device`."""
        return _moved(self, device)

    @staticmethod
    def cat(parts: Sequence["Conditioning"]) -> "Conditioning":
        """Join conditionings in order."""
        first = parts[0]
        for part in parts:
            is_alike = part.tensors.keys() == first.tensors.keys()
            is_alike = is_alike and part.unconditional.keys() == first.unconditional.keys()
            assert is_alike, "conditionings of different names cannot be joined"
        tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors}
        unconditional = {
            name: _joined([part.unconditional[name] for part in parts], parts) for name in first.unconditional
        }
        return Conditioning(tuple(prompt for part in parts for prompt in part.prompts), tensors, unconditional)


@dataclass(frozen=True, eq=False)
class Steps:
    """State-action pairs (x_t, x_{t-1}) chosen from a trajectory, in the order of the plan."""

    x: Float[Tensor, "k *d"]
    next_x: Float[Tensor, "k *d"]
    log_prob: Float[Tensor, " k"]
    """Under the policy that collected them; 0 for a deterministic step."""
    sample: Int[Tensor, " k"]
    index: Int[Tensor, " k"]
    """Step index, 0 = the step from x_T; what `ReverseKernel.step` takes."""
    time: Num[Tensor, " k"]
    """What the denoiser receives."""
    cond: Conditioning
    x0_hat: Float[Tensor, "k *d"] | None = None
    reward: Float[Tensor, " k"] | None = None
    value: Float[Tensor, " k"] | None = None
    advantage: Float[Tensor, " k"] | None = None

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.x)

    def to(self, device: torch.device | str) -> "Steps":
        """Return the same pairs on `device`."""
        return _moved(self, device)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """n denoising runs of t steps, with the log-probs of the policy that made them."""

    x: Float[Tensor, "n t_plus_1 *d"]
    """x_T, ..., x_0: states are x[:, :-1], actions x[:, 1:]."""
    log_prob: Float[Tensor, "n t"]
    """Mean over latent dimensions; 0 at deterministic steps."""
    time: Num[Tensor, " t"]
    """What the denoiser receives at each step; whole numbers or not."""
    stochastic: Bool[Tensor, " t"]
    seeds: Int[Tensor, " n"]
    cond: Conditioning
    guidance: float
    x0_hat: Float[Tensor, "n t *d"] | None = None
    """The clean latent implied at each step: a critic that looks at x̂0 needs no second denoiser call."""
    reward: Float[Tensor, " n"] | None = None
    value: Float[Tensor, "n t"] | None = None
    advantage: Float[Tensor, "n t"] | None = None
    sampled_for: tuple[str, ...] | None = None
    """The prompts that the trajectories were drawn for, where some were relabelled; None: those of `cond`."""
    chosen: tuple[int, ...] | None = None
    """Steps that this batch is learned from, rising; value and advantage are NaN at the others. None: all."""

    def __post_init__(self) -> None:
        """Check that there is one more state than there are steps, and one prompt for each run."""
        n, t = self.log_prob.shape
        assert self.x.shape[:2] == (n, t + 1), f"states {tuple(self.x.shape)} for log-probs {(n, t)}"
        assert len(self.cond) == n, f"{len(self.cond)} prompts for {n} trajectories"
        names = self.sampled_for
        assert names is None or len(names) == n, f"{len(names or ())} sampled prompts for {n} trajectories"

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.x)

    def __getitem__(self, ids: slice | Ids) -> "Trajectory":
        """Return the chosen trajectories, in the order given, with every field."""
        return replace(
            self,
            x=self.x[ids],
            log_prob=self.log_prob[ids],
            seeds=self.seeds[ids],
            cond=self.cond[ids],
            x0_hat=_at(self.x0_hat, ids),
            reward=_at(self.reward, ids),
            value=_at(self.value, ids),
            advantage=_at(self.advantage, ids),
            sampled_for=_names_at(self.sampled_for, ids),
        )

    @property
    def relabelled(self) -> Bool[Tensor, " n"]:
        """Which trajectories were drawn for another prompt than the one they are learned for, on the CPU."""
        drawn = self.cond.prompts if self.sampled_for is None else self.sampled_for
        return torch.tensor([a != b for a, b in zip(drawn, self.cond.prompts, strict=True)], dtype=torch.bool)

    @property
    def horizon(self) -> int:
        """The number of denoising steps t."""
        return self.log_prob.shape[1]

    @property
    def learned(self) -> list[int]:
        """Ids of the steps that are learned from, rising; what critics look at."""
        return list(range(self.horizon) if self.chosen is None else self.chosen)

    @property
    def trained(self) -> Bool[Tensor, " t"]:
        """Which steps belong in a policy loss: those learned from that have noise, since others have no density."""
        is_learned = torch.zeros_like(self.stochastic)
        is_learned[self.learned] = True
        return self.stochastic & is_learned

    @property
    def final(self) -> Float[Tensor, "n *d"]:
        """The clean latents x_0."""
        return self.x[:, -1]

    def steps(self, sample_ids: Ids, step_ids: Ids) -> Steps:
        """Return the pairs (sample_ids[k], step_ids[k]); every per-step field is taken at the same place."""
        i, t = (ids.to(self.x.device, non_blocking=True) for ids in (sample_ids, step_ids))
        return Steps(
            x=self.x[i, t],
            next_x=self.x[i, t + 1],
            log_prob=self.log_prob[i, t],
            sample=i,
            index=t,
            time=self.time[t],
            cond=self.cond[sample_ids],
            x0_hat=_at(self.x0_hat, i, t),
            reward=_at(self.reward, i),
            value=_at(self.value, i, t),
            advantage=_at(self.advantage, i, t),
        )

    def policy_pairs(self) -> tuple[Ids, Ids]:
        """Return (sample_ids, step_ids) of all pairs that belong in a policy loss, sample by sample.

        Deterministic steps are left out: they have no density, so no ratio.
        """
        steps = self.trained.nonzero().flatten().cpu()
        samples = torch.arange(len(self))
        return samples.repeat_interleave(len(steps)), steps.repeat(len(samples))

    def to(self, device: torch.device | str) -> "Trajectory":
        """Return the same trajectories on `device`."""
        return _moved(self, device)

    @staticmethod
    def cat(parts: Sequence["Trajectory"]) -> "Trajectory":
        """Join trajectories of the same sampler; an optional field must be set in all parts or in none."""
        first = parts[0]
        same = all(p.guidance == first.guidance and torch.equal(p.time, first.time) for p in parts)
        same = same and all(torch.equal(p.stochastic, first.stochastic) for p in parts)
        assert same, "trajectories of different samplers (guidance, times or noise) cannot be joined"
        assert all(p.chosen == first.chosen for p in parts), "trajectories learned from at other steps cannot be joined"
        return replace(
            first,
            x=torch.cat([p.x for p in parts]),
            log_prob=torch.cat([p.log_prob for p in parts]),
            seeds=torch.cat([p.seeds for p in parts]),
            cond=Conditioning.cat([p.cond for p in parts]),
            x0_hat=_cat([p.x0_hat for p in parts]),
            reward=_cat([p.reward for p in parts]),
            value=_cat([p.value for p in parts]),
            advantage=_cat([p.advantage for p in parts]),
            sampled_for=_joined_names([p.sampled_for for p in parts]),
        )


def _joined(rows: Sequence[Tensor], parts: Sequence[Conditioning]) -> Tensor:
    # One row stays one where it is the same in all parts.
    if all(len(row) == 1 and (row is rows[0] or torch.equal(row, rows[0])) for row in rows):
        return rows[0]
    return torch.cat([row.expand(len(part), *row.shape[1:]) for row, part in zip(rows, parts, strict=True)])


def _at(values: Tensor | None, *ids: Tensor | slice) -> Tensor | None:
    return None if values is None else values[ids]


def _names_at(names: tuple[str, ...] | None, ids: slice | Ids) -> tuple[str, ...] | None:
    if names is None:
        return None
    return names[ids] if isinstance(ids, slice) else tuple(names[i] for i in ids.tolist())


def _joined_names(parts: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), f"sampled prompts are set in {len(present)} of {len(parts)} trajectories"
    return sum(present, ()) if present else None


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), f"a field is set in {len(present)} of {len(parts)} trajectories"
    return torch.cat(present) if present else None


def _moved(record: Record, device: torch.device | str) -> Record:
    values = {f.name: record.__dict__[f.name] for f in fields(record)}
    moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor | Conditioning)}
    tables = {k: v for k, v in values.items() if isinstance(v, Mapping)}
    moved |= {k: {name: tensor.to(device) for name, tensor in table.items()} for k, table in tables.items()}
    return replace(record, **moved)
