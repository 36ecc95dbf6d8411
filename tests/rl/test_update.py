"""One update: the direction it moves log-probs, its independence of micro-batches, step weights, KL, and NaN."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_rl import nudge, tiny_learner, tiny_problem
from torch import Tensor

from cgru.fast.fixed_batch import OneShape
from cgru.lora.train import base_policy
from cgru.mdp.kernel import Gaussian, ddim_kernel
from cgru.mdp.rollout import policy, rescore
from cgru.mdp.trajectory import Trajectory
from cgru.rl.batches import Plan
from cgru.rl.collect import collect
from cgru.rl.objective import balanced_weights
from cgru.rl.retention import make_bank
from cgru.rl.state import Learner, Problem
from cgru.rl.update import TrainingError, Update, gradient, policy_step


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


def flat(gradients: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([part.flatten() for part in gradients if part is not None])


def surrogate(problem: Problem, batch: Trajectory) -> Tensor:
    """Σ_t w_t mean(-A_t log pi_t) / Σ_t 1 by hand, step by step: at ratio 1 its gradient is that of the clipped one."""
    assert batch.advantage is not None
    weights = balanced_weights(problem.kernel, problem.backbone.latent_shape)
    weights = weights if problem.config.policy.step_weights == "balanced" else torch.ones_like(weights)
    total = torch.zeros(())
    for t in range(batch.horizon):
        steps = batch.steps(torch.arange(len(batch)), torch.full((len(batch),), t))
        log_prob = rescore(problem.backbone, steps, kernel=problem.kernel, guidance=batch.guidance)
        total = total - weights[t] * (batch.advantage[:, t] * log_prob).mean()
    return total / batch.horizon


def pull(problem: Problem, batch: Trajectory, plan: Plan) -> Tensor:
    """mean((mu - mu_base)² / (2 sigma²)) by hand: the KL between Gaussians of one standard deviation."""
    steps = batch.steps(plan.sample_ids, plan.step_ids)
    with torch.no_grad(), base_policy(problem.backbone.denoiser):
        base = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=batch.guidance)
    here = problem.backbone.predict(steps.x, steps.time, steps.cond, guidance=batch.guidance)
    policy, reference = (problem.kernel.step(prediction, steps.x, steps.index) for prediction in (here, base))
    return ((policy.mean - reference.mean) / policy.std[:, None, None, None]).square().mean() / 2


def found_and_parts(folder: Path, *settings: str, with_bank: bool = False) -> tuple[Update, Tensor, dict[str, Tensor]]:
    """What an update leaves in `.grad`, unclipped, in micro-batches of 5, and the gradient of each of its parts."""
    problem = tiny_problem(folder, *settings, "policy.clip=0.1", "policy.gradient_norm=1e9")
    problem = replace(problem, sizes=replace(problem.sizes, update=5))
    bank = make_bank(problem) if with_bank else None
    learner = tiny_learner(problem)
    nudge(learner)
    batch = collect(problem, 0, forget=4)
    advantage = torch.tensor([[1.0], [-1.0], [2.0], [-0.5]]) * torch.tensor([[1.0, 0.5, 2.0]])
    batch, plan = replace(batch, advantage=advantage), Plan(*batch.policy_pairs())
    update = gradient(problem, learner, batch, plan, bank, torch.Generator().manual_seed(0))
    found = flat(p.grad for p in learner.parameters.values())
    parts = {"policy": surrogate(problem, batch), "kl": pull(problem, batch, plan)}
    if bank is not None:
        drawn = bank.draw(problem.config.retention.batch, torch.Generator().manual_seed(0))
        parts["bank"] = pull(problem, bank.trajectory, drawn)
    weights = list(learner.parameters.values())
    return update, found, {name: flat(torch.autograd.grad(part, weights)) for name, part in parts.items()}


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("step_weights", ["equal", "balanced"])
def test_reward_and_kl_count_by_their_coefficients_and_steps_by_their_weights(
    sd_folder: Path, step_weights: str
) -> None:
    settings = ("policy.reward_weight=0.5", "retention.kl_forget=0.3", f"policy.step_weights={step_weights}")
    update, found, parts = found_and_parts(sd_folder, *settings)
    assert off_by(found, 0.5 * parts["policy"] + 0.3 * parts["kl"]) < 1e-4
    assert min(float(part.norm()) for part in (0.5 * parts["policy"], 0.3 * parts["kl"])) > 0.1 * float(found.norm())
    assert update.kl_forget > 0 and update.policy_gradient_norm == pytest.approx(float(found.norm()), rel=1e-5)


def test_the_bank_s_pull_has_its_weight(sd_folder: Path) -> None:
    settings = ("retention.kl=4", "retention.bank=3", "retention.batch=6")
    update, found, parts = found_and_parts(sd_folder, *settings, with_bank=True)
    assert update.kl_weight == 4
    assert off_by(found - parts["policy"], 4 * parts["bank"]) < 1e-3
    # Balanced, it is no longer than a tenth of the policy's gradient: here that is the smaller weight.
    update, found, parts = found_and_parts(sd_folder, *settings, "retention.balance=0.1", with_bank=True)
    pulled = found - parts["policy"]
    assert 0 < update.kl_weight < 4
    assert float(pulled.norm() / parts["policy"].norm()) == pytest.approx(0.1, rel=1e-3)
    assert off_by(pulled, update.kl_weight * parts["bank"]) < 1e-3


def moved_policy(folder: Path, size: int, *settings: str) -> tuple[Problem, Learner, Trajectory, Plan]:
    """A policy that has moved since it collected, so that of 8 pairs some lie outside the clip; parts of `size`."""
    problem, learner, batch = start(folder, *settings, "policy.clip=1e-4", "policy.gradient_norm=1e9")
    nudge(learner, 0.01)
    pairs = Plan(*batch.policy_pairs())
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(2))[:8]
    plan = Plan(pairs.sample_ids[order], pairs.step_ids[order])
    return replace(problem, sizes=replace(problem.sizes, update=size)), learner, batch, plan


def test_a_ratio_that_has_left_the_clip_pulls_no_further(sd_folder: Path) -> None:
    problem, learner, batch, plan = moved_policy(sd_folder, 8)
    found = gradient(problem, learner, batch, plan, None, torch.Generator())
    steps = batch.steps(plan.sample_ids, plan.step_ids)
    log_prob = rescore(problem.backbone, steps, kernel=problem.kernel, guidance=batch.guidance)
    ratio, advantage = (log_prob - steps.log_prob).exp(), steps.advantage
    assert advantage is not None
    # at 256 latent dimensions 1e-4 · √(16384 / 256) = 8e-4
    outside = (ratio - 1).abs() > 8e-4
    pays = (ratio - 1) * advantage > 0
    assert 0 < int((outside & pays).sum()) < int(outside.sum()) < 8  # each kind
    expected = -(ratio * advantage * ~(outside & pays)).sum() / 8
    weights = list(learner.parameters.values())
    assert off_by(flat(p.grad for p in weights), flat(torch.autograd.grad(expected, weights))) < 1e-4
    torch.testing.assert_close(found.log_ratio, (log_prob - steps.log_prob).detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [[], ["retention.kl_forget=1"]])
def test_the_micro_batch_changes_nothing(sd_folder: Path, settings: list[str]) -> None:
    """8 ≡ 1 × 8 ≡ 3 + 3 + 2, in gradients, losses and ratios."""
    gradients, updates = [], []
    for size in (8, 1, 3):
        problem, learner, batch, plan = moved_policy(sd_folder, size, *settings)
        updates.append(gradient(problem, learner, batch, plan, None, torch.Generator()))
        gradients.append(flat(p.grad for p in learner.parameters.values()))
    for found, update in zip(gradients[1:], updates[1:], strict=True):
        assert off_by(found, gradients[0]) < 1e-4
        torch.testing.assert_close(update.log_ratio, updates[0].log_ratio, atol=1e-5, rtol=0)
        assert update.loss == pytest.approx(updates[0].loss, abs=1e-5)
        assert update.kl_forget == pytest.approx(updates[0].kl_forget, rel=1e-4, abs=1e-9)


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


def test_a_trust_region_shortens_an_update_to_its_kl(sd_folder: Path) -> None:
    """The same direction, shorter; a wide region changes no bit."""

    def moved(*settings: str) -> tuple[Tensor, float]:
        problem, learner, batch = start(sd_folder, "policy.learning_rate=1e-2", *settings)
        begun = flat(parameter.detach().clone() for parameter in learner.parameters.values())
        pairs = batch.steps(*batch.policy_pairs())

        def now() -> Gaussian:
            with torch.no_grad():
                return policy(problem.backbone, pairs, kernel=problem.kernel, guidance=batch.guidance)

        old = now()
        step(problem, learner, batch)
        return flat(learner.parameters.values()).detach() - begun, float(now().kl(old).mean())

    (free, far), (wide, same), (short, near) = (
        moved(*settings) for settings in ((), ("policy.kl_limit=1e6",), ("policy.kl_limit=1e-6",))
    )
    assert torch.equal(free, wide) and far == same > 1e-5
    assert near == pytest.approx(1e-6, rel=0.1)
    assert float(torch.cosine_similarity(free, short, dim=0)) > 0.999
    assert float(short.norm() / free.norm()) == pytest.approx((1e-6 / far) ** 0.5, rel=0.1)


def test_the_retention_weight_is_steered_by_updates(sd_folder: Path) -> None:
    settings = ("retention.kl=0.5", "retention.kl_target=1e-9", "retention.bank=2", "retention.batch=4")
    problem = tiny_problem(sd_folder, *settings)
    bank = make_bank(problem)
    learner = tiny_learner(problem)
    nudge(learner)
    batch = collect(problem, 0, forget=4)
    batch = replace(batch, advantage=torch.ones(4, batch.horizon))
    weights = [
        policy_step(
            problem, learner, batch, Plan(*batch.policy_pairs()), bank, torch.Generator().manual_seed(k)
        ).kl_weight
        for k in range(3)
    ]
    assert weights == pytest.approx([0.5, 0.5 * math.exp(0.1), 0.5 * math.exp(0.2)])


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


def test_without_advantages_the_bank_alone_pulls_the_policy_to_the_base(sd_folder: Path) -> None:
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
