"""Draw pictures for prompts and seeds, in batches that fill the device; each picture has its own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cgru.backbones.base import Backbone, as_rgb
from cgru.evaluation.base import Job, stable_hash
from cgru.mdp import rollout
from cgru.tasks import Sampling

DECODED_AT_ONCE = 16
"""Latents per decode: at 512 pixels the decoder has layers of 67 million numbers each, and some kernels use 32-bit
indices."""


@torch.no_grad()
def draw(
    backbone: Backbone,
    prompts: Sequence[str],
    seeds: Sequence[int],
    sampling: Sampling,
    guidances: Sequence[float | None] = (),
    *,
    pad_to: int = 0,
) -> Tensor:
    """Draw one batch of pictures (n, 3, h, w) in [0, 1], each from its own seed and with its own guidance, if any.

    Pictures with equal guidance are drawn together. A compiled denoiser requires one batch size: `pad_to` pads a
    shorter batch with copies of its last job, which are not returned.
    """
    own = [sampling.guidance if value is None else value for value in guidances or [None] * len(prompts)]
    groups = {value: [i for i, other in enumerate(own) if other == value] for value in dict.fromkeys(own)}
    parts = [
        _draw_alike(
            backbone, [prompts[i] for i in group], [seeds[i] for i in group], replace(sampling, guidance=value), pad_to
        )
        for value, group in groups.items()
    ]
    order = [i for group in groups.values() for i in group]
    return torch.cat(parts)[np.argsort(order)]


def draw_jobs(backbone: Backbone, jobs: Sequence[Job], sampling: Sampling, *, pad_to: int = 0) -> Tensor:
    """Draw the jobs' pictures."""
    guidances = [job.guidance for job in jobs]
    return draw(backbone, [job.prompt for job in jobs], [job.seed for job in jobs], sampling, guidances, pad_to=pad_to)


def _draw_alike(backbone: Backbone, prompts: list[str], seeds: list[int], sampling: Sampling, pad_to: int) -> Tensor:
    spare = max(pad_to - len(prompts), 0)
    kernel = backbone.kernel(sampling.steps, eta=sampling.eta)
    condition = backbone.encode_text([*prompts, *[prompts[-1]] * spare])
    own = [*seeds, *[seeds[-1]] * spare]
    x = rollout.sample(backbone, condition, own, kernel=kernel, guidance=sampling.guidance)
    return as_rgb(backbone.decode(x[: len(prompts)], batch_size=DECODED_AT_ONCE))


def default_batch(device: torch.device) -> int:
    """Return the default number of pictures drawn at once; with guidance the denoiser sees twice as many."""
    return 16 if device.type == "cpu" else 64


@dataclass
class Gallery:
    """Pictures shared by the benchmarks of one process: drawn once, kept up to `limit` bytes, oldest dropped first.

    Pictures are identified by model, sampling, prompt and seed; the rest of the batch they were drawn in can change
    only their last bits.
    """

    limit: int = 2 * 1024**3
    kept: dict[str, Tensor] = field(default_factory=dict)

    def draw(
        self, backbone: Backbone, mark: str, jobs: Sequence[Job], sampling: Sampling, *, pad_to: int = 0
    ) -> Tensor:
        """Return the jobs' pictures (n, 3, h, w) by the model with fingerprint `mark`; draws new ones in one batch."""
        keys = [stable_hash([mark, asdict(sampling), job.prompt, job.seed, job.guidance]) for job in jobs]
        new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self.kept}
        if new:
            fresh = draw_jobs(backbone, [*new.values()], sampling, pad_to=pad_to)
            self.kept |= dict(zip(new, fresh.cpu(), strict=True))
        found = torch.stack([self.kept[key] for key in keys]).to(backbone.device)
        while sum(picture.nbytes for picture in self.kept.values()) > self.limit:
            del self.kept[next(iter(self.kept))]
        return found


def mend(images: Tensor) -> tuple[Tensor, np.ndarray]:
    """Replace non-finite pictures (of a diverged model) by white ones; also return which they were (n,)."""
    is_broken = ~images.flatten(1).isfinite().all(1)
    return torch.where(is_broken[:, None, None, None], 1.0, images), is_broken.cpu().numpy()


def to_pictures(images: Tensor) -> list[Image.Image]:
    """Convert images (n, 3, h, w) in [0, 1] to 8-bit pictures."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in pixels]
