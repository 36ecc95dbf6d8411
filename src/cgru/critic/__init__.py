"""The per-timestep critic V(x_t, c, t), the policy's baseline (paper §4; Alg. 1); `build_critic` builds one by name.

`film` is the paper's network, `frozen` the same network on fixed features, `latent` DPOK's critic. `views` prepares
their inputs, `fit` holds the warm start and the online updates.
"""

from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch

from cgru.catalog import unknown
from cgru.critic.film import TIME_RANGE, FilmCritic, Head
from cgru.critic.frozen import FrozenCritic
from cgru.critic.latent import LatentCritic
from cgru.critic.tower import Tower
from cgru.critic.views import View

Kind = Literal["film", "plain", "prompt", "latent"]


def build_critic(
    kind: str,
    head: str,
    view: str,
    *,
    tower: Tower | None,
    labels: Sequence[str] = (),
    target: str | Sequence[str] = (),
    scale: float,
    prior: float,
    latent_shape: tuple[int, ...],
    text_width: int,
    time_range: float = TIME_RANGE,
    seed: int = 0,
    frozen: bool = False,
    dtype: torch.dtype = torch.float32,
) -> FilmCritic | FrozenCritic | LatentCritic:
    """Build an untrained critic, float32 on the CPU; the same seed gives the same weights.

    Args:
        kind: `film` (the paper), `plain` (without time), `prompt` (FiLM by time and prompt) or `latent` (DPOK's).
        head: `value` or `classes`; `latent` has `value` only.
        view: `noisy` or `clean`; `latent` looks at latents whatever this says.
        tower: from `load_tower`, for this critic alone; not needed by `latent`.
        labels: of the classes head.
        target: label or labels that the reward counts against, for the classes head.
        scale: size of the reward.
        prior: mean reward, what the value head says before training.
        latent_shape: of the backbone, for `latent`.
        text_width: of `pooled_text`, for `prompt` and `latent`; 0: the model has no text for a critic.
        time_range: the times that the denoiser receives are 0 to this.
        seed: of the fresh layers.
        frozen: the tower learns nothing, and its features are computed once; `latent` has none.
        dtype: of the model; beside bf16 the tower computes in bf16, too (fp16 would need its gradients scaled).
    """
    _check(kind, head, view, tower, text_width)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed CUDA, outside of this fork
        if tower is None or kind == "latent":
            return LatentCritic(latent_shape, text_width, scale=scale, prior=prior, time_range=time_range)
        critic = FilmCritic(
            tower,
            head=cast(Head, head),
            scale=scale,
            prior=prior,
            labels=labels,
            target=target,
            view=cast(View, view),
            depths=(tower.network.config.num_hidden_layers,) if frozen else None,
            film=kind != "plain",
            text_width=text_width if kind == "prompt" else None,
            time_range=time_range,
            dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        )
        return FrozenCritic(critic) if frozen else critic


def _check(kind: str, head: str, view: str, tower: Tower | None, text_width: int) -> None:
    if kind not in get_args(Kind):
        raise ValueError(unknown("critic kind", kind, get_args(Kind), "Set critic.kind to one of them."))
    if head not in get_args(Head):
        raise ValueError(unknown("critic head", head, get_args(Head), "Set critic.head to one of them."))
    if kind == "latent":
        if head != "value":
            raise ValueError("critic kind 'latent' has no head 'classes'; set critic.head=value or another kind.")
        return
    if kind == "prompt" and not text_width:
        raise ValueError(
            "critic kind 'prompt' reads the conditioning's `pooled` or `embeddings`, and this model has neither; "
            "allowed: film, plain, latent. Set critic.kind to one of these."
        )
    if view not in ("noisy", "clean"):
        raise ValueError(unknown("critic view", view, ("noisy", "clean"), "Set critic.view to one of them."))
    if tower is None:
        raise ValueError(f"critic kind {kind!r} needs a vision tower and got none; give one from load_tower.")
