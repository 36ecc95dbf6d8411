"""DPOK's latent critic against its formula."""

import torch
from tiny_critic import TEXT_WIDTH, conditioning

from cgru.critic.film import pooled_text, text_width
from cgru.critic.latent import LatentCritic
from cgru.mdp.trajectory import Conditioning


def critic() -> LatentCritic:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = LatentCritic((4, 4, 4), TEXT_WIDTH, scale=2.0, prior=1.0)
        torch.nn.init.normal_(made.head.linear.weight)
        return made


def test_three_layers_gated_by_the_bucket_of_the_time() -> None:
    made, x, cond = critic(), torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1)), conditioning(2)
    h = torch.cat([x.flatten(1), pooled_text(cond)], 1)  # 64 latent numbers, 6 of text
    assert [layer.linear.in_features for layer in made.layers] == [70, 256, 256]
    for layer in made.layers:
        # 50 buckets of 20 times: 999 is in the last, 39 in the second
        gamma = layer.gamma.weight[torch.tensor([49, 1])]
        h = torch.relu(gamma * (h @ layer.linear.weight.T + layer.linear.bias))
    expected = 1 + 2 * (h @ made.head.linear.weight.T).squeeze(1)
    torch.testing.assert_close(made(x, torch.tensor([999, 39]), cond), expected, atol=1e-4, rtol=1e-5)


def test_gates_start_between_0_and_1() -> None:
    for layer in critic().layers:
        gamma = layer.gamma.weight
        assert gamma.shape == (50, 256) and 0 <= gamma.min() and gamma.max() <= 1
        assert abs(gamma.mean() - 0.5) < 0.02  # uniform: 12,800 draws, standard error 0.0026


def test_times_of_another_range_fall_into_the_same_buckets() -> None:
    """Times 0 to 1: 0.999 is time 999 of 0 to 1000, and 1.0, where flow models start, is in the last bucket, too."""
    usual, x, cond = critic(), torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(1)), conditioning(3)
    made = LatentCritic((4, 4, 4), TEXT_WIDTH, scale=2.0, prior=1.0, time_range=1.0)
    made.load_state_dict(usual.state_dict())
    expected = usual(x, torch.tensor([999, 39, 999]), cond)
    torch.testing.assert_close(made(x, torch.tensor([0.999, 0.039, 1.0]), cond), expected, atol=0, rtol=0)


def test_a_model_without_text_has_a_critic_of_the_state_alone() -> None:
    cond = Conditioning(("circle", "square"), {"label": torch.arange(2)})
    made = LatentCritic((5,), 0, scale=1.0)
    assert text_width(cond) == 0 and made.layers[0].linear.in_features == 5
    assert made(torch.randn(2, 5), torch.tensor([0.5, 1.0]), cond).shape == (2,)
