"""Sets of prompts for a run: what to forget, what to keep, and what reward, critic and validation get.

As in the paper (§5.1) the parts for reward head, critic and policy are disjoint; so are those for validation, and no
prompt is the benchmark's (`forbidden`). "Equal" means equal words: case, punctuation and articles do not count.
Each set has random numbers of its own, named after it; validation is drawn first, so it moves with no other count.
Limit: without a lexicon nobody knows that a retain prompt of `template_prompts` is a relative of the concept.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from cgru.prompts.grammar import THINGS, CanvasGrammar, Grammar, TemplateGrammar, are_related, words_of
from cgru.tasks import Concept, Head, Lexicon, targets

# A set gets at most an eighth of the sentences there are: four sets may draw from them, and half must stay free, so
# that a new one is soon found.
PART_OF_SENTENCES = 8


@dataclass(frozen=True)
class Prompt:
    """A sentence, what its picture should show ("" where not known) and which head knows that label ("" for none)."""

    text: str
    label: str
    head: Head
    context: str = ""
    """What else it names: the style, or the object where the label is a style; "" where nothing, or not known."""


@dataclass(frozen=True)
class Counts:
    """How many prompts each set gets, 0 for none."""

    policy: int = 80
    retain: int = 80
    critic: int = 40
    validation: int = 32
    """Forget prompts, and as many retain prompts."""
    reward: int = 0
    critic_retain: int = 0

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        for name, count in asdict(self).items():
            if count < 0:
                raise ValueError(f"{count} {name} prompts; allowed: 0 or more. Give 0 for none.")


@dataclass(frozen=True)
class PromptSets:
    """Seven disjoint sets."""

    reward: tuple[Prompt, ...]
    """Every label of the concept's head evenly (hazards, templates: about half the prompts), and others."""
    critic: tuple[Prompt, ...]
    """The concept's, for the critic's warm start."""
    critic_retain: tuple[Prompt, ...]
    policy: tuple[Prompt, ...]
    """The concept's: what is to be forgotten."""
    retain: tuple[Prompt, ...]
    validation_forget: tuple[Prompt, ...]
    validation_retain: tuple[Prompt, ...]
    """Only labels that a head knows, where there is one."""


@dataclass(frozen=True)
class Share:
    """A part of a set: labels evenly, styles evenly ("" names none), and its weight among the parts."""

    labels: tuple[str, ...]
    styles: tuple[str, ...]
    head: Head
    weight: int


@dataclass(frozen=True)
class Plan:
    """What the sets are made of."""

    forget: tuple[Share, ...]
    retain: tuple[Share, ...]
    validation_retain: tuple[Share, ...]
    reward: tuple[Share, ...]


def generated_prompts(
    concept: Concept,
    lexicon: Lexicon,
    *,
    counts: Counts,
    seed: int,
    forbidden: Collection[str] = (),
    own: Sequence[str] = (),
) -> PromptSets:
    """Prompts for a model with a lexicon, such as "an icon of a poodle, Flat style" or "Dogs on a pink background".

    Args:
        concept: what to forget.
        lexicon: the words; everything in it that is not the concept is to be kept.
        counts: how many for each set.
        seed: of the sentences and the split.
        forbidden: sentences that must not occur: the benchmark's.
        own: the user's forget prompts; policy, critic and validation get these instead of written ones.
    """
    return _sets(CanvasGrammar(lexicon), canvas_plan(concept, lexicon), counts, seed, forbidden, own)


def template_prompts(
    concept: str, *, counts: Counts, seed: int, forbidden: Collection[str] = (), own: Sequence[str] = ()
) -> PromptSets:
    """Prompts for any model and any concept; labels are the concept's text and plain nouns, and no head knows them."""
    text = " ".join(concept.split())
    if not text:
        raise ValueError("the concept is empty; allowed: any text. Say what to forget, such as 'golden retriever'.")
    things = tuple(thing for thing in THINGS if not are_related(thing, text))
    forget, retain = Share((text,), ("",), "", 1), Share(things, ("",), "", 1)
    plan = Plan((forget,), (retain,), (retain,), (forget, retain))
    return _sets(TemplateGrammar(), plan, counts, seed, forbidden, own)


def retain_label_table(prompts: Iterable[Prompt]) -> dict[str, tuple[Head, str]]:
    """Text -> (head, label), for the prompts whose label a head knows."""
    return {prompt.text: (prompt.head, prompt.label) for prompt in prompts if prompt.head}


def canvas_plan(concept: Concept, lexicon: Lexicon) -> Plan:
    """What the sets of a concept hold; most of what is kept are classes, since retention is measured on them."""
    gone = targets(concept, lexicon.vocabulary)
    if concept.kind == "style":
        others = tuple(style for style in lexicon.styles if style not in gone)
        forget, retain, reward = (_in_styles(lexicon, styles) for styles in (gone, others, lexicon.styles))
        return Plan(forget, retain, retain, reward)
    any_style = ("", *lexicon.styles)
    whole = {
        "object": Share(lexicon.classes, any_style, "object", 8),
        "hazard": Share(lexicon.hazards, any_style, "hazard", 8 if concept.kind == "hazard" else 1),
        "": Share(lexicon.everyday, any_style, "", 1),
    }
    forget = (Share(gone, any_style, concept.head, 1),)
    retain = _without(gone, whole.values())
    return Plan(forget, retain, tuple(share for share in retain if share.head), _without((), whole.values()))


def _without(gone: Collection[str], shares: Iterable[Share]) -> tuple[Share, ...]:
    left = (Share(tuple(n for n in s.labels if n not in gone), s.styles, s.head, s.weight) for s in shares)
    return tuple(share for share in left if share.labels and share.styles)


def _in_styles(lexicon: Lexicon, styles: tuple[str, ...]) -> tuple[Share, ...]:
    # Everyday things too, so that the style is all that these prompts have in common.
    shares = Share(lexicon.classes, styles, "style", 4), Share(lexicon.everyday, styles, "style", 1)
    return _without((), shares)


def _sets(
    grammar: Grammar, plan: Plan, counts: Counts, seed: int, forbidden: Collection[str], own: Sequence[str]
) -> PromptSets:
    taken = {words_of(text) for text in forbidden}
    wanted = {"validation_forget": counts.validation, "policy": counts.policy, "critic": counts.critic}
    draw = partial(_drawn, grammar=grammar, seed=seed, taken=taken)
    if own:
        forget = _dealt(own, plan.forget, wanted, seed, taken)
    else:
        forget = {name: draw(name, count, plan.forget) for name, count in wanted.items()}
    return PromptSets(
        validation_retain=draw("validation_retain", counts.validation, plan.validation_retain),
        retain=draw("retain", counts.retain, plan.retain),
        critic_retain=draw("critic_retain", counts.critic_retain, plan.retain),
        reward=draw("reward", counts.reward, plan.reward),
        **forget,
    )


def _drawn(
    name: str, count: int, shares: Sequence[Share], *, grammar: Grammar, seed: int, taken: set[str]
) -> tuple[Prompt, ...]:
    """`count` new prompts, divided by weight; `taken` learns their words."""
    if count and not shares:
        raise ValueError(f"{count} {name} prompts wanted, but the model knows nothing besides the concept. Ask for 0.")
    rng = random.Random(f"{seed}/{name}")
    prompts = []
    for share, part in zip(shares, apportioned(count, [share.weight for share in shares]), strict=True):
        _check_room(name, share, part, grammar)
        cells = zip(_rounds(rng, share.labels), _rounds(rng, share.styles), strict=False)  # both without end
        for label, style in itertools.islice(cells, part):
            text = _fresh(partial(grammar.write, rng, label, style), taken)
            shown, context = (style, label) if share.head == "style" else (label, style)
            prompts.append(Prompt(text, shown, share.head, context))
    rng.shuffle(prompts)
    return tuple(prompts)


def _check_room(name: str, share: Share, count: int, grammar: Grammar) -> None:
    sizes = [grammar.size(label, style) for label in share.labels for style in share.styles]
    possible = len(sizes) * (min(sizes) // PART_OF_SENTENCES)  # evenly, so the poorest label decides
    if count > possible:
        about = repr(share.labels[0]) if len(share.labels) == 1 else f"{len(share.labels)} labels"
        raise ValueError(f"{count} {name} prompts wanted for {about}, {possible} are possible. Ask for fewer.")


def _dealt(
    texts: Sequence[str], shares: Sequence[Share], wanted: Mapping[str, int], seed: int, taken: set[str]
) -> dict[str, tuple[Prompt, ...]]:
    """The user's own prompts, shuffled and dealt out; `taken` learns their words."""
    if clash := [text for text in texts if words_of(text) in taken]:
        raise ValueError(f"{len(clash)} of your prompts are the benchmark's own, first {clash[0]!r}. Remove them.")
    distinct, total = {words_of(text): text for text in texts}, sum(wanted.values())
    if len(distinct) < total:
        parts = apportioned(len(distinct), list(wanted.values()))
        fitting = ", ".join(f"{name} {part}" for name, part in zip(wanted, parts, strict=True))
        raise ValueError(
            f"{len(distinct)} different forget prompts given, {total} wanted; allowed: {total} or more, or with these "
            f"{fitting}. Add prompts, or lower prompts.count, prompts.critic and prompts.validation."
        )
    taken |= set(distinct)
    label, head = _only_label(shares), shares[0].head
    shuffled = random.Random(f"{seed}/own").sample(list(distinct.values()), len(distinct))
    prompts = (Prompt(text, label, head) for text in shuffled)
    return {name: tuple(itertools.islice(prompts, count)) for name, count in wanted.items()}


def _only_label(shares: Sequence[Share]) -> str:
    """The label of all these prompts, "" where there are several."""
    labels = {label for share in shares for label in (share.styles if share.head == "style" else share.labels)}
    return labels.pop() if len(labels) == 1 else ""


def apportioned(count: int, weights: Sequence[int]) -> list[int]:
    """Split a number by weights; the parts sum to it, and each is within one of its exact share."""
    edges = [round(count * edge / max(sum(weights), 1)) for edge in itertools.accumulate(weights, initial=0)]
    return [high - low for low, high in itertools.pairwise(edges)]


def _rounds(rng: random.Random, items: Sequence[str]) -> Iterator[str]:
    """Every item once in random order, then again: from the start, any stretch is even within one."""
    while True:
        yield from rng.sample(items, len(items))


def _fresh(write: Callable[[], str], taken: set[str]) -> str:
    while words_of(text := write()) in taken:  # ends: see PART_OF_SENTENCES
        pass
    taken.add(words_of(text))
    return text
