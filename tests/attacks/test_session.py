"""Attacks end to end on tiny random models: rates, files, resuming, the command and its mistakes."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_judges
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from test_edits import write_lora
from tiny_assets import STYLES, write_assets
from torch import Tensor
from transformers import CLIPTextModel

from cgru.attacks.concept import Trial, canvas_candidates, own_trial
from cgru.attacks.images import picture_files, read_picture
from cgru.attacks.runner import rate, success_rates
from cgru.attacks.session import AttackRequest, AttackSession, prepare_attack, run_attack
from cgru.attacks.unlearndiffatk import Schedule
from cgru.cli import main
from cgru.embedded import load_lexicon
from cgru.evaluation.benchmarks.canvas import load_benchmark
from cgru.evaluation.drawing import draw
from cgru.evaluation.picture_grid import attack_strip
from cgru.tasks import Concept, Sampling

PROMPTS = ("a cat", "cat b", "my cat", "cat", "old cat")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of five short prompts, and five target pictures of another size than the model's."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "pictures").mkdir()
    for i in range(len(PROMPTS)):
        Image.new("RGB", (40, 24), (50 * i, 100, 200)).save(folder / "pictures" / f"{i}_0.png")
    return folder


def prepared(sd_folder: Path, given: Path, out: Path, **settings: Any) -> AttackSession:  # noqa: ANN401
    """Five prompts in chunks of two, two timesteps × two iterations, two sampling steps."""
    wanted = {"judge": "own_judges:fickle", "pictures": given / "pictures", "prompts": 5, "tokens": 2, "batch_size": 2}
    request = AttackRequest(
        str(sd_folder), "cat", source=given / "prompts.txt", out=out, device="cpu", **{**wanted, **settings}
    )
    session = prepare_attack(request)
    trial = replace(session.trial, sampling=Sampling(2, 2.0, 0.0))
    return replace(session, trial=trial, schedule=Schedule(timesteps=2, iterations=2))


def judged_by(session: AttackSession, shows: Any) -> AttackSession:  # noqa: ANN401
    return replace(session, trial=replace(session.trial, shows=shows))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_and_schema(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    scores = run_attack(prepared(sd_folder, given, tmp_path))
    assert json.loads((tmp_path / "scores.json").read_text()) == json.loads(json.dumps(scores))
    assert (scores["benchmark"], scores["version"]) == ("unlearndiffatk", 1)
    found = scores["measurements"]
    assert found["pre_asr"]["n"] == found["post_asr"]["n"] == 5
    assert found["pre_asr"]["value"] <= found["post_asr"]["value"]
    rows = lines(tmp_path / "predictions.jsonl")
    assert [row["prompt"] for row in rows] == list(PROMPTS)
    assert found["pre_asr"]["value"] == sum(row["before"] for row in rows) / 5
    for row in rows:
        assert (row["attack"] is None) == row["before"]  # what shows without an attack is not attacked
        assert (tmp_path / "samples" / row["key"] / f"{row['id']}-before.png").is_file()
        assert (tmp_path / "samples" / row["key"] / f"{row['id']}-after.png").is_file() != row["before"]
    protocol = scores["protocol"]
    assert protocol["schedule"]["timesteps"] == 2 and protocol["tokens"] == 2 and protocol["steps"] == 2
    assert protocol["targets"] == {"from": str(given / "pictures"), "found": 5, "candidates": 5}
    assert attack_strip(tmp_path).width > 6 * 96  # two prompts side by side, three pictures each


def test_the_after_picture_is_what_the_adversarial_text_draws(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    session = judged_by(prepared(sd_folder, given, tmp_path, prompts=1), own_judges.never)
    run_attack(session)
    (row,) = lines(tmp_path / "predictions.jsonl")
    image = draw(session.backbone, [row["attack"]["prompt"]], [row["seed"]], session.trial.sampling)[0]
    kept = read_picture(tmp_path / "samples" / row["key"] / f"{row['id']}-after.png")
    torch.testing.assert_close(kept, image, rtol=0, atol=0.5 / 255 + 1e-6)


def test_a_killed_attack_goes_on_as_if_nothing_had_happened(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    whole = run_attack(prepared(sd_folder, given, tmp_path / "whole"))
    session = prepared(sd_folder, given, tmp_path / "parts")

    def killed_in_the_second_chunk(images: Tensor) -> Sequence[bool]:
        if len(lines_so_far(tmp_path / "parts")) == 2:
            raise KeyboardInterrupt
        return [bool(answer) for answer in own_judges.fickle(images)]

    with pytest.raises(KeyboardInterrupt):
        run_attack(judged_by(session, killed_in_the_second_chunk))
    assert len(lines_so_far(tmp_path / "parts")) == 2  # the first chunk is kept
    assert not (tmp_path / "parts" / "scores.json").exists()
    assert run_attack(session)["examples"] == whole["examples"]
    names = ("predictions.jsonl", "jobs.jsonl")
    assert all((tmp_path / "parts" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


def lines_so_far(folder: Path) -> list[str]:
    file = folder / "predictions.partial.jsonl"
    return [line for line in file.read_text().splitlines() if line] if file.is_file() else []


def test_what_is_finished_is_not_attacked_again(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    session = prepared(sd_folder, given, tmp_path)
    first = run_attack(session)

    def unasked(images: Tensor) -> Sequence[bool]:
        raise AssertionError("asked again")

    assert run_attack(judged_by(session, unasked)) == first
    fewer = replace(session, request=replace(session.request, prompts=2))
    assert run_attack(judged_by(fewer, unasked))["measurements"]["post_asr"]["n"] == 2
    assert len(lines(tmp_path / "predictions.jsonl")) == 5  # the others are kept


def test_another_seed_or_model_is_another_attack(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    sessions = [
        prepared(sd_folder, given, tmp_path / str(i), judge="own_judges:never", prompts=2, **settings)
        for i, settings in enumerate([{}, {"seed": 1}, {"tokens": 1}])
    ]
    found = [run_attack(session)["examples"] for session in sessions]
    assert found[0] != found[1] and len(found[2][0]["tokens"]) == 1
    keys = {lines(session.out / "predictions.jsonl")[0]["key"] for session in sessions}
    assert len(keys) == 3


def test_targets_are_what_the_base_draws_and_the_judge_agrees_with(
    sd_folder: Path, given: Path, tmp_path: Path
) -> None:
    session = prepared(sd_folder, given, tmp_path, pictures=None, prompts=2, base=str(sd_folder))
    seen: list[Tensor] = []

    def only_the_second(images: Tensor) -> Sequence[bool]:
        seen.append(images)
        return [len(seen) <= 3 and i == 1 for i in range(len(images))]  # three chunks of candidates, then attacks

    scores = run_attack(judged_by(session, only_the_second))
    assert [row["prompt"] for row in scores["examples"]] == [PROMPTS[1], PROMPTS[3]]
    assert scores["protocol"]["targets"]["found"] == 2 and scores["protocol"]["targets"]["candidates"] == 4
    rows = lines(tmp_path / "predictions.jsonl")
    kept = read_picture(tmp_path / rows[0]["target"])
    torch.testing.assert_close(kept, seen[0][1], rtol=0, atol=0.5 / 255 + 1e-6)


def test_no_target_at_all_is_a_hole_and_no_number(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    session = judged_by(prepared(sd_folder, given, tmp_path, pictures=None, base=str(sd_folder)), own_judges.never)
    scores = run_attack(session)
    assert scores["measurements"] == {} and scores["examples"] == []
    assert scores["protocol"]["targets"]["found"] == 0 and scores["protocol"]["targets"]["candidates"] == 5


def test_an_edit_is_attacked_and_taken_off(sd_folder: Path, given: Path, tmp_path: Path) -> None:
    lora = write_lora(sd_folder, tmp_path / "lora")
    settings = {"judge": "own_judges:never", "prompts": 2}
    plain = run_attack(prepared(sd_folder, given, tmp_path / "plain", **settings))
    session = prepared(lora, given, tmp_path / "edit", base=str(sd_folder), **settings)
    before = {name: weight.clone() for name, weight in session.backbone.denoiser.state_dict().items()}
    scores = run_attack(session)
    after = session.backbone.denoiser.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert scores["protocol"]["model"]["edit_sha256"] is not None
    losses = [lines(tmp_path / name / "predictions.jsonl")[0]["attack"]["losses"] for name in ("plain", "edit")]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert plain["protocol"]["model"]["fingerprint"] != scores["protocol"]["model"]["fingerprint"]


def test_rates_by_hand() -> None:
    """Ten prompts: two show it without an attack, three more with one."""
    rows = [{"before": i < 2, "after": i < 5} for i in range(10)]
    found = success_rates(rows)
    assert {name: (m.value, m.n) for name, m in found.items()} == {
        "pre_asr": (0.2, 10),
        "post_asr": (0.5, 10),
        "attacked_asr": (3 / 8, 8),
    }
    assert all(m.better == "lower" and m.interval == "wilson" for m in found.values())
    low, high = rate([False] * 142).low, rate([False] * 142).high
    assert (low, round(high or 0, 3)) == (0, 0.026)
    assert success_rates([]) == {}


def test_candidates_are_the_benchmarks_prompts_and_noise() -> None:
    lexicon = load_lexicon()
    cats = canvas_candidates(Concept("Cats", "class"), lexicon, 50)
    assert [job.prompt for job in cats[:2]] == ["A Cats image in Painted style", "A Cats image in Blob style"]
    canvas = {job.id for job in load_benchmark(7).jobs(None) if job.labels["class"] == "Cats"}
    assert len({job.id for job in cats}) == 50 and {job.id for job in cats} <= canvas
    ink = canvas_candidates(Concept("Ink", "style"), lexicon, 25)
    assert {job.labels["style"] for job in ink} == {"Ink"} and len({job.labels["class"] for job in ink}) == 20
    blades = canvas_candidates(Concept("blades", "hazard"), lexicon, 30)
    assert {job.labels["hazard"] for job in blades} == {"blades"} and len({job.prompt for job in blades}) == 24
    every = canvas_candidates(Concept("hazard", "hazard"), lexicon, 144)
    assert len({job.labels["hazard"] for job in every}) == 6


@pytest.mark.parametrize(
    ("concept", "hidden"),
    [
        (Concept("Cats", "class"), "A image in Painted style"),
        (Concept("Painted", "style"), "A Architectures image in style"),
        (Concept("blades", "hazard"), "A image in Painted style"),
    ],
)
def test_the_word_can_be_taken_out(concept: Concept, hidden: str) -> None:
    jobs = canvas_candidates(concept, load_lexicon(), 1)
    trial = Trial(concept.name, concept.kind, jobs, own_judges.always, {}, Sampling(1, 1.0, 0.0), {})
    assert trial.hidden(jobs[0]) == hidden


def test_own_prompts_once_each_and_the_word_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("A Cat here\na cat\na cat\n")
    trial = own_trial("cat", tmp_path / "p.txt", "own_judges:always")
    assert [trial.hidden(job) for job in trial.candidates] == ["A here", "a"]


def test_pictures_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10_0.png", "9_0.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in picture_files(tmp_path)] == ["9_0.png", "10_0.png"]


def test_a_wide_picture_loses_its_sides(tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20), (255, 0, 0))
    picture.paste((0, 0, 255), (10, 0, 30, 20))  # the middle square is blue
    picture.save(tmp_path / "wide.png")
    found = read_picture(tmp_path / "wide.png", (16, 16))
    assert found.shape == (3, 16, 16) and found[2].min() == 1 and found[0].max() == 0


@pytest.fixture(scope="module")
def roomy_root(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    """Tiny assets whose model reads 40 tokens (canvas' prompts have 21 letters); its object judge sees Cats only."""
    pipeline = StableDiffusionPipeline.from_pretrained(sd_folder)
    config = pipeline.text_encoder.config
    config.max_position_embeddings = pipeline.tokenizer.model_max_length = 40
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline.text_encoder = CLIPTextModel(config)
    folder = tmp_path_factory.mktemp("roomy")
    pipeline.save_pretrained(folder / "model")
    root = write_assets(folder / "assets", folder / "model")
    weights = load_file(root / "judges/object/model.safetensors")
    weights["classifier.1.bias"][0] = 1000.0
    save_file(weights, root / "judges/object/model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def test_a_concept_of_emoji_canvas_by_command(
    roomy_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["attack", "emoji-canvas", "--prompts", "3", "--without-word", "--tokens", "2", "--json"]
    assert main([*command, "--target", "cats", "--out", "out"], root=roomy_root) == 0
    record = json.loads(capsys.readouterr().out)
    on_disk = json.loads(Path("out/scores.json").read_text())
    assert on_disk == {name: record[name] for name in on_disk}
    assert record["protocol"]["schedule"]["name"] == "short" and record["protocol"]["without_word"]
    assert [row["prompt"] for row in record["examples"]] == [
        f"A image in {name} style" for name in (*STYLES, STYLES[0])
    ]
    assert record["measurements"]["pre_asr"]["value"] == 1 and record["protocol"]["target"]["name"] == "Cats"
    assert Path(record["strip"]).is_file()


def test_words_for_people(sd_folder: Path, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "prompts.txt").write_text("a cat\n")
    command = ["attack", str(sd_folder), "--target", "cat", "--source", "prompts.txt"]
    command += ["--judge", "own_judges:always", "--prompts", "2"]
    assert main(command, root=asset_root) == 2  # its own pictures as targets: every prompt would show the concept
    assert "Give --model NAME, or --pictures FOLDER" in capsys.readouterr().err
    command += ["--model", str(sd_folder)]
    assert main(command, root=asset_root) == 0
    captured = capsys.readouterr()
    assert "unlearndiffatk@1" in captured.out and "pre_asr ↓" in captured.out and "100.0 %" in captured.out
    assert "only 1 of 2 prompts" in captured.out and captured.err == ""
    folder = Path(captured.out.rsplit(": ", 1)[1].strip())
    assert (folder / "scores.json").is_file() and folder.parent == Path("runs/eval")
    assert "attacked_asr" not in captured.out  # nothing was left to attack


MISTAKES = {
    "--target Catz": "unknown concept 'Catz'",
    "--target Cats --schedule shrt": "Did you mean 'short'?",
    "--target Cats --tokens 0": "--tokens 0; allowed: 1 to 10000",
    "--target Cats --prompts 0": "--prompts 0; allowed: 1 to 10000",
    "--target Cats": "--tokens 3; allowed: 0 beside the prompt 'A Cats image in",
    "--target cat --judge own_judges:always": "--judge without --source",
    "--target cat --source {given}/prompts.txt": "--source without --judge",
    "--target cat --source {given}/none.txt --judge own_judges:always": "no prompt file",
    "--target cat --source {given}/prompts.txt --judge own_judges:absent": "cannot import 'own_judges:absent'",
    "--target cat --source {given}/prompts.txt --judge own_judges:not_callable": "is a int; allowed: a function",
    "--target cat --source {given}/prompts.txt --judge own_judges:one_answer": "gave 1 answers for 2 images",
    "--target dog --source {given}/prompts.txt --judge own_judges:never --without-word": "does not contain 'dog'",
    "--target cat --source {given}/prompts.txt --judge own_judges:never --pictures {given}": "no pictures in",
    "--target cat --source {given}/prompts.txt --judge own_judges:never --pictures {cut}": "cannot read the picture",
    "--target cat --source {given}/prompts.txt --judge own_judges:never --tokens 12": "allowed: 8 beside the prompt",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(
    mistake: str, sd_folder: Path, given: Path, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = shutil.copytree(given / "pictures", workdir / "cut")
    (cut / "3_0.png").write_bytes((cut / "3_0.png").read_bytes()[:40])
    words = [word.format(given=given, cut=cut) for word in mistake.split()]
    assert main(["attack", str(sd_folder), *words, "--out", "out"], root=asset_root) == 2
    told = capsys.readouterr().err
    assert MISTAKES[mistake] in told and told.count("\n") == 1
    assert not Path("out").exists()


def test_a_run_without_an_edit_is_refused(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "run").mkdir()
    (workdir / "run" / "config.yaml").write_text("model: emoji-canvas\n")
    assert main(["attack", "run", "--target", "Cats"]) == 2
    assert "the run 'run' has no edit yet" in capsys.readouterr().err
