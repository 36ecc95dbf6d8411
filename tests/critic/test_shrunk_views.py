"""Views of a shrunk latent: means over squares, decoded like any other; sides that do not fit are refused."""

import pytest
import torch
from tiny_critic import trajectory

from cgru.critic.views import check_shrink, decoded_views, shrunk


class Grey:
    """A decoder without a network: the mean over channels, once for each colour."""

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True).sigmoid().expand(-1, 3, -1, -1)


def test_squares_become_their_means() -> None:
    latents = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 6.0, 4.0, 0.0]]).repeat(2, 1).view(1, 1, 4, 4)
    # (1 + 2 + 3 + 6) / 4 = 3 and (0 + 0 + 4 + 0) / 4 = 1, in both rows
    assert shrunk(latents, 2).tolist() == [[[[3.0, 1.0], [3.0, 1.0]]]]
    assert shrunk(latents, 4).item() == 2.0
    assert shrunk(latents, 1) is latents


def test_shrunk_views_are_decoded_from_shrunk_latents() -> None:
    runs = trajectory(2, [900, 500, 100])
    views = decoded_views(Grey(), runs, "noisy", batch_size=4, shrink=2)
    assert views.shape == (2, 3, 3, 2, 2)
    expected = Grey().decode(shrunk(runs.x[1, :1], 2))
    assert torch.equal(views[1, 0], (expected[0] * 255).round().to(torch.uint8))


def test_a_side_that_does_not_divide_is_refused() -> None:
    check_shrink("quarter", (4, 16, 16))
    with pytest.raises(ValueError, match=r"'quarter', but the model's latents are 6 × 4; allowed: full, half, which"):
        check_shrink("quarter", (4, 6, 4))


def test_latents_that_are_no_maps_are_decoded_whole() -> None:
    check_shrink("full", (64,))
    with pytest.raises(ValueError, match=r"'half', but the model's latents are 8 × 64; allowed: full, which"):
        check_shrink("half", (8, 64))
