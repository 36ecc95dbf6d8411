"""The sections of a run's settings, one frozen dataclass per part; under each field its unit and effect.

Defaults are a small run on Emoji Canvas; where they are the paper's, the line says so. Presets live in cgru.presets.
Types carry the allowed range (cgru.config.rules). No config travels below L3: functions take the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cgru.config.rules import Count, Decay, NotNegative, Positive, PositiveShare, Seed, Share, Text, Whole, check


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are drawn."""

    steps: Count = 10
    """Denoising steps of a trajectory (paper: 50); time and memory grow with it."""
    guidance: NotNegative = 3.0
    """Classifier-free guidance scale; 1 is none, more follows the prompt more closely."""
    noisy_steps: Whole = 0
    """Only the first so many steps have noise, and so are learned from; the rest are deterministic. 0: all (paper)."""
    eta: PositiveShare = 1.0
    """DDIM noise, above 0 to 1 (ancestral, DDPO's); at 0 there would be nothing to learn from, as no step is random."""
    explore: Decay = 0.0
    """Share, 0 to under 1, of the forget trajectories that are sampled for a retain prompt and relabelled with their
    forget prompt: behaviour that noise around a sure policy never finds. 0 (paper): none."""
    merged: bool = False
    """Fold the LoRA into the weights while trajectories are sampled: fewer operations, other rounding than in the
    updates. Each iteration then checks that the ratio is still 1; in half precision it hardly ever is."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "sampling")


@dataclass(frozen=True)
class PromptConfig:
    """Which prompts, and how they are split into disjoint parts."""

    source: Text = "generated"
    """The word generated, the word templates, or the path of a .txt, .csv or .jsonl file."""
    column: str = ""
    """Column of a .csv or key of a .jsonl that holds the prompt; empty: "prompt"."""
    count: Count = 80
    """Distinct prompts of the policy (paper: 80 a class)."""
    retain: Whole = 80
    """Distinct prompts of what is to be kept; 0: none."""
    critic: Whole = 40
    """Prompts of the critic's warm start; 0: none."""
    validation: Whole = 32
    """Forget prompts for validation, and as many retain prompts; 0: no validation."""
    split_seed: Seed = 0
    """Seed of the split into parts; the run's own seed does not move it."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "prompts")


@dataclass(frozen=True)
class RewardConfig:
    """What the policy is paid for."""

    name: Text = "concept"
    """A catalog name, a weighted sum such as "0.7*concept+0.3*clip", or one's own "module:attr"."""
    form: Literal["probability", "log-odds"] = "probability"
    """1 - p(target) (the paper), or clipped log-odds, which keep a slope where p saturates."""
    scale: Positive = 10.0
    """Highest reward; the paper: 10 for objects, 1 for NSFW."""
    temperature: Positive = 1.0
    """Logits are divided by it before p is used; above 1 softens."""
    limit: Positive = 6.0
    """Log-odds are clipped to ± this, then mapped linearly to 0..scale."""
    networks: tuple[str, ...] = ("clip",)
    """Members of the ensemble, clip and swin on Emoji Canvas; the worst score counts."""
    views: Count = 1
    """Augmented views averaged per picture; 1: the picture itself only."""
    nothing: Share = 0.0
    """Weight, 0..1, of p(nothing recognisable) counted as if it were the target; at 1 collapse pays nothing."""
    retain: NotNegative = 1.0
    """Scale of the retain reward p(class of the prompt), as a multiple of `scale`."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "reward")


@dataclass(frozen=True)
class CriticConfig:
    """The baseline V(x_t, c, t) and how it is fitted (Alg. 1 and 2)."""

    kind: Literal["film", "plain", "prompt", "latent", "none"] = "film"
    """film: the paper's; plain: without FiLM; prompt: sees the prompt; latent: DPOK's, no decoding; none: no critic."""
    head: Literal["value", "classes"] = "value"
    """A number, or class probabilities turned into V = scale·(1 - p_target), which serve any concept."""
    view: Literal["noisy", "clean"] = "noisy"
    """The decoded x_t (paper) or the decoded x̂0 that the rollout's prediction implies."""
    decode: Literal["full", "half", "quarter"] = "full"
    """Side of the picture that it is shown: half and quarter average the latent over 2 × 2 or 4 × 4 cells before it is
    decoded, which costs about a quarter or a sixteenth. full: the paper's. Not for the kind latent."""
    tower: Literal["trained", "frozen"] = "trained"
    """Whether its vision tower learns, too (paper). frozen: from the start it stays as loaded, each state goes through
    it once, and FiLM acts on its output alone, not at several depths. The kind latent has none."""
    trajectories: Whole = 64
    """Trajectories of the warm start (Alg. 1); 0: no warm start."""
    epochs: Count = 4
    """Passes over the warm-start pairs."""
    batch: Count = 128
    """(state, step) pairs per optimiser step."""
    learning_rate: Positive = 1e-4
    """AdamW's, in the warm start."""
    online_updates: Whole = 4
    """Optimiser steps per iteration (Alg. 2); 0: the critic stays as warm-started."""
    online_learning_rate: Positive = 1e-4
    """AdamW's, in the online updates."""
    weight_decay: NotNegative = 0.01
    """AdamW's, in both."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "critic")


@dataclass(frozen=True)
class RetentionConfig:
    """What keeps the rest of the model as it was; the paper leaves it to future work, so all is off."""

    share: Decay = 0.0
    """Share, 0 to under 1, of an iteration's trajectories that are retain prompts with their own reward."""
    kl: NotNegative = 0.0
    """Weight of KL(base ‖ policy) on states of retain trajectories."""
    kl_forget: NotNegative = 0.0
    """The same on the forget trajectories' states; with kl_form noise it is DPOK's."""
    kl_form: Literal["gaussian", "noise"] = "gaussian"
    """The KL of the step's Gaussians in closed form, or the squared difference of predicted noises (DPOK)."""
    balance: NotNegative = 0.0
    """Above 0: the weight shrinks until the KL gradient's norm is at most this times the policy gradient's; 0: off."""
    bank: Count = 64
    """Retain trajectories of the base policy kept for the KL."""
    batch: Count = 64
    """(state, step) pairs of the bank per update."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "retention")


@dataclass(frozen=True)
class PolicyConfig:
    """Policy optimisation (Alg. 2 and 3) and its LoRA."""

    iterations: Count = 100
    """Collect-and-update rounds, the paper's epochs (100–250)."""
    trajectories: Count = 16
    """Trajectories collected per iteration (paper: 4 batches of 4)."""
    updates: Count = 2
    """Optimiser steps per iteration over disjoint parts of the batch (paper: 2)."""
    passes: Count = 1
    """How often the collected batch is gone through."""
    step_fraction: PositiveShare = 1.0
    """Share of the steps with noise that are used in updates; at least one step. Which: step_choice."""
    step_choice: Literal["each", "shared", "variance"] = "each"
    """How that share is drawn. each: for every trajectory on its own, the critic looking at all states. shared: once an
    iteration for all, and only these states are decoded, valued and fitted to. variance: the same, with steps the
    likelier the larger r - V was; a heuristic, its updates are not weighted by 1 / p."""
    step_weights: Literal["equal", "balanced"] = "equal"
    """How much each denoising step counts: equal (the paper), or balanced, by 1 / its log-prob's sensitivity, so that
    the last steps, whose noise is smallest, do not drown the others."""
    window: Whole = 0
    """Above 0: DPOK's replay window in trajectories, the newest kept; 0: only this iteration's."""
    warmup: Whole = 0
    """Updates over which the learning rate rises to its value, as Adam's first steps are as long as any. 0: none."""
    learning_rate: Positive = 3e-4
    """AdamW's (paper: 3e-4)."""
    weight_decay: NotNegative = 1e-4
    """AdamW's."""
    beta1: Decay = 0.9
    """AdamW's decay of the mean gradient, 0 to under 1."""
    beta2: Decay = 0.999
    """AdamW's decay of the squared gradient, 0 to under 1."""
    gradient_norm: Positive = 1.0
    """Gradients are scaled down to this norm (paper: 1)."""
    clip: Positive = 1e-4
    """Half-width of the ratio's range around 1, in the paper's units: at 16,384 latent dimensions (paper: 1e-4)."""
    clip_mode: Literal["pessimistic", "hard"] = "pessimistic"
    """PPO's worse of clipped and unclipped, or the clamped ratio alone."""
    advantage: Literal["critic", "batch", "per-prompt", "gae"] = "critic"
    """r - V (the paper), DDPO's normalisation over the batch or per prompt, or GAE along the denoising chain."""
    advantage_clamp: Positive = 5.0
    """Normalised advantages (batch, per-prompt) are clamped to ± this, in standard deviations."""
    normalise: bool = False
    """Divide critic and gae advantages by their standard deviation over the batch."""
    gae_lambda: Share = 0.95
    """GAE's λ, 0..1; 1 is r - V."""
    reward_weight: NotNegative = 1.0
    """DPOK's weight of the reward term against its KL."""
    rank: Count = 4
    """LoRA rank; capacity and file size grow with it."""
    alpha: Positive = 4.0
    """LoRA alpha; the update is scaled by alpha / rank."""
    targets: Text = "attention"
    """Layers with a LoRA: attention, cross-attention, cross-attention-kv, attention+ff, or a regex over names."""
    average: Decay = 0.0
    """Decay per update, 0 to under 1, of the averaged LoRA weights that are exported; 0: the last weights."""
    micro_batch: Whole = 0
    """Pairs per forward pass, bounds memory; 0: sized automatically and kept in the run."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "policy")


@dataclass(frozen=True)
class WatchConfig:
    """The outside detector, and stopping on validation prompts."""

    detector: Text = "auto"
    """auto: the one shipped for classes and hazards of Emoji Canvas, elsewhere none; none; or NETWORK#LABEL,LABEL: the
    folder or hub id of a CLIP, SigLIP or image classifier, and what it calls the concept (without #: the same)."""
    every: Whole = 10
    """Iterations between its looks; 0: never."""
    alarm: Share = 0.3
    """Gap, 0..1, between its share of target pictures and 1 - reward/scale that raises an alarm."""
    stop: bool = False
    """Stop at the best validation trade-off."""
    target: Share = 0.95
    """Validation UA, 0..1, wanted before stopping."""
    patience: Count = 3
    """Looks without a better trade-off before stopping."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "watch")


@dataclass(frozen=True)
class DiagnosticsConfig:
    """The gradient variance of the paper's appendix."""

    every: Whole = 0
    """Iterations between measurements; 0: never."""
    trajectories: Count = 16
    """Trajectories of one measurement."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "diagnostics")
