"""A reader comes from the command to the paper's loss in ten functions at most."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_from_main_to_the_loss_are_ten_functions_at_most() -> None:
    command = [sys.executable, "tools/walk.py", "--method", "ddpo"]  # the quickest: it has no critic
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    stack = found["stack"]
    assert (stack[0], stack[-1]) == ("cli/__init__.py main", "rl/objective.py policy_loss")
    assert "rl/train.py iterate" in stack
    assert found["frames"] == len(stack) <= 10, stack
    assert found["functions"] > found["files"] > 10 and found["package_switches"] > 0
