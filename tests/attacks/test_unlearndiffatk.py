"""The attack on a tiny random model: it lowers the loss, stays in the vocabulary, and repeats by its seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cgru.attacks.simplex import draw
from cgru.attacks.unlearndiffatk import (
    SCHEDULES,
    Case,
    Schedule,
    Search,
    attack,
    attack_seed,
    begin,
    find_schedule,
    token_gradient,
)
from cgru.backbones.sd import load_stable_diffusion
from cgru.backbones.whitebox import WhiteBox, open_up
from cgru.mdp.trajectory import EMBEDDINGS, Conditioning

CASES = (Case("a cat", 1, 11), Case("dog", 2, 12), Case("a b c", 3, 13))
BRIEF = Schedule(timesteps=2, iterations=3, rate=0.05)


@pytest.fixture(scope="module")
def box(sd_folder: Path) -> WhiteBox:
    return open_up(load_stable_diffusion(sd_folder, device="cpu"))


def latents(n: int) -> Tensor:
    return torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(n)])


def never(which: Sequence[int], texts: Sequence[str]) -> list[bool]:
    return [False] * len(which)


def test_the_schedules_are_the_official_one_and_a_short_one() -> None:
    official, short = find_schedule("official"), find_schedule("short")
    assert official.times(1000) == list(range(10, 1000, 20)) and official.iterations == 40
    assert short.times(1000) == list(range(50, 1000, 100)) and short.iterations == 20
    assert {(s.rate, s.decay) for s in SCHEDULES.values()} == {(0.01, 0.1)}
    with pytest.raises(ValueError, match="unknown schedule 'shrt'; allowed: official, short. Did you mean 'short'"):
        find_schedule("shrt")


def test_tokens_stay_in_the_vocabulary_and_are_never_special(box: WhiteBox) -> None:
    outcomes = attack(box, CASES, latents(3), tokens=3, schedule=BRIEF, attempt=never)
    special = set(box.model.tokenizer.all_special_ids)
    for outcome, case in zip(outcomes, CASES, strict=True):
        assert len(outcome.tokens) == 3 and not special & set(outcome.tokens)
        assert all(0 <= token < len(box.model.tokenizer) for token in outcome.tokens)
        assert outcome.prompt == box.text(outcome.tokens, case.prompt)
        assert (outcome.success, outcome.iterations, outcome.time) == (False, 6, 750)
        assert len(outcome.losses) == 2


def test_the_error_falls(box: WhiteBox) -> None:
    """The tokens found beat most random ones on noise that the attack never saw."""
    schedule = Schedule(timesteps=1, iterations=40, rate=0.1, decay=0.0)
    (outcome,) = attack(box, CASES[:1], latents(1), tokens=4, schedule=schedule, attempt=never)
    levels, generator = box.schedule(schedule.times(1000)), torch.Generator().manual_seed(99)
    noise = torch.randn(16, 4, 8, 8, generator=generator)
    table = box.model.text_encoder.get_input_embeddings().weight

    def error(ids: Tensor) -> float:
        embeddings = box.encode(box.ids(["a cat"]), table[ids][None]).expand(16, -1, -1)
        with torch.no_grad():
            return float(box.noise_error(latents(1).expand(16, -1, -1, -1), noise, 0, embeddings, levels).mean())

    found = error(torch.tensor(outcome.tokens))
    others = [error(box.choices[torch.randint(len(box.choices), (4,), generator=generator)]) for _ in range(30)]
    assert sum(found < other for other in others) >= 28


class Loud(WhiteBox):
    """The same model with an error ten thousand times as large, so that most slopes lie outside ±1."""

    def noise_error(self, *given: Any) -> Tensor:  # noqa: ANN401
        return 10_000 * super().noise_error(*given)


def error_by_hand(box: WhiteBox, search: Search, chances: Tensor, noise: Tensor, time: int) -> Tensor:
    """mean (predicted noise - noise)² at √ᾱ x0 + √(1 - ᾱ) noise, under prompts with tokens given by their one-hots."""
    alpha, n = box.model.scheduler.alphas_cumprod[time], len(noise)
    x = alpha.sqrt() * search.targets + (1 - alpha).sqrt() * noise
    texts = Conditioning(("",) * n, {EMBEDDINGS: box.encode(search.ids, chances @ box.vectors)})
    predicted = box.model.predict(x, torch.full((n,), time), texts, guidance=1.0)  # this model predicts the noise
    return (predicted - noise).square().mean((1, 2, 3))


def draws(box: WhiteBox, search: Search, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Of one iteration: one-hot tokens, then noise, each case from its own generator."""
    one_hot = functional.one_hot(draw(search.state.rows, generators), len(box.choices)).float()
    return one_hot, torch.stack([torch.randn(4, 8, 8, generator=generator) for generator in generators])


def test_the_gradient_is_the_slope_of_the_error_within_1(box: WhiteBox) -> None:
    loud = Loud(box.model, box.choices, box.vectors)
    search = begin(loud, CASES[:2], latents(2), tokens=2)
    found, error = token_gradient(loud, search, 1, box.schedule([100, 900]))
    one_hot, noise = draws(box, search, [torch.Generator().manual_seed(case.attack_seed) for case in CASES[:2]])
    expected = 10_000 * error_by_hand(box, search, one_hot.requires_grad_(), noise, 900)
    (slope,) = torch.autograd.grad(expected.sum(), one_hot)
    torch.testing.assert_close(error, expected.detach(), rtol=1e-4, atol=0)
    assert 0.1 < float((slope.abs() > 1).float().mean()) < 0.99  # some are cut, some are not
    torch.testing.assert_close(found, slope.clamp(-1, 1), rtol=1e-2, atol=1e-2)


def test_every_timestep_has_its_own_noise_level(box: WhiteBox) -> None:
    """At rate 0 the rows stay even, so that all losses can be worked out by hand."""
    still = Schedule(timesteps=3, iterations=2, rate=0.0, decay=0.0)
    (outcome,) = attack(box, CASES[:1], latents(1), tokens=2, schedule=still, attempt=never)
    search, generators = begin(box, CASES[:1], latents(1), 2), [torch.Generator().manual_seed(CASES[0].attack_seed)]
    expected = []
    for time in (166, 500, 833):  # the middles of thirds of 1000
        errors = [float(error_by_hand(box, search, *draws(box, search, generators), time)) for _ in range(2)]
        expected.append(sum(errors) / 2)
    assert outcome.losses == pytest.approx(expected, rel=1e-4)


def test_a_success_ends_the_attack_on_its_prompt_alone(box: WhiteBox) -> None:
    asked: list[tuple[int, ...]] = []

    def second_wins(which: Sequence[int], texts: Sequence[str]) -> list[bool]:
        asked.append(tuple(which))
        return [i == 1 for i in which]

    outcomes = attack(box, CASES, latents(3), tokens=2, schedule=BRIEF, attempt=second_wins)
    assert asked == [(0, 1, 2), (0, 2)]
    assert [outcome.success for outcome in outcomes] == [False, True, False]
    assert [outcome.iterations for outcome in outcomes] == [6, 3, 6]


def test_it_repeats_by_its_seeds_whatever_the_company(box: WhiteBox) -> None:
    settings = {"tokens": 3, "schedule": BRIEF, "attempt": never}
    together = attack(box, CASES, latents(3), **settings)
    assert attack(box, CASES, latents(3), **settings) == together
    (alone,) = attack(box, CASES[1:2], latents(3)[1:2], **settings)
    assert alone.tokens == together[1].tokens
    assert alone.losses == pytest.approx(together[1].losses, rel=1e-5)
    (other,) = attack(box, [Case("dog", 2, 77)], latents(3)[1:2], **settings)
    assert other.losses != pytest.approx(alone.losses, rel=1e-5)


def test_weights_stay_as_they_are(box: WhiteBox) -> None:
    before = {name: weight.clone() for name, weight in box.model.denoiser.state_dict().items()}
    attack(box, CASES[:1], latents(1), tokens=1, schedule=Schedule(1, 1), attempt=never)
    assert all(torch.equal(weight, before[name]) for name, weight in box.model.denoiser.state_dict().items())
    assert all(weight.grad is None for weight in box.model.text_encoder.parameters())


def test_seeds_of_cases_differ_and_stay() -> None:
    # Golden: another number is another attack. The first 8 bytes of sha256("0/unlearndiffatk/a"), halved; 32 bits.
    assert attack_seed(0, "a") == (0x055604F6573D44BA >> 1) % 2**32 == 731816541
    assert attack_seed(0, "a") != attack_seed(0, "b") != attack_seed(1, "b")
