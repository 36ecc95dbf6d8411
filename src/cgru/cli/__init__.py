"""The command line: `cgru COMMAND`, whose names are in parse.COMMANDS.

Each command first checks and loads everything (a user's mistake ends there: one line on stderr, exit code 2, nothing
written), then works. torch is imported only by commands that need it. No maths here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cgru import processes
from cgru.cli.commands import PREPARE
from cgru.cli.parse import parse
from cgru.evaluation.assets import ROOT


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run one command and return its exit code.

    0; 1 when the machine fails in the middle of the work (a full disk) or `doctor` finds damage; 2 for a user's
    mistake, before anything is written; 130 for Ctrl-C.

    Args:
        argv: arguments without the program's name; None: those of the process.
        root: the asset folder.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            check_text(arguments)
            options = parse(arguments)
            work = PREPARE[type(options)](options, root)
        except (ValueError, OSError) as error:
            return fail(error)
        return work()
    except OSError as error:
        place = f" ({str(error.filename)!r})" if error.filename else ""
        advice = "what is finished is kept. Make room or choose another --out, then run the same command again."
        return fail(f"{error.strerror or error}{place}; {advice}", code=1)
    except KeyboardInterrupt:
        print("cgru: interrupted; an evaluation continues with the same command.", file=sys.stderr)
        return 130


def check_text(arguments: Sequence[str]) -> None:
    """Refuse what is no UTF-8: Python hands it over as surrogates, which neither a tokenizer nor JSON takes."""
    for word in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"{word!r} is not UTF-8; allowed: UTF-8 text. Set your terminal or script to UTF-8.")


def fail(error: Exception | str, code: int = 2) -> int:
    """One line on stderr, of several processes by the main one if it fails, too; returns the exit code."""
    text = " ".join(str(error).split())
    processes.defer_to_main()
    print(processes.signed(text), file=sys.stderr)
    return code
