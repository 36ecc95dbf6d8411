"""Sizes that fit a device's memory, the low-memory mode of a run, and runs whose memory runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cgru.atomic_io import to_json
from cgru.backbones.sd import load_stable_diffusion
from cgru.cli import main
from cgru.config import RLConfig, override
from cgru.fast.low_memory import low_memory
from cgru.lora.file import LORA_FILE
from cgru.lora.train import attach
from cgru.pipeline import fit_critic, resume, unlearn
from cgru.rl.batch_size import GIB, LARGE, SMALL, TOO_MUCH, Costs, Line, choose, fitted, measured, sized
from cgru.rl.critic_stage import CRITIC_STAGE
from cgru.rl.state import Sizes
from cgru.rl.update import TrainingError
from cgru.runs import Run, read_metrics

TINY = [
    "policy.iterations=2",
    "policy.trajectories=4",
    "critic.kind=latent",
    "critic.trajectories=4",
    "critic.batch=8",
    "sampling.steps=2",
    "checkpoint_every=1",
    "samples_every=0",
    "prompts.count=4",
    "prompts.retain=4",
    "prompts.critic=4",
    "watch.every=0",
    "reward.name=own_pipeline:brightness",
]


def config_of(folder: Path, *settings: str) -> RLConfig:
    return override(RLConfig(concept="dogs", model=str(folder)), [*TINY, *settings])


def edit(run: Run) -> dict[str, Tensor]:
    return load_file(run.path / "edit" / LORA_FILE)


def sizes_of(run: Run) -> Sizes:
    return Sizes(**run.manifest["extra"]["sizes"])


def said_of_memory(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "cgru.rl.oom_retry"]


# ---- arithmetic


@pytest.mark.parametrize(
    ("free", "expected"),
    [(9, 0), (10, 0), (12, 1), (15, 2), (17, 2), (18, 4), (25, 4), (26, 8), (41, 12), (42, 16), (1000, 16)],
)
def test_the_most_that_fits(free: int, expected: int) -> None:
    """10 are fixed and each takes 2, so n need 10 + 2n: 8 need 26, 12 need 34, 16 need 42."""
    assert fitted(free, 10, 2, 16) == expected


def costs(free: float, pair: float, *, used: float = 2.0) -> Costs:
    return Costs(int(free * GIB), int(used * GIB), Line(0, int(pair * GIB)), Line(0, GIB // 2))


def chosen(fast: Costs, low: Costs, *settings: str) -> Sizes:
    config = override(RLConfig(concept="dogs"), ["dtype=bf16", *settings])
    return choose(config, LARGE, fast=lambda: fast, low=lambda: low)


def never() -> Costs:
    raise AssertionError("not to be measured")


def test_a_large_card_is_filled_at_full_speed(caplog: pytest.LogCaptureFixture) -> None:
    """16 pairs of 2.2 GiB are 35.2; of 135 free, 3 are left and nine tenths of the rest counted on: 118.8."""
    config = override(RLConfig(concept="dogs"), ["dtype=bf16"])
    with caplog.at_level(logging.INFO):
        found = choose(config, LARGE, fast=lambda: costs(135, 2.2), low=never)
    assert found == Sizes(rollout=16, update=16, decode=16, score=256, low_memory=False)
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("memory: full-speed mode, 16 pairs per update and 16 latents per decode")
    exact = choose(replace(config, dtype="fp32"), LARGE, fast=lambda: costs(135, 2.2), low=never)
    assert exact.rollout == 32  # rounding does not matter there


def test_a_card_of_24_gb_takes_fewer_pairs() -> None:
    """(21 - 3) · 0.9 = 16.2 GiB: 7 pairs of 2.2, so 4; 32 decodes of 0.5, so the 16 that fill the device."""
    found = choose(override(RLConfig(concept="dogs"), ["dtype=bf16"]), LARGE, fast=lambda: costs(21, 2.2), low=never)
    assert (found.update, found.rollout, found.decode, found.low_memory) == (4, 4, 16, False)


def test_a_card_of_12_gb_is_for_the_low_memory_mode(caplog: pytest.LogCaptureFixture) -> None:
    """Of 9.4 GiB free, (9.4 - 3) · 0.9 = 5.8 hold 2 pairs of 2.2, under 4; in the other mode of 0.3: min(9.4, 11 - 2),
    less 3, nine tenths: 5.4, so 16."""
    with caplog.at_level(logging.INFO):
        found = chosen(costs(9.4, 2.2), costs(9.4, 0.3))
    assert found == Sizes(rollout=16, update=16, decode=8, score=256, low_memory=True)
    assert "low-memory mode, 16 pairs" in caplog.records[-1].message


def test_the_low_memory_mode_takes_no_more_of_a_large_card() -> None:
    """11 - 2 in use - 3 = 6, nine tenths: 5.4 GiB hold 9 pairs of 0.6."""
    assert chosen(costs(135, 2.2), costs(135, 0.6), "memory=low").update == 8


@pytest.mark.parametrize(
    ("trajectories", "settings", "expected"),
    [
        (16, ("compile=true",), (8, 8)),  # 12 fit: two parts of 8 fill nothing up, 12 and 4 would fill up 8
        (20, ("compile=true",), (10, 10)),
        (20, ("compile=true", "dtype=bf16"), (8, 8)),  # in half precision the largest power of two that fits
        (16, ("dtype=bf16",), (8, 8)),
        (3, ("dtype=bf16",), (4, 4)),  # and no more than is needed
        (16, (), (24, 12)),  # in float32 and not compiled nothing is filled up
    ],
)
def test_one_shape_is_an_equal_part_of_the_batch_or_a_power_of_two(
    trajectories: int, settings: tuple[str, ...], expected: tuple[int, int]
) -> None:
    """(21 - 3) · 0.9 = 16.2 GiB hold 12 pairs of 1.3."""
    config = override(RLConfig(concept="dogs"), [f"policy.trajectories={trajectories}", *settings])
    found = choose(config, LARGE, fast=lambda: costs(21, 1.3), low=never)
    assert (found.rollout, found.update) == expected


def test_what_is_asked_for_is_taken() -> None:
    assert chosen(costs(9.4, 2.2), costs(9.4, 0.3), "memory=fast").low_memory is False
    assert chosen(costs(9.4, 2.2), costs(9.4, 0.3), "memory=fast").update == 2
    assert chosen(costs(135, 2.2), costs(135, 0.3), "policy.micro_batch=3") == Sizes(3, 3, 16, 256)
    small = chosen(costs(9.4, 2.2), costs(9.4, 0.3), "policy.micro_batch=2")
    assert (small.update, small.low_memory) == (2, False)  # 2 do fit
    large = chosen(costs(9.4, 2.2), costs(9.4, 0.3), "policy.micro_batch=12")
    assert (large.update, large.low_memory) == (12, True)


def test_a_device_too_small_is_tried_one_by_one() -> None:
    found = chosen(replace(costs(1, 2.2), update=TOO_MUCH), replace(costs(1, 2.2), update=TOO_MUCH, decode=TOO_MUCH))
    assert found == Sizes(1, 1, 1, 256, True)


def test_a_small_model_has_other_limits() -> None:
    config = RLConfig(concept="dogs")
    found = choose(config, SMALL, fast=lambda: costs(20, 0.01), low=never)
    # (20 - 0.5) · 0.9 = 17.55 GiB: 1755 pairs of 0.01, so 512; 35 decodes of 0.5, so 32
    assert found == Sizes(1024, 512, 32, 1024)


def test_on_the_cpu_nothing_is_measured(sd_folder: Path) -> None:
    model = load_stable_diffusion(sd_folder, device="cpu")
    config = config_of(sd_folder)
    same, sizes = sized(config, model)
    assert same is model and sizes == Sizes(64, 64, 64, 256, False)
    lean, sizes = sized(override(config, ["memory=low"]), model)
    assert sizes == Sizes(64, 64, 64, 256, True)
    assert lean is not model and model.denoiser.is_gradient_checkpointing


# ---- measuring


@dataclass
class SavedMeter:
    """As a device's meter, but of what autograd keeps, which the CPU can say, too; 100 of it are a library's."""

    room: float = math.inf

    def free(self) -> int:
        return 1000

    def used(self) -> int:
        return 10

    def peak(self, work: Callable[[], object]) -> int:
        kept = list[int]()

        def keep(value: Tensor) -> Tensor:
            kept.append(value.nbytes)
            if sum(kept) > self.room:
                raise torch.OutOfMemoryError("full")
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            work()
        return 100 + sum(kept)


def test_costs_are_those_of_real_updates_and_leave_the_model_as_it_was(sd_folder: Path) -> None:
    model, config = load_stable_diffusion(sd_folder, device="cpu"), config_of(sd_folder)
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    found = measured(config, model, SavedMeter())
    assert (found.free, found.used) == (1000, 10)
    assert found.update.each > 50_000 and found.update.fixed > 100  # a pair's activations; weights, too, are kept
    assert found.decode == Line(99, 1)  # without gradient nothing is kept, so two are as one: 1 at least
    low = measured(config, low_memory(model), SavedMeter())
    assert low.update.each < found.update.each / 2
    after = model.denoiser.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    fresh = load_stable_diffusion(sd_folder, device="cpu")
    options = {"rank": 2, "alpha": 2.0, "targets": "attention", "seed": 3}
    mine, theirs = (attach(each.denoiser, **options) for each in (model, fresh))  # type: ignore[arg-type]
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_what_does_not_fit_alone_is_too_much(sd_folder: Path) -> None:
    model = load_stable_diffusion(sd_folder, device="cpu")
    found = measured(config_of(sd_folder), model, SavedMeter(room=10_000))
    assert found.update == TOO_MUCH and found.decode == Line(99, 1)


# ---- runs


def test_a_run_in_the_low_memory_mode_ends_as_any_other(sd_folder: Path, tmp_path: Path) -> None:
    low = unlearn(config_of(sd_folder, "memory=low"), tmp_path / "low")
    fast = unlearn(config_of(sd_folder, "memory=fast"), tmp_path / "fast")
    assert low.path.name == fast.path.name  # rounding apart, it is the same run
    assert (sizes_of(low).low_memory, sizes_of(fast).low_memory) == (True, False)
    torch.testing.assert_close(edit(low), edit(fast), atol=1e-6, rtol=0)


def test_the_mode_is_kept_until_another_is_asked_for(sd_folder: Path, tmp_path: Path) -> None:
    run = fit_critic(config_of(sd_folder, "memory=low", "policy.micro_batch=2"), tmp_path)
    begun = sizes_of(run)
    assert begun.low_memory and begun.update == 2
    again = fit_critic(config_of(sd_folder, "memory=auto", "policy.micro_batch=2"), tmp_path)
    assert again.path == run.path and sizes_of(again) == begun
    run.annotate(sizes={**run.manifest["extra"]["sizes"], "rollout": 3})
    unlearn(config_of(sd_folder, "policy.micro_batch=2"), tmp_path)
    assert sizes_of(run) == replace(begun, rollout=3)  # those of the run count, not what this machine would take


def test_resume_keeps_the_mode_that_was_changed_to(sd_folder: Path, tmp_path: Path) -> None:
    """Begun with memory=fast, gone on with memory=low: the folder's config still says fast."""
    run = fit_critic(config_of(sd_folder, "memory=fast"), tmp_path)
    (run.path / "stages" / CRITIC_STAGE / "done.json").unlink()
    fit_critic(config_of(sd_folder, "memory=low"), tmp_path)
    resume(run.path, code=["own_pipeline"])
    assert sizes_of(run).low_memory


def test_another_mode_sizes_anew(sd_folder: Path, tmp_path: Path) -> None:
    run = fit_critic(config_of(sd_folder, "memory=fast"), tmp_path)
    run.annotate(sizes={**run.manifest["extra"]["sizes"], "rollout": 3})
    (run.path / "stages" / CRITIC_STAGE / "done.json").unlink()
    fit_critic(config_of(sd_folder, "memory=low"), tmp_path)
    assert sizes_of(run) == Sizes(64, 64, 64, 256, True)


HERE = {"device": "cpu", "processes": 1}


@pytest.mark.parametrize(
    ("there", "rollout"),
    [
        (HERE, 3),
        (None, 3),  # runs of earlier versions
        ({"device": "NVIDIA H200, 140 GiB", "processes": 1}, 64),
        ({"device": "cpu", "processes": 4}, 64),
    ],
)
def test_sizes_are_those_of_the_run_on_a_machine_alike_only(
    sd_folder: Path, tmp_path: Path, there: dict[str, Any] | None, rollout: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = fit_critic(config_of(sd_folder), tmp_path)
    assert run.manifest["extra"]["sized_for"] == HERE
    extra = {**run.manifest["extra"], "sized_for": there}
    extra["sizes"]["rollout"] = 3
    run.save("manifest.json", to_json({**run.manifest, "extra": {k: v for k, v in extra.items() if v is not None}}))
    with caplog.at_level(logging.INFO):
        resume(run.path, code=["own_pipeline"])
    assert sizes_of(run) == Sizes(rollout, 64, 64, 256) and run.manifest["extra"]["sized_for"] == HERE
    assert ("this is cpu and 1 process: finding them again" in caplog.text) == (rollout == 64)


@pytest.mark.parametrize(
    ("begun", "there", "is_low"),
    [
        ("fast", {"device": "cpu", "processes": 4}, True),  # it had not fitted this device
        ("fast", {"device": "a small card, 12 GiB", "processes": 1}, False),  # another one: whatever fits
        ("low", {"device": "a small card, 12 GiB", "processes": 1}, True),  # as was asked for
    ],
)
def test_elsewhere_a_resumed_run_is_in_the_mode_that_fits(
    sd_folder: Path, tmp_path: Path, begun: str, there: dict[str, Any], is_low: bool
) -> None:
    run = fit_critic(config_of(sd_folder, f"memory={begun}"), tmp_path)
    run.annotate(sizes={**run.manifest["extra"]["sizes"], "low_memory": True}, sized_for=there)
    resume(run.path, code=["own_pipeline"])
    assert sizes_of(run).low_memory == is_low


def test_memory_that_runs_out_halves_the_micro_batch_and_the_run_keeps_it(
    sd_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(sd_folder, "policy.micro_batch=4", "reward.name=own_pipeline:on_a_small_device")
    with caplog.at_level(logging.WARNING):
        run = unlearn(config, tmp_path)
    assert [words[:26] for words in said_of_memory(caplog)] == ["out of memory in an update"]
    assert sizes_of(run) == Sizes(32, 2, 64, 256)
    begun_smaller = unlearn(config_of(sd_folder, "policy.micro_batch=2"), tmp_path / "smaller")
    rows = [read_metrics(each.path / "metrics.jsonl") for each in (run, begun_smaller)]
    for key in ("policy/loss", "policy/gradient_norm", "reward/mean"):
        assert [row[key] for row in rows[0]] == pytest.approx([row[key] for row in rows[1]], rel=1e-4, abs=1e-6), key
    (run.path / "edit" / "edit.json").unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resume(run.path, code=["own_pipeline"])
    assert sizes_of(run).update == 2 and not said_of_memory(caplog)


def test_memory_that_runs_out_again_leaves_the_checkpoint(sd_folder: Path, tmp_path: Path) -> None:
    config = config_of(sd_folder, "policy.micro_batch=4", "reward.name=own_pipeline:on_a_device_that_fills_up")
    with pytest.raises(TrainingError, match="2 pairs: Tried to allocate 2.00 GiB") as caught:
        unlearn(config, tmp_path)
    assert "\n" not in str(caught.value)
    (path,) = tmp_path.iterdir()
    run = Run.open(path)
    latest = run.latest("3-policy")
    assert latest is not None and latest[0] == 1 and not run.is_done("3-policy")
    assert sizes_of(run).update == 2


def test_memory_that_runs_out_in_an_earlier_stage_is_one_line(sd_folder: Path, tmp_path: Path) -> None:
    config = config_of(sd_folder, "reward.name=own_pipeline:on_no_device")
    with pytest.raises(TrainingError, match="^out of memory .Tried to allocate 9.00 GiB.*memory=low") as caught:
        unlearn(config, tmp_path)
    assert "\n" not in str(caught.value)


def test_memory_that_runs_out_before_there_is_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["unlearn", "Dogs", "--out", str(tmp_path), "--dry-run", "reward.name=own_pipeline:on_no_device"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("cgru: out of memory (Tried to allocate 9.00 GiB") and told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
