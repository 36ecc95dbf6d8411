"""The FiLM critic: identity at the start (design test 5), the tower run layer by layer, heads, prompts."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_critic import TEXT_WIDTH, conditioning, pictures, tiny_clip, tiny_tower, trajectory
from torch import Tensor

from cgru.critic import build_critic
from cgru.critic.film import FilmCritic, pooled_text, sinusoidal, text_width
from cgru.critic.latent import LatentCritic
from cgru.mdp.trajectory import Conditioning

TIME = torch.tensor([1, 300, 700, 999])
LABELS = ("Cats", "Dogs", "Trees")


def value_critic(**options: object) -> FilmCritic:
    return FilmCritic(tiny_tower(), head="value", scale=10.0, prior=3.0, **options)


def class_critic(target: str | tuple[str, ...] = "Dogs", **options: object) -> FilmCritic:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return FilmCritic(tiny_tower(), head="classes", labels=LABELS, target=target, scale=10.0, **options)


def stirred(critic: FilmCritic) -> FilmCritic:
    """The critic with all its weights moved a little, as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return critic


def test_layer_by_layer_is_the_towers_own_forward() -> None:
    images = pictures(4)
    critic = value_critic(film=False)
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.5]).view(3, 1, 1)
    expected = tiny_clip().vision_model((images - mean) / std).pooler_output
    torch.testing.assert_close(critic.features(images, TIME, conditioning(4)), expected, atol=1e-6, rtol=0)


def test_beside_a_bf16_model_the_tower_computes_in_bf16_and_learns_in_float32() -> None:
    exact, coarse = stirred(value_critic()), value_critic(dtype=torch.bfloat16)
    coarse.load_state_dict(exact.state_dict())
    inputs = (pictures(4), TIME, conditioning(4))
    found, expected = coarse(*inputs), exact(*inputs)
    assert found.dtype == torch.float32
    off = float(((found - expected).abs().max() / expected.std()).detach())
    assert 1e-6 < off < 0.1  # another rounding, and no more than that
    found.sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in coarse.film.parameters())


@pytest.mark.parametrize("text_width", [None, TEXT_WIDTH])
@pytest.mark.parametrize("depths", [None, (0, 1, 2, 3), (2,)])
def test_film_at_start_is_no_film_bit_for_bit(depths: tuple[int, ...] | None, text_width: int | None) -> None:
    inputs = (pictures(4), TIME, conditioning(4))
    plain = class_critic(film=False)
    film = class_critic(depths=depths, text_width=text_width)
    film.head.load_state_dict(plain.head.state_dict())  # FiLM's own layers drew other random numbers before the head
    assert torch.equal(film.features(*inputs), plain.features(*inputs))
    assert torch.equal(film(*inputs), plain(*inputs))


@pytest.mark.parametrize("text_width", [None, TEXT_WIDTH])
def test_a_trained_critic_sees_time_and_a_plain_one_does_not(text_width: int | None) -> None:
    image, prompt = pictures(1).repeat(4, 1, 1, 1), conditioning(1)[torch.zeros(4, dtype=torch.long)]
    film, plain = stirred(value_critic(text_width=text_width)), stirred(value_critic(film=False))
    apart = film(image, TIME, prompt).detach().sort().values.diff()
    assert float(apart.min()) > 1e-3
    same = plain(image, TIME, prompt)
    torch.testing.assert_close(same, same[:1].expand(4))


def test_only_the_prompt_variant_sees_the_prompt() -> None:
    image, time = pictures(1).repeat(2, 1, 1, 1), torch.tensor([500, 500])
    blind, prompt = stirred(value_critic()), stirred(value_critic(text_width=TEXT_WIDTH))
    first, second = blind(image, time, conditioning(2)).tolist()
    assert first == pytest.approx(second, abs=1e-5)
    first, second = prompt(image, time, conditioning(2)).tolist()
    assert abs(first - second) > 1e-3


def test_gradients_reach_film_and_after_one_step_everything() -> None:
    frozen = tiny_tower()
    frozen.network.requires_grad_(False)
    critic = FilmCritic(frozen, head="classes", labels=LABELS, target="Dogs", scale=10.0, text_width=TEXT_WIDTH)
    optimiser = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic(pictures(4), TIME, conditioning(4)).sum().backward()
    assert critic.film is not None
    last = critic.film.mlp[2].weight.grad
    # The zero last layer gets a gradient at every depth (4 depths × γ, β × width 16) ...
    assert last is not None and bool((last.view(4, 2, 16, -1).abs().amax((2, 3)) > 0).all())
    optimiser.step()
    optimiser.zero_grad()
    critic(pictures(4), TIME, conditioning(4)).sum().backward()
    # ... and once it has moved, so does everything before it. (A key's bias cancels in the softmax: rounding only.)
    silent = [n for n, p in critic.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
    assert [name for name in silent if not name.endswith("k_proj.bias")] == []


def test_value_head_starts_at_the_prior_and_is_linear_in_units_of_scale() -> None:
    critic = value_critic()
    assert critic(pictures(4), TIME, conditioning(4)).tolist() == [3.0] * 4
    torch.nn.init.constant_(critic.head.linear.bias, 0.25)
    assert critic(pictures(4), TIME, conditioning(4)).tolist() == [5.5] * 4  # 3 + 10 · 0.25


def test_class_head_is_the_papers_reward_form() -> None:
    critic = class_critic()
    torch.nn.init.zeros_(critic.head.linear.weight)
    with torch.no_grad():
        critic.head.linear.bias.copy_(torch.tensor([0.0, math.log(2), 0.0]))
    # p = (1, 2, 1) / 4, so V = 10 · (1 - 1/2)
    torch.testing.assert_close(critic(pictures(4), TIME, conditioning(4)), torch.full((4,), 5.0))
    logits = critic.logits(pictures(4), TIME, conditioning(4))
    torch.testing.assert_close(logits, torch.tensor([[0.0, math.log(2), 0.0]]).expand(4, 3))


def test_several_targets_add_up_and_any_concept_takes_the_same_weights() -> None:
    trained = stirred(class_critic("Dogs"))
    values = {}
    for target in ("Cats", "Dogs", "Trees", ("Cats", "Trees")):
        critic = class_critic(target)
        critic.load_state_dict(trained.state_dict())
        values[target] = critic(pictures(4), TIME, conditioning(4))
    # the three p add up to 1: Σ 10 (1 - p) = 20
    torch.testing.assert_close(values["Cats"] + values["Dogs"] + values["Trees"], torch.full((4,), 20.0))
    torch.testing.assert_close(values["Cats", "Trees"], values["Cats"] + values["Trees"] - 10)


def test_bytes_and_floats_are_the_same_picture_and_large_ones_are_shrunk() -> None:
    critic = stirred(value_critic())
    stored = (pictures(4, size=16) * 255).round().to(torch.uint8)
    from_bytes = critic(stored, TIME, conditioning(4))
    torch.testing.assert_close(from_bytes, critic(stored.float() / 255, TIME, conditioning(4)))
    flat = torch.full((4, 3, 32, 32), 0.25)
    # a picture of one colour is the same picture at any size
    torch.testing.assert_close(critic(flat, TIME, conditioning(4)), critic(flat[..., :8, :8], TIME, conditioning(4)))


def test_values_do_not_depend_on_the_batch() -> None:
    critic = stirred(value_critic(text_width=TEXT_WIDTH))
    cond, images = conditioning(4), pictures(4)
    one_by_one = [critic(images[i : i + 1], TIME[i : i + 1], cond[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(torch.cat(one_by_one), critic(images, TIME, cond))


def test_sinusoidal_by_hand() -> None:
    # width 4: frequencies 1 and 10,000^(-1/2) = 0.01
    expected = torch.tensor([[math.cos(100), math.cos(1), math.sin(100), math.sin(1)]])
    torch.testing.assert_close(sinusoidal(torch.tensor([100]), 4), expected, atol=1e-5, rtol=0)


def test_pooled_text_is_what_the_prompt_adds() -> None:
    empty = torch.full((1, 2, 4), 50.0)
    said = torch.tensor([[[52.0, 50, 50, 48], [50, 50, 50, 50]]])
    pooled = pooled_text(Conditioning(("a", ""), {"embeddings": torch.cat([said, empty])}, {"embeddings": empty}))
    # difference (1, 0, 0, -1): mean 0, variance 1/2; divided by √(1/2) it is (√2, 0, 0, -√2)
    expected = torch.tensor([[math.sqrt(2), 0, 0, -math.sqrt(2)], [0, 0, 0, 0]])
    torch.testing.assert_close(pooled, expected, atol=1e-4, rtol=0)


def test_a_models_own_summary_of_the_prompt_is_preferred() -> None:
    pooled, cond = torch.tensor([[2.0, 0.0], [1.0, 3.0]]), conditioning(2)
    summed_up = replace(cond, tensors={**cond.tensors, "pooled": pooled})  # unconditional: none, so zeros
    # each row minus its mean (1, 2), divided by its standard deviation (1, 1)
    torch.testing.assert_close(pooled_text(summed_up), torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), atol=1e-4, rtol=0)
    assert (text_width(cond), text_width(summed_up)) == (TEXT_WIDTH, 2)


def test_grey_pictures_are_seen_as_colours_of_one_shade() -> None:
    critic, grey = stirred(value_critic()), pictures(4)[:, :1]
    expected = critic(grey.expand(-1, 3, -1, -1), TIME, conditioning(4))
    assert torch.equal(critic(grey, TIME, conditioning(4)), expected)
    assert torch.equal(critic((grey * 255).byte(), TIME, conditioning(4)).isfinite(), torch.ones(4, dtype=torch.bool))


def test_times_of_another_range_say_the_same() -> None:
    usual = stirred(value_critic())
    film = value_critic(time_range=1.0)
    film.load_state_dict(usual.state_dict())
    inputs = pictures(4), conditioning(4)
    torch.testing.assert_close(film(inputs[0], TIME / 1000, inputs[1]), usual(inputs[0], TIME, inputs[1]))


@pytest.mark.parametrize("depths", [(4,), (-1,), (1, 1), ()])
def test_depths_outside_the_tower_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="from 0 to 3"):
        value_critic(depths=depths)


def test_class_head_mistakes() -> None:
    with pytest.raises(ValueError, match="Did you mean 'Dogs'"):
        class_critic("Dog")
    with pytest.raises(ValueError, match="0 targets"):
        class_critic(())
    with pytest.raises(ValueError, match="head 'classes'"):
        value_critic().logits(pictures(4), TIME, conditioning(4))


def build(kind: str = "film", head: str = "value", view: str = "noisy", **options: object) -> FilmCritic | LatentCritic:
    settings = {
        "tower": tiny_tower(),
        "labels": LABELS,
        "target": "Dogs",
        "scale": 10.0,
        "prior": 4.0,
        "latent_shape": (4, 4, 4),
        "text_width": TEXT_WIDTH,
    }
    return build_critic(kind, head, view, **(settings | options))


@pytest.mark.parametrize("kind", ["film", "plain", "prompt", "latent"])
def test_every_kind_starts_at_the_prior_and_is_reproducible_by_seed(kind: str) -> None:
    state = trajectory(4, [999, 500])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    critic, again, other = build(kind), build(kind), build(kind, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    view = state.x[:, 0] if critic.view == "latent" else pictures(4)
    assert critic(view, TIME, state.cond).tolist() == [4.0] * 4
    assert equal(critic.state_dict(), again.state_dict())
    assert kind == "plain" or not equal(critic.state_dict(), other.state_dict())  # plain: tower and a zero head


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_view_is_what_was_asked_for() -> None:
    assert [build(view="noisy").view, build(view="clean").view, build("latent").view] == ["noisy", "clean", "latent"]
    assert isinstance(build("latent", tower=None), LatentCritic)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "flim"}, "Did you mean 'film'"),
        ({"head": "values"}, "Did you mean 'value'"),
        ({"view": "latent"}, "unknown critic view 'latent'"),
        ({"kind": "latent", "head": "classes"}, "no head 'classes'"),
        ({"tower": None}, "needs a vision tower"),
    ],
)
def test_building_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
