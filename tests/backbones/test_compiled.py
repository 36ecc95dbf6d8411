"""A compiled denoiser: the same pictures under the same names, LoRAs seen, and eager again where it fails."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cgru.backbones.adapter import attach, detach
from cgru.backbones.compiled import compile_denoiser, compile_network
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.mdp.rollout import sample


@pytest.fixture
def tiny(sd_folder: Path) -> StableDiffusion:
    """A model of its own for each test."""
    torch.compiler.reset()
    return load_stable_diffusion(sd_folder, device="cpu")


def latents(backbone: StableDiffusion) -> Tensor:
    kernel = backbone.kernel(2, eta=0.0)
    return sample(backbone, backbone.encode_text(["a dog", "trees"]), [5, 6], kernel=kernel, guidance=3.0)


@pytest.mark.filterwarnings("default")  # torch warns while tracing; as errors these are failures to compile
@pytest.mark.slow  # tracing takes 15 s of CPU time
def test_same_pictures_names_and_one_graph_until_a_lora_comes(tiny: StableDiffusion) -> None:
    graphs: list[fx.GraphModule] = []

    def trace_only(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # runs what was traced, op by op: Inductor would take a minute

    names, before = list(tiny.denoiser.state_dict()), latents(tiny)
    seconds = compile_denoiser(tiny, lambda: latents(tiny), backend=trace_only)
    assert seconds is not None and seconds > 0
    traced = len(graphs)
    assert traced > 0
    torch.testing.assert_close(latents(tiny), before, atol=1e-5, rtol=0)  # channels-last sums in another order
    assert len(graphs) == traced, "the same shapes again must not compile again"
    assert list(tiny.denoiser.state_dict()) == names

    for parameter in attach(tiny.denoiser, rank=2, alpha=2.0, targets="attention", seed=3).values():
        parameter.data += 0.1
    assert (latents(tiny) - before).abs().max() > 1e-3
    assert len(graphs) > traced
    detach(tiny.denoiser)
    torch.testing.assert_close(latents(tiny), before, atol=1e-5, rtol=0)


def broken_backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """As a machine without a C++ compiler."""
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("backend", ["nonsense", pytest.param(broken_backend, marks=pytest.mark.slow)])
def test_where_it_fails_the_denoiser_stays_as_it_was(
    tiny: StableDiffusion, backend: str | Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = latents(tiny)
    with caplog.at_level(logging.WARNING):
        assert compile_denoiser(tiny, lambda: latents(tiny), backend=backend) is None
    assert [record.name for record in caplog.records] == ["cgru.backbones.compiled"]
    assert "runs as it is" in caplog.text
    assert torch.equal(latents(tiny), before)


@pytest.mark.filterwarnings("default")  # of torch about itself
def test_inductor_is_told_to_time_no_forms_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is one that torch knows, and other backends, which know none, get none."""
    told = {}
    monkeypatch.setattr(nn.Module, "compile", lambda part, *, backend, options, **rest: told.update({backend: options}))
    for backend in ("inductor", "aot_eager"):
        compile_network(nn.Identity(), lambda: None, what="nothing", backend=backend)
    assert told == {"inductor": {"triton.autotune_pointwise": False}, "aot_eager": None}
    torch.compile(nn.Identity(), options=told["inductor"])  # refuses what it does not know
