"""ESD: its loop against a plain second implementation, what it trains, and that a run survives."""

import contextlib
import json
import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import own_pipeline
import pytest
import torch
from diffusers import DDIMScheduler
from test_survival import only_run, run_child
from tiny_edits import changed, picture, state
from torch import Tensor, nn

from cgru.backbones import load_model
from cgru.backbones.hooked import Hooked
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.cli import main
from cgru.config import override
from cgru.edits import WeightsEdit, load_edit
from cgru.mdp.rollout import noise_for, sample
from cgru.methods.esd import CANVAS, STATE, Config, adjust, begin, check, prepare, prompts_of, rollout_to, target
from cgru.methods.esd import trained_parameters as chosen
from cgru.pipeline import resume, unlearn
from cgru.presets import resolve_config
from cgru.prompts import task_for
from cgru.runs import Run, Scalar, read_metrics
from cgru.seeds import child_random, child_seed

TINY = ["iterations=4", "steps=3", "batch=2", "learning_rate=1e-3", "prompts=sentences", "checkpoint_every=1"]
MOMENTS = [
    ("log", 1),  # after the log line of iteration 0, before its checkpoint
    ("rename", 1),  # before that checkpoint is put in place
    ("step", 2),  # between the gradient and the step of iteration 1
    ("rename", 3),  # the cut log, the checkpoints of iterations 1 and 2
]


def config_of(folder: Path | str, *settings: str) -> Config:
    return override(Config("dogs", model=str(folder), method="esd", device="cpu"), [*TINY, *settings])


@pytest.fixture
def model(sd_folder: Path) -> StableDiffusion:
    return load_stable_diffusion(sd_folder, device="cpu")


@pytest.fixture(scope="module")
def whole(sd_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return unlearn(config_of(sd_folder), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cgru.pipeline.unlearning", "cgru.methods.esd"])
    return context


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def data_of(run: Run) -> bytes:
    return (run.path / "edit" / "weights.safetensors").read_bytes()


def reference(folder: Path, config: Config, part: str = "attn2") -> tuple[list[float], dict[str, Tensor]]:
    """The paper's loop with diffusers' sampler and a second copy of the network: losses, and changes by name."""
    model, frozen = (load_stable_diffusion(folder, device="cpu") for _ in range(2))
    trained = {name: p.requires_grad_() for name, p in model.denoiser.named_parameters() if part in name}
    optimiser, task, losses = (
        torch.optim.Adam(trained.values(), lr=config.learning_rate),
        task_for("dogs", str(folder)),
        [],
    )
    scheduler = DDIMScheduler.from_config(model.scheduler.config)
    scheduler.set_timesteps(config.steps)

    def noise(unet: nn.Module, z: Tensor, t: Tensor, prompts: list[str]) -> Tensor:
        return unet(z, t, model.encode_text(prompts).embeddings).sample

    for i in range(config.iterations):
        c, empty = prompts_of(task, config, i), [""] * config.batch
        k = child_random(config.seed, "step", i).randrange(config.steps)
        seeds = [child_seed(config.seed, "noise", i, j) for j in range(config.batch)]
        z = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        with torch.no_grad():
            for t in scheduler.timesteps[:k]:
                e = noise(model.denoiser, z, t, empty)
                e = e + config.guidance * (noise(model.denoiser, z, t, c) - e)
                z = scheduler.step(e, t, z).prev_sample
            t = scheduler.timesteps[k]
            e_empty, e_concept = noise(frozen.denoiser, z, t, empty), noise(frozen.denoiser, z, t, c)
        aim = e_empty - config.negative_guidance * (e_concept - e_empty)
        loss = nn.functional.mse_loss(noise(model.denoiser, z, t, c), aim)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    old = dict(frozen.denoiser.named_parameters())
    return losses, {name: p.detach() - old[name] for name, p in trained.items()}


@pytest.mark.parametrize("prompts", ["words", "sentences"])
def test_a_run_is_the_paper_s_loop(sd_folder: Path, tmp_path: Path, prompts: str) -> None:
    config = config_of(sd_folder, f"prompts={prompts}", "negative_guidance=2")
    run = unlearn(config, tmp_path)
    losses, deltas = reference(sd_folder, config)
    records = read_metrics(run.path / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1, 2, 3] and config.length == 4
    assert len({record["step"] for record in records}) > 1  # else rollouts would not be seen
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-3)
    edit = load_edit(run.path)
    assert isinstance(edit, WeightsEdit)
    found = edit.deltas["denoiser"]
    assert found.keys() == deltas.keys()
    for name, delta in found.items():  # Adam's steps are of the size of the rate where a gradient is near zero, too
        assert (delta - deltas[name]).abs().mean() < 0.02 * config.learning_rate


def test_the_target_by_hand() -> None:
    """1 - 3 (1.5 - 1) = -0.5; 0 - 3 (-1 - 0) = 3."""
    found = target(torch.tensor([1.0, 0.0]), torch.tensor([1.5, -1.0]), 3.0)
    assert found.tolist() == [-0.5, 3.0]


@pytest.mark.parametrize("part", ["x", "u"])
def test_one_step_is_adam_s_on_the_gradient_of_the_squared_error(model: StableDiffusion, part: str) -> None:
    training = begin(model, config_of(model.name, f"train={part}"))
    z, time = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0)), torch.tensor([300, 300])
    cond, empty = model.encode_text(["a dog", "dogs"]), model.encode_text(["", ""])
    with torch.no_grad():
        e_empty, e_concept = (model.predict(z, time, c, guidance=1.0) for c in (empty, cond))
    loss = (model.predict(z, time, cond, guidance=1.0) - (e_empty - 2.0 * (e_concept - e_empty))).square().mean()
    names = list(training.parameters)
    gradients = dict(zip(names, torch.autograd.grad(loss, list(training.parameters.values())), strict=True))
    before = {name: p.detach().clone() for name, p in training.parameters.items()}
    assert training.step(z, time, cond, 2.0) == pytest.approx(float(loss.detach()), rel=1e-4)
    # Adam's first step, from zero moments: rate · g / (|g| + 1e-8)
    steps = torch.cat([((before[n] - training.parameters[n]).detach() / 1e-3).flatten() for n in names])
    expected = torch.cat([(g / (g.abs() + 1e-8)).flatten() for g in gradients.values()])
    is_sure = torch.cat([g.flatten() for g in gradients.values()]).abs() > 1e-6
    assert is_sure.float().mean() > 0.5
    torch.testing.assert_close(steps[is_sure], expected[is_sure], rtol=0, atol=0.02)
    assert all(p.grad is None for p in (*training.parameters.values(), *training.learned.values()))


def test_what_is_trained(model: StableDiffusion) -> None:
    x, u = (set(chosen(model, part)) for part in ("x", "u"))
    every = {name for name, _ in model.denoiser.named_parameters()}
    block = "mid_block.attentions.0.transformer_blocks.0"
    layers = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "to_out.0.bias")
    assert {name for name in x if name.startswith(block)} == {f"{block}.attn2.{layer}" for layer in layers}
    assert x == {name for name in every if ".attn2." in name}
    left = {name.split(".")[0] for name in every - x - u}
    assert left == {"time_embedding", "conv_norm_out", "conv_out"}
    parts = ["conv_in.weight", f"{block}.attn1.to_k.weight", f"{block}.norm2.weight", f"{block}.ff.net.2.bias"]
    assert {*parts, "mid_block.resnets.0.time_emb_proj.weight", "mid_block.attentions.0.proj_in.weight"} <= u
    assert not x & u


def test_in_sdxl_the_embedding_of_sizes_stays_too(family_folders: dict[str, Path]) -> None:
    model = load_model(family_folders["sdxl"], device="cpu")
    trained = {*chosen(model, "x"), *chosen(model, "u")}
    left = {name.split(".")[0] for name, _ in model.denoiser.named_parameters() if name not in trained}
    assert left == {"time_embedding", "add_embedding", "conv_norm_out", "conv_out"}


@pytest.mark.parametrize("part", ["x", "u"])
def test_nothing_else_changes_and_the_teacher_stays(model: StableDiffusion, part: str) -> None:
    before = state(model)
    training = begin(model, config_of(model.name, f"train={part}"))
    z, time, cond = torch.randn(1, *model.latent_shape), torch.tensor([300]), model.encode_text(["dog"])
    aim = training.teacher(z, time, cond, 1.0)
    for _ in range(3):
        training.step(z, time, cond, 1.0)
    assert torch.equal(training.teacher(z, time, cond, 1.0), aim)
    assert {name.removeprefix("denoiser.") for name in changed(before, state(model))} == set(training.parameters)
    assert [n for n, p in model.denoiser.named_parameters() if p.requires_grad] == list(training.parameters)
    # Kept twice is what is trained, no more.
    assert training.before.keys() == training.parameters.keys()
    assert all(training.learned[name].data_ptr() == p.data_ptr() for name, p in training.parameters.items())


@pytest.mark.parametrize("part", ["x", "u"])
def test_the_loss_falls(model: StableDiffusion, part: str) -> None:
    training = begin(model, config_of(model.name, f"train={part}", "learning_rate=3e-4"))
    z, time, cond = torch.randn(4, *model.latent_shape), torch.tensor([500] * 4), model.encode_text(["dog"] * 4)
    losses = [training.step(z, time, cond, 3.0) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@torch.no_grad()
def test_rollouts_stop_where_they_are_to(model: StableDiffusion) -> None:
    kernel, cond = model.kernel(4, eta=0.0), model.encode_text(["a cat", "x"])
    found = rollout_to(4, model, cond, [1, 2], kernel=kernel, guidance=3.0)
    torch.testing.assert_close(found, sample(model, cond, [1, 2], kernel=kernel, guidance=3.0))
    start = rollout_to(0, model, cond, [1, 2], kernel=kernel, guidance=3.0)
    assert torch.equal(start, torch.cat([noise_for(seed, model.latent_shape, 0) for seed in (1, 2)]))


def test_half_precision_learns_in_float32(model: StableDiffusion) -> None:
    half = load_stable_diffusion(model.name, device="cpu", dtype="bf16")
    training = begin(half, config_of(model.name, "learning_rate=1e-6"))
    z, time, cond = torch.randn(1, *half.latent_shape), torch.tensor([300]), half.encode_text(["dog"])
    before = {name: value.float() for name, value in training.before.items()}
    for _ in range(3):
        training.step(z, time, cond, 1.0)
    edit = WeightsEdit.between({"denoiser": before}, {"denoiser": training.learned})
    sizes = torch.cat([delta.abs().flatten() for delta in edit.deltas["denoiser"].values()])
    assert 5e-7 < float(sizes.median()) < 4e-6  # steps of 1e-6, which the network's bf16 would have lost
    for name, parameter in training.parameters.items():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter.data, training.learned[name].data.bfloat16())


def test_a_bf16_run_resumes_in_the_same_bytes(sd_folder: Path, tmp_path: Path) -> None:
    config = config_of(sd_folder, "dtype=bf16", "iterations=3")
    done = unlearn(config, tmp_path / "whole")

    def stops(record: Mapping[str, Scalar]) -> None:
        if record["iteration"] == 1:  # its checkpoint is not there yet
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        unlearn(config, tmp_path / "cut", listeners=(stops,))
    assert data_of(resume(only_run(tmp_path / "cut").path)) == data_of(done)


def test_killed_again_and_again_it_ends_in_the_same_bytes(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, whole: Run
) -> None:
    config = config_of(sd_folder)
    codes = [run_child(processes, config, tmp_path, kind, left) for kind, left in MOMENTS]
    assert codes == [-signal.SIGKILL] * len(MOMENTS)
    cut = only_run(tmp_path)
    assert not cut.has_edit and cut.latest("training") is not None
    assert data_of(resume(cut.path)) == data_of(whole)
    assert (cut.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("damage", [{"iteration": "2"}, {"weights": {}}, {"optimiser": {}}])
def test_a_damaged_checkpoint_is_named(model: StableDiffusion, tmp_path: Path, damage: dict[str, object]) -> None:
    training = begin(model, config_of("folder"))
    with (tmp_path / STATE).open("wb") as file:
        training.save(file)
    training.restore(tmp_path)
    torch.save(torch.load(tmp_path / STATE) | damage, tmp_path / STATE)
    with pytest.raises(ValueError, match=f"cannot read '.*{STATE}' .*its stage then starts again"):
        training.restore(tmp_path)


def test_the_last_iteration_is_saved_whatever_the_rhythm(sd_folder: Path, tmp_path: Path, whole: Run) -> None:
    run = unlearn(config_of(sd_folder, "checkpoint_every=3"), tmp_path)  # of 4 iterations
    found = run.latest("training")
    assert found is not None and found[0] == 4 and data_of(run) == data_of(whole)


def test_ctrl_c_saves_after_the_iteration_and_resume_completes(
    sd_folder: Path, tmp_path: Path, processes: ForkServerContext, whole: Run
) -> None:
    config = config_of(sd_folder, "checkpoint_every=100")  # so only Ctrl-C can have saved; changes no result
    assert run_child(processes, config, tmp_path, "step", 2, signal.SIGINT) == own_pipeline.INTERRUPTED
    cut = only_run(tmp_path)
    found = cut.latest("training")
    assert found is not None and found[0] == 2 and len(read_metrics(cut.path / "metrics.jsonl")) == 2
    assert data_of(resume(cut.path)) == data_of(whole)


def test_the_edit_is_undone_bit_for_bit(model: StableDiffusion, whole: Run) -> None:
    edit, before, plain = load_edit(whole.path), state(model), picture(model)
    with edit.applied(model) as edited:
        inside = changed(before, state(model))
        assert (picture(edited) - plain).abs().max() > 1e-4
    assert inside == sorted(f"denoiser.{name}" for name in chosen(model, "x"))
    assert changed(before, state(model)) == [] and torch.equal(picture(model), plain)


@pytest.mark.parametrize(
    ("concept", "model", "kind", "expected"),
    [
        ("Dogs", "emoji-canvas", "words", {"dog", "puppy", "poodle"}),
        ("Dogs", "emoji-canvas", "sentences", {"a dog", "poodle icon"}),
        ("Ink", "emoji-canvas", "sentences", {"a cat in Ink style", "a tree in Ink style"}),
        ("hazard", "emoji-canvas", "words", {"skull", "beer", "needle"}),
        ("Van Gogh", "owner/sd", "words", {"Van Gogh"}),
        ("Van Gogh", "owner/sd", "sentences", {"an oil painting of Van Gogh"}),
    ],
)
def test_prompts_name_the_concept(concept: str, model: str, kind: str, expected: set[str]) -> None:
    task = task_for(concept, model)
    config = override(Config(concept, model=model), [f"prompts={kind}", "batch=16"])
    drawn = [prompt for i in range(100) for prompt in prompts_of(task, config, i)]
    assert expected <= set(drawn)
    assert all(any(word in prompt for word in task.words) for prompt in drawn)
    assert prompts_of(task, config, 3) == drawn[48:64] != drawn[:16] or len(set(drawn)) == 1


@pytest.mark.parametrize("part", ["x", "u"])
def test_emoji_canvas_has_defaults_of_its_own(part: str) -> None:
    own = CANVAS[part]
    found = resolve_config("Dogs", method="esd", overrides=[f"train={part}"])
    assert {name: getattr(found, name) for name in own} == dict(own)
    longer = resolve_config("Dogs", method="esd", overrides=[f"train={part}", "iterations=1000", "batch=3"])
    assert (longer.length, getattr(longer, "batch", 0)) == (1000, 3)  # the user's own win
    paper = Config("dogs", model="owner/sd", train="u" if part == "u" else "x")
    assert adjust(paper) == paper
    assert (paper.learning_rate, paper.iterations, paper.negative_guidance, paper.steps) == (1e-5, 1000, 1.0, 50)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train=y"], "unknown train 'y'; allowed: x, u"),
        (["dtype=fp16"], "dtype is fp16, in which ESD's gradients vanish; allowed: fp32, bf16"),
        (["iterations=0"], "iterations is 0; allowed: a whole number, at least 1"),
        (["steps=5000"], "5000 denoising steps"),
        (["--preset", "demo"], "holds settings of the method 'anchored'"),
    ],
)
def test_a_wrong_setting_is_one_line(
    sd_folder: Path, workdir: Path, capsys: pytest.CaptureFixture[str], settings: list[str], said: str
) -> None:
    assert main(["unlearn", "dogs", "--method", "esd", "--model", str(sd_folder), *settings]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and not Path("runs").exists()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="2 processes, and ESD trains in one; allowed: 1"):
        check(config_of("owner/sd"))


def test_models_that_it_cannot_train_are_refused(model: StableDiffusion) -> None:
    task, config = task_for("dogs", model.name), config_of(model.name)
    other = replace(model, denoiser=nn.Sequential(nn.Linear(2, 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no cross-attention layers \('attn2'\)") as caught:
        prepare(other, task, config)
    assert "\n" not in str(caught.value)
    alone = Hooked(model, embed=lambda cond: replace(cond, unconditional={}))
    with pytest.raises(ValueError, match="no empty prompt .*Choose another method"):
        prepare(alone, task, config)


def test_training_that_diverges_is_one_line(sd_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the loss is nan in iteration .: training has diverged. Lower learning_rate"):
        unlearn(config_of(sd_folder, "learning_rate=1e30", "iterations=9"), tmp_path)
    assert not only_run(tmp_path).has_edit


def test_by_the_command_line(
    sd_folder: Path, asset_root: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["unlearn", "dogs", "--method", "esd", "--model", str(asset_root / "emoji-canvas"), *TINY, "train=u"]
    assert main([*command, "--dry-run"]) == 0 and not Path("runs").exists()
    capsys.readouterr()
    assert main(command) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    note = json.loads((run / "edit" / "edit.json").read_text())
    assert (note["kind"], note["method"], note["concept"]) == ("weights", "esd", "dogs")
    assert main(["evaluate", str(run), "--images", "1", "--target", "Dogs", "--json"], root=asset_root) == 0
    assert json.loads(capsys.readouterr().out)["measurements"].keys() >= {"ua", "ira"}
    assert main(["report", str(run)], root=asset_root) == 0
    assert main(["resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["iterations"] == 4
