"""A critic on fixed features: the same values as FiLM at the last depth, a tower that never moves."""

from __future__ import annotations

import pytest
import torch
from tiny_critic import TEXT_WIDTH, conditioning, pictures, tiny_tower

from cgru.critic import build_critic
from cgru.critic.film import FilmCritic
from cgru.critic.fit import regress
from cgru.critic.frozen import FrozenCritic

LABELS = ("cats", "dogs")
TIMES = torch.tensor([900, 500, 100])


def frozen(kind: str = "film", head: str = "value") -> FrozenCritic:
    sizes = {"latent_shape": (4, 4, 4), "text_width": TEXT_WIDTH, "scale": 10.0, "prior": 5.0}
    names = {"labels": LABELS, "target": "dogs"} if head == "classes" else {}
    critic = build_critic(kind, head, "noisy", tower=tiny_tower(), frozen=True, **sizes, **names)
    assert isinstance(critic, FrozenCritic)
    return critic


def stirred(critic: torch.nn.Module) -> None:
    """FiLM and head start at zero; give all that can learn something to say."""
    generator = torch.Generator().manual_seed(1)
    for parameter in critic.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("kind", ["film", "plain", "prompt"])
def test_values_are_those_of_film_after_the_last_layer(kind: str) -> None:
    critic, cond, shown = frozen(kind), conditioning(3), pictures(3)
    stirred(critic)
    whole = critic.inner(shown, TIMES, cond)  # pictures through the tower, FiLM at its 3rd and last layer
    features = critic.seen(shown, batch_size=2)
    assert features.shape == (3, 16) and whole.std() > 0.1
    torch.testing.assert_close(critic(features, TIMES, cond), whole)


def test_time_changes_what_the_features_are_worth() -> None:
    critic = frozen()
    stirred(critic)
    features, cond = critic.seen(pictures(1), batch_size=1).expand(3, -1), conditioning(3)
    assert len(set(critic(features, TIMES, cond).tolist())) == 3


def test_only_film_and_head_learn() -> None:
    critic, cond = frozen(), conditioning(4)
    before = {name: value.clone() for name, value in critic.state_dict().items()}
    views = critic.seen(pictures(12), batch_size=4).view(4, 3, 16)
    learns = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learns, lr=0.01)
    settings = {"updates": 3, "batch": 6, "generator": torch.Generator().manual_seed(0)}
    regress(critic, optimiser, views, torch.tensor([0.0, 9.0, 2.0, 7.0]), TIMES, cond, **settings)
    moved = {name.split(".")[1] for name, value in critic.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"film", "head"}
    assert all(parameter.grad is None for parameter in critic.inner.tower.parameters())


def test_classes_have_logits() -> None:
    critic, cond = frozen(head="classes"), conditioning(3)
    features = critic.seen(pictures(3), batch_size=3)
    p_dogs = critic.logits(features, TIMES, cond).softmax(1)[:, 1]
    torch.testing.assert_close(critic(features, TIMES, cond), 10 * (1 - p_dogs))


def test_film_inside_the_tower_cannot_be_frozen() -> None:
    with pytest.raises(AssertionError, match="features would change"):
        FrozenCritic(FilmCritic(tiny_tower(), head="value", scale=1.0))
