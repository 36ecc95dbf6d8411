"""The sections of a policy-gradient run's settings, one frozen dataclass each; under each field its unit and effect.

The defaults make a small run on Emoji Canvas; a field says so if its default is the paper's value. Presets are in
cgru.presets. A field's type carries its allowed range (cgru.config.rules). Configs are not passed below the training
code (layer L3): the functions there take plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cgru.config.rules import (
    Count,
    Decay,
    NotNegative,
    Positive,
    PositiveShare,
    Range,
    Seed,
    Share,
    Text,
    Texts,
    Whole,
    check,
)


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are drawn."""

    steps: Count = 10
    """Denoising steps per trajectory (paper: 50); time and memory grow with this number."""
    guidance: NotNegative = 3.0
    """Classifier-free guidance scale: 1 is no guidance, higher values follow the prompt more closely."""
    noisy_steps: Whole = 0
    """Number of first steps that have noise and are used for learning; the rest are deterministic. 0: all (paper)."""
    eta: PositiveShare = 1.0
    """DDIM's eta, above 0 and up to 1 (ancestral, as in DDPO). At 0 no step would be random, so nothing could be
    learned."""
    pairs: bool = False
    """Draw trajectories in pairs: an iteration has noise in one of the noisy steps, another one each time, and a pair
    differs in the sign of that noise alone. With policy.advantage=pair each member is the other's baseline, which
    leaves far less noise in the gradient than any baseline that sees the state alone (docs/unlearning.md)."""
    explore: Decay = 0.0
    """Share, 0 to below 1, of the forget trajectories that are sampled for a retain prompt and relabelled with the
    forget prompt. They show behaviour that noise around a confident policy never finds. For method anchored; 0 (paper):
    none."""
    explore_credit: Literal["reward", "shuffled", "constant"] = "reward"
    """The credit of relabelled trajectories. reward: their own reward. Two controls: shuffled permutes the rewards
    among them at random; constant gives all of them one advantage, the mean of the absolute values."""
    explore_ratio: Literal["sampled", "own"] = "sampled"
    """The log-probs in the denominator of a relabelled trajectory's ratio. sampled: under the prompt it was drawn for,
    so that clipping pulls towards that prompt; own: under the prompt it is learned for, so that the ratio starts at
    1."""
    merged: bool = False
    """Merge the LoRA into the weights while trajectories are sampled. This needs fewer operations but rounds
    differently from the updates, so each iteration checks that the ratio is still 1; in half precision it hardly ever
    is."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "sampling")


@dataclass(frozen=True)
class PromptConfig:
    """The prompts, and how they are split into disjoint sets."""

    source: Text = "generated"
    """The word generated or templates, or the path of a .txt, .csv or .jsonl file."""
    column: str = ""
    """Column of the .csv file, or key of the .jsonl file, that holds the prompt; empty: "prompt"."""
    count: Count = 80
    """Number of distinct prompts for the policy (paper: 80 per class)."""
    retain: Whole = 80
    """Number of distinct retain prompts, about things that are to be kept; 0: none."""
    critic: Whole = 40
    """Number of prompts for the critic's warm start; 0: none."""
    policy_share: Share = 0.0
    """Above 0: share of a file's distinct prompts that the policy gets, instead of `count` (paper, NSFW: 0.2)."""
    critic_share: Share = 0.0
    """Above 0: share of a file's distinct prompts that the critic gets, instead of `critic` (paper, NSFW: 0.1)."""
    validation: Whole = 32
    """Number of forget prompts for validation, and the same number of retain prompts; 0, or without an outside
    detector: no validation."""
    split_seed: Seed = 0
    """Seed of the split into sets; the seed of the run does not change the split."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "prompts")
        if self.policy_share + self.critic_share > 1:
            raise ValueError(
                f"prompts.policy_share is {self.policy_share:g} and prompts.critic_share {self.critic_share:g}; "
                "allowed: 1 together, since no prompt is in both. Lower one of them."
            )


@dataclass(frozen=True)
class RewardConfig:
    """The reward that the policy maximises."""

    name: Text = "concept"
    """A catalog name, a weighted sum such as "0.7*concept+0.3*clip", or your own "module:attr"."""
    form: Literal["probability", "log-odds"] = "probability"
    """probability: 1 - p(target), as in the paper; log-odds: clipped log-odds, which keep a slope where p saturates."""
    scale: Positive = 10.0
    """Highest reward; the paper: 10 for objects, 1 for NSFW."""
    temperature: Positive = 1.0
    """Divides the logits before p is computed; values above 1 soften p."""
    limit: Positive = 6.0
    """Log-odds are clipped to ± this, then mapped linearly to 0..scale."""
    networks: tuple[str, ...] = ("clip",)
    """Networks of the ensemble (on Emoji Canvas clip and swin); the lowest of their scores counts."""
    views: Count = 1
    """Number of augmented views that are averaged per picture; 1: only the picture itself."""
    nothing: Share = 0.0
    """Weight, 0..1, with which p(nothing recognisable) counts as the target; at 1 an empty picture earns no reward."""
    model: str = ""
    """Folder or hub id of the network of the rewards clip, nsfw and aesthetic; empty: the paper's network."""
    label: str = ""
    """The unwanted label of the nsfw network; empty: nsfw."""
    weights: str = ""
    """File (.safetensors or .pth) of the aesthetic predictor; empty: LAION's v2 from the hub."""
    negatives: Texts = ()
    """Texts that compete with the concept in the reward clip; none: only the cosine with the concept counts."""
    classes: str = ""
    """Classes of the head that the run trains. Empty: the concept and "other"; paper: the paper's 20, drawn by the base
    model; else a folder with one subfolder of pictures a class. Not used where a network knows the concept."""
    clip: str = ""
    """Folder or hub id of the CLIP on which the run trains class heads; empty: openai/clip-vit-base-patch32, the
    paper's."""
    retain: NotNegative = 1.0
    """Scale of the retain reward p(class of the prompt), as a multiple of `scale`."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "reward")
        if len(set(self.networks)) < len(self.networks):
            raise ValueError(f"reward.networks is {list(self.networks)}; allowed: each network once. Leave one out.")


@dataclass(frozen=True)
class CriticConfig:
    """The baseline V(x_t, c, t) and how it is fitted (Alg. 1 and 2)."""

    kind: Literal["film", "plain", "prompt", "latent", "none"] = "film"
    """film: the paper's; plain: without FiLM; prompt: also sees the prompt; latent: DPOK's, on latents; none: no
    critic."""
    head: Literal["value", "classes"] = "value"
    """value: the critic outputs V; classes: it outputs class probabilities, and V = scale·(1 - p_target) for any
    concept."""
    view: Literal["noisy", "clean"] = "noisy"
    """What the critic sees. noisy: the decoded x_t (paper); clean: the decoded x̂0 that the rollout's prediction
    implies."""
    decode: Literal["full", "half", "quarter"] = "full"
    """Side length of the picture that the critic sees. half and quarter average the latent over 2 × 2 or 4 × 4 cells,
    so that decoding costs about a quarter or a sixteenth. full: the paper's. Not for the kind latent."""
    tower: Literal["trained", "frozen"] = "trained"
    """trained: the critic's vision tower learns, too (paper). frozen: the tower stays as loaded, each state passes
    through it once, and FiLM acts only on its output, not at several depths. The kind latent has no tower."""
    clip: str = ""
    """Folder or hub id of the CLIP that the critic starts from; empty: on Emoji Canvas its own CLIP, elsewhere
    openai/clip-vit-base-patch32 (paper). The kind latent has none."""
    trajectories: Whole = 64
    """Trajectories of the warm start (Alg. 1); 0: no warm start."""
    epochs: Count = 4
    """Passes over the warm-start pairs."""
    batch: Count = 128
    """(state, step) pairs per optimiser step."""
    learning_rate: Positive = 1e-4
    """AdamW's learning rate in the warm start."""
    online_updates: Whole = 4
    """Optimiser steps per iteration (Alg. 2); 0: the critic stays as it was after the warm start."""
    online_learning_rate: Positive = 1e-4
    """AdamW's learning rate in the online updates."""
    weight_decay: NotNegative = 0.01
    """AdamW's weight decay, in the warm start and the online updates."""
    trust: Literal["full", "measured"] = "full"
    """full: the baseline is V (paper). measured: the mean reward and V's deviation from its own mean, weighted by what
    it explains of the rest of the batch (0 to 1), so that a critic that has fallen behind does no harm."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "critic")


@dataclass(frozen=True)
class RetentionConfig:
    """Losses that keep the rest of the model unchanged. The paper leaves them to future work, so all are off by
    default."""

    share: Decay = 0.0
    """Share, 0 to below 1, of an iteration's trajectories that are drawn for retain prompts and get the retain
    reward."""
    kl: NotNegative = 0.0
    """Weight of KL(base ‖ policy) on states of retain trajectories."""
    kl_forget: NotNegative = 0.0
    """Weight of the same KL on states of forget trajectories; with kl_form=noise this is DPOK's KL."""
    kl_form: Literal["gaussian", "noise"] = "gaussian"
    """gaussian: closed-form KL of the step's Gaussians; noise: squared difference of the predicted noises (DPOK)."""
    kl_target: NotNegative = 0.0
    """Above 0: the divergence on retain prompts to hold. The weight starts at `kl`, rises while the measured divergence
    is above this and falls while it is below, at most thirtyfold either way. 0: the weight is constant."""
    balance: NotNegative = 0.0
    """Above 0: the KL weight is reduced until the norm of the KL gradient is at most this multiple of the policy
    gradient's norm; 0: off."""
    bank: Count = 64
    """Number of retain trajectories of the base policy that are stored (the bank) for the KL."""
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
    """Optimiser steps per iteration, over disjoint parts of the batch (paper: 2)."""
    passes: Count = 1
    """Number of passes over the collected batch."""
    step_fraction: PositiveShare = 1.0
    """Share of the noisy steps that are used in updates, at least one step; step_choice selects them."""
    step_choice: Literal["each", "shared", "variance"] = "each"
    """How the steps are drawn. each: separately for every trajectory; the critic sees all states. shared: once per
    iteration for all trajectories; only these states are decoded, valued and fitted to. variance: like shared, but a
    step is the likelier the larger r - V was; a heuristic, because updates are not weighted by 1 / p."""
    step_weights: Literal["equal", "balanced"] = "equal"
    """Weight of each denoising step in the loss. equal: the paper's; balanced: 1 / the sensitivity of the step's
    log-prob, so that the last steps, whose noise is smallest, do not dominate the others."""
    window: Whole = 0
    """Size of DPOK's replay window in trajectories, which keeps the newest; 0: only the current iteration's."""
    warmup: Whole = 0
    """Updates over which the learning rate rises to its value, because Adam's first steps have full length. 0: none."""
    learning_rate: Positive = 3e-4
    """AdamW's learning rate (paper: 3e-4)."""
    weight_decay: NotNegative = 1e-4
    """AdamW's weight decay."""
    beta1: Decay = 0.9
    """AdamW's decay rate of the mean gradient, 0 to below 1."""
    beta2: Decay = 0.999
    """AdamW's decay rate of the mean squared gradient, 0 to below 1."""
    gradient_norm: Positive = 1.0
    """Largest gradient norm; longer gradients are scaled down to it (paper: 1)."""
    clip: Positive = 1e-4
    """Half-width of the ratio's range around 1, in the paper's units: at 16,384 latent dimensions (paper: 1e-4)."""
    clip_mode: Literal["pessimistic", "hard"] = "pessimistic"
    """pessimistic: PPO's, the worse of clipped and unclipped objective; hard: the clamped ratio alone."""
    advantage: Literal["critic", "batch", "per-prompt", "gae", "pair"] = "critic"
    """critic: r - V (the paper); batch, per-prompt: DDPO's normalised rewards; gae: GAE along the denoising chain;
    pair: half the difference to the other member of a pair (sampling.pairs)."""
    advantage_clamp: Positive = 5.0
    """Normalised advantages (batch, per-prompt) are clamped to ± this, in standard deviations."""
    normalise: bool = False
    """Divide critic, gae and pair advantages by their standard deviation over the batch."""
    normalise_floor: Share = 0.0
    """Least standard deviation that is divided by, as a share 0..1 of the reward's range: below it advantages shrink
    with the reward's spread, and its noise is not blown up to unit size. 0: none."""
    gae_lambda: Share = 0.95
    """GAE's λ, 0..1; 1 is r - V."""
    reward_weight: NotNegative = 1.0
    """DPOK's weight of the reward term against its KL."""
    rank: Annotated[int, Range(1, 4096)] = 4
    """LoRA rank; capacity and file size grow with the rank."""
    alpha: Positive = 4.0
    """LoRA alpha; the update is scaled by alpha / rank."""
    targets: Text = "attention"
    """Layers that get a LoRA: attention, cross-attention, cross-attention-kv, attention+ff, or a regex over layer
    names."""
    kl_limit: NotNegative = 0.0
    """Above 0: a trust region. An update is shortened so that the mean KL between the policy before and after it, on
    its own pairs and per latent dimension, stays within this: s² / 2 for means that move by s of their step's noise."""
    average: Decay = 0.0
    """Decay per update, 0 to below 1, of the moving average of the LoRA weights that is saved; 0: the last weights."""
    micro_batch: Whole = 0
    """(state, step) pairs per forward pass, which bounds memory; 0: chosen automatically and recorded in the run."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "policy")


@dataclass(frozen=True)
class WatchConfig:
    """The outside detector, and stopping on validation prompts."""

    detector: Text = "auto"
    """auto: the shipped detector for classes and hazards of Emoji Canvas, otherwise none. none: no detector.
    NETWORK#LABEL,LABEL: the folder or hub id of a CLIP, SigLIP or image classifier, and its labels for the concept
    (without #: the concept's own name)."""
    every: Whole = 10
    """Iterations between two validation checks by the detector; 0: never."""
    alarm: Share = 0.3
    """Gap, 0..1, between the detector's share of target pictures and 1 - reward/scale that raises an alarm."""
    stop: bool = False
    """Stop early, and keep the weights with the best trade-off on validation prompts."""
    target: Share = 0.95
    """Validation UA, 0..1, that must be reached before stopping."""
    patience: Count = 3
    """Validation checks without a better trade-off before stopping."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "watch")


@dataclass(frozen=True)
class DiagnosticsConfig:
    """The gradient variance of the paper's appendix."""

    every: Whole = 0
    """Iterations between measurements; 0: never."""
    trajectories: Count = 16
    """Number of trajectories per measurement."""

    def __post_init__(self) -> None:
        """Check every field."""
        check(self, "diagnostics")
