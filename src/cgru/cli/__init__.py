"""The command line: cgru generate | evaluate | list | doctor.

Each command first checks and loads everything (a user's mistake ends there: one line on stderr, exit code 2, nothing
written), then works. torch is imported only by commands that need it. No maths here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cgru.cli.commands import PREPARE
from cgru.cli.options import parse
from cgru.evaluation.assets import ROOT


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run one command and return its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C.

    Args:
        argv: arguments without the program's name; None: those of the process.
        root: the asset folder.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            options = parse(arguments)
            work = PREPARE[type(options)](options, root)
        except (ValueError, OSError) as error:
            return fail(error)
        return work()
    except PermissionError as error:
        return fail(error)  # the disk's doing, not a bug, even in the middle of the work
    except KeyboardInterrupt:
        print("cgru: interrupted; an evaluation continues with the same command.", file=sys.stderr)
        return 130


def fail(error: Exception) -> int:
    """One line on stderr, exit code 2."""
    text = " ".join(str(error).split())
    print(f"cgru: {text}", file=sys.stderr)
    return 2
