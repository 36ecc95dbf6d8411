"""UCE: Unified Concept Editing in Diffusion Models (Gandikota, Orgad, Belinkov, Materzyńska, Bau; WACV 2024).

Link: https://arxiv.org/abs/2308.14761. Official repository: https://github.com/rohitgandikota/unified-concept-editing
(MIT). Variant: the closed form of the 2023 code (train-scripts/train_erase.py), technique "replace", on the keys and
values of every cross-attention layer; tokens=last is that of the 2025 code, which looks at one token a prompt.
What differs: prompts are the task's templates around every word for the concept; they are aligned from their first
difference on, where the code starts at the last token of the subject; targets and matrices are float64; and without an
anchor one is chosen (`nearest`): the kept thing nearest in text-embedding space, as close targets that are no synonyms
disturb the rest least (Bui et al., https://arxiv.org/abs/2501.18950). Where the task has no words of the concept's own
kind (free text), the anchor is the sentence without the concept, the code's own default for objects.
Defaults: erase 1 (both codes); preserve 10, ridge 1 and templates 16 (ours: the best of twelve settings on Dogs, Horses
and Flowers of Emoji Canvas, docs/lab.md). The 2023 code has preserve max(0.1, 1 / retain prompts) and a lambda of 0.5
whatever the embeddings' length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cgru.config import RunConfig
from cgru.config.rules import Count, NotNegative, Positive, Text
from cgru.method import Method
from cgru.prompts import sentence, task_for, words_of
from cgru.prompts.grammar import are_related

if TYPE_CHECKING:
    from torch import Tensor

    from cgru.backbones.base import Backbone, HasTextLimit
    from cgru.edits import Edit
    from cgru.runs import Run
    from cgru.tasks import UnlearnTask

AUTO = "auto"
LAYERS = ("attn2.to_k.weight", "attn2.to_v.weight")
NARROW = 512
"""Width of the text embeddings below which one thread is enough: Emoji Canvas has 192, every Stable Diffusion 768 or
more."""
SAME = 0.01
"""Two embeddings are of the same text so far if they differ by less than this, relative to their length: what rounding
does is under 0.5 % even in bf16, another token is of the order of 1."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings beside those of every run."""

    anchor: Text = AUTO
    """Text for what is drawn instead of the concept; auto: the nearest kept thing, or for free text the empty
    prompt."""
    tokens: Literal["all", "last"] = "all"
    """Tokens of a prompt that count: all, or only the last token of its subject."""
    erase: Positive = 1.0
    """Weight a of a token of the concept's prompts."""
    preserve: NotNegative = 10.0
    """Weight b of a token of the kept things' prompts; 0: only `ridge` holds them."""
    ridge: Positive = 1.0
    """Weight lambda of each matrix's distance from its original, in tokens: this number times the mean squared length
    of the concept's embeddings. A higher value makes the edit weaker."""
    templates: Count = 16
    """Number of the task's sentences into which the words are put, evenly spaced; time grows with it."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run, made before its folder exists."""

    anchor: str
    """"": the sentence without the concept."""
    is_chosen: bool
    """Whether the anchor was chosen automatically."""
    templates: tuple[str, ...]
    layers: tuple[str, ...]
    """Names of the denoiser's weights that are edited."""
    words: int
    kept: int


def check(config: Config) -> None:
    """Refuse an anchor that is the concept itself, and texts that are too long, before a model is loaded."""
    from cgru.backbones.words import words_of_model

    task = task_for(config.concept, config.model)
    names = {words_of(word) for word in (config.concept, task.concept.name, *task.words)}
    if config.anchor != AUTO and words_of(config.anchor) in names:
        raise ValueError(
            f"the anchor {config.anchor!r} is a word for the concept {config.concept!r}; allowed: anything else the "
            "model draws, or auto. Give another anchor."
        )
    if words := words_of_model(config.model):
        refuse_long(config.model, words, texts_of(task, config))


def prepare(backbone: Backbone, task: UnlearnTask, config: Config) -> Plan:
    """Find the layers and the anchor; refuses a model that cannot be edited this way."""
    from cgru.backbones.base import HasTextLimit, unwrapped

    with few_threads(backbone):
        layers, model = cross_attention(backbone), unwrapped(backbone)
        if isinstance(model, HasTextLimit):
            refuse_long(backbone.name, model, texts_of(task, config))
        anchor = chosen_anchor(backbone, task) if config.anchor == AUTO else config.anchor
    templates = spread(task.templates, config.templates)
    return Plan(anchor, config.anchor == AUTO, templates, layers, len(task.words), len(task.kept))


def chosen_anchor(backbone: Backbone, task: UnlearnTask) -> str:
    """The nearest kept word; for free text "", because kept words are plain nouns, unlike, say, a painter."""
    return "" if task.concept.kind == "text" else nearest(backbone, task)


def plan(prepared: Plan) -> Mapping[str, Any]:
    """For `--dry-run`."""
    origin = "chosen" if prepared.is_chosen else "given"
    anchor = repr(prepared.anchor) if prepared.anchor else "nothing in its place"
    count = f"{prepared.words} words of the concept and {prepared.kept} kept"
    lines = {
        "anchor": f"{anchor} ({origin})",
        "prompts": f"{count}, in {len(prepared.templates)} sentences",
        "changes": f"{len(prepared.layers)} matrices of cross-attention",
    }
    return {"anchor": prepared.anchor, "lines": lines}


def run(backbone: Backbone, task: UnlearnTask, config: Config, run: Run, *, prepared: Plan | None = None) -> Edit:
    """Compute the sums over the prompts, solve once, and change every layer."""
    from cgru.edits import WeightsEdit

    found = prepared or prepare(backbone, task, config)
    with few_threads(backbone):
        sums = summed(backbone, task, found.anchor, found.templates, only_last=config.tokens == "last")
        ridge = config.ridge * float(sums.own.trace()) / sums.tokens
        change = solve(config.erase * sums.cross, config.erase * sums.own, config.preserve * sums.kept, ridge)
        weights = {name: backbone.denoiser.get_parameter(name).detach().cpu().double() for name in found.layers}
        deltas = {name: weight @ change for name, weight in weights.items()}
        figures = {"loss": sums.left(change), "kept/moved": sums.moved(change)}
    about = {"anchor": found.anchor, "anchor_is": "chosen" if found.is_chosen else "given"}
    run.log({"iteration": 0, **figures, **about})
    return WeightsEdit({"denoiser": deltas}, parameters=about)


@contextmanager
def few_threads(backbone: Backbone) -> Iterator[None]:
    """Compute in one thread inside the `with` block if the model is small.

    Its matrices give a second thread next to nothing to do, but on busy cores it waits for its turn with a full load.
    """
    import torch

    before = torch.get_num_threads()
    widths = (p.shape[-1] for name, p in backbone.denoiser.named_parameters() if name.endswith(LAYERS))
    torch.set_num_threads(1 if max(widths, default=0) < NARROW else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def solve(cross: Tensor, own: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """D of W' = W (I + D), the minimum of a Σ |W'c - Wc*|² + b Σ |W'k - Wk|² + λ |W' - W|², the same for every W.

    W' = (λW + a Σ Wc* cᵀ + b Σ Wk kᵀ) S⁻¹ with S = λI + a Σ ccᵀ + b Σ kkᵀ, so D = a Σ (c* - c) cᵀ S⁻¹.

    Args:
        cross: a Σ c* cᵀ, float64; c* is the anchor's embedding for the concept's c.
        own: a Σ c cᵀ.
        kept: b Σ k kᵀ.
        ridge: λ.
    """
    import torch

    system = ridge * torch.eye(len(own), dtype=own.dtype) + own + kept
    return torch.linalg.solve(system, (cross - own).T).T  # S is symmetric


@dataclass(frozen=True, eq=False)
class Sums:
    """The inputs of `solve`: sums over the prompts' tokens, float64 on the CPU."""

    cross: Tensor
    """Σ c* cᵀ: c a token of the concept's prompts, c* its counterpart in the anchor's."""
    own: Tensor
    """Σ c cᵀ."""
    kept: Tensor
    """Σ k kᵀ: k a token of the kept things' prompts and of the empty one."""
    apart: float
    """Σ |c* - c|²."""
    tokens: int
    """How many c there are."""

    def left(self, change: Tensor) -> float:
        """Σ |(I + D)c - c*|² / Σ |c - c*|²: the remaining distance to the anchor, 0 to 1."""
        gone = (change @ self.own * change).sum() - 2 * (change * (self.cross - self.own)).sum()
        return 1 + float(gone) / self.apart

    def moved(self, change: Tensor) -> float:
        """Σ |Dk|² / Σ |k|²: how much the kept things change."""
        return float((change @ self.kept * change).sum() / self.kept.trace())


def summed(backbone: Backbone, task: UnlearnTask, anchor: str, templates: Sequence[str], *, only_last: bool) -> Sums:
    """The sums over every word for the concept and every kept word, in each of the templates."""
    import torch

    empty = embedded(backbone, [""])[0]  # what guidance leads away from
    cross, own = (torch.zeros(empty.shape[1], empty.shape[1], dtype=torch.float64) for _ in range(2))
    kept, apart, count = empty.T @ empty, 0.0, 0
    words, heads = (*task.words, anchor, *task.kept), dict[str, list[int]]()
    for template in templates:
        head = template[: template.index("}") + 1]  # up to the word; many templates begin alike
        if head not in heads:
            heads[head] = last_tokens(backbone, [filled(head, word) for word in words])
        rows = embedded(backbone, [filled(template, word) for word in words])
        target, target_end = rows[len(task.words)], heads[head][len(task.words)]
        for place, (row, end) in enumerate(zip(rows, heads[head], strict=True)):
            tokens = slice(end, end + 1) if only_last else slice(None)
            if place < len(task.words):
                goal = target[aligned(row, target, end, target_end)]
                cross += goal[tokens].T @ row[tokens]
                own += row[tokens].T @ row[tokens]
                apart += float((goal - row)[tokens].square().sum())
                count += len(row[tokens])
            elif place > len(task.words):
                kept += row[tokens].T @ row[tokens]
    return Sums(cross, own, kept, apart, count)


def aligned(concept: Tensor, anchor: Tensor, end: int, anchor_end: int) -> Tensor:
    """For each token of a concept's prompt (l, d), the position of its counterpart in the anchor's prompt (l, d).

    Positions are equal as long as both texts are equal. From there on they are counted from the subject's last token,
    so that everything after it (rest of the sentence, end, padding) is matched with itself.
    """
    import torch

    places = torch.arange(len(concept))
    start = first_difference(concept, anchor)
    shifted = (places + anchor_end - end).clamp(min(start, anchor_end), len(concept) - 1)
    return torch.where(places < start, places, shifted)


def nearest(backbone: Backbone, task: UnlearnTask) -> str:
    """The kept word most similar to the concept's words: highest mean cosine at the end token, in the first template.

    Words that share a word, or part of one, with a word for the concept are excluded.
    """
    import torch

    kept = [word for word in task.kept if not any(are_related(word, own) for own in task.words)]
    if not kept:
        raise ValueError(
            f"every kept word is related to {task.concept.name!r}, so none can be the anchor; allowed: anything else "
            "that the model draws. Give anchor=WORD."
        )
    texts = [sentence(task.templates[0], word) for word in (*task.words, *kept)]
    ends = [last + 1 for last in last_tokens(backbone, texts)]
    summaries = embedded(backbone, texts)[torch.arange(len(texts)), torch.tensor(ends)]
    units = torch.nn.functional.normalize(summaries, dim=1)
    likeness = (units[: len(task.words)] @ units[len(task.words) :].T).mean(0)
    return kept[int(likeness.argmax())]


def cross_attention(backbone: Backbone) -> tuple[str, ...]:
    """Names of the matrices that read the text; ValueError if there are none or they read something else."""
    from cgru.mdp.trajectory import EMBEDDINGS

    shapes = {n: p.shape for n, p in backbone.denoiser.named_parameters() if n.endswith(LAYERS)}
    tensors = backbone.encode_text([""]).tensors
    width = tensors[EMBEDDINGS].shape[-1] if EMBEDDINGS in tensors else None
    if not shapes or any(shape[-1] != width for shape in shapes.values()):
        why = "no cross-attention" if not shapes else "cross-attention that does not read its text embeddings"
        raise ValueError(
            f"the model {backbone.name!r} has {why}; allowed for uce: a denoiser with attn2.to_k and attn2.to_v, such "
            "as Stable Diffusion's. Give another model or method."
        )
    return tuple(shapes)


def texts_of(task: UnlearnTask, config: Config) -> list[str]:
    """The sentences with words for the concept, and with the anchor if one is given."""
    given = () if config.anchor == AUTO else (config.anchor,)
    templates = spread(task.templates, config.templates)
    return [filled(template, word) for template in templates for word in (*task.words, *given)]


def refuse_long(name: str, model: HasTextLimit, texts: Sequence[str]) -> None:
    """Refuse sentences that reach the model's token limit; `last_tokens` needs room for one more word."""
    longest, text = max(zip(model.count_tokens([f"{text} a" for text in texts]), texts, strict=True))
    if longest > model.max_tokens:
        raise ValueError(
            f"{text!r:.80} is as long as the {model.max_tokens} tokens that {name!r} reads; allowed: a few words. Give "
            "a shorter concept or anchor."
        )


def last_tokens(backbone: Backbone, texts: Sequence[str]) -> list[int]:
    """The position of each text's last token; 0 (the start token) for an empty text.

    Found without a tokenizer: a text and the same text with one more word differ from the end token on, because a
    causal text encoder only sees earlier tokens.
    """
    longer = embedded(backbone, [f"{text} a".strip() for text in texts])
    found = [first_difference(one, other) - 1 for one, other in zip(embedded(backbone, texts), longer, strict=True)]
    for text, place in zip(texts, found, strict=True):
        if place < 0:
            raise ValueError(
                f"the text encoder of {backbone.name!r} looks ahead, so prompts cannot be aligned; allowed for uce: "
                "causal ones, such as CLIP's. Give another model or method."
            )
        assert place < longer.shape[1] - 2, f"{text!r:.80} fills the model's prompt, which `refuse_long` refuses"
    return found


def first_difference(one: Tensor, other: Tensor) -> int:
    """The first position at which two prompts' embeddings (l, d) differ; l if they are equal."""
    apart = (one - other).norm(dim=-1) > SAME * one.norm(dim=-1)
    return int(apart.int().argmax()) if bool(apart.any()) else len(one)


def embedded(backbone: Backbone, texts: Sequence[str]) -> Tensor:
    """(n, l, d), float64 on the CPU."""
    return backbone.encode_text(texts).embeddings.detach().cpu().double()


def filled(template: str, word: str) -> str:
    """A template with a word in it; without one, the rest of the sentence."""
    return sentence(template, word) if word else " ".join(template.format(a="", bare="").split())


def spread(items: Sequence[str], count: int) -> tuple[str, ...]:
    """At most `count` of them, evenly spaced, the first among them."""
    count = min(count, len(items))
    return tuple(items[i * len(items) // count] for i in range(count))


METHOD = Method(
    config=Config,
    run=run,
    summary="closed-form edit of cross-attention that maps the concept to an anchor",
    check=check,
    prepare=prepare,
    plan=plan,
)
