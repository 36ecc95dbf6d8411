"""What critics look at, on the tiny Stable Diffusion."""

from dataclasses import dataclass, replace

import pytest
import torch
from tiny_critic import trajectory
from torch import Tensor

from cgru.backbones.sd import StableDiffusion
from cgru.critic.views import decoded_views, resized
from cgru.mdp.rollout import rollout
from cgru.mdp.trajectory import Trajectory


@pytest.fixture(scope="module")
def collected(backbone: StableDiffusion) -> Trajectory:
    cond = backbone.encode_text(["a dog", "a cat"])
    return rollout(backbone, cond, [0, 1], kernel=backbone.kernel(3, eta=1.0), guidance=1.0, keep_x0=True)


def test_noisy_and_clean_are_the_decoded_states_as_bytes(backbone: StableDiffusion, collected: Trajectory) -> None:
    noisy = decoded_views(backbone, collected, "noisy", batch_size=4)
    clean = decoded_views(backbone, collected, "clean", batch_size=4)
    assert noisy.shape == clean.shape == (2, 3, 3, 16, 16) and noisy.dtype == torch.uint8
    assert collected.x0_hat is not None
    for i, t in [(0, 0), (1, 2)]:
        for views, latents in ((noisy, collected.x), (clean, collected.x0_hat)):
            image = backbone.decode(latents[i, t][None])[0]
            # rounding to 255 levels is off by half a level at most
            torch.testing.assert_close(views[i, t].float() / 255, image, atol=0.5 / 255 + 1e-5, rtol=0)
    assert not torch.equal(noisy, clean)


def test_latent_is_the_states_themselves(backbone: StableDiffusion, collected: Trajectory) -> None:
    views = decoded_views(backbone, collected, "latent", batch_size=1)
    assert torch.equal(views, collected.x[:, :-1]) and views.data_ptr() == collected.x.data_ptr()


def test_large_pictures_are_shrunk_before_they_are_kept(backbone: StableDiffusion, collected: Trajectory) -> None:
    small = decoded_views(backbone, collected, "noisy", batch_size=6, size=8)
    assert small.shape == (2, 3, 3, 8, 8)
    expected = resized(backbone.decode(collected.x[:, 0]), 8)
    torch.testing.assert_close(small[:, 0].float() / 255, expected, atol=0.5 / 255 + 1e-5, rtol=0)
    # smaller ones stay as they are: enlarging only costs memory
    assert decoded_views(backbone, collected, "noisy", batch_size=6, size=64).shape[-1] == 16


@pytest.mark.parametrize("which", ["noisy", "clean", "latent"])
def test_only_the_chosen_states_are_looked_at(backbone: StableDiffusion, collected: Trajectory, which: str) -> None:
    everything = decoded_views(backbone, collected, which, batch_size=6).float()
    some = decoded_views(backbone, replace(collected, chosen=(0, 2)), which, batch_size=6).float()
    off = 0.0 if which == "latent" else 1.0  # a byte may be off by one, since batches of other sizes round differently
    torch.testing.assert_close(some, everything[:, [0, 2]], atol=off, rtol=0)
    assert float((everything[:, 1] - everything[:, 2]).abs().max()) > 2 * off


@dataclass(frozen=True)
class Broken:
    def decode(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 3, 8, 8), float("nan"))


def test_mistakes() -> None:
    states = trajectory(2, [999, 500])
    with pytest.raises(ValueError, match="keep_x0=True"):
        decoded_views(Broken(), replace(states, x0_hat=None), "clean", batch_size=4)
    with pytest.raises(ValueError, match="Did you mean 'clean'"):
        decoded_views(Broken(), states, "cleen", batch_size=4)
    with pytest.raises(ValueError, match="NaN"):
        decoded_views(Broken(), states, "noisy", batch_size=4)
