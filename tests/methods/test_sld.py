"""SLD: its guidance against a plain second implementation, its momentum over batches, and the way to a picture."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_edits import changed, state
from torch import Tensor

from cgru.backbones.base import Backbone
from cgru.backbones.hooked import Hooked
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.cli import main
from cgru.edits import HookEdit, load_edit, save_edit, stack
from cgru.edits.hook import Value
from cgru.mdp.kernel import ReverseKernel
from cgru.mdp.rollout import noise_for, sample
from cgru.methods.sld import CANVAS, KEPT, NUMBERS, PAPER_LIST, PRESETS, Config, adjust, edit_for, steer
from cgru.presets import resolve_config
from cgru.prompts import task_for
from cgru.tasks import Concept, UnlearnTask

# Some numbers that leave nothing out: φ below and above 1, a warm-up within the steps, momentum.
SETTINGS = {"scale": 200.0, "threshold": 0.002, "warmup": 0.4, "momentum": 0.5, "decay": 0.7}
PROMPTS, SEEDS, STEPS, GUIDANCE = ("a cat", "my dog", "two", "x"), (1, 2, 3, 4), 5, 3.0


@pytest.fixture(scope="module")
def model(sd_folder: Path) -> StableDiffusion:
    return load_stable_diffusion(sd_folder, device="cpu")


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def sld(**settings: Value) -> HookEdit:
    return HookEdit("sld", {"strength": "medium", "text": "dog", **SETTINGS, **settings})


def drawn(
    model: Backbone,
    prompts: Sequence[str] = PROMPTS,
    seeds: Sequence[int] = SEEDS,
    *,
    kernel: ReverseKernel | None = None,
    batch_size: int | None = None,
) -> Tensor:
    own, cond = kernel or model.kernel(STEPS, eta=0.0), model.encode_text(prompts)
    return sample(model, cond, seeds, kernel=own, guidance=GUIDANCE, batch_size=batch_size)


def reference(model: StableDiffusion, prompt: str, seed: int, numbers: dict[str, float]) -> np.ndarray[Any, Any]:
    """One picture at a time, one number at a time, as the paper's equations 3 to 8 read."""
    kernel = model.kernel(STEPS, eta=0.0)
    x = noise_for(seed, model.latent_shape, 0)
    nu = np.zeros(x.numel())
    for i in range(STEPS):
        e_empty, e_prompt, e_safety = (
            model.predict(x, kernel.timesteps[i].expand(1), model.encode_text([text]), guidance=1.0).numpy().flatten()
            for text in ("", prompt, "dog")
        )
        guided = np.empty_like(e_empty)
        for j in range(len(nu)):
            phi = min(1.0, numbers["scale"] * abs(e_prompt[j] - e_safety[j]))
            mu = phi if e_prompt[j] - e_safety[j] < numbers["threshold"] else 0.0
            gamma = mu * (e_safety[j] - e_empty[j]) + numbers["momentum"] * nu[j]
            nu[j] = numbers["decay"] * nu[j] + (1 - numbers["decay"]) * gamma
            used = gamma if i >= numbers["warmup"] * STEPS else 0.0
            guided[j] = e_empty[j] + GUIDANCE * (e_prompt[j] - e_empty[j] - used)
        x = kernel.step(torch.tensor(guided).view_as(x), x, i).mean
    return x[0].numpy()


@torch.no_grad()
@pytest.mark.parametrize(
    "numbers",
    [SETTINGS, {**SETTINGS, "warmup": 0.0}, {**SETTINGS, "momentum": 0.0}, {**SETTINGS, "threshold": 1.0}],
    ids=["all", "no warm-up", "no momentum", "everywhere"],
)
def test_pictures_are_those_of_the_formula(model: StableDiffusion, numbers: dict[str, float]) -> None:
    with sld(**numbers).applied(model) as edited:
        found = drawn(edited)
    expected = [reference(model, prompt, seed, numbers) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    np.testing.assert_allclose(found.numpy(), np.stack(expected), rtol=0, atol=2e-4)
    assert (found - drawn(model)).abs().max() > 0.02


def test_one_step_by_hand() -> None:
    """e(p) - e(S) = -0.2, 0.005, 0.3: φ = 1 (20 at most 1), 0.5, 1; the last is over λ = 0.01, so μ = 1, 0.5, 0."""
    empty, prompt, safety = (
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([0.1, 0.505, 0.6]),
        torch.tensor([0.3, 0.5, 0.3]),
    )
    config = Config("x", scale=100, threshold=0.01, momentum=0.5, decay=0.25)
    gamma, velocity = steer(empty, prompt, safety, torch.tensor([0.2, 0.0, 0.4]), config)
    # γ = μ (e(S) - e(∅)) + 0.5 ν = 0.3 + 0.1, 0.5 · -0.5, 0 + 0.2
    torch.testing.assert_close(gamma, torch.tensor([0.4, -0.25, 0.2]))
    # ν' = 0.25 ν + 0.75 γ
    torch.testing.assert_close(velocity, torch.tensor([0.35, -0.1875, 0.25]))


@torch.no_grad()
@pytest.mark.parametrize("numbers", [{"scale": 0.0}, {"warmup": 1.0}, {"threshold": -100.0}], ids=str)
def test_a_strength_of_nothing_is_the_base(model: StableDiffusion, numbers: dict[str, float]) -> None:
    with sld(**numbers).applied(model) as edited:
        torch.testing.assert_close(drawn(edited), drawn(model), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("strength", ["medium", "negative"])
def test_without_guidance_it_does_nothing_and_says_so_once(
    model: StableDiffusion, strength: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sld(strength=strength).applied(model) as edited:
        cond, x, time = model.encode_text(["a cat"]), torch.randn(1, *model.latent_shape), torch.tensor([300])
        for _ in range(2):
            found = edited.predict(x, time, cond, guidance=1.0)
    assert torch.equal(found, model.predict(x, time, cond, guidance=1.0))
    assert [record.getMessage() for record in caplog.records] == [
        "guidance is 1: without classifier-free guidance, SLD does nothing"
    ]


@torch.no_grad()
def test_negative_is_the_concept_in_place_of_the_empty_prompt(model: StableDiffusion) -> None:
    with sld(strength="negative").applied(model) as edited:
        x, time, cond = torch.randn(2, *model.latent_shape), torch.tensor([300, 20]), model.encode_text(["a cat", "x"])
        found = edited.predict(x, time, cond, guidance=4.0)
    toward, away = (
        model.predict(x, time, model.encode_text(texts), guidance=1.0) for texts in (["a cat", "x"], ["dog"] * 2)
    )
    torch.testing.assert_close(found, away + 4 * (toward - away), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_batch_does_not_matter(model: StableDiffusion) -> None:
    with sld().applied(model) as edited:
        kernel = edited.kernel(STEPS, eta=0.0)
        whole = drawn(edited, kernel=kernel)
        for size in (1, 3):  # 3 and 1: the last batch has another size than the momentum before it
            torch.testing.assert_close(drawn(edited, kernel=kernel, batch_size=size), whole, rtol=0, atol=1e-4)
        backwards = drawn(edited, PROMPTS[::-1], SEEDS[::-1])
    torch.testing.assert_close(backwards.flip(0), whole, rtol=0, atol=1e-4)


@torch.no_grad()
def test_every_sampling_starts_without_momentum(model: StableDiffusion) -> None:
    with sld(warmup=0.0).applied(model) as edited:
        kernel = edited.kernel(STEPS, eta=0.0)
        first = drawn(edited, kernel=kernel)
        drawn(edited, ["two", "others", "and", "more"], kernel=kernel)
        assert torch.equal(drawn(edited, kernel=kernel), first)  # the same kernel, other prompts in between
        with pytest.raises(RuntimeError, match="in the middle"):
            broken_off(edited)
        assert torch.equal(drawn(edited, kernel=edited.kernel(STEPS, eta=0.0)), first)
        two = drawn(edited, kernel=edited.kernel(2, eta=0.0))
        assert not torch.equal(two, first) and torch.equal(drawn(edited), first)


def broken_off(model: Backbone) -> None:
    kernel, cond = model.kernel(STEPS, eta=0.0), model.encode_text(PROMPTS)
    for i in range(2):
        model.predict(torch.randn(4, *model.latent_shape), kernel.timesteps[i].expand(4), cond, guidance=GUIDANCE)
    raise RuntimeError("in the middle")


@torch.no_grad()
@pytest.mark.parametrize(
    "calls",
    [[(0, 2), (2, 2)], [(1, 2)], [(0, 2), (1, 1)], [(0, 2), (1, 2), (1, 2)], [(0, 2), (1, 2), (None, 2)]],
    ids=["left out", "from the middle", "another batch", "twice", "no step"],
)
def test_steps_out_of_order_are_an_error(model: StableDiffusion, calls: list[tuple[int | None, int]]) -> None:
    with sld().applied(model) as edited, pytest.raises(ValueError, match="asked for step") as caught:
        kernel = edited.kernel(STEPS, eta=0.0)
        for index, n in calls:
            time = torch.tensor(7) if index is None else kernel.timesteps[index]
            edited.predict(
                torch.randn(n, *model.latent_shape), time.expand(n), model.encode_text(["a"] * n), guidance=2.0
            )
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_saved_and_loaded_it_draws_the_same(model: StableDiffusion, tmp_path: Path) -> None:
    edit = sld()
    save_edit(edit, tmp_path, base=model.name, base_fingerprint=None, method="sld", concept="Dogs")
    assert [path.name for path in tmp_path.iterdir()] == ["edit.json"]
    again = load_edit(tmp_path)  # cgru's own hook, so it needs no leave
    before = state(model)
    with edit.applied(model) as edited, again.applied(model) as also:
        assert torch.equal(drawn(edited), drawn(also))
    assert again.fingerprint == edit.fingerprint and changed(before, state(model)) == []


def test_the_paper_s_table_is_what_strength_lays_down() -> None:
    """s_S, λ, warm-up steps of 50, s_m and β as the paper has them."""
    table = {name: (*row[:2], round(50 * row[2]), *row[3:]) for name, row in PRESETS.items()}
    assert table == {
        "weak": (20, 0, 15, 0, 0),
        "medium": (1000, 0.01, 10, 0.3, 0.4),
        "strong": (2000, 0.025, 7, 0.5, 0.7),
        "max": (5000, 1.0, 0, 0.5, 0.7),
    }
    config = resolve_config("Dogs", method="sld", overrides=["strength=strong", "momentum=0.1"])
    assert isinstance(config, Config)
    assert {name: getattr(config, name) for name in NUMBERS} == {
        "scale": 2000.0,
        "threshold": 0.025,
        "warmup": 0.14,
        "momentum": 0.1,  # the user's own wins
        "decay": 0.7,
    }
    plain = adjust(Config("Dogs", model="owner/sd"))
    assert plain.strength == "medium" and tuple(getattr(plain, name) for name in NUMBERS) == PRESETS["medium"]
    assert tuple(getattr(Config("Dogs"), name) for name in NUMBERS) == PRESETS["medium"]
    assert adjust(Config("Dogs")).strength == CANVAS and adjust(plain) == plain


@pytest.mark.parametrize(
    ("concept", "model", "settings", "text"),
    [
        ("Dogs", "emoji-canvas", {}, "dog"),
        ("Dogs", "emoji-canvas", {"words": 3}, "dog, puppy, doggy"),  # "Dogs" and "dogs" say nothing new
        ("Ink", "emoji-canvas", {}, "Ink style"),
        ("smoking", "emoji-canvas", {"words": 2}, "cigarette, smoking"),
        ("Van Gogh", "owner/sd", {}, "Van Gogh"),
        ("nudity", "owner/sd", {"text": "paper-list"}, PAPER_LIST),
        ("nudity", "owner/sd", {"text": "naked people"}, "naked people"),
    ],
)
def test_the_safety_concept(concept: str, model: str, settings: dict[str, Any], text: str) -> None:
    edit = edit_for(task_for(concept, model), Config(concept, model=model, **settings))
    assert edit.settings["text"] == text and edit.settings.keys() == set(KEPT)


def test_all_hazards_are_named_before_their_synonyms() -> None:
    text = str(edit_for(task_for("hazard", "emoji-canvas"), Config("hazard", words=9)).settings["text"])
    assert text == "blade, explosive, skull, cigarette, smoking, alcoholic drink, alcohol, needle, axe"
    assert len(PAPER_LIST.split(", ")) == 20


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scale": "much"}, "scale is 'much'; allowed: a number"),
        ({"decay": 1.0}, "decay is 1.0; allowed: a number, at least 0 and under 1"),
        ({"strength": "mild"}, "unknown strength 'mild'; allowed: auto, weak"),
        ({"text": " "}, "concept is ' '"),
        ({"speed": 3}, "SLD's settings are strength, text, scale"),
    ],
)
def test_settings_that_are_none_are_one_line(model: StableDiffusion, settings: dict[str, Value], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught, sld(**settings).applied(model):
        pass
    assert "\n" not in str(caught.value)


def test_two_such_edits_do_not_stack(model: StableDiffusion) -> None:
    with pytest.raises(ValueError, match="another hook makes already.*Name several"), stack([sld(), sld()], model):
        pass


def test_a_model_without_guidance_is_refused(model: StableDiffusion) -> None:
    from dataclasses import replace

    alone = Hooked(model, embed=lambda cond: replace(cond, unconditional={}))
    task = UnlearnTask(Concept("dog", "text"), ("dog",))
    with pytest.raises(ValueError, match="no classifier-free guidance"):
        edit_for(task, Config("dog")).check(alone)


def test_from_the_command_line_to_pictures_and_scores(
    asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tiny model stands in for Emoji Canvas, for which SLD has a vocabulary; it is the assets' own afterwards.
    assert main(["unlearn", "dog", "--method", "sld", "--model", str(asset_root / "emoji-canvas")]) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    note = json.loads((run / "edit" / "edit.json").read_text())
    assert (note["kind"], note["parameters"]["hook"], note["parameters"]["settings"]["text"]) == ("hook", "sld", "dog")
    assert [path.name for path in (run / "edit").iterdir()] == ["edit.json"]
    draw = ["generate", "a dog", "--steps", "4", "--guidance", "5", "--out", "dog.png", "--json", "--model"]
    assert main([*draw, str(run)], root=asset_root) == 0
    edited = Path("dog.png").read_bytes()
    assert main([*draw, str(asset_root / "emoji-canvas")], root=asset_root) == 0
    assert edited != Path("dog.png").read_bytes()
    command = ["evaluate", str(run), "--images", "1", "--target", "Dogs", "--json"]
    capsys.readouterr()
    assert main(command, root=asset_root) == 0
    assert json.loads(capsys.readouterr().out)["measurements"].keys() >= {"ua", "ira"}
    assert main(["report", str(run)], root=asset_root) == 0


def test_a_white_box_attack_is_refused_with_the_reason(
    sd_folder: Path, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_edit(sld(), workdir / "edit", base=str(sd_folder), base_fingerprint=None, method="sld", concept="dog")
    (workdir / "prompts.txt").write_text("a cat\n")
    (workdir / "pictures").mkdir()
    Image.new("RGB", (16, 16), (50, 100, 200)).save(workdir / "pictures" / "0.png")
    options = ["--target", "cat", "--source", "prompts.txt", "--pictures", "pictures", "--judge", "own_judges:never"]
    assert main(["attack", "edit", *options, "--tokens", "2", "--out", "attacked"], root=asset_root) == 2
    told = capsys.readouterr().err
    assert "cannot be attacked white box: SLD acts through classifier-free guidance" in told and told.count("\n") == 1
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [("strength=hard", "unknown strength 'hard'"), ("words=-1", "words is -1; allowed"), ("steps=3", "unknown key")],
)
def test_a_wrong_setting_is_one_line(
    workdir: Path, capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    assert main(["unlearn", "Dogs", "--method", "sld", setting]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and not Path("runs").exists()
