"""A compiled denoiser: the same pictures under the same names, LoRAs seen, and eager again where it fails."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.fast import compile, fixed_batch
from cgru.fast.compile import Backend, compile_denoiser, compile_network
from cgru.lora.train import attach, detach
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
    assert [record.name for record in caplog.records] == ["cgru.fast.compile"]
    assert "runs without compilation" in caplog.text
    assert torch.equal(latents(tiny), before)


Told = list[tuple[nn.Module, Backend, dict[str, bool] | None]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is compiled, by which backend, with which options; none of it is done."""
    found: Told = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda part, *, backend, options, **_: found.append((part, backend, options))
    )
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_only_inductor_has_options_and_only_those_that_torch_knows(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    network, known = nn.Identity(), dict(compile.INDUCTOR)
    monkeypatch.setitem(compile.INDUCTOR, "triton.no_such_option", True)
    for backend in ("inductor", "aot_eager", broken_backend):
        compile_network(network, lambda: None, what="nothing", backend=backend)
    assert [options for _, _, options in told] == [known, None, None]
    assert known == {"triton.autotune_pointwise": False, "deterministic": True}
    torch.compile(network, options=told[0][2])  # refuses what it does not know
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(network, options=compile.INDUCTOR)


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_network_without_blocks_of_ours_is_compiled_as_a_whole(told: Told, has_norm: bool) -> None:
    """Nothing that is known, or a norm that shares its shape with none."""
    network = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4) if has_norm else nn.ReLU())
    assert (
        compile_network(network, lambda: None, what="it", glimpse=lambda: network(torch.ones(1, 4, 8, 8))) is not None
    )
    assert [part for part, _, _ in told] == [network]


def test_blocks_that_are_never_called_are_left_alone(told: Told) -> None:
    network = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)])
    assert compile_network(network, lambda: None, what="it", glimpse=lambda: None) is not None
    assert [part for part, _, _ in told] == [network]


def test_the_look_at_one_sample_leaves_cudnns_attention_out(
    tiny: StableDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plans each new shape, which takes seconds at full size."""
    allowed = []

    def look(network: nn.Module, probe: object, *, glimpse: Callable[[], object] | None = None, **_: object) -> None:
        if glimpse is not None:
            hook = network.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
            glimpse()
            hook.remove()

    monkeypatch.setattr(fixed_batch, "compile_network", look)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    fixed_batch.compiled_backbone(tiny, batch=2, decode_batch=2, guidance=3.0)
    assert allowed == [False] and before and torch.backends.cuda.cudnn_sdp_enabled()


def test_among_processes_all_are_compiled_or_none(tiny: StableDiffusion, caplog: pytest.LogCaptureFixture) -> None:
    """The backend fails when it is used: what is not undone would show."""
    torch.compiler.reset()
    before, told = latents(tiny), list[str | None]()

    def elsewhere(work: Callable[[], str | None]) -> str:
        told.append(work())
        return "no compiler"

    with caplog.at_level(logging.WARNING):
        found = compile_network(tiny.denoiser, lambda: None, what="it", backend=broken_backend, together=elsewhere)
    assert found is None and told == [None]
    assert [record.message for record in caplog.records] == [
        "torch.compile failed (no compiler); it runs without compilation, slower"
    ]
    assert torch.equal(latents(tiny), before)


def test_memory_that_runs_out_is_no_failure_to_compile(tiny: StableDiffusion) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("none is left")

    with pytest.raises(torch.OutOfMemoryError):
        compile_network(tiny.denoiser, full, what="it", backend="aot_eager")
