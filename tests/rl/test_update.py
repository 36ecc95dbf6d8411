"""One update: the direction it moves log-probs, its independence of micro-batches, step weights, KL, and NaN."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import nudge, tiny_learner, tiny_problem
from torch import Tensor

from cgru.backbones.steady import OneShape
from cgru.mdp.kernel import ddim_kernel
from cgru.mdp.rollout import rescore
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan
from cgru.rl.collect import collect
from cgru.rl.objective import balanced_weights
from cgru.rl.problem import Learner, Problem
from cgru.rl.retention import make_bank
from cgru.rl.update import TrainingError, policy_step


def start(folder: Path, *settings: str) -> tuple[Problem, Learner, Trajectory]:
    """A policy that is not the base, with a batch under it; advantages +1 and -1 in turn."""
    problem = tiny_problem(folder, *settings)
    learner = tiny_learner(problem)
    nudge(learner)
    batch = collect(problem, 0, forget=4)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(-1, batch.horizon)
    return problem, learner, replace(batch, advantage=signs.clone())


def step(problem: Problem, learner: Learner, batch: Trajectory, plan: Plan | None = None) -> Tensor:
    """Take one step; returns the change of every pair's log-prob."""
    pairs = plan or Plan(*batch.policy_pairs())
    policy_step(problem, learner, batch, pairs, None, torch.Generator().manual_seed(0))
    steps = batch.steps(pairs.sample_ids, pairs.step_ids)
    with torch.no_grad():
        return rescore(problem.backbone, steps, kernel=problem.kernel, guidance=batch.guidance) - steps.log_prob


@pytest.mark.parametrize("mode", ["pessimistic", "hard"])
def test_good_actions_become_likelier_and_bad_ones_less(sd_folder: Path, mode: str) -> None:
    for sample in (0, 1):  # advantage +1, then -1, one pair alone each
        problem, learner, batch = start(sd_folder, f"policy.clip_mode={mode}", "policy.clip=0.1")
        moved = step(problem, learner, batch, Plan(torch.tensor([sample]), torch.tensor([1])))
        assert float(moved) * (1 if sample == 0 else -1) > 1e-5


def test_on_a_whole_plan_the_surrogate_rises(sd_folder: Path) -> None:
    problem, learner, batch = start(sd_folder, "policy.clip=0.1", "policy.learning_rate=1e-4")
    moved = step(problem, learner, batch)
    advantage = batch.steps(*batch.policy_pairs()).advantage
    assert advantage is not None
    assert float((moved * advantage).mean()) > 0


@pytest.mark.parametrize("settings", [[], ["retention.kl_forget=1"], ["policy.step_weights=balanced"]])
def test_the_micro_batch_changes_nothing(sd_folder: Path, settings: list[str]) -> None:
    weights, updates = [], []
    for size in (5, 64):
        problem, learner, batch = start(sd_folder, *settings, "policy.clip=0.1", "policy.weight_decay=0")
        problem = replace(problem, sizes=replace(problem.sizes, update=size))
        learner.optimiser = torch.optim.SGD(learner.parameters.values(), lr=1.0)  # the step is the gradient itself
        before = torch.cat([p.detach().flatten().clone() for p in learner.parameters.values()])
        plan, generator = Plan(*batch.policy_pairs()), torch.Generator().manual_seed(0)
        updates.append(policy_step(problem, learner, batch, plan, None, generator))
        weights.append(torch.cat([p.detach().flatten() for p in learner.parameters.values()]) - before)
    assert float(weights[0].norm()) > 1e-3
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(updates[0].log_ratio, updates[1].log_ratio, atol=1e-5, rtol=0)
    assert updates[0].kl_forget == pytest.approx(updates[1].kl_forget, rel=1e-4, abs=1e-9)


def test_the_fast_path_has_the_gradient_of_ddpo_s_loop(sd_folder: Path) -> None:
    """Timestep by timestep on 2 samples as DDPO does it, against parts of 5 of a shuffled plan, the last filled up."""
    gradients = []
    for is_fast in (False, True):
        problem, learner, batch = start(sd_folder, "policy.clip=0.1", "policy.gradient_norm=1e9")
        pairs = Plan(*batch.policy_pairs())  # 4 trajectories × 3 steps
        by_timestep = (pairs.step_ids * 4 + pairs.sample_ids).argsort()
        shuffled = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(2))
        order = shuffled if is_fast else by_timestep
        if is_fast:
            problem = replace(problem, backbone=OneShape(problem.backbone, batch=5, decode_batch=5))
        problem = replace(problem, sizes=replace(problem.sizes, update=5 if is_fast else 2))
        plan = Plan(pairs.sample_ids[order], pairs.step_ids[order])
        policy_step(problem, learner, batch, plan, None, torch.Generator())
        gradients.append(torch.cat([p.grad.flatten() for p in learner.parameters.values() if p.grad is not None]))
    reference, fast = gradients
    assert float(reference.norm()) > 1e-3
    assert float((fast - reference).norm() / reference.norm()) < 1e-5


def test_right_after_collection_the_ratio_is_one(sd_folder: Path) -> None:
    problem, learner, batch = start(sd_folder)
    update = policy_step(problem, learner, batch, Plan(*batch.policy_pairs()), None, torch.Generator())
    assert float(update.log_ratio.abs().max()) < 1e-5
    assert update.index.tolist() == [0, 1, 2] * 4 and update.kl == update.kl_weight == update.kl_forget == 0


def test_the_learning_rate_warms_up(sd_folder: Path) -> None:
    """Three updates to 3e-4: 1e-4, 2e-4, 3e-4, and no more."""
    problem, learner, batch = start(sd_folder, "policy.warmup=3", "policy.learning_rate=3e-4")
    rates = []
    for _ in range(4):
        policy_step(problem, learner, batch, Plan(torch.tensor([0]), torch.tensor([0])), None, torch.Generator())
        rates.append(learner.optimiser.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4]) and learner.updates == 4


def test_gradients_are_scaled_down_to_the_norm(sd_folder: Path) -> None:
    problem, learner, batch = start(sd_folder, "policy.gradient_norm=1e-3", "policy.clip=0.1")
    learner.optimiser = torch.optim.SGD(learner.parameters.values(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in learner.parameters.values()])
    update = policy_step(problem, learner, batch, Plan(*batch.policy_pairs()), None, torch.Generator())
    moved = torch.cat([p.detach().flatten() for p in learner.parameters.values()]) - before
    assert update.gradient_norm == update.policy_gradient_norm > 1e-3
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("form", ["gaussian", "noise"])
def test_dpok_s_kl_pulls_to_the_base_on_the_batch_s_own_states(sd_folder: Path, form: str) -> None:
    problem, learner, batch = start(
        sd_folder,
        "retention.kl_forget=1",
        f"retention.kl_form={form}",
        "policy.reward_weight=0",
        "policy.weight_decay=0",
    )
    plan = Plan(*batch.policy_pairs())
    found = [policy_step(problem, learner, batch, plan, None, torch.Generator()).kl_forget for _ in range(6)]
    assert found[0] > found[-1] > 0
    assert all(p.requires_grad for p in learner.parameters.values())


def test_the_bank_s_gradient_is_added(sd_folder: Path) -> None:
    """Without advantages only the KL moves the policy, towards the base."""
    problem = tiny_problem(sd_folder, "retention.kl=1", "retention.bank=3", "retention.batch=6")
    bank = make_bank(problem)
    learner = tiny_learner(problem)
    nudge(learner)
    batch = collect(problem, 0, forget=2)
    batch = replace(batch, advantage=torch.zeros(2, batch.horizon))
    plan = Plan(*batch.policy_pairs())
    found = [policy_step(problem, learner, batch, plan, bank, torch.Generator().manual_seed(0)) for _ in range(6)]
    assert found[0].kl > found[-1].kl > 0
    assert found[0].policy_gradient_norm == 0 < found[0].gradient_norm and found[0].kl_weight == 1


def test_a_gradient_that_is_not_finite_stops_before_the_step(sd_folder: Path) -> None:
    problem, learner, batch = start(sd_folder)
    before = {name: p.detach().clone() for name, p in learner.parameters.items()}
    assert batch.advantage is not None
    batch.advantage[2, 1] = torch.nan
    with pytest.raises(TrainingError, match="not finite .* last checkpoint is intact") as caught:
        policy_step(problem, learner, batch, Plan(*batch.policy_pairs()), None, torch.Generator())
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in learner.parameters.items())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_balanced_weights_undo_each_step_s_sensitivity(prediction: str) -> None:
    """Finite differences: the slope of the log-prob along the prediction, at an action one sigma away, times weight."""
    alphas = torch.linspace(0.999, 0.01, 100)
    times = torch.tensor([90, 65, 40, 15])
    kernel = ddim_kernel(alphas, times, final_alpha=1.0, eta=1.0, prediction_type=prediction)
    weights = balanced_weights(kernel, (2, 3))
    assert kernel.stochastic.tolist() == [True, True, True, False] and weights[3] == 0
    assert float(weights.sum() / 3) == pytest.approx(1)
    x = torch.randn(1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    slopes = []
    for t in range(3):
        here = kernel.step(0 * x, x, t)
        action = here.mean + here.std
        size = 1e-2 * float(here.std)
        up, down = (kernel.step(0 * x + sign * size, x, t).log_prob(action) for sign in (1, -1))
        slopes.append(abs(float(up - down)) / (2 * size))
    evened = [slope * float(weight) for slope, weight in zip(slopes, weights[:3], strict=True)]
    assert max(slopes) > 1.2 * min(slopes)
    assert evened == pytest.approx([evened[0]] * 3, rel=0.02)


def test_balanced_weights_in_numbers() -> None:
    """Predicting x0 at alpha 0.5 -> 0.8: sigma² = (0.2 / 0.5)(1 - 0.5 / 0.8) = 0.15, direction √(0.2 - 0.15).

    d mu / d x0 = √0.8 - √0.05 · √0.5 / √0.5 = 0.67082, so sigma / slope = 0.387298 / 0.670820 = 0.577350; the second
    step, alpha 0.8 -> 0.9: sigma² = 0.5 (1 - 8/9) = 0.055556, direction √(0.1 - 0.055556) = 0.210819,
    slope √0.9 - 0.210819 · √0.8 / √0.2 = 0.527046, sigma / slope = 0.235702 / 0.527046 = 0.447214. Mean 0.512282.
    """
    alphas = torch.tensor([0.95, 0.9, 0.8, 0.5])
    # four training times in two steps lead two times down: 3 -> 1 would skip 0.8, so one step each, of stride 1
    kernel = ddim_kernel(alphas, torch.tensor([3, 2, 1, 0]), final_alpha=1.0, eta=1.0, prediction_type="sample")
    weights = balanced_weights(kernel, (1,))
    expected = [0.577350, 0.447214]
    assert float(weights[0] / weights[1]) == pytest.approx(expected[0] / expected[1], rel=1e-5)
