"""Runs in half precision and compiled runs, from start to end: what `settled` makes of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import side_by_side
from torch._dynamo import lookup_backend

from cgru import distributed
from cgru.backbones.base import Backbone
from cgru.config import RLConfig, override
from cgru.fast.fixed_batch import OneShape, compiled_backbone
from cgru.pipeline import unlearn
from cgru.rl import stages
from cgru.rl.build import build_setting
from cgru.rl.stages import settled
from cgru.runs import read_metrics

TINY = [
    "policy.iterations=2",
    "policy.trajectories=4",
    "policy.clip=0.1",
    "critic.trajectories=4",
    "critic.batch=8",
    "sampling.steps=2",
    "samples_every=1",
    "prompts.count=4",
    "prompts.retain=4",
    "prompts.critic=4",
    "watch.every=0",
    "reward.name=own_pipeline:brightness",
]


def config_of(folder: Path, *settings: str) -> RLConfig:
    return override(RLConfig(concept="dogs", model=str(folder)), [*TINY, *settings])


def test_only_what_rounds_by_the_batch_is_cut_into_one_shape(sd_folder: Path) -> None:
    exact, half = (build_setting(config_of(sd_folder, "critic.kind=none", "policy.advantage=batch", *words))
                   for words in ([], ["dtype=bf16", "policy.micro_batch=2"]))  # fmt: skip
    assert settled(exact) is exact
    backbone = settled(half).problem.backbone
    assert isinstance(backbone, OneShape) and (backbone.batch, backbone.one_graph) == (2, False)


def test_a_run_in_half_precision(sd_folder: Path, tmp_path: Path) -> None:
    """Batches of 4 in rollouts and updates; the ratio before the first update is as near to 1 as is asked for."""
    run = unlearn(config_of(sd_folder, "dtype=bf16", "critic.kind=latent", "policy.micro_batch=4"), tmp_path)
    rows = read_metrics(run.path / "metrics.jsonl")
    assert len(rows) == 2 and run.is_done("3-policy")
    parity = rows[0]["policy/parity"]
    assert isinstance(parity, float) and parity <= 1e-6


def broken(graph: Any, inputs: Any) -> Callable[..., Any]:  # noqa: ANN401 - a backend of torch.compile
    raise RuntimeError("no compiler\nfor this machine")


@pytest.mark.filterwarnings("default")  # torch warns while tracing; as errors these are failures to compile
def test_a_run_whose_networks_cannot_be_compiled_says_so_once_and_goes_on(
    sd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(stages, "compiled_backbone", partial(compiled_backbone, backend=broken))
    with caplog.at_level(logging.WARNING, logger="cgru"):
        run = unlearn(config_of(sd_folder, "compile=true", "critic.kind=latent"), tmp_path)
    (said,) = [record.message for record in caplog.records if "compile" in record.message]
    assert "no compiler for this machine" in said and said.endswith("the denoiser runs without compilation, slower")
    assert run.is_done("3-policy") and len(read_metrics(run.path / "metrics.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("decode", ["full", "half"])
def test_after_its_start_a_compiled_run_compiles_nothing_and_uses_what_it_has(
    sd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_clip_on_the_hub: str, decode: str
) -> None:
    """Nothing for the pictures of iteration 0 either, which are whole where the critic's decoder is one for halves."""
    torch.compiler.reset()
    calls = list[int]()
    """Of each graph."""
    begun = list[int]()

    def counting(graph: Any, inputs: Any) -> Callable[..., Any]:  # noqa: ANN401 - a backend of torch.compile
        compiled, number = lookup_backend("aot_eager")(graph, inputs), len(calls)
        calls.append(0)

        def call(*args: Any) -> Any:  # noqa: ANN401
            calls[number] += 1
            return compiled(*args)

        return call

    def compiled(*args: Any, **settings: Any) -> Backbone:  # noqa: ANN401
        found = compiled_backbone(*args, backend=counting, **settings)
        assert isinstance(found, OneShape) and found.one_graph
        begun.extend(calls)
        return found

    monkeypatch.setattr(stages, "compiled_backbone", compiled)
    run = unlearn(config_of(sd_folder, "compile=true", "critic.kind=film", f"critic.decode={decode}"), tmp_path)
    assert run.is_done("3-policy") and len(list((run.path / "samples").iterdir())) == 3
    assert len(calls) == len(begun) > 1 and all(now > then for now, then in zip(calls, begun, strict=True))


def compiled_in_one(folder: str, out: str) -> tuple[list[bool], int]:
    """Whether the networks were compiled here, and the iterations of the run; the second process has no compiler."""
    found = list[bool]()

    def compiled(*args: Any, **settings: Any) -> Backbone:  # noqa: ANN401
        backend = broken if distributed.rank() else "aot_eager"
        backbone = compiled_backbone(*args, backend=backend, **settings)
        found.append(isinstance(backbone, OneShape) and backbone.one_graph)
        return backbone

    stages.compiled_backbone = compiled  # in a process of its own
    run = unlearn(config_of(Path(folder), "compile=true", "critic.kind=latent"), out)
    return found, len(read_metrics(run.path / "metrics.jsonl"))


@pytest.mark.slow
def test_where_one_process_cannot_compile_none_is_compiled(sd_folder: Path, tmp_path: Path) -> None:
    assert side_by_side(2, compiled_in_one, str(sd_folder), str(tmp_path)) == [([False], 2)] * 2
