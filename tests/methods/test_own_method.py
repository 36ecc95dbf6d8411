"""A user's own method, "module:attr", from the command line to its edit: docs/add-a-method.md as it stands."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cgru.backbones import load_model
from cgru.cli import main
from cgru.config import RunConfig
from cgru.edits import HookEdit, WeightsEdit, load_edit, model_fingerprint
from cgru.lineage import Trainers, trainers_of
from cgru.runs import Run

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"
OPTIONS = ["unlearn", "Dogs", "--method", "dampen:METHOD", "strength=0.3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def dampen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's code as an importable module, in a folder that is the working directory."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert code is not None
    (tmp_path / "dampen.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "dampen.py"
    for name in ("dampen", "broken", "probe"):
        sys.modules.pop(name, None)


def trained(capsys: pytest.CaptureFixture[str], *options: str) -> Path:
    assert main([*OPTIONS, *options]) == 0
    return Path(capsys.readouterr().out.splitlines()[-1])


def test_the_page_s_method_runs_and_its_edit_is_what_the_formula_says(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(capsys)
    note = json.loads((run / "edit" / "edit.json").read_text())
    assert (note["kind"], note["method"], note["concept"]) == ("weights", "dampen:METHOD", "Dogs")
    edit = load_edit(run)
    assert isinstance(edit, WeightsEdit)
    backbone = load_model("emoji-canvas", device="cpu")
    assert note["base"] == {"model": "emoji-canvas", "fingerprint": model_fingerprint(backbone)}
    values = {n: p for n, p in backbone.denoiser.named_parameters() if n.endswith("attn2.to_v.weight")}
    before = {name: value.detach().clone() for name, value in values.items()}
    with edit.applied(backbone):
        for name, value in values.items():
            assert value.sub(0.7 * before[name]).abs().max() < 1e-6
    assert all(value.equal(before[name]) for name, value in values.items())


def test_a_run_says_that_no_network_trained_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(capsys)
    assert trainers_of(str(run), run / "edit" / "edit.json") == Trainers({})  # and no notice of an unknown lineage


def test_float32_is_exact_while_a_method_runs_or_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """By torch's flag, which on a CPU has no effect."""
    Path("probe.py").write_text(
        "import torch\nfrom cgru.config import RunConfig\nfrom cgru.edits import HookEdit\n"
        "from cgru.method import Method\n\ndef run(backbone, task, config, run):\n"
        "    return HookEdit('probe:hook', {'allow_tf32': torch.backends.cudnn.allow_tf32})\n\n"
        "def hook(backbone, settings, tensors):\n    return backbone\n\n"
        "METHOD = Method(config=RunConfig, run=run)\n",
        encoding="utf-8",
    )
    assert torch.backends.cudnn.allow_tf32
    assert main(["unlearn", "Dogs", "--method", "probe:METHOD", "--device", "cpu"]) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    notes = [(run / "edit" / "edit.json").read_text()]
    (run / "edit" / "edit.json").unlink()
    assert main(["resume", str(run), "--code", "probe:METHOD"]) == 0
    notes.append((run / "edit" / "edit.json").read_text())
    assert [json.loads(note)["parameters"]["settings"] for note in notes] == [{"allow_tf32": False}] * 2
    assert torch.backends.cudnn.allow_tf32


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "dampen:METHOD" in told and "Dogs (class) in emoji-canvas" in told
    assert not Path("runs").exists()


def test_a_dry_run_shows_the_lines_of_a_method_s_own_plan(capsys: pytest.CaptureFixture[str], dampen: Path) -> None:
    functions = (
        "def prepare(backbone, task, config):\n    return task.words[0]\n\n"
        "def plan(word):\n    return {'word': word, 'lines': {'plainest': f'{word} comes first'}}\n\n"
    )
    code = dampen.read_text(encoding="utf-8").replace(
        "METHOD = Method(", "METHOD = Method(prepare=prepare, plan=plan, "
    )
    dampen.write_text(code.replace("METHOD =", functions + "METHOD ="), encoding="utf-8")
    assert main([*OPTIONS, "--dry-run"]) == 0
    assert re.search(r"^plainest +dog comes first", capsys.readouterr().out, re.M)
    assert main([*OPTIONS, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["word"] == "dog"


def test_the_same_command_again_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(capsys)
    before = (run / "edit" / "edit.json").stat().st_mtime_ns
    assert trained(capsys) == run
    assert (run / "edit" / "edit.json").stat().st_mtime_ns == before


def test_reading_a_run_imports_nothing_that_only_its_config_names(
    capsys: pytest.CaptureFixture[str], dampen: Path
) -> None:
    run = trained(capsys)
    sys.modules.pop("dampen")
    dampen.write_text("raise SystemExit('imported')", encoding="utf-8")
    assert Run.open(run).config.method == "dampen:METHOD"
    (run / "edit" / "edit.json").unlink()  # so that there is something left to do
    assert main(["resume", str(run)]) == 2
    assert "uses code of its own, 'dampen:METHOD'" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert "dampen" not in sys.modules


def test_resume_runs_the_code_that_the_user_names(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(capsys)
    before = (run / "edit" / "weights.safetensors").read_bytes()
    (run / "edit" / "edit.json").unlink()
    assert main(["resume", str(run), "--code", "dampen:METHOD"]) == 0
    assert (run / "edit" / "weights.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("METHOD = 3", "is a int and no method"),
        ("from math import sqrt as METHOD", "is a builtin_function_or_method and no method"),
        ("raise SyntaxError('oops')", "oops"),
    ],
)
def test_what_is_no_method_gets_one_line(capsys: pytest.CaptureFixture[str], code: str, said: str) -> None:
    Path("broken.py").write_text(code, encoding="utf-8")
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not Path("runs").exists()


def test_a_method_that_returns_no_edit_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text(
        "from cgru.config import RunConfig\nfrom cgru.method import Method\n"
        "METHOD = Method(config=RunConfig, run=lambda backbone, task, config, run: None)\n",
        encoding="utf-8",
    )
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD"]) == 2
    told = capsys.readouterr().err
    assert "returned a NoneType; allowed: an Edit" in told and "Traceback" not in told
    (run,) = Path("runs").glob("dogs-broken-*")
    assert not (run / "edit").exists()


BODY = """
import torch
from dataclasses import dataclass
from cgru.config import RunConfig
from cgru.edits import WeightsEdit
from cgru.method import Method

def run(backbone, task, config, run):
    name, weight = next(iter(backbone.denoiser.named_parameters()))
    return WeightsEdit({"denoiser": {name: torch.ones_like(weight)}})
"""
REFUSED = {  # what is wrong with it shows before there is a run folder
    "a config that is none": (
        "class Config: pass\nMETHOD = Method(config=Config, run=run)",
        "has the config 'Config'; allowed: a frozen dataclass that extends cgru.config.RunConfig",
    ),
    "no config at all": ("METHOD = Method(config=None, run=run)", "has the config None; allowed: a frozen dataclass"),
    "a config that is no dataclass": (
        "class Config(RunConfig):\n    strength: float = 1.0\nMETHOD = Method(config=Config, run=run)",
        "has 'strength' in Config, which is no dataclass",
    ),
    "a setting without a default": (
        "@dataclass(frozen=True, kw_only=True)\nclass Config(RunConfig):\n    strength: float\n"
        "METHOD = Method(config=Config, run=run)",
        "has no default for the setting 'strength'",
    ),
    "no run function": ("METHOD = Method(config=RunConfig, run=None)", "has run = None; allowed: a function"),
    "a check that breaks": (
        "def check(config):\n    return {}['a']\nMETHOD = Method(config=RunConfig, run=run, check=check)",
        "fails (KeyError: 'a', broken.py line 12)",
    ),
    "an adjust that returns nothing": (
        "METHOD = Method(config=RunConfig, run=run, adjust=lambda config: None)",
        "its adjust returned a NoneType; allowed: a RunConfig",
    ),
    "a prepare that breaks": (
        "METHOD = Method(config=RunConfig, run=run, prepare=lambda backbone: None)",
        "fails (TypeError: <lambda>() takes 1 positional argument but 3 were given)",
    ),
}
BROKEN = {  # and what shows only while it runs
    "an error": (
        "def run(*words):\n    return 1 / 0",
        "fails (ZeroDivisionError: division by zero, broken.py line 13)",
    ),
    "wrong arguments": ("def run(backbone):\n    pass", "run() takes 1 positional argument but 4 were given"),
    "a record that is not flat": (
        "def run(backbone, task, config, run):\n    run.log({'iteration': 0, 'loss': torch.ones(1)})",
        "cannot log 'loss' = tensor([1.]); allowed: numbers and texts. Give float(value).",
    ),
    "parameters that are no JSON": (
        "def run(backbone, task, config, run):\n    name, weight = next(iter(backbone.denoiser.named_parameters()))\n"
        "    return WeightsEdit({'denoiser': {name: weight}}, parameters={'norm': weight.norm()})",
        "the edit's parameter 'norm' is",
    ),
}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_part_of_a_method_gets_one_line_and_no_folder(
    case: str, dry: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = REFUSED[case]
    Path("broken.py").write_text(BODY + code + "\n", encoding="utf-8")
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD", "--device", "cpu", *dry]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and "broken:METHOD" in told
    assert not Path("runs").exists()


@pytest.mark.parametrize("case", BROKEN)
def test_a_method_that_breaks_gets_one_line_and_leaves_no_edit(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = BROKEN[case]
    Path("broken.py").write_text(f"{BODY}\n{code}\nMETHOD = Method(config=RunConfig, run=run)\n", encoding="utf-8")
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    (run,) = Path("runs").glob("dogs-broken-*")
    assert said in told and told.count("\n") == 1
    assert told.endswith(f" Continue with: cgru resume {run} --code broken:METHOD\n")
    assert not (run / "edit").exists()


HOOKS = """
from safetensors.torch import save
from cgru.backbones.hooked import Hooked
from cgru.edits import HookEdit, LoraEdit

class Odd(WeightsEdit):
    kind = "banana"

class Swapped(WeightsEdit):
    kind = "lora"

def five(backbone, settings, tensors):
    return 5

def needy(backbone, settings, tensors):
    return settings["strength"]

def predicts_five(backbone, settings, tensors):
    return Hooked(backbone, prediction=lambda x, time, cond, guidance: 5)

def predicts_half(backbone, settings, tensors):
    return Hooked(backbone, prediction=lambda x, time, cond, guidance: x[:, :1])

def fails(backbone, settings, tensors):
    return Hooked(backbone, prediction=lambda x, time, cond, guidance: x @ x.flatten())

def embeds_five(backbone, settings, tensors):
    return Hooked(backbone, embed=lambda cond: 5)

def run(backbone, task, config, run):
    name, weight = next(iter(backbone.denoiser.named_parameters()))
    return """
MISFITS = {  # an edit, and why it is refused
    "an unknown parameter": (
        "WeightsEdit({'denoiser': {'no.such.weight': torch.ones(2)}})",
        "returned a wrong edit: the edit does not fit the model at 'denoiser.no.such.weight' (no such parameter).",
    ),
    "a wrong shape": ("WeightsEdit({'denoiser': {name: torch.ones(3)}})", "the edit's (3,))"),
    "an unknown network": (
        "WeightsEdit({'vae': {name: torch.ones(3)}})",
        "the edit changes the 'vae' and the model 'emoji-canvas' has denoiser, text_encoder.",
    ),
    "a parameter that the method has added": (
        "backbone.denoiser.register_parameter('own', torch.nn.Parameter(torch.ones(3))) or "
        "WeightsEdit({'denoiser': {'own': torch.ones(3)}})",
        "'denoiser.own' (no such parameter).",
    ),
    "an unknown kind": (
        "Odd({'denoiser': {name: torch.ones_like(weight)}})",
        "returned a Odd of kind 'banana'; allowed: lora (a LoraEdit), weights (a WeightsEdit), hook (a HookEdit).",
    ),
    "another's kind": ("Swapped({'denoiser': {name: torch.ones_like(weight)}})", "a Swapped of kind 'lora'; allowed:"),
    "a LoRA on no layer": (
        "LoraEdit.from_bytes(save({f'unet.no.layer.lora_{side}.weight': torch.ones(2, 2) for side in 'AB'}))",
        "the LoRA does not fit the model at 'no.layer' (no such layer).",
    ),
    "an unknown hook": ("HookEdit('slt', {})", "unknown hook 'slt'; allowed: sld."),
    "a hook that is not there": ("HookEdit('broken:absent', {})", "cannot import 'broken:absent'"),
    "a hook that returns 5": ("HookEdit('broken:five', {})", "the hook 'broken:five' returns a int and no backbone"),
    "a hook that lacks a setting": ("HookEdit('broken:needy', {})", "'broken:needy' fails (KeyError: 'strength', "),
    "a prediction of 5": (
        "HookEdit('broken:predicts_five', {})",
        "the prediction of the hook 'broken:predicts_five' is a int; allowed: a tensor of shape (1, 4, ",
    ),
    "a prediction of one channel": ("HookEdit('broken:predicts_half', {})", "is of shape (1, 1, "),
    "a prediction that fails": ("HookEdit('broken:fails', {})", "the hook 'broken:fails' fails (RuntimeError: "),
    "an embedding of 5": (
        "HookEdit('broken:embeds_five', {})",
        "the text embedding of the hook 'broken:embeds_five' is a int; allowed: a Conditioning.",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_edit_that_its_model_cannot_have_gets_one_line_and_is_not_saved(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, said = MISFITS[case]
    Path("broken.py").write_text(
        f"{BODY}{HOOKS}{edit}\n\nMETHOD = Method(config=RunConfig, run=run)\n", encoding="utf-8"
    )
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    (run,) = Path("runs").glob("dogs-broken-*")
    assert "method 'broken:METHOD' returned a " in told and said in told and told.count("\n") == 1
    assert "Correct its run function." in told and "give its own base" not in told
    assert not (run / "edit").exists()


def test_an_own_hook_that_draws_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    hook = (
        "def half(backbone, settings, tensors):\n"
        "    predict = lambda x, time, cond, guidance: backbone.predict(x, time, cond, guidance=guidance / 2)\n"
        "    return Hooked(backbone, prediction=predict)\n"
    )
    edit = "HookEdit('broken:half', {})"
    code = f"{BODY}{HOOKS}{edit}\n\n{hook}\nMETHOD = Method(config=RunConfig, run=run)\n"
    Path("broken.py").write_text(code, encoding="utf-8")
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD", "--device", "cpu"]) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(load_edit(run, allow_hooks=["broken:half"]), HookEdit)


def test_a_method_may_leave_the_model_trained_and_with_a_lora_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The edit is then still for the model as it was."""
    Path("broken.py").write_text(
        BODY.partition("def run")[0]
        + """
from cgru.lora.train import attach

def run(backbone, task, config, run):
    weights = dict(backbone.denoiser.named_parameters())
    name = next(name for name in weights if name.endswith("attn2.to_v.weight"))
    before = {"denoiser": {name: weights[name].detach().clone()}}
    weights[name].data += 0.5
    edit = WeightsEdit.between(before, {"denoiser": weights})
    attach(backbone.denoiser, rank=2, alpha=2.0, targets="attention", seed=0)
    assert name not in dict(backbone.denoiser.named_parameters())
    return edit

METHOD = Method(config=RunConfig, run=run)
""",
        encoding="utf-8",
    )
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD", "--device", "cpu"]) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    load_edit(run).check(load_model("emoji-canvas", device="cpu"))


def test_a_plan_that_is_none_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    made = "METHOD = Method(config=RunConfig, run=run, prepare=lambda *words: 5, plan=lambda five: five)\n"
    Path("broken.py").write_text(BODY + made, encoding="utf-8")
    assert main(["unlearn", "Dogs", "--method", "broken:METHOD", "--device", "cpu", "--dry-run"]) == 2
    assert "its plan returned a int; allowed: a Mapping" in capsys.readouterr().err


@pytest.mark.parametrize("record", ["{'iteration': 0, 'layers': 3}", "{'layers': 3}"])
def test_a_record_without_reward_or_loss_is_told_without_a_number(
    record: str, capsys: pytest.CaptureFixture[str], dampen: Path
) -> None:
    code = dampen.read_text(encoding="utf-8")
    dampen.write_text(re.sub(r"run\.log\(.*\)", f"run.log({record})", code), encoding="utf-8")
    assert main(OPTIONS) == 0
    assert capsys.readouterr().err == ("iteration 1/1\n" if "iteration" in record else "")


def test_a_config_file_that_names_what_is_no_method_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.yaml").write_text("concept: Dogs\nmethod: math:sqrt\n", encoding="utf-8")
    assert main(["unlearn", "Dogs", "--config", "own.yaml", "--code", "math:sqrt"]) == 2
    assert "'math:sqrt' is a builtin_function_or_method and no method" in capsys.readouterr().err


def test_settings_of_another_method_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "policy.iterations=3"]) == 2
    assert "unknown key 'policy.iterations'; allowed: concept, model" in capsys.readouterr().err
    assert main([*OPTIONS, "--preset", "demo"]) == 2
    assert "holds settings of the method 'anchored'" in capsys.readouterr().err


def test_a_config_extends_what_every_run_has() -> None:
    assert RunConfig("Dogs").length == 1
