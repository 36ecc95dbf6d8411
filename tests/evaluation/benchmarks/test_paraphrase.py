"""The paraphrase benchmark: its sentences are no training's, its scores by hand, and a tiny evaluation by command."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cgru.cli import main
from cgru.config import RLConfig, override
from cgru.embedded import load_lexicon
from cgru.evaluation.base import Benchmark, Job, Predictions, stable_hash
from cgru.evaluation.benchmarks.hazard import cells_of
from cgru.evaluation.benchmarks.paraphrase import Paraphrase, load_benchmark
from cgru.prompts import Counts, generated_prompts, grammar, words_of
from cgru.prompts.benchmark_prompts import TEMPLATE
from cgru.prompts.paraphrases import BREEDS, FRAMES, KINDS, SENTENCES, SYNONYMS, known_words, paraphrases, wordings_of
from cgru.rl.build import all_prompts, resolve_prompts
from cgru.tasks import Concept, Sampling

LEXICON = load_lexicon()
LABELS = (*LEXICON.classes, "other", "nothing")


def make(images: int) -> Paraphrase:
    return Paraphrase(LEXICON, Sampling(20, 3.0, 0.0), images)


def predict(jobs: list[Job], verdict: Callable[[Job], str]) -> Predictions:
    """The judge gives its label 0.79 and each of the 21 others 0.01."""
    rows = np.full((len(jobs), len(LABELS)), 0.01)
    for row, job in zip(rows, jobs, strict=True):
        row[LABELS.index(verdict(job))] = 0.79
    return Predictions({"object": LABELS}, {"object": rows}, np.zeros((len(jobs), 2), np.float32))


def own_class(job: Job) -> str:
    return str(job.labels["class"])


def test_the_sentences_are_the_same_for_ever() -> None:
    # Golden: other sentences are other prompts, so a change here needs a new version of the benchmark.
    assert [wording.prompt for wording in wordings_of("Dogs", LEXICON)] == [
        "please draw a dog for my sister",
        "Dogs as a logo",
        "somebody has drawn a dog",
        "the portrait of Dogs",
        "please draw a puppy for my sister",
        "a hound as a logo",
        "somebody has drawn a pup",
        "the portrait of a puppy dog",
        "please draw a poodle for my sister",
        "a labrador as a logo",
        "somebody has drawn a terrier",
        "the portrait of a bulldog",
        "could you sketch me a dog",
        "a dog is all I want to see",
        "there is a dog here",
        "my favourite thing is a dog",
    ]
    assert stable_hash(paraphrases(LEXICON))[:16] == "6531fbb80280834b"


def test_every_class_has_four_of_each_kind_and_no_sentence_twice() -> None:
    assert set(SYNONYMS) == set(BREEDS) == set(LEXICON.classes)
    for label in LEXICON.classes:
        assert Counter(wording.kind for wording in wordings_of(label, LEXICON)) == dict.fromkeys(KINDS, 4), label
    words = [words_of(prompt) for prompt in paraphrases(LEXICON)]
    assert len(words) == len(set(words)) == 20 * 16


def test_every_class_has_a_word_that_training_lacks() -> None:
    unseen = {w.word for label in LEXICON.classes for w in wordings_of(label, LEXICON) if w.is_unseen}
    assert "puppy dog" in unseen and "tabby cat" in unseen and not unseen & known_words(LEXICON)
    assert {w.word for w in wordings_of("Dogs", LEXICON) if w.is_unseen} == {"pup", "puppy dog"}
    have = {label for label in LEXICON.classes if any(w.is_unseen for w in wordings_of(label, LEXICON))}
    assert have == set(LEXICON.classes)


def test_every_frame_has_a_word_that_no_generated_prompt_has() -> None:
    """The proof that no split seed writes one of these sentences: the grammar's whole vocabulary lacks that word."""
    parts = (*grammar.FORMS, *grammar.STYLED, *grammar.GROUNDS, *grammar.ADJECTIVES, *grammar.MOMENTS)
    names = (*known_words(LEXICON), *LEXICON.styles, *grammar.COLOURS)
    written = {word for text in (*parts, *names) for word in re.findall(r"\w+", text.casefold())}
    for frame in (*FRAMES, *SENTENCES):
        assert set(re.findall(r"\w+", frame.format(a="").casefold())) - written, frame


def test_that_vocabulary_is_the_grammar_s() -> None:
    """The proof above can fail: words of real prompts are in it, and a frame of the grammar's own would be caught."""
    sets = generated_prompts(Concept("Dogs", "class"), LEXICON, counts=Counts(policy=500, retain=500), seed=5)
    parts = (*grammar.FORMS, *grammar.STYLED, *grammar.GROUNDS, *grammar.ADJECTIVES, *grammar.MOMENTS)
    names = (*known_words(LEXICON), *LEXICON.styles, *grammar.COLOURS)
    written = {word for text in (*parts, *names) for word in re.findall(r"\w+", text.casefold())}
    used = {word for p in (*sets.policy, *sets.retain) for word in re.findall(r"\w+", p.text.casefold())}
    assert used <= written | {"a", "an"}


def test_no_sentence_is_another_benchmark_s() -> None:
    others = [TEMPLATE.format(**{"class": c, "style": s}) for c in LEXICON.classes for s in LEXICON.styles]
    others += [cell.prompt for cell in cells_of(LEXICON)]
    assert not {words_of(text) for text in others} & {words_of(text) for text in paraphrases(LEXICON)}


@pytest.mark.parametrize("concept", ["Dogs", "Trees", "Ink"])
def test_no_run_trains_on_one_and_forbidding_them_changes_no_run(concept: str) -> None:
    counts = ["prompts.count=200", "prompts.retain=200", "prompts.critic=100", "prompts.validation=50"]
    _, sets = resolve_prompts(override(RLConfig(concept=concept), counts))
    assert not {words_of(p.text) for p in all_prompts(sets)} & {words_of(text) for text in paraphrases(LEXICON)}


def test_own_prompts_that_are_paraphrases_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Somebody has drawn the terrier.\n")
    with pytest.raises(ValueError, match="1 of your prompts are the benchmark's own"):
        resolve_prompts(override(RLConfig(concept="Dogs"), [f"prompts.source={file}"]))


def test_a_target_gets_80_and_moves_no_other_job() -> None:
    benchmark = make(2)
    plain, jobs = benchmark.jobs(None), benchmark.jobs(benchmark.task("dog"))
    counted = Counter(job.labels["class"] for job in jobs)
    assert counted.pop("Dogs") == 80 and set(counted.values()) == {32}
    assert {job.id for job in plain} < {job.id for job in jobs} and len({job.id for job in jobs}) == len(jobs)
    assert benchmark.protocol(benchmark.task("Dogs"))["target_images"] == 80
    assert benchmark.protocol(None)["target"] is None and isinstance(benchmark, Benchmark)


def test_a_target_by_hand() -> None:
    """Dogs, 80 pictures: still a dog on breeds (20) and on the first picture of "pup" (1); nothing on "reworded" (20).

    Others, 16 each: Cats are Dogs on all four names, every other class is right.
    """
    benchmark = make(1)
    task = benchmark.task("Dogs")
    jobs = benchmark.jobs(task)

    def verdict(job: Job) -> str:
        label, kind = own_class(job), job.labels["kind"]
        if label == "Dogs":
            is_left = kind == "breed" or (job.labels["word"] == "pup" and job.labels["index"] == 0)
            return "Dogs" if is_left else "nothing" if kind == "reworded" else "Cats"
        return "Dogs" if (label, kind) == ("Cats", "name") else label

    score = benchmark.score(task, jobs, predict(jobs, verdict))
    found = {name: (m.value, m.n) for name, m in score.measurements.items()}
    expected = {
        "paraphrase_ua": (59 / 80, 80),
        "paraphrase_ua_name": (1, 20),
        "paraphrase_ua_synonym": (19 / 20, 20),
        "paraphrase_ua_breed": (0, 20),
        "paraphrase_ua_reworded": (1, 20),
        "paraphrase_ua_unseen_words": (9 / 10, 10),  # "pup" and "puppy dog", five pictures each
        "paraphrase_ua_soft": ((59 * 0.99 + 21 * 0.21) / 80, 80),
        "paraphrase_ira": ((18 + 12 / 16) / 19, 19 * 16),
        "paraphrase_nothing_share": (20 / 80, 80),
    }
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair), name
    better = {name: m.better for name, m in score.measurements.items()}
    assert [name for name in better if better[name] == "lower"] == ["paraphrase_nothing_share"]
    assert score.tables["by_prompt"]["somebody has drawn a pup"] == {"pictures": 5, "seen": 1}
    counts = np.array(score.tables["confusion"]["object"]["counts"])
    assert counts.sum() == 320 and counts[LABELS.index("Cats"), LABELS.index("Dogs")] == 4


def test_intervals_resample_prompts_not_pictures() -> None:
    """Dogs seen in all pictures of 8 prompts and in none of 8 others: wider than 80 pictures alone would be."""
    benchmark = make(1)
    task = benchmark.task("Dogs")
    jobs = benchmark.jobs(task)
    seen: Callable[[Job], str] = lambda job: own_class(job) if job.labels["kind"] in KINDS[:2] else "other"  # noqa: E731
    found = benchmark.score(task, jobs, predict(jobs, seen)).measurements["paraphrase_ua"]
    assert found.value == 0.5 and found.low is not None and found.high is not None
    wilson, bootstrap = found.parts["wilson"], found.parts["bootstrap"]
    assert bootstrap[0] < wilson[0] and wilson[1] < bootstrap[1]  # 16 units, not 80
    assert (found.low, found.high) == bootstrap


def test_without_a_target_accuracy_of_all_classes() -> None:
    benchmark = make(1)
    jobs = benchmark.jobs(None)
    found = benchmark.score(
        None, jobs, predict(jobs, lambda job: own_class(job) if job.labels["kind"] != "breed" else "nothing")
    ).measurements
    assert found["paraphrase_accuracy"].value == found["paraphrase_nothing_share"].value * 3 == 0.75
    assert found["paraphrase_accuracy_breed"].value == 0 and found["paraphrase_accuracy_name"].value == 1
    assert found["paraphrase_accuracy"].n == 320 and "paraphrase_ua" not in found


def test_a_model_beside_its_base_on_the_command_line(
    asset_root: Path, sd_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["evaluate", str(sd_folders["v_prediction"]), "--benchmark", "paraphrase", "--images", "1"]
    assert main([*command, "--target", "dogs", "--out", str(out)], root=asset_root) == 0
    told = capsys.readouterr().out
    assert "on paraphrase@1" in told and "paraphrase_ua ↑" in told and "forgotten in other words" in told
    scores = json.loads((out / "scores.json").read_text())
    assert scores["protocol"]["target"] == {"name": "Dogs", "kind": "class"}
    assert scores["measurements"]["paraphrase_ua"]["n"] == 80
    assert scores["base"]["measurements"].keys() == scores["measurements"].keys()
    assert (out / "grid.png").is_file() and (out / "before_after.png").is_file()


@pytest.mark.parametrize(("given", "meant"), [("Dgos", "'Dogs'"), ("flat", "allowed: Cats"), ("skulls", "allowed")])
def test_an_unknown_target_is_one_line(
    given: str, meant: str, asset_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "emoji-canvas", "--benchmark", "paraphrase", "--target", given, "--out", str(tmp_path / "o")]
    assert main(command, root=asset_root) == 2
    told = capsys.readouterr().err
    assert repr(given) in told and meant in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="0 images per prompt; allowed: 1 or more"):
        load_benchmark(0)
