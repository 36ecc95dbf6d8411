"""A user's own model, "module:attr": how it is resolved, what it must provide, and what is never run."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cgru import catalog
from cgru.backbones import is_own_loader, load_model
from cgru.backbones.base import Backbone
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.backbones.trial import METHODS, PARTS, failing
from cgru.config import is_code
from cgru.mdp.kernel import Gaussian

CALLS = list[tuple[object, ...]]()
NUMBER = 3


class Loaders:
    """What the tests name as module:attr; a folder is set by the fixture."""

    folder: Path


@pytest.fixture(autouse=True)
def folder(sd_folder: Path) -> Iterator[None]:
    """The tiny model that the loaders load."""
    Loaders.folder = sd_folder
    CALLS.clear()
    yield


def good(name: str, *, device: torch.device, dtype: torch.dtype) -> Backbone:
    CALLS.append((name, device, dtype))
    model = load_stable_diffusion(Loaders.folder, device=device, dtype=dtype)
    model.denoiser.requires_grad_(True).train()
    return model


def raising(name: str, *, device: torch.device, dtype: torch.dtype) -> Backbone:
    raise KeyError("weights\nof two lines")


def ending(name: str, *, device: torch.device, dtype: torch.dtype) -> Backbone:
    sys.exit(5)


def nothing(name: str, *, device: torch.device, dtype: torch.dtype) -> None:
    return None


def without_keywords(name: str) -> None:
    return None


def test_a_loader_is_called_as_documented_and_its_networks_are_frozen() -> None:
    model = load_model(f"{__name__}:good", device="cpu", dtype="bf16")
    assert isinstance(model, StableDiffusion) and model.dtype == torch.bfloat16
    assert CALLS == [(f"{__name__}:good", torch.device("cpu"), torch.bfloat16)]
    assert not model.denoiser.training and not any(p.requires_grad for p in model.denoiser.parameters())


def test_a_name_of_the_catalog_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.MODELS, "mine", f"{__name__}:good")  # type: ignore[arg-type]
    load_model("mine", device="cpu")
    assert CALLS == [("mine", torch.device("cpu"), torch.float32)]


@pytest.mark.parametrize(
    ("attr", "said"),
    [
        ("raising", r"the loader of model '.*:raising' failed \(KeyError: .*weights.*of two lines.*\); correct it"),
        ("ending", r"failed .SystemExit: 5"),
        ("without_keywords", "failed .TypeError: .*unexpected keyword argument"),
        ("nothing", "is a NoneType without 'name'; allowed: a cgru.backbones.base.Backbone"),
        ("NUMBER", "is a int; allowed: a function"),
        ("no_such_name", "cannot import"),
    ],
)
def test_a_loader_that_is_none_is_one_line(attr: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        load_model(f"{__name__}:{attr}", device="cpu")
    assert "\n" not in str(caught.value)


def lacking(name: str, *, device: torch.device, dtype: torch.dtype) -> object:
    model, (changed,) = good(name, device=device, dtype=dtype), CALLS.pop(0)
    parts = {part: getattr(model, part) for part in (*PARTS, *METHODS) if part != changed}
    return SimpleNamespace(**parts)


@pytest.mark.parametrize("part", [*PARTS, *METHODS])
def test_a_part_that_is_missing_is_named(part: str) -> None:
    CALLS.append((part,))
    with pytest.raises(ValueError, match=f"is a SimpleNamespace without '{part}'; allowed: a"):
        load_model(f"{__name__}:lacking", device="cpu")


def test_all_that_a_backbone_has_is_asked_for() -> None:
    assert {name for name in vars(Backbone) if not name.startswith("_")} == {*PARTS, *METHODS}


class Wrapped(nn.Module):
    """A backbone that is an nn.Module, whose networks are no plain attributes."""

    def __init__(self, model: StableDiffusion, shape: object) -> None:
        super().__init__()
        self.denoiser, self.decoder = model.denoiser, model.decoder
        self.name, self.latent_shape, self.device, self.dtype = model.name, shape, model.device, model.dtype
        self.encode_text, self.predict, self.kernel = model.encode_text, model.predict, model.kernel
        self.decode, self.encode = model.decode, model.encode


def a_module(name: str, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return Wrapped(load_stable_diffusion(Loaders.folder, device=device), (4, 8, 8))


def of_a_list(name: str, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return Wrapped(load_stable_diffusion(Loaders.folder, device=device), [4, 8, 8])


def of_no_size(name: str, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return Wrapped(load_stable_diffusion(Loaders.folder, device=device), (4, 0, 8))


def test_a_backbone_may_be_a_module_and_its_parts_are_of_their_types() -> None:
    assert load_model(f"{__name__}:a_module", device="cpu").latent_shape == (4, 8, 8)
    with pytest.raises(ValueError, match="whose 'latent_shape' is a list, not a tuple"):
        load_model(f"{__name__}:of_a_list", device="cpu")
    with pytest.raises(ValueError, match=r"whose 'latent_shape' is \(4, 0, 8\), not numbers of at least 1"):
        load_model(f"{__name__}:of_no_size", device="cpu")


class Idle:
    """A sampler that goes nowhere."""

    def __init__(self, steps: int) -> None:
        self.timesteps, self.stochastic = torch.arange(steps), torch.zeros(steps, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.timesteps)

    def step(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Gaussian | Tensor:
        return Gaussian(x, torch.zeros(1))

    def x0(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Tensor:
        return x


class Undistributed(Idle):
    def step(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Tensor:
        return x


class Uniform(Idle):
    """All latents must be at the same step."""

    def step(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Gaussian:
        return [Gaussian(x, torch.zeros(1))][index]


class Unclean(Idle):
    def x0(self, prediction: Tensor, x: Tensor, index: int | Tensor) -> Tensor:
        raise ArithmeticError("no x0")


WRONG: dict[str, tuple[str, object, str]] = {  # case -> part, what it is, what is said
    "no conditioning": ("encode_text", lambda prompts: torch.zeros(1), "returns a Tensor, not a Conditioning"),
    "no kernel": ("kernel", lambda steps, *, eta, noisy_steps=None: None, "returns a NoneType, not a ReverseKernel"),
    "no steps": ("kernel", lambda *_, **__: Idle(0), r"'kernel' has \(0,\) and \(0,\) as 'timesteps' and 'stochastic'"),
    "no distribution": ("kernel", lambda *_, **__: Undistributed(2), "'kernel.step' returns a Tensor, not a Gaussian"),
    "one step for all": ("kernel", lambda *_, **__: Uniform(2), "'kernel.step' fails .TypeError.* a Gaussian;"),
    "no clean latent": ("kernel", lambda *_, **__: Unclean(2), "'kernel.x0' fails .ArithmeticError: no x0, test_own"),
    "a kernel of its own terms": ("kernel", lambda steps: None, "'kernel' fails .TypeError: .*'eta'.*a ReverseKernel;"),
    "another shape": ("predict", lambda x, *_, guidance: x[:, :1], r"returns \(2, 1, 8, 8\), not \(2, 4, 8, 8\)"),
    "no prediction": ("predict", lambda x, *_, guidance: {}[x], r"fails \(KeyError: .*, test_own_model.py line \d+\)"),
    "the end of the program": ("predict", lambda x, *_, guidance: sys.exit(5), r"fails \(SystemExit: 5, test_own"),
    "four channels": ("decode", lambda x, batch_size=None: x, r"returns \(2, 4, 8, 8\), not \(2, 3, h, w\)"),
    "one class": ("classes", "cross", "'classes' are 'cross', not a tuple of names"),
    "no class": ("classes", (), r"'classes' are \(\), not a tuple of names"),
}


def with_a_wrong_part(name: str, *, device: torch.device, dtype: torch.dtype) -> object:
    model, (case,) = good(name, device=device, dtype=dtype), CALLS.pop(0)
    parts = {part: getattr(model, part) for part in (*PARTS, *METHODS)}
    return SimpleNamespace(**parts | dict([WRONG[str(case)][:2]]))


@pytest.mark.parametrize("case", WRONG)
def test_a_part_that_does_not_do_what_it_must_is_named(case: str) -> None:
    CALLS.append((case,))
    with pytest.raises(ValueError, match=WRONG[case][2]) as caught:
        load_model(f"{__name__}:with_a_wrong_part", device="cpu")
    assert "\n" not in str(caught.value) and "with_a_wrong_part" in str(caught.value)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_shipped_model_stands_the_trial(dtype: str) -> None:
    assert failing(load_model("emoji-canvas", device="cpu", dtype=dtype)) is None


def test_a_path_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sd_folder: Path) -> None:
    for name in (r"C:\models\sd", "C:/models/sd", "D:", ":load", "owner/name", "emoji-canvas", "http://x"):
        assert not is_code(name)
    for name in (r"C:\models\sd", "C:/models/sd"):
        with pytest.raises(FileNotFoundError, match="no model"):
            load_model(name, device="cpu")
    monkeypatch.chdir(tmp_path)
    assert is_own_loader("mine:load")
    (tmp_path / "mine:load").symlink_to(sd_folder)
    assert not is_own_loader("mine:load")
    assert load_model("mine:load", device="cpu").name == "mine:load"
