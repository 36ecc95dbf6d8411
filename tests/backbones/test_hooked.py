"""A backbone with hooks is the inner one in all that they leave alone."""

from dataclasses import replace

import torch

from cgru.backbones.base import Backbone
from cgru.backbones.hooked import Hooked
from cgru.backbones.sd import StableDiffusion
from cgru.mdp.kernel import ReverseKernel


@torch.no_grad()
def test_without_functions_it_is_the_inner_model(backbone: StableDiffusion) -> None:
    hooked = Hooked(backbone)
    assert isinstance(hooked, Backbone)
    for name in ("name", "latent_shape", "device", "dtype"):
        assert getattr(hooked, name) == getattr(backbone, name)
    assert hooked.denoiser is backbone.denoiser and hooked.decoder is backbone.decoder
    x = torch.randn((3, *backbone.latent_shape), generator=torch.Generator().manual_seed(0))
    time, cond = torch.tensor([3, 300, 900]), backbone.encode_text(["a", "b", "c"])
    assert torch.equal(hooked.encode_text(["a", "b", "c"]).embeddings, cond.embeddings)
    assert torch.equal(hooked.predict(x, time, cond, guidance=3.0), backbone.predict(x, time, cond, guidance=3.0))
    pictures = backbone.decode(x, batch_size=2)
    assert torch.equal(hooked.decode(x, batch_size=2), pictures)
    assert torch.equal(hooked.encode(pictures, batch_size=2), backbone.encode(pictures, batch_size=2))


def test_kernels_are_the_inner_model_s_and_told(backbone: StableDiffusion) -> None:
    told: list[ReverseKernel] = []
    hooked = Hooked(backbone, begin=told.append)
    kernel, own = (model.kernel(5, eta=0.5, noisy_steps=2) for model in (hooked, backbone))
    assert told == [kernel] and kernel.stochastic.tolist() == own.stochastic.tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
    x = torch.ones((1, *backbone.latent_shape))
    assert torch.equal(kernel.step(x, x, 1).std, own.step(x, x, 1).std)


@torch.no_grad()
def test_functions_are_around_embedding_and_prediction(backbone: StableDiffusion) -> None:
    x, time = torch.ones((1, *backbone.latent_shape)), torch.tensor([300])
    other = backbone.encode_text(["dog"])
    hooked = Hooked(
        backbone,
        embed=lambda cond: replace(cond, tensors=other.tensors),
        prediction=lambda x, time, cond, guidance: guidance * backbone.predict(x, time, cond, guidance=1.0),
    )
    cond = hooked.encode_text(["cat"])
    assert cond.prompts == ("cat",) and torch.equal(cond.embeddings, other.embeddings)
    expected = 3 * backbone.predict(x, time, other, guidance=1.0)
    assert torch.equal(hooked.predict(x, time, cond, guidance=3.0), expected)
