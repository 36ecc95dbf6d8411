"""Guidance, and the choice of device and dtype."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cgru import distributed
from cgru.backbones.base import as_rgb, guided, parse_dtype, pick_device
from cgru.mdp.trajectory import Conditioning

COND = Conditioning(
    ("a", "b"), {"embeddings": torch.tensor([1.0, 2.0]).view(2, 1, 1)}, {"embeddings": torch.zeros(1, 1, 1)}
)


def echo(x: Tensor, time: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """A denoiser that shows what it was given: x + time + everything in the conditioning, in half precision."""
    return (x + sum(part.view(-1, 1, 1, 1) for part in (time, *tensors.values()))).bfloat16()


def test_guidance_by_hand() -> None:
    # x = 0, time 10 and 20; unconditional 10, 20; conditional 11, 22; guidance 3: 10 + 3 · 1, 20 + 3 · 2
    out = guided(echo, torch.zeros(2, 1, 1, 1), torch.tensor([10, 20]), COND, guidance=3.0)
    assert out.flatten().tolist() == [13, 26] and out.dtype == torch.float32


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_guidance_of_at_most_one_is_the_conditional_pass_alone(guidance: float) -> None:
    batches = []

    def counting(x: Tensor, time: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        batches.append(len(x))
        return echo(x, time, tensors)

    out = guided(counting, torch.zeros(2, 1, 1, 1), torch.tensor([10, 20]), COND, guidance=guidance)
    assert out.flatten().tolist() == [11, 22] and batches == [2]


def test_a_tensor_without_an_unconditional_one_is_the_same_in_both_passes() -> None:
    # as above with 100 and 200 more in both passes, which guidance leaves alone
    cond = replace(COND, tensors={**COND.tensors, "size": torch.tensor([100, 200])})
    out = guided(echo, torch.zeros(2, 1, 1, 1), torch.tensor([10, 20]), cond, guidance=3.0)
    assert out.flatten().tolist() == [113, 226]


def test_a_model_without_unconditional_tensors_is_not_guided() -> None:
    cond = replace(COND, unconditional={})
    assert guided(echo, torch.zeros(2, 1, 1, 1), torch.tensor([10, 20]), cond, guidance=1.0).shape == (2, 1, 1, 1)
    with pytest.raises(ValueError, match="guidance is 3, but this model has nothing .*Set sampling.guidance=1"):
        guided(echo, torch.zeros(2, 1, 1, 1), torch.tensor([10, 20]), cond, guidance=3.0)


def test_grey_pictures_become_three_equal_channels() -> None:
    grey = torch.rand(2, 1, 4, 4)
    assert torch.equal(as_rgb(grey), torch.cat([grey, grey, grey], 1)) and as_rgb(as_rgb(grey)).shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match="pictures of 4 channels; allowed: 1 .* or 3"):
        as_rgb(torch.rand(2, 4, 4, 4))


def test_parse_dtype() -> None:
    assert [parse_dtype(name) for name in ("fp32", "bf16", "fp16")] == [torch.float32, torch.bfloat16, torch.float16]
    assert parse_dtype(torch.bfloat16) == torch.bfloat16
    for wrong in ("bf61", torch.int8):
        with pytest.raises(ValueError, match="unknown dtype .*; allowed: fp32, bf16, fp16"):
            parse_dtype(wrong)


def test_pick_device() -> None:
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ValueError, match="'cuda:99' does not exist on this machine; available: auto, cpu"):
        pick_device("cuda:99")
    with pytest.raises(ValueError, match="unknown device 'cpuu'; allowed: auto, cpu.* Did you mean 'cpu'"):
        pick_device("cpuu")


@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:0", "cuda:7"])
def test_among_processes_each_has_its_own_device(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Also where the run was begun on one with a number."""
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda", 3))
    assert pick_device(asked) == torch.device("cuda", 3)
    assert pick_device("cpu") == torch.device("cpu")
