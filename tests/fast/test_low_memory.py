"""The low-memory mode: the same predictions, gradients and pictures; less kept, and idle networks away."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cgru.backbones import load_model
from cgru.backbones.base import Backbone, HasTextEncoders
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.fast.fixed_batch import OneShape, compiled_backbone
from cgru.fast.low_memory import low_memory
from cgru.lora.train import attach
from cgru.mdp.rollout import rollout

PROMPTS = ["a dog", "trees", "two cats"]
AWAY = torch.device("meta")  # a name only: the moves below stay on the CPU


def with_lora(folder: Path, dtype: str = "fp32") -> StableDiffusion:
    """A model with a LoRA that is not the base; the same each time."""
    model = load_stable_diffusion(folder, device="cpu", dtype=dtype)
    for number, parameter in enumerate(attach(model.denoiser, rank=2, alpha=2.0, targets="attention", seed=3).values()):
        parameter.data += 0.05 * ((number % 3) - 1.2)
    return model


def inputs(model: Backbone) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, *model.latent_shape, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(3) * 100 + 1


def gradient(model: Backbone) -> tuple[Tensor, int]:
    """The LoRA's gradient of some loss, and how many bytes the forward pass left for the backward pass."""
    kept = list[int]()
    pack = lambda value: (kept.append(value.nbytes), value)[1]  # noqa: E731
    x, time = inputs(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = model.predict(x, time, model.encode_text(PROMPTS), guidance=3.0).square().sum()
    found = torch.autograd.grad(loss, [p for p in model.denoiser.parameters() if p.requires_grad])
    return torch.cat([part.flatten() for part in found]), sum(kept)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])  # bf16: the LoRA is cast, which the second forward pass must know
def test_checkpointing_keeps_less_and_finds_the_same_gradient(sd_folder: Path, dtype: str) -> None:
    model = with_lora(sd_folder, dtype)
    expected, before = gradient(model)
    found, after = gradient(low_memory(model))
    assert float(expected.norm()) > 1e-2
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert after < before / 2


def test_nothing_is_random_when_blocks_run_again(sd_folder: Path) -> None:
    """No dropout anywhere, the LoRA's included: the second forward pass needs no random state."""
    model = low_memory(with_lora(sd_folder))
    assert not model.denoiser.training
    assert {part.p for part in model.denoiser.modules() if isinstance(part, nn.Dropout)} <= {0.0}


class Yard:
    """Where networks wait without their weights: one that is asked while away draws nonsense."""

    def __init__(self, networks: Sequence[nn.Module], names: Sequence[str]) -> None:
        self.names = {id(network): name for network, name in zip(networks, names, strict=True)}
        self.weights: dict[int, list[Tensor]] = {}
        self.moves: list[str] = []

    def move(self, network: nn.Module, place: torch.device) -> None:
        is_leaving = place == AWAY
        self.moves.append(("-" if is_leaving else "+") + self.names[id(network)])
        if is_leaving:
            self.weights[id(network)] = [p.data for p in network.parameters()]
        for parameter, kept in zip(network.parameters(), self.weights[id(network)], strict=True):
            parameter.data = torch.full_like(kept, torch.nan) if is_leaving else kept


def test_idle_networks_are_away_and_come_back(sd_folder: Path) -> None:
    model = with_lora(sd_folder)
    kernel, seeds = model.kernel(2, eta=1.0), [1, 2, 3]
    expected = rollout(model, model.encode_text(PROMPTS), seeds, kernel=kernel, guidance=3.0)
    pictures = model.decode(expected.final)
    latents = model.encode(pictures)

    yard = Yard((model.vae, model.text_encoder), ("vae", "text"))
    lean = low_memory(model, away=AWAY, move=yard.move)
    found = rollout(lean, lean.encode_text(PROMPTS), seeds, kernel=kernel, guidance=3.0)
    assert torch.equal(found.x, expected.x)
    assert yard.moves == ["-text", "-vae", "+text", "-text"]
    for start in range(3):
        assert torch.equal(lean.decode(found.final[start : start + 1]), model.decode(expected.final[start : start + 1]))
    assert torch.equal(lean.encode(pictures), latents)
    assert yard.moves[4:] == ["+vae"]  # once for all batches
    lean.encode_text(["a new prompt"])
    lean.predict(*inputs(lean), lean.encode_text(PROMPTS), guidance=1.0)
    assert yard.moves[5:] == ["+text", "-text", "+text", "-text", "-vae"]


def test_one_shape_goes_around_it(sd_folder: Path) -> None:
    model = with_lora(sd_folder)
    expected, _ = gradient(model)
    found, _ = gradient(OneShape(low_memory(model), batch=2, decode_batch=2))
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.filterwarnings("default")  # torch warns while tracing; as errors these are failures to compile
@pytest.mark.slow  # tracing forward and backward passes takes a minute of CPU time
@pytest.mark.parametrize(("dtype", "allowed"), [("fp32", 1e-5), ("bf16", 0.05)])  # bf16 has 8 bits, 4e-3 each step
def test_compiled_blocks_find_the_same_gradient(sd_folder: Path, dtype: str, allowed: float) -> None:
    torch.compiler.reset()
    model = with_lora(sd_folder, dtype)
    expected, _ = gradient(model)
    steady = compiled_backbone(low_memory(model), batch=3, decode_batch=2, guidance=3.0, backend="aot_eager")
    assert isinstance(steady, OneShape) and steady.one_graph
    found, _ = gradient(steady)
    assert float((found - expected).norm() / expected.norm()) < allowed


def test_other_models_are_refused(sd_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\(OneShape\) lacks `saving_memory`.*Set memory=fast") as caught:
        low_memory(OneShape(with_lora(sd_folder), batch=1, decode_batch=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_other_families_have_it_too(family_folders: dict[str, Path], name: str) -> None:
    model = load_model(family_folders[name], device="cpu")
    for number, parameter in enumerate(attach(model.denoiser, rank=2, alpha=2.0, targets="attention", seed=3).values()):
        parameter.data += 0.05 * ((number % 3) - 1.2)
    assert isinstance(model, HasTextEncoders)
    names = [*model.text_encoders, "vae"]
    expected, before = gradient(model)
    pictures = model.decode(inputs(model)[0])

    yard = Yard([*model.text_encoders.values(), model.vae], names)  # type: ignore[attr-defined]
    lean = low_memory(model, away=AWAY, move=yard.move)
    assert yard.moves == [f"-{part}" for part in names]
    found, after = gradient(lean)
    assert float(expected.norm()) > 1e-3
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert after < before
    assert yard.moves[len(names) :] == [f"{sign}{part}" for part in model.text_encoders for sign in "+-"]
    assert torch.equal(lean.decode(inputs(model)[0]), pictures)
    assert yard.moves[-1] == "+vae"
