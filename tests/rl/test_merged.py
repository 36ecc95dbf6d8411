"""Rollouts with the LoRA in the weights: the ratio stays 1, and the base comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_rl import nudge, tiny_learner, tiny_problem

from cgru.lora.train import base_policy, merged
from cgru.rl.collect import collect
from cgru.rl.oom_retry import Memory
from cgru.rl.state import Problem
from cgru.rl.train import check_parity, iterate
from cgru.rl.update import TrainingError


def bits(problem: Problem) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in problem.backbone.denoiser.state_dict().items()}


def prediction(problem: Problem) -> torch.Tensor:
    x = torch.randn(2, *problem.backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return problem.backbone.predict(x, torch.tensor([700, 300]), problem.encode(["a dog", "dogs"]), guidance=3.0)


def test_merged_is_the_lora_and_leaves_no_trace(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    nudge(tiny_learner(problem))
    before, plain = bits(problem), prediction(problem)
    with base_policy(problem.backbone.denoiser):
        assert (prediction(problem) - plain).abs().max() > 1e-3  # the LoRA does something
    with pytest.raises(KeyError), merged(problem.backbone.denoiser):
        assert (prediction(problem) - plain).abs().max() < 1e-5
        assert any(not torch.equal(value, before[name]) for name, value in bits(problem).items())
        raise KeyError
    after = bits(problem)
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(prediction(problem), plain)


def test_a_network_without_a_lora_stays_as_it_is(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder)
    plain = prediction(problem)
    with merged(problem.backbone.denoiser):
        assert torch.equal(prediction(problem), plain)


def test_the_ratio_of_merged_rollouts_is_one(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.merged=true")
    nudge(tiny_learner(problem))
    before = bits(problem)
    batch = collect(problem, 0, forget=3)
    assert 0 < check_parity(problem, batch) <= 1e-5  # 0 would mean that nothing was merged
    assert all(torch.equal(value, before[name]) for name, value in bits(problem).items())


def test_parity_is_checked_in_every_iteration(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, "sampling.merged=true")
    learner = tiny_learner(problem)
    nudge(learner)
    learner.iteration = 5
    assert "policy/parity" in iterate(Memory(problem), learner, None).record


def test_half_precision_is_stopped_by_the_check(sd_folder: Path) -> None:
    """Sums of W and the LoRA's product, rounded to bf16, are another policy than the two apart."""
    problem = tiny_problem(sd_folder, "sampling.merged=true", "dtype=bf16")
    learner = tiny_learner(problem)
    nudge(learner)
    learner.iteration = 1
    with pytest.raises(TrainingError, match=r"before the update max .* in bf16. Set sampling.merged=false."):
        iterate(Memory(problem), learner, None)


def test_compiled_rollouts_are_not_merged(sd_folder: Path) -> None:
    with pytest.raises(ValueError, match="sampling.merged is true and compile true; allowed: one of them"):
        tiny_problem(sd_folder, "sampling.merged=true", "compile=true")
