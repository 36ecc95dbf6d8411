"""How far it is from `cgru unlearn` to the loss of the paper: what a reader who follows the run has to go through.

    python tools/walk.py                                  # this checkout
    PYTHONPATH=../old/src python tools/walk.py            # another one, e.g. `git worktree add ../old 5d62ef3`

One tiny run on the CPU is watched from the call of `cgru.cli.main` until `policy_loss` is entered for the first time,
and ends there. Only functions of `cgru` count, lambdas and methods among them; comprehensions, class bodies, imports
and what dataclasses generate do not. Printed as JSON:

- frames: functions on the call stack, `main` and `policy_loss` included, outermost first;
- functions, files: how many were entered, and how many files hold them;
- package_switches: the functions are put in the order in which they are first entered, and neighbours in different
  packages are counted. The package is the folder below `cgru`; a module beside the folders is its own.
"""

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cgru
from cgru.cli import main as command

PACKAGE = Path(cgru.__file__).parent
SETTINGS = (
    "policy.iterations=1",
    "policy.trajectories=8",
    "critic.trajectories=8",
    "prompts.validation=4",
    "sampling.steps=4",
)
NOT_FUNCTIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Python before 3.12 calls them like functions."""


class Arrived(BaseException):
    """Ends the run; no `except` of the package holds it up."""


class Walk:
    """Functions in the order in which they were first entered, and the stack at the end; a profiler of `sys`."""

    def __init__(self) -> None:
        """Nothing was entered yet."""
        self.entered: dict[CodeType, None] = {}
        self.stack: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; raises `Arrived` in `policy_loss`."""
        if event != "call" or not is_ours(frame.f_code):
            return
        self.entered[frame.f_code] = None
        if frame.f_code.co_name == "policy_loss":
            self.stack = stack_of(frame)
            raise Arrived


def is_ours(code: CodeType) -> bool:
    """Whether it is a function of the package."""
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in NOT_FUNCTIONS
    return is_function and code.co_filename.startswith(f"{PACKAGE}/")


def stack_of(frame: FrameType | None) -> list[CodeType]:
    """The package's functions that led here, outermost first."""
    found = []
    while frame is not None:
        found += [frame.f_code] if is_ours(frame.f_code) else []
        frame = frame.f_back
    return found[::-1]


def place(code: CodeType) -> str:
    """File and name, such as "rl/train.py iterate"."""
    return f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()} {code.co_qualname}"


def package(code: CodeType) -> str:
    """The folder below `cgru`, or the module beside the folders."""
    return Path(code.co_filename).relative_to(PACKAGE).parts[0]


def walk(method: str) -> Walk:
    """Watch one run."""
    seen = Walk()
    with tempfile.TemporaryDirectory() as out:
        arguments = ["unlearn", "Dogs", "--method", method, "--device", "cpu", "--out", out, *SETTINGS]
        before = sys.getprofile()
        sys.setprofile(seen)
        try:
            code = command(arguments)
        except Arrived:
            return seen
        finally:
            sys.setprofile(before)
    raise RuntimeError(f"`cgru {' '.join(arguments)}` ended with code {code} and never entered policy_loss")


def summary(seen: Walk) -> dict[str, Any]:
    """The figures of a walk."""
    switches = sum(package(one) != package(other) for one, other in pairwise(seen.entered))
    return {
        "frames": len(seen.stack),
        "package_switches": switches,
        "files": len({code.co_filename for code in seen.entered}),
        "functions": len(seen.entered),
        "stack": [place(code) for code in seen.stack],
    }


def commit() -> str:
    """Of the checkout that the package comes from."""
    words = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the walk as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="cgru", help="cgru, ddpo or dpok")
    method = parser.parse_args(argv).method
    print(json.dumps({"commit": commit(), "method": method, **summary(walk(method))}, indent=1))


if __name__ == "__main__":
    main()
