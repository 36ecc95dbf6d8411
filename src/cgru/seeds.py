"""Named seeds: one root seed, a child for every purpose, so that adding a draw in one place moves no other.

A run stores no random state: whatever is drawn in iteration 7 depends on the root, the purpose and the number 7 only,
which is what makes a resumed run equal to an uninterrupted one.
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
    """Python's generator of a named purpose, for choices among plain objects."""
    return random.Random(child_seed(root, *names))
