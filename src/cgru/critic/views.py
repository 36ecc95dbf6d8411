"""The critic protocol and its inputs: the decoded x_t (the paper), the decoded x̂0, or the latent itself.

All three are functions of the state (x_t, c, t) alone, so A = r - V stays unbiased (paper, App. A). Every state is
decoded once per trajectory and stored, because evaluation and critic updates read it several times. Images are stored
as uint8 at no more than the critic's input size: 800 states of SD at 512 px take 2.5 GB in float32, but 120 MB as 224
px bytes. A latent that is shrunk before decoding is still a function of the state and needs at most a quarter of the
decoder's work.
"""
# ruff: noqa: F722, F821 - jaxtyping shapes are strings, not forward references

from collections.abc import Callable
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Num, Shaped, UInt8
from torch import Tensor
from torch.nn import functional

from cgru.catalog import unknown
from cgru.mdp.trajectory import Conditioning, Trajectory

View = Literal["noisy", "clean", "latent"]
SHRINKS = {"full": 1, "half": 2, "quarter": 4}
"""Name of a decode -> side of the squares of latent cells that are averaged into one."""


@runtime_checkable
class Critic(Protocol):
    """V(x_t, c, t), the expected terminal reward; in practice an nn.Module."""

    @property
    def view(self) -> View:
        """Return the kind of input it expects."""

    def __call__(self, view: Tensor, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, " k"]:
        """Return values in reward units for k states; `time` is what the denoiser receives, so any step count serves.

        Images are floats in [0, 1] or uint8; inputs may be on another device than the critic.
        """


@runtime_checkable
class ClassCritic(Critic, Protocol):
    """A critic that also predicts the class of the finished image."""

    def logits(self, view: Tensor, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "k classes"]:
        """Return one logit per label."""


@runtime_checkable
class Decoder(Protocol):
    """The part of a backbone that views need."""

    def decode(self, x: Tensor) -> Tensor:
        """Turn latents into images, [0, 1]."""


@torch.no_grad()
def decoded_views(
    backbone: Decoder,
    trajectory: Trajectory,
    which: str,
    *,
    batch_size: int,
    size: int | None = None,
    resize: Callable[[Tensor], Tensor] | None = None,
    shrink: int = 1,
) -> Shaped[Tensor, "n t *state"]:
    """Return what a critic looks at, for the t states of each trajectory that are learned from, on its device.

    Args:
        backbone: its VAE decodes; not used for `latent`.
        trajectory: n trajectories; `clean` needs x0_hat. The `learned` steps of x_T..x_1 are used.
        which: `noisy`, `clean` (both uint8 images) or `latent` (float32).
        batch_size: latents to decode at once.
        size: larger images are resized to this side before they are stored; give the critic's `image_size`.
        resize: how, such as the critic's `resized`; None: straight to that size.
        shrink: average latents over squares of this side before decoding; it must divide their sides.
    """
    latents = _latents(trajectory, which)
    if trajectory.chosen is not None:
        latents = latents[:, trajectory.learned]
    if which == "latent":
        return latents
    kept, good = zip(
        *(
            _kept(backbone.decode(part), size, resize)
            for part in shrunk(latents.flatten(0, 1), shrink).split(batch_size)
        ),
        strict=True,
    )
    if not bool(torch.stack(good).all()):  # a single read-back: each one makes the host wait for the device
        raise ValueError("the decoded states hold NaN or infinity; run the model in fp32 or bf16.")
    return torch.cat(kept).unflatten(0, latents.shape[:2])


def shrunk(latents: Float[Tensor, "n *d"], side: int) -> Float[Tensor, "n *small"]:
    """Return the means over squares of side × side cells of latents (c, h, w); 1: the latents, of any shape."""
    return latents if side == 1 else functional.avg_pool2d(latents, side)


def check_shrink(decode: str, latent_shape: tuple[int, ...]) -> None:
    """Refuse a decode that does not divide the sides of the model's latents."""
    is_map = len(latent_shape) == 3  # (c, h, w): others have no squares to average over
    fitting = [
        name
        for name, side in SHRINKS.items()
        if side == 1 or (is_map and all(length % side == 0 for length in latent_shape[1:]))
    ]
    if decode not in fitting:
        sides = " × ".join(map(str, latent_shape[1:] if is_map else latent_shape))
        raise ValueError(
            f"critic.decode is {decode!r}, but the model's latents are {sides}; allowed: {', '.join(fitting)}, which "
            "divide both sides. Set critic.decode to one of these."
        )


def resized(images: Float[Tensor, "n c h w"], size: int) -> Float[Tensor, "n c size size"]:
    """Return images of `size` × `size`; antialiased, which matters only when shrinking."""
    if images.shape[-2:] == (size, size):
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", align_corners=False, antialias=True)


def _latents(trajectory: Trajectory, which: str) -> Tensor:
    if which not in get_args(View):
        raise ValueError(unknown("critic view", which, get_args(View), "Set critic.view to one of them."))
    # The last state, x_0, needs no value: no action is taken there.
    if which != "clean":
        return trajectory.x[:, :-1]
    if trajectory.x0_hat is None:
        raise ValueError("critic view 'clean' needs x̂0, which this rollout did not keep; roll out with keep_x0=True.")
    return trajectory.x0_hat


def _kept(
    images: Tensor, size: int | None, resize: Callable[[Tensor], Tensor] | None
) -> tuple[UInt8[Tensor, "n c h w"], Bool[Tensor, ""]]:
    # The bytes, and whether all was finite: as bytes a NaN would silently become a colour.
    small = images
    if size is not None and max(images.shape[-2:]) > size:
        small = resized(images, size) if resize is None else resize(images)
    return (small * 255).round().to(torch.uint8), images.isfinite().all()
