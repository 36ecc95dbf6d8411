"""What a critic is, and what it looks at: decoded x_t (the paper), decoded x̂0, or the latent itself.

All three are functions of the state (x_t, c, t) alone, so A = r - V stays unbiased (paper, App. A). Every state is
decoded once per trajectory and kept, because values and critic updates read it several times. Pictures are kept as
uint8 of at most the critic's input size: 800 states of SD at 512 px are 2.5 GB in float32, 120 MB as 224-px bytes.
A latent shrunk before it is decoded is a function of the state as well, and costs the decoder a quarter or less.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor
from torch.nn import functional

from cgru.catalog import unknown
from cgru.mdp.trajectory import Conditioning, Trajectory

View = Literal["noisy", "clean", "latent"]
SHRINKS = {"full": 1, "half": 2, "quarter": 4}
"""Name of a decode -> the side of the latent's cells that are averaged to one."""


@runtime_checkable
class Critic(Protocol):
    """V(x_t, c, t): the expected terminal reward; an nn.Module in practice."""

    @property
    def view(self) -> View:
        """What to feed it."""

    def __call__(self, view: Tensor, time: Int[Tensor, " k"], cond: Conditioning) -> Float[Tensor, " k"]:
        """Return values in reward units for k states; `time` is what the denoiser receives, so any step count serves.

        Pictures are [0, 1] floats or uint8; inputs may lie on another device than the critic.
        """


@runtime_checkable
class ClassCritic(Critic, Protocol):
    """A critic that names what the finished picture will show."""

    def logits(self, view: Tensor, time: Int[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "k classes"]:
        """Return one logit per label."""


@runtime_checkable
class Decoder(Protocol):
    """The part of a backbone that views need."""

    def decode(self, x: Tensor) -> Tensor:
        """Turn latents into images, [0, 1]."""


@torch.no_grad()
def decoded_views(
    backbone: Decoder, trajectory: Trajectory, which: str, *, batch_size: int, size: int | None = None, shrink: int = 1
) -> Shaped[Tensor, "n t c h w"]:
    """Return what a critic looks at, for the t states of each trajectory that are learned from, on its device.

    Args:
        backbone: whose VAE decodes; not used for `latent`.
        trajectory: n runs; `clean` needs its x0_hat. Of x_T..x_1, its `learned` steps count.
        which: `noisy`, `clean` (both uint8 pictures) or `latent` (float32).
        batch_size: latents decoded at once.
        size: larger pictures are shrunk to this side before they are kept; give the critic's `image_size`.
        shrink: latents are averaged over squares of this side before they are decoded; it must divide theirs.
    """
    latents = _latents(trajectory, which)
    if trajectory.chosen is not None:
        latents = latents[:, trajectory.learned]
    if which == "latent":
        return latents
    kept, good = zip(
        *(_kept(backbone.decode(part), size) for part in shrunk(latents.flatten(0, 1), shrink).split(batch_size)),
        strict=True,
    )
    if not bool(torch.stack(good).all()):  # asked once: each answer makes the host wait for the device
        raise ValueError("the decoded states hold NaN or infinity; run the model in fp32 or bf16.")
    return torch.cat(kept).unflatten(0, latents.shape[:2])


def shrunk(latents: Float[Tensor, "n c h w"], side: int) -> Float[Tensor, "n c small_h small_w"]:
    """Return the means over squares of side × side cells; 1: the latents themselves."""
    return latents if side == 1 else functional.avg_pool2d(latents, side)


def check_shrink(decode: str, latent_shape: tuple[int, ...]) -> None:
    """Refuse a decode that does not divide the sides of the model's latents."""
    fitting = [name for name, side in SHRINKS.items() if all(length % side == 0 for length in latent_shape[1:])]
    if decode not in fitting:
        sides = " × ".join(map(str, latent_shape[1:]))
        raise ValueError(
            f"critic.decode is {decode!r} and the model's latents are {sides}; allowed: {', '.join(fitting)}, which "
            "divide them. Set critic.decode to one of these."
        )


def resized(images: Float[Tensor, "n 3 h w"], size: int) -> Float[Tensor, "n 3 size size"]:
    """Return images of `size` × `size`; antialiased, which matters only when shrinking."""
    if images.shape[-2:] == (size, size):
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", align_corners=False, antialias=True)


def _latents(trajectory: Trajectory, which: str) -> Tensor:
    if which not in get_args(View):
        raise ValueError(unknown("critic view", which, get_args(View), "Set critic.view to one of them."))
    if which != "clean":
        return trajectory.x[:, :-1]
    if trajectory.x0_hat is None:
        raise ValueError("critic view 'clean' needs x̂0, which this rollout did not keep; roll out with keep_x0=True.")
    return trajectory.x0_hat


def _kept(images: Tensor, size: int | None) -> tuple[UInt8[Tensor, "n 3 h w"], Bool[Tensor, ""]]:
    # The bytes, and whether all was finite: as bytes a NaN would silently become a colour.
    small = resized(images, size) if size is not None and max(images.shape[-2:]) > size else images
    return (small * 255).round().to(torch.uint8), images.isfinite().all()
