"""Named seeds: one root seed and a child seed per purpose, so that a new random draw in one place changes no other.

A run stores no random state: the draws of iteration 7 depend only on the root seed, the purpose and the number 7.
Therefore a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import random


def child_seed(root: int, *names: str | int) -> int:
    """A 63-bit seed for a named purpose.

    >>> child_seed(0, "rollout", 3) == child_seed(0, "rollout", 3) != child_seed(0, "rollout", 4)
    True
    """
    text = "/".join(map(str, (root, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def child_random(root: int, *names: str | int) -> random.Random:
    """Python's random generator for a named purpose, for choices among plain objects."""
    return random.Random(child_seed(root, *names))
