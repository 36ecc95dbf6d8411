"""OOM recovery: batches are halved once, and the result is that of a run begun with the smaller ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Raised, side_by_side
from tiny_rl import nudge, tiny_learner, tiny_problem
from torch import Tensor, nn

from cgru import distributed
from cgru.fast.fixed_batch import OneShape
from cgru.rl.collect import collect
from cgru.rl.oom_retry import Memory
from cgru.rl.retention import make_bank
from cgru.rl.state import Learner, Problem, Sizes
from cgru.rl.train import Iteration, iterate, rounded_alike, train
from cgru.rl.update import TrainingError

# 8 trajectories of 2 steps in 2 updates: 8 pairs each in 2 micro-batches of 4, and 4 of the bank.
SETTINGS = ["policy.iterations=1", "policy.trajectories=8", "sampling.steps=2", "policy.clip=0.1"]
SETTINGS += ["retention.kl=0.1", "retention.bank=4", "retention.batch=4"]
BEGUN, HALF = Sizes(rollout=4, update=4, decode=4, score=8), Sizes(rollout=2, update=2, decode=4, score=8)


@dataclass
class Cramped:
    """A network's hook: from its `first` call of the kind on, more than `most` samples are too many."""

    most: int
    learns: bool = True
    """Whether calls with gradient count, or those without."""
    first: int = 1
    calls: int = 0

    def __call__(self, network: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() != self.learns:
            return
        self.calls += 1
        if self.calls >= self.first and len(args[0]) > self.most:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nGPU 0 has 1.00 GiB free.")


def start(folder: Path, sizes: Sizes, *settings: str) -> tuple[Problem, Learner]:
    problem = tiny_problem(folder, *SETTINGS, *settings, sizes=sizes)
    learner = tiny_learner(problem)
    nudge(learner)
    # SGD: Adam's first steps are as long for a gradient of rounding as for any other
    learner.optimiser = torch.optim.SGD(learner.parameters.values(), lr=1e-2)
    return problem, learner


def trained(
    problem: Problem, learner: Learner, after_halving: Callable[[Problem], None] = lambda _: None
) -> dict[str, Tensor]:
    train(problem, learner, make_bank(problem), after_halving=after_halving)
    return {name: parameter.detach() for name, parameter in learner.parameters.items()}


@pytest.fixture(scope="module")
def expected(sd_folder: Path) -> dict[str, Tensor]:
    """What a run ends in that was begun with the smaller batches."""
    return trained(*start(sd_folder, HALF))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("first", [1, 2, 3, 4])  # at once; with a gradient there already; in the bank's KL; later
def test_an_update_is_begun_again_in_half_the_micro_batch(
    sd_folder: Path, expected: dict[str, Tensor], caplog: pytest.LogCaptureFixture, first: int
) -> None:
    problem, learner = start(sd_folder, BEGUN)
    # guidance doubles 2 pairs; calls with gradient: 2 micro-batches, 1 of the bank, those of the second update
    problem.backbone.denoiser.register_forward_pre_hook(Cramped(most=4, first=first))
    told = list[Sizes]()
    with caplog.at_level(logging.WARNING):
        found = trained(problem, learner, lambda new: told.append(new.sizes))
    assert_close(found, expected)
    assert told == [HALF] and learner.updates == 2
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        "out of memory in an update (Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.): retrying"
    )
    assert said.endswith("half the batch, 2 pairs instead of 4 pairs")


@pytest.mark.parametrize(("network", "what"), [("denoiser", "rollouts"), ("decoder", "rewards")])
def test_rollouts_and_decoding_too(sd_folder: Path, caplog: pytest.LogCaptureFixture, network: str, what: str) -> None:
    expected = trained(*start(sd_folder, HALF, "retention.kl=0"))
    problem, learner = start(sd_folder, BEGUN, "retention.kl=0")
    hook = {"denoiser": Cramped(most=4, learns=False), "decoder": Cramped(most=2, learns=False)}[network]
    handle = {"denoiser": problem.backbone.denoiser, "decoder": problem.backbone.decoder}[network]
    removable = handle.register_forward_pre_hook(hook)
    with caplog.at_level(logging.WARNING):
        found = trained(problem, learner)
    removable.remove()  # the decoder is shared between tests
    assert_close(found, expected)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [f"out of memory in {what}"]


def test_a_second_time_ends_the_run_before_anything_moved(sd_folder: Path) -> None:
    problem, learner = start(sd_folder, BEGUN)
    before = {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}
    problem.backbone.denoiser.register_forward_pre_hook(Cramped(most=2))  # room for one pair, and 2 are half of 4
    with pytest.raises(TrainingError, match="out of memory .an update, 2 pairs: Tried.*memory=low") as caught:
        trained(problem, learner)
    assert "\n" not in str(caught.value) and caught.value.__context__ is None  # which would hold the failed graph
    assert learner.updates == learner.iteration == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in learner.parameters.items())


def test_one_pair_cannot_be_halved(sd_folder: Path) -> None:
    problem, learner = start(sd_folder, replace(BEGUN, update=1))
    problem.backbone.denoiser.register_forward_pre_hook(Cramped(most=1))
    with pytest.raises(TrainingError, match="an update, 1 pairs"):
        iterate(Memory(problem), learner, None)


def test_other_errors_are_not_taken_for_it(sd_folder: Path) -> None:
    memory = Memory(tiny_problem(sd_folder, sizes=BEGUN))
    with pytest.raises(RuntimeError, match="out of luck"):
        for attempt in memory.attempts("an update"):
            with attempt:
                raise RuntimeError("out of luck")
    assert not memory.halved and memory.problem.sizes == BEGUN


def test_parts_of_one_shape_follow(sd_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    problem, learner = start(sd_folder, BEGUN, "retention.kl=0")
    problem = replace(problem, backbone=OneShape(problem.backbone, batch=4, decode_batch=4, one_graph=True))
    problem.backbone.denoiser.register_forward_pre_hook(Cramped(most=4))
    told = list[Problem]()
    with caplog.at_level(logging.WARNING):
        trained(problem, learner, told.append)
    (now,) = told
    assert isinstance(now.backbone, OneShape) and (now.backbone.batch, now.backbone.decode_batch) == (2, 4)
    assert not now.backbone.one_graph  # no graph fits
    assert "compiled graphs do not fit that" in caplog.records[0].message


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(Sizes(32, 16, 12, 256, True), Sizes(16, 8, 6, 128, True)), (Sizes(1, 3, 1, 1), Sizes(1, 1, 1, 1))],
)
def test_half_of_sizes(sizes: Sizes, expected: Sizes) -> None:
    """Each kind alone: decoding has no say in how pairs round."""
    assert sizes.halved("pairs") == replace(sizes, rollout=expected.rollout, update=expected.update)
    assert sizes.halved("pictures") == replace(sizes, decode=expected.decode, score=expected.score)


def test_in_half_precision_log_probs_follow_the_smaller_batch(sd_folder: Path) -> None:
    """Those of the policy's own trajectories; the first one explored, under another prompt."""
    problem, learner = start(sd_folder, BEGUN, "dtype=bf16")
    small = replace(problem, sizes=HALF)
    trajectory = collect(problem, 0, forget=3)
    off = replace(trajectory, log_prob=trajectory.log_prob + 1.0)
    found = rounded_alike(off, BEGUN, small, first=1)
    assert torch.equal(found.log_prob[0], off.log_prob[0])
    random = found.stochastic
    torch.testing.assert_close(found.log_prob[1:, random], trajectory.log_prob[1:, random], atol=1e-2, rtol=0)
    assert rounded_alike(off, BEGUN, problem, first=1) is off  # nothing was halved


def test_after_a_halving_every_update_of_the_iteration_goes_by_the_new_log_probs(sd_folder: Path) -> None:
    """On a device that rounds by the size of the batch, and with a policy that stays: all ratios must be 1."""
    problem, learner = start(sd_folder, BEGUN, "dtype=bf16", "retention.kl=0")
    problem = replace(problem, backbone=OneShape(problem.backbone, batch=4, decode_batch=4))
    learner.optimiser = torch.optim.SGD(learner.parameters.values(), lr=0.0)
    learner.iteration, learner.is_parity_checked = 1, True
    denoiser = problem.backbone.denoiser
    denoiser.register_forward_hook(lambda network, args, out: (out[0] + 0.01 * len(args[0]), *out[1:]))
    denoiser.register_forward_pre_hook(Cramped(most=4))
    record = iterate(Memory(problem), learner, None).record
    assert learner.updates == 2 and record["policy/ratio_max"] == 0


def test_the_parity_check_goes_by_what_was_taken_again(sd_folder: Path) -> None:
    """Memory runs out in it, on such a device: only the steps that are learned from have new log-probs."""
    settings = ["dtype=bf16", "retention.kl=0", "sampling.steps=4", "policy.step_choice=shared"]
    problem, learner = start(sd_folder, BEGUN, *settings, "policy.step_fraction=0.5")
    problem = replace(problem, backbone=OneShape(problem.backbone, batch=4, decode_batch=4))
    denoiser = problem.backbone.denoiser
    denoiser.register_forward_hook(lambda network, args, out: (out[0] + 0.01 * len(args[0]), *out[1:]))
    denoiser.register_forward_pre_hook(Cramped(most=4, learns=False, first=9))  # 2 batches of 4 steps are rollouts
    told, seen = list[Sizes](), list[Iteration]()
    train(
        problem,
        learner,
        None,
        after=lambda done: bool(seen.append(done)),
        after_halving=lambda new: told.append(new.sizes),
    )
    assert told == [HALF] and seen[0].record["policy/parity"] == 0


def cramped_in_one(folder: str, most: int) -> tuple[dict[str, Any], Sizes]:
    """Memory runs out in the second process alone."""
    problem, learner = start(Path(folder), BEGUN)
    if distributed.rank() == 1:
        problem.backbone.denoiser.register_forward_pre_hook(Cramped(most=most))
    told = list[Sizes]()
    found = trained(problem, learner, lambda new: told.append(new.sizes))
    return {name: value.numpy() for name, value in found.items()}, told[0]


def test_all_processes_halve_together(sd_folder: Path, expected: dict[str, Tensor]) -> None:
    """4 pairs each: at once with guidance they are 8 samples, too many for 4."""
    for found, sizes in side_by_side(2, cramped_in_one, str(sd_folder), 4):
        assert sizes == HALF
        torch.testing.assert_close(
            {name: torch.from_numpy(value) for name, value in found.items()}, expected, atol=1e-5, rtol=0
        )


def test_all_processes_end_together(sd_folder: Path) -> None:
    for error in side_by_side(2, cramped_in_one, str(sd_folder), 1):
        assert isinstance(error, Raised) and error.kind == "TrainingError", error
        assert "2 pairs" in error.text
