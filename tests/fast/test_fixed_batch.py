"""Networks that see one shape only: the same predictions, gradients and pictures, and no second graph."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.fast.batch_invariant import BatchInvariantConv2d
from cgru.fast.compile import Backend
from cgru.fast.fixed_batch import OneShape, compiled_backbone, no_recompiles, steady_backbone
from cgru.fast.subpixel import SubpixelUpsample2D
from cgru.lora.train import attach
from cgru.mdp.rollout import rescore, rollout

PROMPTS = ["a dog", "trees", "two cats", "a red house", "the sea"]


@pytest.fixture
def tiny(sd_folder: Path) -> StableDiffusion:
    """A model of its own for each test, with a LoRA that is not the base."""
    model = load_stable_diffusion(sd_folder, device="cpu")
    for number, parameter in enumerate(attach(model.denoiser, rank=2, alpha=2.0, targets="attention", seed=3).values()):
        parameter.data += 0.05 * ((number % 3) - 1.2)
    return model


def inputs(model: StableDiffusion, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, *model.latent_shape, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(n) * 100 + 1


def sizes_seen(network: nn.Module) -> list[int]:
    """Filled with the batch of every call from now on."""
    seen: list[int] = []
    network.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return seen


def gradient(model: StableDiffusion | OneShape, n: int) -> Tensor:
    model.denoiser.zero_grad()
    x, time = inputs(model.inner if isinstance(model, OneShape) else model, n)
    model.predict(x, time, model.encode_text(PROMPTS[:n]), guidance=3.0).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.denoiser.parameters() if p.grad is not None])


@pytest.mark.parametrize("n", [1, 2, 5])  # less than a part, one part, two and a half
@torch.no_grad()
def test_the_same_predictions_and_pictures_in_parts_of_one_size(tiny: StableDiffusion, n: int) -> None:
    steady = OneShape(tiny, batch=2, decode_batch=3)
    (x, time), cond = inputs(tiny, n), tiny.encode_text(PROMPTS[:n])
    expected, pictures = tiny.predict(x, time, cond, guidance=3.0), tiny.decode(x)
    denoised, decoded = sizes_seen(tiny.denoiser), sizes_seen(tiny.decoder)
    found = steady.predict(x, time, cond, guidance=3.0)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(steady.decode(x, batch_size=1), pictures, atol=1e-5, rtol=0)
    assert set(denoised) == {4} and len(denoised) == (n + 1) // 2  # guidance doubles 2
    assert set(decoded) == {3} and len(decoded) == (n + 2) // 3


@pytest.mark.parametrize("n", [1, 5])
def test_the_same_gradient(tiny: StableDiffusion, n: int) -> None:
    """What fills a part up has no say in it."""
    expected, found = gradient(tiny, n), gradient(OneShape(tiny, batch=2, decode_batch=2), n)
    assert float(expected.norm()) > 1e-2
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_policy_s_convolutions_give_a_sample_the_same_bits_in_any_place(tiny: StableDiffusion) -> None:
    """By their kind: on a CPU torch's own do, too. What they are for is seen on CUDA alone (test_batch_invariant)."""
    before = {name: type(part) for name, part in tiny.denoiser.named_modules() if isinstance(part, nn.Conv2d)}
    steady = steady_backbone(tiny, batch=4, decode_batch=3)
    after = {name: type(part) for name, part in tiny.denoiser.named_modules() if isinstance(part, nn.Conv2d)}
    assert set(before.values()) == {nn.Conv2d} and after == dict.fromkeys(before, BatchInvariantConv2d)
    assert (steady.batch, steady.decode_batch, steady.one_graph) == (4, 3, False)


def test_rollouts_run_the_updates_graph_and_keep_nothing_of_it(tiny: StableDiffusion) -> None:
    modes: list[bool] = []
    tiny.denoiser.register_forward_pre_hook(lambda module, args: modes.append(torch.is_grad_enabled()))
    kernel, cond = tiny.kernel(2, eta=1.0), tiny.encode_text(PROMPTS[:3])
    for one_graph in (True, False):
        steady = OneShape(tiny, batch=2, decode_batch=2, one_graph=one_graph)
        trajectory = rollout(steady, cond, [1, 2, 3], kernel=kernel, guidance=3.0)
        assert not trajectory.x.requires_grad and not trajectory.log_prob.requires_grad
    assert modes == [True] * 4 + [False] * 4  # 2 steps of 2 parts


def failing(graph: object, inputs: object) -> NoReturn:
    raise RuntimeError("no Triton here")


@pytest.mark.parametrize("backend", ["nonsense", failing])  # refused at once; only when something is to be compiled
def test_what_cannot_be_compiled_stays_as_it_was(
    tiny: StableDiffusion, caplog: pytest.LogCaptureFixture, backend: Backend
) -> None:
    with caplog.at_level(logging.WARNING):
        found = compiled_backbone(tiny, batch=2, decode_batch=2, guidance=3.0, backend=backend)
    assert isinstance(found, OneShape) and not found.one_graph
    # One notice: the decoder is not tried.
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == [
        "the denoiser runs without compilation, slower"
    ]
    assert float(gradient(tiny, 2).norm()) > 1e-2


@pytest.mark.filterwarnings("default")  # torch warns while tracing; as errors these are failures to compile
@pytest.mark.slow  # tracing forward and backward passes takes a minute of CPU time
@pytest.mark.parametrize("regional", [True, False])
def test_one_compilation_serves_rollouts_and_updates_alike(tiny: StableDiffusion, regional: bool) -> None:
    torch.compiler.reset()
    expected, pictures = gradient(tiny, 3), copy.deepcopy(tiny).decode
    steady = compiled_backbone(
        tiny, batch=2, decode_batch=2, guidance=3.0, regional=regional, backend="aot_eager"
    )  # aot_eager: traced and split as for Inductor, but run op by op
    assert isinstance(steady, OneShape) and steady.one_graph
    assert any(isinstance(part, SubpixelUpsample2D) for part in tiny.decoder.modules())
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    with no_recompiles():
        kernel, cond = tiny.kernel(2, eta=1.0), tiny.encode_text(PROMPTS[:3])
        trajectory = rollout(steady, cond, [1, 2, 3], kernel=kernel, guidance=3.0)
        torch.testing.assert_close(steady.decode(trajectory.final), pictures(trajectory.final), atol=1e-5, rtol=0)
        steps = trajectory.steps(*trajectory.policy_pairs())
        now = rescore(steady, steps, kernel=kernel, guidance=3.0)
    assert now.requires_grad
    torch.testing.assert_close(now, steps.log_prob, atol=1e-6, rtol=0)
    found = gradient(steady, 3)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    half = replace(steady, batch=1, one_graph=False)  # as after memory ran out: no graph fits any more
    with no_recompiles():
        now = half.predict(*inputs(tiny, 3), cond, guidance=3.0)
        with torch.no_grad():
            assert torch.equal(half.predict(*inputs(tiny, 3), cond, guidance=3.0), now)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_the_decoder_of_a_critic_that_sees_small_pictures_has_a_graph_for_these_alone(tiny: StableDiffusion) -> None:
    torch.compiler.reset()
    plain = copy.deepcopy(tiny)
    steady = compiled_backbone(tiny, batch=2, decode_batch=2, guidance=3.0, shrink=2, backend="aot_eager")
    assert isinstance(steady, OneShape) and set(steady.compile_seconds) == {"denoiser", "decoder"}
    x = torch.randn((2, *tiny.latent_shape), generator=torch.Generator().manual_seed(0))
    graphs = counters["stats"]["unique_graphs"]
    for latents in (x, x[..., ::2, ::2]):
        with no_recompiles(), torch.no_grad():
            found = steady.decode(latents)
        torch.testing.assert_close(found, plain.decode(latents), atol=1e-5, rtol=0)
        assert counters["stats"]["unique_graphs"] == graphs
    with torch.no_grad():
        steady.decode(x[..., ::2, ::2])  # where recompiling is allowed it has its graph
        assert counters["stats"]["unique_graphs"] == graphs
        steady.decode(x)
    assert counters["stats"]["unique_graphs"] == graphs + 1
