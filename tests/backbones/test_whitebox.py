"""A model opened up: vectors for ids change nothing, special tokens are not offered, the loss is of the noise."""

from dataclasses import dataclass

import pytest
import torch

from cgru.backbones.sd import StableDiffusion
from cgru.backbones.whitebox import open_up


def test_vectors_go_through_the_encoder_as_their_ids_do(backbone: StableDiffusion) -> None:
    box = open_up(backbone)
    prefix = box.ids(["xyz"])[:, 1:4]
    vectors = backbone.text_encoder.get_input_embeddings().weight[prefix]
    found = box.encode(box.ids(["a cat"]), vectors)
    torch.testing.assert_close(found, backbone.encode_text(["xyz a cat"]).embeddings)
    assert (found - backbone.encode_text(["a cat"]).embeddings).abs().max() > 0.01


def test_the_encoder_is_as_before_afterwards(backbone: StableDiffusion) -> None:
    box, before = open_up(backbone), backbone.encode_text(["a cat"]).embeddings
    box.encode(box.ids(["a cat"]), torch.zeros(1, 2, 16))
    torch.testing.assert_close(backbone.encode_text(["a cat"]).embeddings, before, rtol=0, atol=0)


def test_special_tokens_are_not_offered(backbone: StableDiffusion) -> None:
    box = open_up(backbone)
    assert not set(box.choices.tolist()) & set(backbone.tokenizer.all_special_ids)
    assert len(box.choices) == len(backbone.tokenizer) - 2 == len(box.vectors)  # all but start and end


def test_tokens_become_text_before_the_prompt(backbone: StableDiffusion) -> None:
    box = open_up(backbone)
    ids = box.ids(["xyz"])[0, 1:4].tolist()
    assert box.text(ids, "a cat") == "xyz a cat"
    assert box.room("a cat") == 16 - 2 - 4  # one token a letter, start and end


def test_the_loss_is_the_error_of_the_predicted_noise(backbone: StableDiffusion) -> None:
    box = open_up(backbone)
    x0, noise = torch.randn(2, 2, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    cond = backbone.encode_text(["a cat", "a dog"])
    levels = box.schedule([10, 500])
    alpha = backbone.scheduler.alphas_cumprod[500]
    x = alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise
    output = backbone.predict(x, torch.tensor([500, 500]), cond, guidance=1.0)
    if backbone.scheduler.config.prediction_type == "v_prediction":
        output = alpha.sqrt() * output + (1 - alpha).sqrt() * x  # from v = √ᾱ ε - √(1-ᾱ) x0
    expected = (output - noise).square().mean((1, 2, 3))
    torch.testing.assert_close(box.noise_error(x0, noise, 1, cond.embeddings, levels), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_another_kind_is_refused() -> None:
    @dataclass
    class Other:
        name: str = "other"

    with pytest.raises(
        ValueError,
        match="'other' is a Other, which lacks `white_box`: .* Stable Diffusion 1.x and 2.x read. Attack such",
    ):
        open_up(Other())  # type: ignore[arg-type]
