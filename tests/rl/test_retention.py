"""The KL to the base on retain prompts: flat at the base, a pull back elsewhere; `balance` only ever limits."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import nudge, tiny_learner, tiny_problem

from cgru.mdp.rollout import rescore
from cgru.rl.batches import Plan
from cgru.rl.retention import Bank, balanced_weight, bank_backward, controlled_weight, make_bank, norm

SETTINGS = ["retention.kl=1", "retention.bank=3", "retention.batch=4"]


def everything(bank: Bank) -> Plan:
    return Plan(*bank.trajectory.policy_pairs())


def gradients(parameters: dict[str, torch.nn.Parameter]) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters.values()]


def test_without_a_kl_there_is_no_bank(sd_folder: Path) -> None:
    assert make_bank(tiny_problem(sd_folder)) is None


@pytest.mark.parametrize("form", ["gaussian", "noise"])
def test_flat_at_the_base_and_a_pull_back_elsewhere(sd_folder: Path, form: str) -> None:
    problem = tiny_problem(sd_folder, *SETTINGS, f"retention.kl_form={form}")
    bank = make_bank(problem)
    assert bank is not None and set(bank.trajectory.cond.prompts) == {"a cat", "trees"}
    learner = tiny_learner(problem)
    at_base = bank_backward(problem, bank, everything(bank))
    assert at_base < 1e-9 and norm(gradients(learner.parameters)) < 1e-4
    nudge(learner)
    learner.optimiser.zero_grad()
    before = bank_backward(problem, bank, everything(bank))
    pull = gradients(learner.parameters)
    assert before > 1e-5
    with torch.no_grad():
        for parameter, gradient in zip(learner.parameters.values(), pull, strict=True):
            parameter -= 1e-3 * gradient / norm(pull)
    assert bank_backward(problem, bank, everything(bank)) < before


def test_the_bank_holds_what_the_base_predicts(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, *SETTINGS)
    bank = make_bank(problem)
    assert bank is not None
    steps = bank.trajectory.steps(torch.tensor([2, 0]), torch.tensor([0, 1]))
    found = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=bank.trajectory.guidance)
    torch.testing.assert_close(bank.prediction[[2, 0], [0, 1]], found.detach(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        again = rescore(problem.backbone, steps, kernel=problem.kernel, guidance=bank.trajectory.guidance)
    torch.testing.assert_close(again, steps.log_prob, atol=1e-5, rtol=0)


def test_the_kl_is_the_mean_over_pairs_whatever_the_micro_batch(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, *SETTINGS)
    bank = make_bank(problem)
    assert bank is not None
    learner = tiny_learner(problem)
    nudge(learner)
    found = []
    for size in (1, 64):
        learner.optimiser.zero_grad()
        part = replace(problem, sizes=replace(problem.sizes, update=size))
        kl = bank_backward(part, bank, everything(bank))
        found.append((kl, torch.cat([g.flatten() for g in gradients(learner.parameters)])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-4)


def test_a_draw_spreads_over_trajectories(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, *SETTINGS)
    bank = make_bank(problem)
    assert bank is not None
    plan = bank.draw(3, torch.Generator().manual_seed(0))
    assert sorted(plan.sample_ids.tolist()) == [0, 1, 2]
    assert bool(bank.trajectory.stochastic[plan.step_ids].all())


# kl 0.5; the policy's gradient has norm 2, the KL's 10. Without balance: 0.5. With balance 1 the KL's part may be
# 1 · 2 long, so its weight is 2 / 10; with balance 10 it could be 2, and stays 0.5. No policy gradient: no KL.
@pytest.mark.parametrize(
    ("policy", "balance", "expected"), [(2.0, 0.0, 0.5), (2.0, 1.0, 0.2), (2.0, 10.0, 0.5), (0.0, 1.0, 0.0)]
)
def test_balance_only_limits(policy: float, balance: float, expected: float) -> None:
    assert balanced_weight(policy, 10.0, kl=0.5, balance=balance) == pytest.approx(expected)


@pytest.mark.parametrize(("form", "kept"), [("gaussian", {0}), ("noise", {0, 1, 2, 3})])
def test_a_difference_of_predictions_needs_no_noise(sd_folder: Path, form: str, kept: set[int]) -> None:
    """With noise in the first step only, the squared difference still holds the deterministic steps to the base."""
    settings = ["sampling.steps=4", "sampling.noisy_steps=1", f"retention.kl_form={form}"]
    bank = make_bank(tiny_problem(sd_folder, *SETTINGS, *settings))
    assert bank is not None
    drawn = bank.draw(100, torch.Generator().manual_seed(0))
    assert set(drawn.step_ids.tolist()) == kept


def test_the_weight_follows_the_measured_divergence() -> None:
    held = {"kl": 0.3, "target": 0.01}
    assert controlled_weight(0.3, 0.01, **held) == pytest.approx(0.3)
    assert controlled_weight(0.3, 1.0, **held) == pytest.approx(0.3 * math.exp(0.1))
    assert controlled_weight(0.3, 0.0, **held) == pytest.approx(0.3 * math.exp(-0.1))
    assert controlled_weight(8.9, 1.0, **held) == pytest.approx(9.0)  # thirtyfold at most
    assert controlled_weight(0.0101, 0.0, **held) == pytest.approx(0.01)
