"""Each method as an overlay: what it fixes, what it leaves, and that applying it twice is applying it once."""

import pytest

from cgru.config import RLConfig, diff, override
from cgru.method import find_method
from cgru.presets import preset

DEMO = preset("demo", "Dogs")
OWN = preset("on-policy", "Dogs")
POLICY_GRADIENTS = ("anchored", "cgru", "ddpo", "dpok")


def applied(name: str, config: RLConfig) -> RLConfig:
    found: RLConfig = find_method(name).adjust(config)
    return found


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_a_method_names_itself_and_is_idempotent(name: str) -> None:
    once = applied(name, DEMO)
    assert once.method == name
    assert applied(name, once) == once


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_what_every_method_leaves_to_the_preset(name: str) -> None:
    start = DEMO if name == "anchored" else OWN
    fixed = {line.split(":")[0] for line in diff(start, applied(name, start))}
    left = {"policy.learning_rate", "policy.clip", "policy.iterations", "policy.trajectories", "policy.rank"}
    assert not fixed & left
    assert not any(key.startswith(("sampling.", "prompts.", "reward.", "watch.")) for key in fixed)


def test_ddpo_differs_from_cgru_in_critic_and_advantage_alone() -> None:
    assert diff(OWN, applied("ddpo", OWN)) == [
        "method: 'cgru' -> 'ddpo'",
        "critic.kind: 'film' -> 'none'",
        "policy.advantage: 'critic' -> 'per-prompt'",
    ]


def test_dpok_is_its_released_code() -> None:
    config = applied("dpok", DEMO)
    assert (config.critic.kind, config.critic.trajectories) == ("latent", 0)  # V learns online only
    assert (config.policy.clip_mode, config.retention.kl_forget, config.retention.kl_form) == ("hard", 0.01, "noise")
    assert config.policy.window == 2 * DEMO.policy.trajectories  # 1000 transitions: two rounds of 10 × 50
    assert config.policy.reward_weight * config.reward.scale == 100
    assert config.retention.kl == 0


@pytest.mark.parametrize("other", ["ddpo", "dpok"])
def test_cgru_after_another_method_has_its_critic_again(other: str) -> None:
    config = applied("cgru", applied(other, DEMO))
    assert (config.critic.kind, config.policy.advantage, config.policy.clip_mode) == ("film", "critic", "pessimistic")
    assert (config.policy.window, config.policy.reward_weight, config.retention.kl_forget) == (0, 1.0, 0.0)


def test_cgru_keeps_gae_and_other_critics() -> None:
    config = override(OWN, ["policy.advantage=gae", "critic.kind=plain"])
    assert applied("cgru", config) == config


@pytest.mark.parametrize("name", ["cgru", "ddpo", "dpok"])
def test_only_anchored_relabels(name: str) -> None:
    config = override(DEMO, ["sampling.explore_credit=constant", "sampling.explore_ratio=own"])
    sampling = applied(name, config).sampling
    assert (sampling.explore, sampling.explore_credit, sampling.explore_ratio) == (0.0, "reward", "sampled")
    assert applied("anchored", config) == config
    assert applied("anchored", applied(name, DEMO)).sampling.explore == 0.5


def test_anchored_can_do_without_a_critic() -> None:
    config = override(DEMO, ["critic.kind=none", "policy.advantage=batch"])
    assert applied("anchored", config) == config
