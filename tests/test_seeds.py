"""Named seeds: stable over processes and versions, different for every name, within what torch and Python take."""

import torch

from cgru.seeds import child_random, child_seed


def test_a_seed_is_the_same_for_ever() -> None:
    # The first 8 bytes of sha256("0/rollout/3/1") as a big-endian number, halved: runs must stay repeatable.
    assert child_seed(0, "rollout", 3, 1) == 0x7C0EB51CE6C2C472 >> 1


def test_every_part_of_the_name_counts() -> None:
    seeds = {child_seed(root, name, i, j) for root in (0, 1) for name in "ab" for i in range(12) for j in range(12)}
    assert len(seeds) == 2 * 2 * 12 * 12
    assert child_seed(0, "a", 1, 12) != child_seed(0, "a", 11, 2)


def test_torch_takes_every_seed() -> None:
    for i in range(100):
        seed = child_seed(i)
        assert 0 <= seed < 2**63
        assert torch.tensor([seed]).item() == seed  # trajectories keep their seeds as int64
        torch.Generator().manual_seed(seed)


def test_choices_repeat() -> None:
    draws = [child_random(0, "prompts", i).sample(range(100), 10) for i in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
