"""The paper's critic: a CLIP vision tower whose features are modulated by time through FiLM (paper §4, App. E).

Sinusoidal time embedding -> small MLP -> scale and shift of every channel at several depths of the tower. The MLP's
last layer starts at zero and the scale is 1 + γ, so an untrained critic equals the tower without FiLM, bit for bit. The
paper specifies neither depths nor widths: ours are four depths, from the first layer's input to the last layer's
output, applied to all tokens. The prompt variant (ours) adds the pooled text to the time embedding; `film=False` is the
paper's ablation. No layer behaves differently during training, so train/eval mode does not matter.
"""
# ruff: noqa: F722 - jaxtyping shapes are strings, not forward references

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Num, UInt8
from torch import Tensor, nn
from torch.nn import functional

from cgru.backbones.base import as_rgb
from cgru.catalog import unknown
from cgru.critic.tower import Tower
from cgru.critic.views import View
from cgru.mdp.trajectory import EMBEDDINGS, POOLED, Conditioning
from cgru.rewards.pictures import fitted

Head = Literal["value", "classes"]
Pictures = Float[Tensor, "k c h w"] | UInt8[Tensor, "k c h w"]

TIME_WIDTH = 128
MLP_WIDTH = 256
DEPTHS = 4
MAX_PERIOD = 10_000.0  # as in transformers and diffusers: periods from 2π to 2π · 10,000 over times 0..999
TIME_RANGE = 1000.0  # of times that these periods are made for


def sinusoidal(time: Num[Tensor, " k"], width: int) -> Float[Tensor, "k width"]:
    """Return the sinusoidal embedding of times: cosines, then sines, of geometrically spaced frequencies."""
    half = width // 2
    # omega_i = 10000^(-i / half)
    frequency = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=time.device) / half)
    angle = time.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], 1)


def pooled_text(cond: Conditioning) -> Float[Tensor, "k d"]:
    """Return one vector per prompt with mean 0 and variance 1; the empty prompt gives 0.

    Mean over tokens of the difference to the empty prompt: CLIP's few huge channels are the same for every text and
    would drown the rest. Padding is part of the mean: in CLIP it comes after the text and so has read it. A model that
    sums up the prompt itself (`pooled`) is taken at its word; of one without either, the vector has no numbers.
    """
    name = POOLED if POOLED in cond.tensors else EMBEDDINGS
    if name not in cond.tensors:
        return torch.zeros(len(cond), 0)
    said = cond.tensors[name].float()
    empty = cond.unconditional[name].float() if name in cond.unconditional else torch.zeros_like(said[:1])
    difference = (said - empty).flatten(1, -2).mean(1) if said.ndim > 2 else said - empty
    return functional.layer_norm(difference, difference.shape[1:])


def text_width(cond: Conditioning) -> int:
    """The length of what `pooled_text` returns; 0 where critics cannot see the prompt."""
    return pooled_text(cond[:1]).shape[1]


class Film(nn.Module):
    """Maps time, and the prompt if `text_width` is given, to γ and β at each depth; all are zero before training."""

    def __init__(self, width: int, depths: int, text_width: int | None = None, time_range: float = TIME_RANGE) -> None:
        """Build the MLP for towers of a width and a number of depths, and times of 0 to `time_range`."""
        super().__init__()
        self.time_scale = TIME_RANGE / time_range
        self.shape = (depths, 2, width)
        self.text = nn.Linear(text_width, TIME_WIDTH) if text_width is not None else None
        last = nn.Linear(MLP_WIDTH, math.prod(self.shape))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(nn.Linear(TIME_WIDTH, MLP_WIDTH), nn.SiLU(), last)

    def forward(self, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "depths 2 k 1 width"]:
        """Return (γ, β) for each depth, ready to broadcast over tokens."""
        embedding = sinusoidal(time * self.time_scale, TIME_WIDTH)
        if self.text is not None:
            embedding = embedding + self.text(pooled_text(cond).to(embedding.device))
        modulation: Tensor = self.mlp(embedding)
        return modulation.unflatten(1, self.shape).permute(1, 2, 0, 3).unsqueeze(3)


class ValueHead(nn.Module):
    """V = prior + scale · (w·h + b); w and b start at zero, so an untrained critic is the constant baseline `prior`.

    The output is linear, not squashed to the reward's range, which would learn slowly where rewards pile up at the ends
    of the range. It is in units of `scale`, so that one learning rate serves rewards of 0..1 and of 0..10.
    """

    def __init__(self, width: int, *, prior: float, scale: float) -> None:
        """Build the head on features of the given width; prior and scale are in reward units."""
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.scale = scale
        self.prior: Tensor
        self.register_buffer("prior", torch.tensor(float(prior)))  # saved: the weights are fitted relative to it

    def forward(self, features: Float[Tensor, "k width"]) -> Float[Tensor, " k"]:
        """Return one value per state, in reward units."""
        return self.prior + self.scale * self.linear(features).squeeze(1).float()


class ClassHead(nn.Module):
    """K-way logits with V = scale · (1 - p_target), the form of the paper's reward; several targets are summed.

    The target is not saved with the weights, so a critic warm-started on class labels serves any concept.
    """

    def __init__(self, width: int, labels: Sequence[str], target: str | Sequence[str], *, scale: float) -> None:
        """Build the head on features of the given width; `target` is one label or several."""
        super().__init__()
        self.linear = nn.Linear(width, len(labels))
        self.scale = scale
        self.target: Tensor
        self.register_buffer("target", torch.tensor(_places(labels, target)), persistent=False)

    def forward(self, features: Float[Tensor, "k width"]) -> Float[Tensor, " k"]:
        """Return one value per state, in reward units."""
        # p_target = Σ_{k in target} softmax(W h + b)_k
        p_target = self.linear(features).float().softmax(1)[:, self.target].sum(1)
        return self.scale * (1 - p_target)


class FilmCritic(nn.Module):
    """V(x_t, c, t) from images of states; implements `Critic`, and `ClassCritic` with the classes head."""

    def __init__(
        self,
        tower: Tower,
        *,
        head: Head,
        scale: float,
        prior: float = 0.0,
        labels: Sequence[str] = (),
        target: str | Sequence[str] = (),
        view: View = "noisy",
        depths: Sequence[int] | None = None,
        film: bool = True,
        text_width: int | None = None,
        time_range: float = TIME_RANGE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build a critic around a tower, which it then owns and trains.

        Args:
            tower: the initial tower; its projection is not used.
            head: `value` (uses `prior`) or `classes` (uses `labels` and `target`).
            scale: scale of the reward; the classes head returns 0 to scale.
            prior: the value head's output before training, the mean reward.
            labels: labels of the classes head.
            target: the label or labels to forget.
            view: the kind of input it expects.
            depths: where FiLM acts: 0 is the first layer's input, i the output of layer i. None: four, evenly spaced.
            film: False is the ablation without time.
            text_width: of `pooled_text`, for the prompt-conditioned variant; None ignores the prompt.
            time_range: the times that the denoiser receives are 0 to this.
            dtype: what the tower computes in; its weights, FiLM and head are float32 all the same.
        """
        super().__init__()
        self.dtype = dtype
        self.view: View = view
        self.tower = tower.network.vision_model.requires_grad_(True)  # a reward's tower arrives frozen
        config = tower.network.config
        self.image_size: int = config.image_size
        self.depths = _depths(depths, config.num_hidden_layers) if film else ()
        self.film = Film(config.hidden_size, len(self.depths), text_width, time_range) if film else None
        self.head = (
            ValueHead(config.hidden_size, prior=prior, scale=scale)
            if head == "value"
            else ClassHead(config.hidden_size, labels, target, scale=scale)
        )
        self.shortest, self.mode = tower.shortest, tower.mode
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(tower.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(tower.std).view(3, 1, 1), persistent=False)

    def forward(self, view: Pictures, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, " k"]:
        """Return the expected terminal reward of k states, in reward units."""
        value: Tensor = self.head(self.features(view, time, cond))
        return value

    def logits(self, view: Pictures, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "k classes"]:
        """Return the logits of the classes head (the paper's ablation)."""
        if not isinstance(self.head, ClassHead):
            raise ValueError("this critic has head 'value', which names no class; build it with head 'classes'.")
        return self.head.linear(self.features(view, time, cond)).float()

    def features(self, view: Pictures, time: Num[Tensor, " k"], cond: Conditioning) -> Float[Tensor, "k width"]:
        """Return the tower's pooled output; its own modules are run one by one, with FiLM between them."""
        hidden = self.hidden(view, self._modulation(time, cond))
        # CLIP's pooled output: layer norm of the class token
        pooled: Tensor = self.tower.post_layernorm(hidden[:, 0])
        return pooled

    def hidden(self, view: Pictures, modulation: Mapping[int, Tensor]) -> Float[Tensor, "k tokens width"]:
        """Return every token after the last layer; `modulation` maps a depth to its (γ, β)."""
        with torch.autocast(self.mean.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.tower.pre_layrnorm(self.tower.embeddings(self._pixels(view)))
            hidden = _modulated(hidden, modulation.get(0))
            for depth, layer in enumerate(self.tower.encoder.layers, start=1):
                hidden = _modulated(layer(hidden, None), modulation.get(depth))  # None: no attention mask
        return hidden.float()

    def modulated_features(
        self, token: Float[Tensor, "k width"], time: Num[Tensor, " k"], cond: Conditioning
    ) -> Float[Tensor, "k width"]:
        """Return the pooled output from the head's token after the last layer, where FiLM acts at that depth only."""
        modulation = self._modulation(time, cond).get(len(self.tower.encoder.layers))
        pooled: Tensor = self.tower.post_layernorm(_modulated(token[:, None], modulation)[:, 0])
        return pooled

    def resized(self, images: Float[Tensor, "k c h w"]) -> Float[Tensor, "k c s s"]:
        """Return images at the tower's size, resized and cropped as its processor does."""
        size = (self.image_size, self.image_size)
        return images if images.shape[-2:] == size else fitted(images, size, self.shortest, self.mode)

    def _modulation(self, time: Tensor, cond: Conditioning) -> dict[int, Tensor]:
        # Maps each depth to its (γ, β): (2, k, 1, width).
        if self.film is None:
            return {}
        return dict(zip(self.depths, self.film(time.to(self.mean.device), cond), strict=True))

    def _pixels(self, view: Tensor) -> Tensor:
        moved = view.to(self.mean.device)
        # CLIP's normalisation: (image - mean) / std, for images in [0, 1]
        images = moved.float() / 255 if moved.dtype == torch.uint8 else moved.float()
        return (as_rgb(self.resized(images)) - self.mean) / self.std


def _modulated(hidden: Tensor, modulation: Tensor | None) -> Tensor:
    # FiLM(h) = (1 + γ) ⊙ h + β (App. E)
    return hidden if modulation is None else (1 + modulation[0]) * hidden + modulation[1]


def _depths(given: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    if given is None:
        # 6 layers: 0, 2, 4, 6; 12 layers: 0, 4, 8, 12; a tower with fewer layers than depths gets FiLM everywhere
        return tuple(sorted({round(i * layers / (DEPTHS - 1)) for i in range(DEPTHS)}))
    wrong = [depth for depth in given if not 0 <= depth <= layers]
    if wrong or not given or len(set(given)) < len(given):
        raise ValueError(f"FiLM depths {list(given)}; give at least one, each once, from 0 to {layers} (the layers).")
    return tuple(given)


def _places(labels: Sequence[str], target: str | Sequence[str]) -> list[int]:
    wanted = [target] if isinstance(target, str) else list(target)
    if not labels or not wanted:
        raise ValueError(
            f"head 'classes' got {len(labels)} labels and {len(wanted)} targets; give the reward's labels and at least "
            "one target, or use head 'value'."
        )
    for name in wanted:
        if name not in labels:
            raise ValueError(unknown("target label", name, labels, "Give a label that the reward knows."))
    return [list(labels).index(name) for name in wanted]
