"""A learner at its start: each optimiser has the rates, betas and decay that the settings name."""

from pathlib import Path

from tiny_rl import tiny_learner, tiny_problem

from cgru.critic.latent import LatentCritic
from cgru.rl.state import make_learner, trainable

SETTINGS = (
    "policy.learning_rate=7e-4",
    "policy.beta1=0.8",
    "policy.beta2=0.98",
    "policy.weight_decay=0.02",
    "critic.kind=latent",
    "critic.online_learning_rate=3e-4",
    "critic.weight_decay=0.05",
)


def test_optimisers_have_the_settings_of_the_run(sd_folder: Path) -> None:
    problem = tiny_problem(sd_folder, *SETTINGS)
    critic = LatentCritic(problem.backbone.latent_shape, 16, scale=1.0, prior=0.4)
    next(iter(critic.parameters())).requires_grad_(False)
    learner = make_learner(problem, tiny_learner(problem).parameters, critic)
    assert learner.critic_optimiser is not None
    (policy,), (value,) = learner.optimiser.param_groups, learner.critic_optimiser.param_groups
    assert (policy["lr"], policy["betas"], policy["weight_decay"]) == (7e-4, (0.8, 0.98), 0.02)
    # The critic has no setting for its betas: they are Adam's own.
    assert (value["lr"], value["betas"], value["weight_decay"]) == (3e-4, (0.9, 0.999), 0.05)
    assert [id(p) for p in policy["params"]] == [id(p) for p in learner.parameters.values()]
    assert [id(p) for p in value["params"]] == [id(p) for p in trainable(critic)]
    assert len(value["params"]) == len(list(critic.parameters())) - 1
