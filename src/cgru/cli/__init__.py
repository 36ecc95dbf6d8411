"""The command line `cgru COMMAND`; parse.COMMANDS lists the commands.

Each command first checks its input and loads what it needs, then does the work. Invalid input ends the first part with
one line on stderr and exit code 2, before anything is written. torch is imported only by commands that need it.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cgru import distributed
from cgru.catalog import own_mistake
from cgru.cli.commands import PREPARE
from cgru.cli.parse import parse
from cgru.cli.terminal import NARROWEST, one_line
from cgru.embedded import ROOT


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run one command and return its exit code.

    0: success. 1: the machine failed during the work (a full disk, a closed pipe), or `doctor` found damage. 2: invalid
    input, nearly always reported before anything is written. 130: Ctrl-C.

    Args:
        argv: arguments without the program's name; None: the arguments of the process.
        root: the asset folder.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # closed by `>&-`
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)  # at 4 columns tyro's layout never ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # arrows print as ? where the output is not UTF-8
    try:
        try:
            check_text(arguments)
            options = parse(arguments)
            work = PREPARE[type(options)](options, root)
        except ValueError as error:
            return fail(error)
        except OSError as error:
            if error.strerror and not error.filename:  # no path to correct: stdout is closed or full
                raise
            told = f"{error.strerror} ({str(error.filename)!r}); give another path." if error.strerror else str(error)
            return fail(told)
        except SystemExit:  # --help and --version: written now, because Python would report a closed pipe at exit
            sys.stdout.flush()
            raise
        with _no_exit():
            code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `cgru list | head -1`; Python would report it again at exit
        _drop_unwritten()
        return 1
    except ValueError as error:  # a damaged file that is read only during the work
        return fail(error)
    except OSError as error:
        _drop_unwritten()
        place = f" ({str(error.filename)!r})" if error.filename else ""
        advice = "what is finished is kept. Make room or choose another --out, then run the same command again."
        return fail(f"{error.strerror or error}{place}; {advice}", code=1)
    except Exception as error:  # a bug of cgru keeps its traceback; one in the user's code gets one line
        if (mistake := own_mistake(error)) is None:
            raise
        return fail(mistake)
    except KeyboardInterrupt:
        print("cgru: interrupted; an evaluation continues with the same command.", file=sys.stderr)
        return 130


def _drop_unwritten() -> None:
    """Drop what stdout does not take; Python would report it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _no_exit() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # how rich reacts to a closed pipe
            raise BrokenPipeError from error
        # Raised by the user's own reward or method; cgru itself never calls sys.exit here.
        raise ValueError(f"code that you named ended the program (exit code {error.code}); correct it.") from error


def check_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8: Python decodes them to surrogates, which tokenizers and JSON reject."""
    for word in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"{word!r} is not UTF-8; allowed: UTF-8 text. Set your terminal or script to UTF-8.")


def fail(error: Exception | str, code: int = 2) -> int:
    """Print one line on stderr and return the exit code. Of several failing processes, only the main one prints."""
    distributed.defer_to_main()
    print(distributed.signed(one_line(error)), file=sys.stderr)
    return code
