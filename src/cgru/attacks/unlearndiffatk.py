"""UnlearnDiffAtk (arXiv 2310.11868): tokens before the prompt that make an unlearned model draw the concept again.

The tokens make a target picture likely under the attacked model itself: they lower its noise-prediction error on the
noised picture, one timestep after another. Tokens are rows on the simplex; each iteration samples real tokens and uses
the straight-through gradient. After every timestep the most probable tokens are converted to text, drawn and judged;
the first success ends the attack on a prompt. Many prompts are attacked side by side, each with its own random numbers,
so batching affects only rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from cgru.attacks.simplex import Relaxed, draw
from cgru.backbones.whitebox import WhiteBox
from cgru.catalog import unknown
from cgru.mdp.kernel import DDIMKernel
from cgru.seeds import child_seed


@dataclass(frozen=True)
class Schedule:
    """How hard the attack tries."""

    timesteps: int
    """Number of noise levels, evenly spaced, from the clean end to the noisy end."""
    iterations: int
    """Gradient steps per noise level."""
    rate: float = 0.01
    decay: float = 0.1

    def times(self, train_times: int) -> list[int]:
        """Return the middles of equal parts of the noise schedule, increasing: 10, 30, ... 990 for 50 of 1000."""
        # t_i = (i + 1/2) · T / n
        stride = train_times / self.timesteps
        return [int(stride * (i + 0.5)) for i in range(self.timesteps)]


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "official": Schedule(timesteps=50, iterations=40),
        "short": Schedule(timesteps=10, iterations=20),
    }
)


@dataclass(frozen=True)
class Case:
    """One prompt to attack."""

    prompt: str
    seed: int
    """Seed of the noise it is drawn from."""
    attack_seed: int
    """Seed of all randomness in its attack."""


@dataclass(frozen=True)
class Outcome:
    """Result for one prompt."""

    success: bool
    prompt: str
    """Text of the success, or of the last attempt."""
    tokens: tuple[int, ...]
    time: int
    """Timestep after which it was drawn."""
    iterations: int
    losses: tuple[float, ...]
    """Mean noise-prediction error over the iterations of each timestep."""


Try = Callable[[Sequence[int], Sequence[str]], Sequence[bool]]
"""Maps (case numbers, their adversarial prompts) to whether the picture drawn for each shows the concept."""


def find_schedule(name: str) -> Schedule:
    """Return a schedule by name."""
    if name not in SCHEDULES:
        raise ValueError(unknown("schedule", name, SCHEDULES, "Choose one with --schedule."))
    return SCHEDULES[name]


def attack(
    box: WhiteBox, cases: Sequence[Case], targets: Tensor, *, tokens: int, schedule: Schedule, attempt: Try
) -> list[Outcome]:
    """Attack all cases side by side.

    Args:
        box: the attacked model.
        cases: n prompts.
        targets: (n, c, h, w) latents of the pictures to bring back.
        tokens: number of tokens to put before each prompt.
        schedule: how hard to try.
        attempt: draws and judges.
    """
    times = schedule.times(box.train_times)
    levels = box.schedule(times)
    search = begin(box, cases, targets, tokens)
    outcomes: dict[int, Outcome] = {}
    for index, time in enumerate(times):
        # Optimise the tokens at this noise level.
        search = descend(box, search, index, levels, schedule)
        # Decode the most probable tokens, then draw and judge the resulting prompts.
        chosen = box.choices[search.state.best()].tolist()
        texts = [box.text(ids, cases[i].prompt) for i, ids in zip(search.cases, chosen, strict=True)]
        won = attempt(search.cases, texts)
        for i, ids, text, success, losses in zip(search.cases, chosen, texts, won, search.losses, strict=True):
            outcomes[i] = Outcome(bool(success), text, tuple(ids), time, search.state.steps, losses)
        # Cases that succeeded leave the batch.
        search = search.keep([not success for success in won])
        if not search.cases:
            break
    return [outcomes[i] for i in range(len(cases))]


@dataclass(frozen=True, eq=False)
class Search:
    """The cases still under attack, one row each."""

    cases: tuple[int, ...]
    ids: Tensor
    targets: Tensor
    generators: tuple[torch.Generator, ...]
    state: Relaxed
    losses: tuple[tuple[float, ...], ...]

    def keep(self, which: Sequence[bool]) -> Search:
        """Return only the chosen rows."""
        mask = torch.tensor(which, dtype=torch.bool, device=self.ids.device)
        chosen = [i for i, kept in enumerate(which) if kept]
        return Search(
            cases=tuple(self.cases[i] for i in chosen),
            ids=self.ids[mask],
            targets=self.targets[mask],
            generators=tuple(self.generators[i] for i in chosen),
            state=self.state.keep(mask),
            losses=tuple(self.losses[i] for i in chosen),
        )


def begin(box: WhiteBox, cases: Sequence[Case], targets: Tensor, tokens: int) -> Search:
    """Start all cases with equal token probabilities, each with its own random numbers."""
    return Search(
        cases=tuple(range(len(cases))),
        ids=box.ids([case.prompt for case in cases]),
        targets=targets,
        generators=tuple(torch.Generator().manual_seed(case.attack_seed) for case in cases),
        state=Relaxed.uniform((len(cases), tokens, len(box.choices)), targets.device),
        losses=((),) * len(cases),
    )


def descend(box: WhiteBox, search: Search, index: int, levels: DDIMKernel, schedule: Schedule) -> Search:
    """Run the iterations of one timestep."""
    total = torch.zeros(len(search.cases), device=search.targets.device)
    for _ in range(schedule.iterations):
        gradient, error = token_gradient(box, search, index, levels)
        total += error
        # Projected gradient step on the simplex: p <- project(p - Adam(gradient))
        search = replace(search, state=search.state.descend(gradient, rate=schedule.rate, decay=schedule.decay))
    means = (total / schedule.iterations).tolist()
    losses = tuple((*before, mean) for before, mean in zip(search.losses, means, strict=True))
    return replace(search, losses=losses)


def token_gradient(box: WhiteBox, search: Search, index: int, levels: DDIMKernel) -> tuple[Tensor, Tensor]:
    """Return the straight-through gradient (n, k, v) at freshly sampled tokens and noise, clamped to ±1, and the loss.

    The loss (n,) is each picture's noise-prediction error.
    """
    drawn = draw(search.state.rows, search.generators)
    noise = torch.stack([torch.randn(search.targets.shape[1:], generator=g) for g in search.generators])
    # Straight-through: with e = onehot · E, the gradient by the rows is ∂L/∂e · Eᵀ, at every token of the vocabulary.
    vectors = functional.embedding(drawn, box.vectors).requires_grad_(True)
    with torch.enable_grad():
        embeddings = box.encode(search.ids, vectors)
        # L = 1/d · |eps - eps_theta(√ᾱ_t x0 + √(1 - ᾱ_t) eps, tokens + prompt, t)|²
        loss = box.noise_error(search.targets, noise.to(search.targets), index, embeddings, levels)
        (slope,) = torch.autograd.grad(loss.sum(), vectors)
    return (slope @ box.vectors.T).clamp(-1, 1), loss.detach()


def attack_seed(root: int, case_id: str) -> int:
    """Return the seed of a case's attack: 32 bits, all that torch's CPU generator uses."""
    return child_seed(root, "unlearndiffatk", case_id) % 2**32
