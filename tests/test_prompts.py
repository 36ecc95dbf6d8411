"""Prompt sets: disjoint, even, repeatable, never the benchmark's; the user's own from files."""

import itertools
import json
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cgru.embedded import load_lexicon
from cgru.prompts import (
    Counts,
    Prompt,
    PromptSets,
    generated_prompts,
    prompts_from_file,
    retain_label_table,
    template_prompts,
    words_of,
)
from cgru.prompts import grammar as sentences
from cgru.prompts.benchmark_prompts import TEMPLATE
from cgru.prompts.sets import apportioned
from cgru.tasks import Concept, Lexicon, Noun, find_concept

LEXICON = load_lexicon()
CELLS = list(itertools.product(LEXICON.classes, LEXICON.styles))
BENCHMARK = [TEMPLATE.format_map({"class": label, "style": style}) for label, style in CELLS]
EVERY = Counts(policy=80, retain=80, critic=40, validation=32, reward=60, critic_retain=20)
SIZES = {
    "reward": 60,
    "critic": 40,
    "critic_retain": 20,
    "policy": 80,
    "retain": 80,
    "validation_forget": 32,
    "validation_retain": 32,
}
TINY = Lexicon(("Cats", "Dogs"), ("Flat",), (), (), {"Cats": Noun("cat", "cats"), "Dogs": Noun("dog", "dogs")})


def concept(name: str) -> Concept:
    return find_concept(name, LEXICON.vocabulary, LEXICON.aliases)


def written(name: str, counts: Counts = EVERY, seed: int = 0) -> PromptSets:
    return generated_prompts(concept(name), LEXICON, counts=counts, seed=seed, forbidden=BENCHMARK)


def as_sets(sets: PromptSets) -> dict[str, tuple[Prompt, ...]]:
    return {name: getattr(sets, name) for name in asdict(sets)}


def style_named(text: str) -> str:
    return next((style for style in LEXICON.styles if f"{style.lower()} style" in text.lower()), "")


def is_even(counted: Counter[str], among: int) -> bool:
    """Each of `among` occurs, and equally often within one."""
    return len(counted) == among and max(counted.values()) - min(counted.values()) <= 1


@pytest.mark.parametrize("name", ["Dogs", "Jellyfish", "Human", "Ink", "blades", "hazard", "Van Gogh, painter"])
def test_sets_have_the_wanted_sizes_and_share_nothing(name: str) -> None:
    is_text = name.startswith("Van")
    sets = as_sets(template_prompts(name, counts=EVERY, seed=0) if is_text else written(name))
    assert {key: len(prompts) for key, prompts in sets.items()} == SIZES
    words = [words_of(prompt.text) for prompts in sets.values() for prompt in prompts]
    assert len(set(words)) == sum(SIZES.values())


def test_no_prompt_is_the_benchmarks_however_it_is_punctuated() -> None:
    """Without `forbidden` some are; with it none, though forms close to it remain."""
    many = Counts(policy=1500, retain=1500)
    forbidden = {words_of(text) for text in BENCHMARK}
    free = generated_prompts(concept("Dogs"), LEXICON, counts=many, seed=0)
    bound = written("Dogs", many)
    assert any(words_of(prompt.text) in forbidden for prompt in (*free.policy, *free.retain))
    assert not any(words_of(p.text) in forbidden for prompts in as_sets(bound).values() for p in prompts)
    assert any(re.fullmatch(r"dogs image, \w+ style\.?", prompt.text.lower()) for prompt in bound.policy)
    assert any(re.fullmatch(r"an image of dogs in \w+ style\.?", prompt.text.lower()) for prompt in bound.policy)


def test_equal_words_are_an_equal_prompt() -> None:
    assert (
        words_of("A Dogs image in Flat style.") == words_of("the dogs  IMAGE, in flat style") == words_of(BENCHMARK[44])
    )
    assert words_of("an image of Dogs") != words_of("a Dogs image")
    assert words_of("?!") == "?!"  # no words at all: the text itself


def test_the_same_seed_gives_the_same_prompts_and_another_others() -> None:
    assert written("Dogs") == written("Dogs")
    ours, others = (set(written("Dogs", seed=seed).policy) for seed in (0, 1))
    assert len(ours & others) < 40  # of 80; "a dog in Ink style" may come up twice


def test_validation_does_not_move_with_the_other_counts() -> None:
    few, many = written("Dogs"), written("Dogs", Counts(policy=300, retain=0, critic=0))
    assert few.validation_forget == many.validation_forget
    assert few.validation_retain == many.validation_retain
    assert few.policy != many.policy


def test_prompts_of_a_class_name_it_in_every_style_evenly() -> None:
    policy = written("Dogs").policy
    assert {(prompt.label, prompt.head) for prompt in policy} == {("Dogs", "object")}
    noun = LEXICON.nouns["Dogs"]
    words = {noun.singular, noun.plural, *noun.synonyms, *noun.breeds}
    assert all(any(word in prompt.text.lower() for word in words) for prompt in policy)
    assert is_even(Counter(style_named(prompt.text) for prompt in policy), 9)  # eight styles and none
    used = {word for word in words if any(re.search(rf"\b{word}\b", prompt.text.lower()) for prompt in policy)}
    assert len(used) >= 8  # of 16: not always the same word
    assert len({c for c in sentences.COLOURS if any(f" {c} back" in p.text.lower() for p in policy)}) >= 8


def test_what_is_kept_are_the_other_classes_evenly_and_a_few_others() -> None:
    retain = written("Dogs", replace(EVERY, retain=380)).retain
    counted = Counter(prompt.label for prompt in retain if prompt.head == "object")
    assert "Dogs" not in counted
    assert is_even(counted, 19)
    assert counted.total() == 304  # 8 of 10 shares of 380
    assert Counter(prompt.head for prompt in retain) == {"object": 304, "hazard": 38, "": 38}
    assert {prompt.label for prompt in retain if prompt.head == ""} <= set(LEXICON.everyday)


def test_kept_validation_prompts_have_labels_that_a_head_knows() -> None:
    assert {prompt.head for prompt in written("Dogs").validation_retain} == {"object", "hazard"}
    assert {prompt.head for prompt in written("Ink").validation_retain} == {"style"}


def test_a_style_is_forgotten_over_all_classes_and_the_other_styles_kept() -> None:
    sets = written("Ink", replace(EVERY, policy=100, retain=140))
    assert {prompt.label for prompt in sets.policy} == {"Ink"}
    assert {style_named(prompt.text) for prompt in sets.policy} == {"Ink"}
    assert all(style_named(prompt.text) == prompt.label for prompt in sets.retain)
    # 140 in two shares, 112 with classes and 28 with everyday things, each even over the seven styles left.
    assert Counter(prompt.label for prompt in sets.retain) == {s: 20 for s in LEXICON.styles if s != "Ink"}
    assert {prompt.label for prompt in sets.reward} == set(LEXICON.styles)


def test_hazard_is_every_category_and_keeps_none() -> None:
    sets = written("hazard")
    assert is_even(Counter(prompt.label for prompt in sets.policy), 6)
    assert {prompt.head for prompt in (*sets.retain, *sets.critic_retain)} == {"object", ""}
    one = written("blades")
    assert {prompt.label for prompt in one.policy} == {"blades"}
    assert {p.label for p in one.retain if p.head == "hazard"} == set(LEXICON.hazards) - {"blades"}


def test_the_reward_head_sees_every_label_and_the_hazard_head_half_hazards() -> None:
    reward = written("Dogs", replace(EVERY, reward=200)).reward
    assert Counter(p.label for p in reward if p.head == "object") == dict.fromkeys(LEXICON.classes, 8)
    heads = Counter(prompt.head for prompt in written("hazard", replace(EVERY, reward=170)).reward)
    assert heads == {"object": 80, "hazard": 80, "": 10}  # weights 8, 8 and 1


def test_line_art_is_never_asked_for_on_a_ground_that_hides_it() -> None:
    policy = written("Ink", Counts(policy=2000)).policy
    assert not [p.text for p in policy if re.search(r"(black|brown) back", p.text.lower())]
    assert [p.text for p in written("Flat", Counts(policy=500)).policy if "black back" in p.text.lower()]


def test_extra_words_name_nothing_that_could_be_drawn() -> None:
    rows = ((n.singular, n.plural, *n.synonyms, *n.breeds) for n in LEXICON.nouns.values())
    names = itertools.chain(LEXICON.styles, *rows)
    drawable = {word for text in names for word in words_of(text).split()} - {"of", "with"}
    extra = " ".join((*sentences.ADJECTIVES, *sentences.MOMENTS, *sentences.FORMS))
    assert not set(words_of(extra).split()) & drawable


@pytest.mark.parametrize(
    ("noun", "phrase"),
    [
        ("beagle", "a beagle"),
        ("owl", "an owl"),
        ("Dogs", "Dogs"),
        ("crossed swords", "crossed swords"),
        ("glass of wine", "a glass of wine"),
        ("pints of beer", "pints of beer"),
        ("mug of beer", "a mug of beer"),
        ("bread", "bread"),
        ("cactus", "a cactus"),
    ],
)
def test_articles(noun: str, phrase: str) -> None:
    assert sentences.with_article(noun) == phrase


def test_a_small_lexicon_says_how_many_are_possible_and_gives_that_many() -> None:
    """Naming no style is poorest: 2 words · 8 forms · 68 extras / 8 = 136; with and without the one style, 272."""
    dogs = Concept("Dogs", "class")
    with pytest.raises(
        ValueError, match="273 policy prompts wanted for 'Dogs', but only 272 are possible. Ask for fewer."
    ):
        generated_prompts(dogs, TINY, counts=Counts(policy=273), seed=0)
    full = Counts(policy=272, critic=272, validation=136)
    assert len({p.text for p in generated_prompts(dogs, TINY, counts=full, seed=0).policy}) == 272


def test_nothing_to_keep_is_said() -> None:
    alone = Lexicon(("Dogs",), ("Flat",), (), (), {"Dogs": Noun("dog", "dogs")})
    with pytest.raises(ValueError, match="knows only the concept"):
        generated_prompts(Concept("Dogs", "class"), alone, counts=Counts(retain=1, validation=0), seed=0)
    none = generated_prompts(Concept("Dogs", "class"), alone, counts=Counts(retain=0, validation=0), seed=0)
    assert none.retain == ()
    assert len(none.policy) == 80


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 critic prompts; allowed: 0 or more"):
        Counts(critic=-1)


def test_templates_hold_the_text_as_it_stands_and_keep_unrelated_things() -> None:
    sets = template_prompts("  sunflowers {0} ", counts=EVERY, seed=0)
    assert all("sunflowers {0}" in prompt.text.lower() for prompt in (*sets.policy, *sets.validation_forget))
    kept = {prompt.label for prompt in sets.retain}
    assert len(kept) == 45  # of 46 things: "a sunflower" is related
    assert "a sunflower" not in kept
    assert Counter(prompt.label == "sunflowers {0}" for prompt in sets.reward) == {True: 30, False: 30}
    with pytest.raises(ValueError, match="the concept is empty"):
        template_prompts(" ", counts=EVERY, seed=0)
    with pytest.raises(ValueError, match="9999 policy prompts wanted for 'cats', but only 432 are possible"):
        template_prompts("cats", counts=Counts(policy=9999), seed=0)  # 12 media · 24 settings · 12 looks / 8


def test_own_prompts_are_dealt_out_and_never_written_again() -> None:
    own = [f"dog number {i}" for i in range(20)] + ["a dog", "A dog.", "The dog"]  # the last three are one prompt
    counts = Counts(policy=10, critic=6, validation=5, retain=30)
    sets = generated_prompts(concept("Dogs"), LEXICON, counts=counts, seed=0, forbidden=BENCHMARK, own=own)
    dealt = [*sets.policy, *sets.critic, *sets.validation_forget]
    assert {words_of(prompt.text) for prompt in dealt} == {words_of(text) for text in own}
    assert {prompt.label for prompt in dealt} == {"Dogs"}
    assert len(dealt) == 21
    again = generated_prompts(concept("Dogs"), LEXICON, counts=counts, seed=0, forbidden=BENCHMARK, own=own)
    other = generated_prompts(concept("Dogs"), LEXICON, counts=counts, seed=1, forbidden=BENCHMARK, own=own)
    assert sets == again
    assert set(sets.policy) != set(other.policy)
    everything = template_prompts("dog", counts=counts, seed=0, own=own)
    assert {prompt.label for prompt in everything.policy} == {"dog"}


def test_own_prompts_of_several_labels_have_none() -> None:
    own = [f"something sharp {i}" for i in range(3)]
    counts = Counts(policy=1, critic=1, validation=1)
    of_all, of_style = (
        generated_prompts(concept(name), LEXICON, counts=counts, seed=0, own=own).policy[0]
        for name in ("hazard", "Ink")
    )
    assert (of_all.label, of_all.head) == ("", "hazard")
    assert (of_style.label, of_style.head) == ("Ink", "style")


def test_too_few_own_prompts_are_refused_with_counts_that_fit() -> None:
    # 152 wanted as 32, 80, 40; of 19 that is 4, 10, 5.
    with pytest.raises(
        ValueError, match=r"19 different .*, 152 wanted; .* validation_forget 4, policy 10, critic 5\. Add"
    ):
        template_prompts("dog", counts=Counts(), seed=0, own=[f"dog {i}" for i in range(19)])


def test_own_prompts_that_are_the_benchmarks_are_refused() -> None:
    own = ["dog one", "a dogs image in flat style", "dog two"]
    with pytest.raises(
        ValueError, match="1 of your prompts are the benchmark's own, first 'a dogs image in flat style'"
    ):
        generated_prompts(concept("Dogs"), LEXICON, counts=Counts(1, 1, 1, 1), seed=0, forbidden=BENCHMARK, own=own)


def test_the_label_table_holds_what_a_head_knows() -> None:
    prompts = [Prompt("a cat", "Cats", "object"), Prompt("a key", "key", "")]
    assert retain_label_table(prompts) == {"a cat": ("object", "Cats")}


@pytest.mark.parametrize(("count", "weights"), [(80, [8, 1, 1]), (7, [1, 1]), (0, [3, 4]), (5, [9, 1, 1, 1])])
def test_parts_sum_and_stay_near_their_share(count: int, weights: list[int]) -> None:
    parts = apportioned(count, weights)
    assert sum(parts) == count
    assert all(abs(part - count * weight / sum(weights)) <= 1 for part, weight in zip(parts, weights, strict=True))


FILES = {
    "lines.txt": "\ufeffa dog\r\n\r\n  two dogs, # not a comment \n\u00fcber dog",
    "table.csv": '\ufeffid,prompt\r\n1,a dog\r\n2," "\r\n3,"  two dogs, # not a comment "\r\n4,\u00fcber dog\r\n',
    "rows.jsonl": "\n".join(
        json.dumps({"prompt": text}) for text in ("a dog", "", "  two dogs, # not a comment ", "\u00fcber dog")
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_as_they_stand(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name].encode())
    assert prompts_from_file(tmp_path / name) == ["a dog", "  two dogs, # not a comment ", "\u00fcber dog"]


def test_another_column_and_a_line_break_inside_a_cell(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_text('caption,prompt\n"a\ndog",x\n')
    assert prompts_from_file(str(tmp_path / "a.CSV"), "caption") == ["a\ndog"]


BAD_FILES = {
    "empty.txt": (b"", "no prompts in .*empty or blank"),
    "blank.txt": (b"\n \n\t\r\n", "no prompts in .*empty or blank"),
    "empty.csv": (b"", "no prompts in"),
    "header.csv": (b"prompt\n", "no prompts in"),
    "latin.txt": ("über".encode("latin-1"), r"is not UTF-8 text \(byte 0\)"),
    "binary.txt": (b"PNG\0\0dog", "is not text: it has zero bytes"),
    "other.csv": (
        b"id,prompts\n1,a dog\n",
        "line 1: unknown column 'prompt'; allowed: id, prompts. Did you mean 'prompts'",
    ),
    "short.csv": (b"id,prompt\n1\n", "line 2: 'prompt' is None, not text"),
    "torn.csv": (b'prompt\n"a dog\n', "is not valid CSV after line 1"),
    "other.jsonl": (
        b'{"prompt": "a"}\n{"promt": "b"}',
        "line 2: unknown column 'prompt'; allowed: promt. Did you mean",
    ),
    "half.jsonl": (b'{"prompt": "a dog \\ud800"}', "line 1: 'prompt' is 'a dog .ud800', not UTF-8"),
    "number.jsonl": (b'{"prompt": 3}', "line 1: 'prompt' is 3, not text"),
    "list.jsonl": (b'["a dog"]', "line 1 is not a JSON object"),
    "torn.jsonl": (b'{"prompt": "a dog"', "line 1 is not JSON"),
    "deep.jsonl": (b"[" * 100_000, "line 1 is not JSON"),
    "prompts.json": (b"[]", r"unknown kind of prompt file 'prompts.json'; allowed: .txt, .csv, .jsonl"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        prompts_from_file(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    for name in ("none.txt", "folder.txt"):
        with pytest.raises(FileNotFoundError, match=f"no prompt file '.*{name}'"):
            prompts_from_file(tmp_path / name)
