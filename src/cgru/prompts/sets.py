"""Sets of prompts for a run: what to forget, what to retain, and the prompts of reward head, critic and validation.

As in the paper (§5.1), the prompts of reward head, critic and policy are disjoint; so are those of validation, and no
prompt is one of the benchmarks' (`forbidden`). Two prompts are equal if their words are, ignoring case, punctuation and
articles. Each set has its own random numbers, seeded by its name; validation is drawn first, so it does not change with
other counts. Limit: without a lexicon, a retain prompt of `template_prompts` may be related to the concept unnoticed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from cgru.prompts.grammar import THINGS, CanvasGrammar, Grammar, TemplateGrammar, are_related, words_of
from cgru.tasks import Concept, Head, Lexicon, targets

# A set may use at most an eighth of the possible sentences: four sets may draw from the same ones, and half must stay
# unused so that a new sentence is found quickly.
PART_OF_SENTENCES = 8


@dataclass(frozen=True)
class Prompt:
    """A sentence, the label its image should show ("" if unknown) and the head that knows the label ("" for none)."""

    text: str
    label: str
    head: Head
    context: str = ""
    """What else the prompt names: the style, or the object if the label is a style; "" if nothing or unknown."""


@dataclass(frozen=True)
class Counts:
    """Number of prompts in each set; 0 for none."""

    policy: int = 80
    retain: int = 80
    critic: int = 40
    validation: int = 32
    """Forget prompts, and the same number of retain prompts."""
    reward: int = 0
    critic_retain: int = 0

    def __post_init__(self) -> None:
        """Reject negative numbers."""
        for name, count in asdict(self).items():
            if count < 0:
                raise ValueError(f"{count} {name} prompts; allowed: 0 or more. Give 0 for none.")


@dataclass(frozen=True)
class PromptSets:
    """Seven disjoint sets."""

    reward: tuple[Prompt, ...]
    """All labels of the concept's head, evenly (hazards, templates: about half the prompts), and other prompts."""
    critic: tuple[Prompt, ...]
    """Prompts of the concept, for the critic's warm start."""
    critic_retain: tuple[Prompt, ...]
    policy: tuple[Prompt, ...]
    """Prompts of the concept: what to forget."""
    retain: tuple[Prompt, ...]
    validation_forget: tuple[Prompt, ...]
    validation_retain: tuple[Prompt, ...]
    """Only labels known to a head, if there is a head."""


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
    """Write prompts for a model with a lexicon, such as "an icon of a poodle, Flat style".

    Args:
        concept: what to forget.
        lexicon: the words; everything in it other than the concept is to be retained.
        counts: number of prompts per set.
        seed: seed of the sentences and the split.
        forbidden: sentences that must not occur, i.e. the benchmarks'.
        own: the user's forget prompts, which replace generated ones for policy, critic and validation.
    """
    return _sets(CanvasGrammar(lexicon), canvas_plan(concept, lexicon), counts, seed, forbidden, own)


def template_prompts(
    concept: str,
    *,
    counts: Counts,
    seed: int,
    forbidden: Collection[str] = (),
    own: Sequence[str] = (),
    subjects: Mapping[str, str] | None = None,
) -> PromptSets:
    """Write prompts for any model and concept; labels are the concept's text and plain nouns, unknown to any head.

    With `subjects` (label -> what sentences call it) the labels are these, and the concept is one of them.
    """
    if subjects is not None:
        others = tuple(label for label in subjects if label != concept)
        forget, retain = Share((concept,), ("",), "", 1), Share(others, ("",), "", 1)
        whole = Plan((forget,), (retain,), (retain,), (Share(tuple(subjects), ("",), "", 1),))
        return _sets(TemplateGrammar(subjects), whole, counts, seed, forbidden, own)
    text = " ".join(concept.split())
    if not text:
        raise ValueError("the concept is empty; allowed: any text. Say what to forget, such as 'golden retriever'.")
    things = tuple(thing for thing in THINGS if not are_related(thing, text))
    forget, retain = Share((text,), ("",), "", 1), Share(things, ("",), "", 1)
    plan = Plan((forget,), (retain,), (retain,), (forget, retain))
    return _sets(TemplateGrammar(), plan, counts, seed, forbidden, own)


def class_prompts(concept: str, classes: Sequence[str], *, counts: Counts) -> PromptSets:
    """The sets of a model whose only prompts are the names of its classes.

    There are no others to tell apart, so the sets are not disjoint; validation repeats its prompts, on other noise.
    """
    forget = (Prompt(concept, concept, ""),)
    kept = tuple(Prompt(name, name, "") for name in classes if name != concept)
    return PromptSets(
        reward=(*forget, *kept)[: counts.reward],
        critic=forget[: counts.critic],
        critic_retain=kept[: counts.critic_retain],
        policy=forget[: counts.policy],
        retain=kept[: counts.retain],
        validation_forget=forget * counts.validation,
        validation_retain=tuple(itertools.islice(itertools.cycle(kept), counts.validation)),
    )


def retain_label_table(prompts: Iterable[Prompt]) -> dict[str, tuple[Head, str]]:
    """Map text -> (head, label) for the prompts whose label a head knows."""
    return {prompt.text: (prompt.head, prompt.label) for prompt in prompts if prompt.head}


def canvas_plan(concept: Concept, lexicon: Lexicon) -> Plan:
    """Return the composition of a concept's sets; most retain prompts are classes, on which retention is measured."""
    gone = targets(concept, lexicon.vocabulary)
    if concept.kind == "style":
        others = tuple(style for style in lexicon.styles if style not in gone)
        forget, retain, reward = (_in_styles(lexicon, styles) for styles in (gone, others, lexicon.styles))
        return Plan(forget, retain, retain, reward)
    if concept.kind == "attribute":  # it is in pictures whose style is left open; to keep: what prompts do ask for
        unasked = (Share(lexicon.classes, ("",), "", 1),)
        asked = (Share(lexicon.classes, lexicon.styles, "object", 4), Share(lexicon.everyday, lexicon.styles, "", 1))
        return Plan(unasked, asked, asked[:1], unasked)
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
    # Everyday things are included, so that the style is all that these prompts have in common.
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
    """Write `count` new prompts, divided by weight; adds their words to `taken`."""
    if count and not shares:
        raise ValueError(f"{count} {name} prompts wanted, but the model knows only the concept. Ask for 0.")
    rng = random.Random(f"{seed}/{name}")
    prompts = []
    for share, part in zip(shares, apportioned(count, [share.weight for share in shares]), strict=True):
        _check_room(name, share, part, grammar)
        cells = zip(_rounds(rng, share.labels), _rounds(rng, share.styles), strict=False)  # both infinite
        for label, style in itertools.islice(cells, part):
            text = _fresh(partial(grammar.write, rng, label, style), taken)
            shown, context = (style, label) if share.head == "style" else (label, style)
            prompts.append(Prompt(text, shown, share.head, context))
    rng.shuffle(prompts)
    return tuple(prompts)


def _check_room(name: str, share: Share, count: int, grammar: Grammar) -> None:
    sizes = [grammar.size(label, style) for label in share.labels for style in share.styles]
    possible = len(sizes) * (min(sizes) // PART_OF_SENTENCES)  # labels share evenly, so the one with fewest decides
    if count > possible:
        about = repr(share.labels[0]) if len(share.labels) == 1 else f"{len(share.labels)} labels"
        raise ValueError(f"{count} {name} prompts wanted for {about}, but only {possible} are possible. Ask for fewer.")


def _dealt(
    texts: Sequence[str], shares: Sequence[Share], wanted: Mapping[str, int], seed: int, taken: set[str]
) -> dict[str, tuple[Prompt, ...]]:
    """Shuffle the user's own prompts and distribute them; adds their words to `taken`."""
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
    """Return the label of all these prompts, "" if there are several."""
    labels = {label for share in shares for label in (share.styles if share.head == "style" else share.labels)}
    return labels.pop() if len(labels) == 1 else ""


def apportioned(count: int, weights: Sequence[int]) -> list[int]:
    """Split a number in proportion to weights; the parts sum to it, each within one of its exact share."""
    edges = [round(count * edge / max(sum(weights), 1)) for edge in itertools.accumulate(weights, initial=0)]
    return [high - low for low, high in itertools.pairwise(edges)]


def _rounds(rng: random.Random, items: Sequence[str]) -> Iterator[str]:
    """Yield every item once in random order, then again, without end: any prefix is even to within one."""
    while True:
        yield from rng.sample(items, len(items))


def _fresh(write: Callable[[], str], taken: set[str]) -> str:
    while words_of(text := write()) in taken:  # terminates: see PART_OF_SENTENCES
        pass
    taken.add(words_of(text))
    return text
