"""Appendix A as a test, on Gaussian policies small enough to know the answers.

Any baseline that depends on the state alone leaves the mean gradient unchanged; V lowers the variance against none. The
paper calls V itself optimal, which is not exact: the best scalar baseline weighs returns by the squared score,
E[|∇log π|² r | s] / E[|∇log π|² | s]. For a ~ N(theta, 1) and r = a² that is theta² + 3, while V is theta² + 1.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cgru.mdp.kernel import Gaussian
from cgru.mdp.trajectory import Conditioning, Trajectory
from cgru.rl.advantage import critic_advantage, gae_advantage
from cgru.rl.diagnostics import gradient_variance, per_trajectory_gradients

STEPS, RUNS = 3, 1200
DRIFT = torch.tensor([0.5, -0.3, 0.8])  # theta_t of the chain: x_{t+1} ~ N(x_t + theta_t, 1)


def expectation(values: np.ndarray) -> float:
    """Over z ~ N(0, 1), exact for polynomials up to degree 39."""
    return float(values @ NODE_WEIGHTS)


NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


# a = theta + z, g = z (a² - b). With c = theta² - b: E[g²] = E[z² (c + 2 theta z + z²)²] = c² + 6c + 12 theta² + 15 and
# E[g] = 2 theta, so Var = (c + 3)² + 8 theta² + 6: least at b = theta² + 3, and 4 more at V = theta² + 1.
@pytest.mark.parametrize("theta", [-2.0, 0.0, 1.0])
@pytest.mark.parametrize("above", [0.0, 1.0, 3.0, 4.0])  # theta²; 1 is V, 3 the optimum
def test_one_step_exactly_and_as_measured(theta: float, above: float) -> None:
    variance, baseline = (3 - above) ** 2 + 8 * theta**2 + 6, theta**2 + above
    exact = NODES * ((theta + NODES) ** 2 - baseline)
    assert expectation(exact) == pytest.approx(2 * theta, abs=1e-9)
    assert expectation(exact**2) - expectation(exact) ** 2 == pytest.approx(variance)
    z = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    measured = gradient_variance((z * ((theta + z) ** 2 - baseline))[:, None])
    assert measured.trace == pytest.approx(variance, rel=0.03)
    assert measured.mean_squared_norm == pytest.approx(4 * theta**2, rel=0.03, abs=1e-3)
    if theta:
        assert measured.normalised == pytest.approx(variance / (4 * theta**2), rel=0.05)


def walk() -> Trajectory:
    """A Gaussian chain with r = x_0² and its exact value: V(x_t) = (x_t + drift left)² + steps left."""
    noise = torch.randn(RUNS, STEPS, generator=torch.Generator().manual_seed(0))
    start = torch.randn(RUNS, 1, generator=torch.Generator().manual_seed(1))
    x = torch.cat([start, start + (noise + DRIFT).cumsum(1)], 1)
    drift_left = DRIFT.flip(0).cumsum(0).flip(0)
    steps_left = torch.arange(STEPS, 0, -1)
    return Trajectory(
        x=x.view(RUNS, STEPS + 1, 1, 1, 1),
        log_prob=torch.zeros(RUNS, STEPS),
        time=torch.arange(STEPS),
        stochastic=torch.ones(STEPS, dtype=torch.bool),
        seeds=torch.arange(RUNS),
        cond=Conditioning(("",) * RUNS, {}),
        guidance=1.0,
        reward=x[:, -1] ** 2,
        value=(x[:, :-1] + drift_left) ** 2 + steps_left,
    )


@pytest.fixture(scope="module")
def gradients() -> dict[str, torch.Tensor]:
    """Per-trajectory gradients (RUNS, STEPS) of one set of walks under different weightings; theta_t has step t's."""
    trajectory = walk()
    assert trajectory.value is not None
    x = trajectory.x.flatten(1)
    weightings = {
        "none": critic_advantage(replace(trajectory, value=torch.zeros(RUNS, STEPS))),
        "state": critic_advantage(replace(trajectory, value=5 * torch.sin(3 * x[:, :-1]) - 2)),
        "V": critic_advantage(trajectory),
        # E[z² (m + z + rest)²] = m² + 3 + var(rest) = V + 2, whatever the step: the score-weighted optimum
        "optimum": critic_advantage(replace(trajectory, value=trajectory.value + 2)),
        "gae": gae_advantage(trajectory, 0.5),
        "mean": critic_advantage(replace(trajectory, value=(x[:, -1:] ** 2).mean().expand(RUNS, STEPS))),
        "action": critic_advantage(replace(trajectory, value=x[:, 1:])),
    }
    theta = DRIFT.clone().requires_grad_()

    def log_prob_of(i: int) -> torch.Tensor:
        return Gaussian((x[i, :-1] + theta)[:, None], torch.ones(1)).log_prob(x[i, 1:, None])

    found = per_trajectory_gradients([theta], log_prob_of, torch.stack(list(weightings.values())))
    return dict(zip(weightings, found, strict=True))


def standard_errors_apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """How far two mean gradients of the same walks differ, in standard errors, in the worst of the parameters."""
    difference = (first - second).double()
    return float((difference.mean(0) / (difference.std(0) / len(difference) ** 0.5)).abs().max())


@pytest.mark.parametrize("name", ["state", "V", "optimum", "mean", "gae"])
def test_a_state_only_baseline_leaves_the_mean_gradient(gradients: dict[str, torch.Tensor], name: str) -> None:
    """GAE too, since V is exact here. (The batch mean knows the action, but only by one part in 1,200.)"""
    assert standard_errors_apart(gradients["none"], gradients[name]) < 4


def test_the_mean_gradient_is_the_true_one(gradients: dict[str, torch.Tensor]) -> None:
    """J = E[x_0²] with E[x_0] = Σ theta = 1, so dJ/dtheta_t = 2 · 1 for every t."""
    assert standard_errors_apart(gradients["V"], torch.full((RUNS, STEPS), 2.0)) < 4


def test_a_baseline_that_knows_the_action_is_biased(gradients: dict[str, torch.Tensor]) -> None:
    """The check above can fail: E[z · x_{t+1}] = 1, which is taken from every component."""
    assert standard_errors_apart(gradients["none"], gradients["action"]) > 10


def test_v_lowers_the_variance_and_the_optimum_is_at_or_below_it(gradients: dict[str, torch.Tensor]) -> None:
    trace = {name: gradient_variance(values).trace for name, values in gradients.items()}
    assert trace["optimum"] <= trace["V"] < 0.8 * trace["none"]
    assert trace["V"] < trace["mean"] < trace["none"]
    assert trace["gae"] < trace["V"]


def test_the_optimum_lies_at_two_above_v(gradients: dict[str, torch.Tensor]) -> None:
    """Per step, the constant k that minimises Var[z (r - V - k)] over these walks is E[z² (r - V)] / E[z²] = 2."""
    score = (gradients["V"] - gradients["optimum"]).double() / 2  # z · 2 / 2
    best = (score * gradients["V"]).mean(0) / score.square().mean(0)
    assert best.tolist() == pytest.approx([2.0] * STEPS, abs=0.6)
