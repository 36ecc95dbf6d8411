"""UCE: its closed form beside another solver's, what it makes of prompts, and whole runs from the command line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from tiny_edits import changed, state
from torch import Tensor

from cgru.backbones import load_model
from cgru.backbones.base import Backbone
from cgru.backbones.hooked import Hooked
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.cli import main
from cgru.config import override
from cgru.edits import WeightsEdit, load_edit
from cgru.mdp.trajectory import Conditioning
from cgru.methods import uce
from cgru.prompts import task_for
from cgru.prompts.grammar import are_related
from cgru.runs import Run, read_metrics
from cgru.tasks import Concept, UnlearnTask

OPTIONS = ["--method", "uce", "--device", "cpu"]


@pytest.fixture(scope="module")
def canvas() -> Backbone:
    """Emoji Canvas; do not change its weights."""
    return load_model("emoji-canvas", device="cpu")


@pytest.fixture(scope="module")
def dogs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the defaults, from the command line."""
    return unlearned("Dogs", tmp_path_factory.mktemp("runs"))


def unlearned(concept: str, out: Path, *options: str) -> Path:
    """The run's folder."""
    before = set(out.iterdir())
    assert main(["unlearn", concept, *OPTIONS, "--out", str(out), *options]) == 0
    (run,) = set(out.iterdir()) - before
    return run


def parameters(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "edit" / "edit.json").read_text())["parameters"]
    return found


def values(backbone: Backbone, prompt: str, place: int) -> dict[str, Tensor]:
    """Layer -> what its keys or values are for one token of a prompt."""
    token = backbone.encode_text([prompt]).embeddings[0, place]
    rows = dict(backbone.denoiser.named_parameters())
    return {name: rows[name].detach() @ token for name in uce.cross_attention(backbone)}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Over all layers, relative to the other's length."""
    apart = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (apart / sum(float(row.square().sum()) for row in other.values())) ** 0.5


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["unlearn", *options, *OPTIONS]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and not Path("runs").exists()
    return told


def test_the_closed_form_by_hand() -> None:
    # W = 2, c = 1, c* = 3, k = 2, λ = 1, a = 1, b = 0.5: W' = (1·2 + 1·6·1 + 0.5·4·2) / (1 + 1 + 0.5·4) = 12 / 4 = 3.
    cross, own, kept = (torch.tensor([[value]], dtype=torch.float64) for value in (3.0, 1.0, 0.5 * 4))
    assert 2 * (1 + float(uce.solve(cross, own, kept, 1.0))) == pytest.approx(3)


def test_the_closed_form_is_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    weight, concept, anchor, kept = (torch.randn(n, 5, **wide) for n in (4, 7, 7, 6))
    a, b, ridge = 2.0, 0.3, 0.7
    change = uce.solve(a * anchor.T @ concept, a * concept.T @ concept, b * kept.T @ kept, ridge)
    # The same sum of squares as one overdetermined system, each row scaled by the root of its weight.
    inputs = torch.cat([a**0.5 * concept, b**0.5 * kept, ridge**0.5 * torch.eye(5, **wide)])
    goals = torch.cat([a**0.5 * anchor @ weight.T, b**0.5 * kept @ weight.T, ridge**0.5 * weight.T])
    expected = torch.linalg.lstsq(inputs, goals).solution.T
    assert torch.allclose(weight + weight @ change, expected, atol=1e-12)


@pytest.mark.parametrize("only_last", [False, True])
def test_a_run_is_the_closed_form_on_the_prompts_by_hand(sd_folder: Path, tmp_path: Path, only_last: bool) -> None:
    """Each word is of three tokens, so the tokens of "yak" and "emu" meet those of "cow" place by place."""
    model = load_stable_diffusion(sd_folder, device="cpu")
    task = UnlearnTask(Concept("yak", "text"), ("yak", "emu"), ("hen", "cat"), ("a {bare}", "{bare} at sea"))
    settings = [f"tokens={'last' if only_last else 'all'}", "anchor=cow", "erase=2", "preserve=0.3", "ridge=0.7"]
    config = override(uce.Config("yak", model=str(sd_folder), method="uce"), settings)
    run = Run.create(tmp_path, config)
    edit = uce.run(model, task, config, run)
    assert isinstance(edit, WeightsEdit)

    def tokens(word: str) -> Tensor:
        rows = model.encode_text([f"a {word}", f"{word} at sea"]).embeddings.double()
        return (
            torch.stack([rows[0, 4], rows[1, 3]]) if only_last else rows.flatten(0, 1)
        )  # start, "a", the word's three

    own = torch.cat([tokens("yak"), tokens("emu")])
    goals = torch.cat([tokens("cow"), tokens("cow")])
    kept = torch.cat([tokens("hen"), tokens("cat"), model.encode_text([""]).embeddings[0].double()])
    ridge = 0.7 * own.square().sum(1).mean()
    # W' = (λW + a Σ Wc* cᵀ + b Σ Wk kᵀ)(λI + a Σ ccᵀ + b Σ kkᵀ)⁻¹
    system = ridge * torch.eye(16) + 2 * own.T @ own + 0.3 * kept.T @ kept
    for name, delta in edit.deltas["denoiser"].items():
        weight = model.denoiser.get_parameter(name).detach().double()
        goal = ridge * weight + 2 * weight @ goals.T @ own + 0.3 * weight @ kept.T @ kept
        expected = goal @ system.inverse() - weight
        torch.testing.assert_close(delta.double(), expected, rtol=1e-3, atol=1e-5)
        assert delta.abs().max() > 1e-2
    assert edit.deltas["denoiser"].keys() == set(uce.cross_attention(model))
    change = 2 * (goals - own).T @ own @ system.inverse()
    (record,) = read_metrics(run.path / "metrics.jsonl")
    left = (own + own @ change.T - goals).square().sum() / (own - goals).square().sum()
    assert record["loss"] == pytest.approx(float(left), rel=1e-4)
    assert record["kept/moved"] == pytest.approx(
        float((kept @ change.T).square().sum() / kept.square().sum()), rel=1e-4
    )


def test_what_is_left_and_what_has_moved_are_sums_of_squares() -> None:
    torch.manual_seed(0)
    concept, anchor, kept, change = (torch.randn(n, 3, dtype=torch.float64) for n in (5, 5, 4, 3))
    apart = float((anchor - concept).square().sum())
    sums = uce.Sums(anchor.T @ concept, concept.T @ concept, kept.T @ kept, apart, 5)
    left = (concept + concept @ change.T - anchor).square().sum() / apart
    assert sums.left(change) == pytest.approx(float(left))
    assert sums.moved(change) == pytest.approx(float((kept @ change.T).square().sum() / kept.square().sum()))
    assert sums.left(torch.zeros(3, 3, dtype=torch.float64)) == 1


def test_tokens_meet_their_counterparts() -> None:
    # Start, "a", two tokens of a subject, "in", "Ink", end, padding; the anchor's subject is one token.
    prompt, other = torch.arange(8.0)[:, None] + 1, torch.tensor([1.0, 2, 30, 50, 60, 70, 80, 80])[:, None]
    assert uce.aligned(prompt, other, 3, 2).tolist() == [0, 1, 2, 2, 3, 4, 5, 6]
    assert uce.aligned(other, prompt, 2, 3).tolist() == [0, 1, 3, 4, 5, 6, 7, 7]
    # Without an anchor the sentence ends at "a", which the subject's last token meets; what follows meets what follows.
    assert uce.aligned(prompt, torch.tensor([1.0, 2, 40, 40, 40, 40, 40, 40])[:, None], 3, 1).tolist() == [
        0, 1, 1, 1, 2, 3, 4, 5
    ]  # fmt: skip


def test_the_last_token_is_where_the_tokenizer_says(backbone: StableDiffusion, canvas: Backbone) -> None:
    assert isinstance(canvas, StableDiffusion)
    for model, texts in ((backbone, ["", "a cat", "ox"]), (canvas, ["", "a poodle", "a bunch of flowers", "Dogs"])):
        lengths = [len(ids) for ids in model.tokenizer(texts)["input_ids"]]
        assert uce.last_tokens(model, texts) == [length - 2 for length in lengths]


def test_templates_are_spread_and_kept_whole() -> None:
    assert uce.spread("abcdefgh", 3) == ("a", "c", "f")
    assert uce.spread("ab", 9) == ("a", "b")
    assert uce.filled("a photo of {bare}", "") == "a photo of" and uce.filled("{a} icon", "owl") == "an owl icon"


def test_a_prompt_of_the_concept_is_read_as_the_anchor_s(dogs: Path, canvas: Backbone) -> None:
    before, edit, anchor = state(canvas), load_edit(dogs), str(parameters(dogs)["anchor"])  # type: ignore[arg-type]
    assert isinstance(edit, WeightsEdit)
    pairs = [("a dog", f"a {anchor}", 2), ("A Dogs image in Flat style", f"A {anchor} image in Flat style", 3)]
    goals = [values(canvas, other, place) for _, other, place in pairs]
    apart = [
        distance(values(canvas, prompt, place), goal) for (prompt, _, place), goal in zip(pairs, goals, strict=True)
    ]
    kept = ["a horse", "a rabbit", "A Trees image in Ink style", "a picture of a fish", ""]
    originals = [values(canvas, prompt, 2) for prompt in kept]
    with edit.applied(canvas):
        for (prompt, _, place), goal, was in zip(pairs, goals, apart, strict=True):
            assert was > 0.5
            assert distance(values(canvas, prompt, place), goal) < 0.25 * was
        for prompt, original in zip(kept, originals, strict=True):
            assert distance(values(canvas, prompt, 2), original) < 0.15
    assert changed(before, state(canvas)) == []  # type: ignore[arg-type]


def test_the_anchor_is_chosen_recorded_and_no_relative(dogs: Path) -> None:
    task = task_for("Dogs", "emoji-canvas")
    found = parameters(dogs)
    assert found["anchor_is"] == "chosen" and found["anchor"] in task.kept
    (record,) = [json.loads(line) for line in (dogs / "metrics.jsonl").read_text().splitlines()]
    assert record["anchor"] == found["anchor"]
    assert 0 < record["loss"] < 0.2 and 0 < record["kept/moved"] < 0.01


def test_relatives_are_passed_over(canvas: Backbone) -> None:
    task = task_for("Flowers", "emoji-canvas")
    relatives = ("flower bed", "sunflower field", "rose")
    assert uce.nearest(canvas, replace(task, kept=(*relatives, "tower"))) == "tower"
    assert all(any(are_related(word, own) for own in task.words) for word in relatives)
    with pytest.raises(ValueError, match="every kept word is related to 'Flowers'.*Give anchor=WORD"):
        uce.nearest(canvas, replace(task, kept=relatives))


def test_an_anchor_of_the_user_s_is_used(tmp_path: Path, canvas: Backbone) -> None:
    run = unlearned("Dogs", tmp_path, "anchor=Rabbits", "templates=4")
    assert parameters(run) == {"anchor": "Rabbits", "anchor_is": "given"}
    goal = values(canvas, "Rabbits", 1)
    with load_edit(run).applied(canvas):
        assert distance(values(canvas, "dog", 1), goal) < 0.3


def test_the_same_settings_make_the_same_bytes_also_after_a_kill(tmp_path: Path) -> None:
    first, second = (unlearned("Dogs", tmp_path, "templates=2", f"seed={seed}") for seed in (0, 1))
    data = (first / "edit" / "weights.safetensors").read_bytes()
    assert (second / "edit" / "weights.safetensors").read_bytes() == data
    (first / "edit" / "edit.json").unlink()
    assert main(["resume", str(first)]) == 0
    assert (first / "edit" / "weights.safetensors").read_bytes() == data


@pytest.mark.parametrize(
    ("concept", "prompt", "place", "kept", "left"),
    [  # the place of the word's last token; one word in four sentences weighs little against ridge and kept styles
        ("hazard", "an axe", 4, "a cat", 0.4),
        ("Ink", "a dog in Ink style", 4, "a dog in Flat style", 0.7),
    ],
)
def test_hazards_and_styles_go_the_same_way(
    concept: str, prompt: str, place: int, kept: str, left: float, tmp_path: Path, canvas: Backbone
) -> None:
    run = unlearned(concept, tmp_path, "templates=4")
    anchor = str(parameters(run)["anchor"])
    assert anchor in task_for(concept, "emoji-canvas").kept
    replaced = prompt.replace("an axe", f"a {anchor}").replace("Ink", anchor)
    counterpart = 2 if concept == "hazard" else place  # the last token of the word that is drawn instead
    goal, original = values(canvas, replaced, counterpart), values(canvas, kept, 2)
    was = distance(values(canvas, prompt, place), goal)
    with load_edit(run).applied(canvas):
        assert distance(values(canvas, prompt, place), goal) < left * was
        assert distance(values(canvas, kept, 2), original) < 0.1


def test_the_last_token_alone_moves_less(tmp_path: Path) -> None:
    whole, last = (unlearned("Dogs", tmp_path, "templates=4", f"tokens={tokens}") for tokens in ("all", "last"))
    one, other = (load_edit(run) for run in (whole, last))
    assert isinstance(one, WeightsEdit) and isinstance(other, WeightsEdit)
    assert one.fingerprint != other.fingerprint
    assert one.deltas["denoiser"].keys() == other.deltas["denoiser"].keys()


def test_free_text_on_another_model_leaves_the_sentence_without_it(long_sd_folder: Path, tmp_path: Path) -> None:
    run = unlearned("Van Gogh", tmp_path, "--model", str(long_sd_folder), "templates=3")
    assert parameters(run) == {"anchor": "", "anchor_is": "chosen"}
    model = load_stable_diffusion(long_sd_folder, device="cpu")
    goal, kept = values(model, "a photo of", 7), values(model, "a photo of a bicycle", 18)
    original = values(model, "a photo of Van Gogh", 18)  # one token a letter; "f" of "of" is the 7th
    with load_edit(run).applied(model):
        assert distance(values(model, "a photo of Van Gogh", 18), goal) < distance(original, goal)
        assert distance(values(model, "a photo of a bicycle", 18), kept) < 0.2


def test_a_dry_run_names_the_anchor_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["unlearn", "Dogs", *OPTIONS, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^anchor +'cat' \(chosen\)", told, re.M)
    assert "17 words of the concept and 19 kept, in 16 sentences" in told and "20 matrices" in told
    assert main(["unlearn", "Dogs", *OPTIONS, "--dry-run", "--json", "anchor=rabbit"]) == 0
    assert json.loads(capsys.readouterr().out)["anchor"] == "rabbit"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("anchor=dog", "the anchor 'dog' is a word for the concept 'Dogs'"),
        ("anchor=A Puppy", "the anchor 'A Puppy' is a word for the concept 'Dogs'"),
        ("anchor=", "anchor is ''; allowed: a text of one line, not empty"),
        ("ridge=0", "ridge is 0.0; allowed: a number, above 0"),
        ("templates=0", "templates is 0; allowed: a whole number, at least 1"),
        ("tokens=first", "unknown tokens 'first'; allowed: all, last"),
        (f"anchor={'cat ' * 60}", "is as long as the 48 tokens that 'emoji-canvas' reads"),
    ],
)
def test_wrong_settings_are_one_line(
    setting: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "Dogs", setting)


def test_free_text_that_fills_the_prompt_is_one_line(
    sd_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, "a whole long text", "--model", str(sd_folder))
    assert "is as long as the 16 tokens that" in told


@pytest.mark.parametrize(("narrow", "threads"), [(uce.NARROW, 1), (8, 2)])  # the tiny model's texts have width 16
def test_a_small_model_takes_one_thread_and_gives_the_others_back(
    narrow: int, threads: int, long_sd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[int]()

    def counted(cond: Conditioning) -> Conditioning:
        seen.add(torch.get_num_threads())
        return cond

    monkeypatch.setattr(uce, "NARROW", narrow)
    model = Hooked(load_stable_diffusion(long_sd_folder, device="cpu"), embed=counted)
    config = uce.Config("Van Gogh", model=str(long_sd_folder), method="uce", templates=1)
    torch.set_num_threads(2)
    try:
        uce.run(model, task_for("Van Gogh", config.model), config, Run.create(tmp_path, config))
        assert seen == {threads} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_what_is_too_long_is_refused_before_the_model_is_loaded(sd_folder: Path) -> None:
    with pytest.raises(ValueError, match="'.*a whole long text.*' is as long as the 16 tokens that .*; allowed"):
        uce.check(uce.Config("a whole long text", model=str(sd_folder), method="uce"))


def test_a_prompt_may_be_as_long_as_leaves_room_for_one_word_more(backbone: StableDiffusion) -> None:
    """Of 16 tokens two are start and end, and last_tokens adds "a": 13 letters fit."""
    uce.refuse_long("tiny", backbone, ["cat", "x" * 13])
    assert uce.last_tokens(backbone, ["cat", "x" * 13]) == [3, 13]
    with pytest.raises(ValueError, match=f"'{'x' * 14}' is as long as the 16 tokens"):
        uce.refuse_long("tiny", backbone, ["x" * 14, "cat"])


def test_models_that_do_not_read_text_so_are_refused(backbone: StableDiffusion) -> None:
    config, task = uce.Config("Van Gogh", model="own"), task_for("Van Gogh", "own")
    blocks = {"block_out_channels": (8,), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    plain = UNet2DModel(
        **blocks, in_channels=4, out_channels=4, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    narrow = UNet2DConditionModel(
        **blocks,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=8,
        attention_head_dim=4,
    )
    with pytest.raises(ValueError, match=r"has no cross-attention; allowed for uce"):
        uce.prepare(replace(backbone, denoiser=plain), task, config)
    with pytest.raises(ValueError, match="has cross-attention that does not read its text embeddings; allowed for uce"):
        uce.prepare(replace(backbone, denoiser=narrow), task, config)


def test_an_encoder_that_looks_ahead_is_refused(backbone: StableDiffusion) -> None:
    def seen_by_all(cond: Conditioning) -> Conditioning:
        return replace(cond, tensors={"embeddings": cond.embeddings + cond.embeddings.mean(1, keepdim=True)})

    with pytest.raises(ValueError, match="looks ahead, so prompts cannot be aligned; allowed for uce: causal ones"):
        uce.last_tokens(Hooked(backbone, embed=seen_by_all), ["a cat"])


@pytest.mark.slow
def test_the_judge_misses_horses_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = unlearned("Horses", tmp_path)
    capsys.readouterr()
    command = ["evaluate", str(run), "--target", "Horses", "--images", "1", "--no-base", "--device", "cpu", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["measurements"]
    assert found["ua"]["n"] == 80 and found["ua"]["value"] >= 0.95
    assert found["ira"]["n"] == 152 and found["ira"]["value"] >= 0.93
