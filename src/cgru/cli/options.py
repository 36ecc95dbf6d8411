"""The options of each command, their help texts, and parsing with mistakes told in one line."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand
from tyro.constructors import PrimitiveConstructorSpec

from cgru import __version__, catalog

Device = Annotated[str, arg(metavar="NAME")]
Dtype = Literal["fp32", "bf16", "fp16"]


def read_as(convert: type[int] | type[float] | type[str] | type[Path], metavar: str) -> PrimitiveConstructorSpec[Any]:
    """An option's value read by `convert`; without it tyro explains a wrong number by Python's types."""

    def read(words: list[str]) -> object:
        if convert is Path and not words[0].strip():
            raise ValueError(f"the path {words[0]!r} is empty; allowed: a folder or file. Give '.' for this folder.")
        try:
            return convert(words[0])
        except ValueError:
            kind, example = ("a whole number", 4) if convert is int else ("a number", 7.5)
            raise ValueError(f"{words[0]!r} is not {kind}; give one such as {example}.") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, convert),
        str_from_instance=lambda value: [str(value)],
    )


OWN = "(default: {}; emoji-canvas: its own)"
BATCH = "(default: 16, on a GPU 64)"
Count = Annotated[int, read_as(int, "N")]
Steps = Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=OWN.format(50))]
Guidance = Annotated[float | None, read_as(float, "X"), arg(help_behavior_hint=OWN.format(7.5))]
Eta = Annotated[float | None, read_as(float, "X"), arg(help_behavior_hint=OWN.format(0))]
Text = Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="")]
Place = Annotated[Path | None, read_as(Path, "PATH"), arg(help_behavior_hint="(default: a folder under runs/)")]


@dataclass(frozen=True)
class Generate:
    """Draw pictures."""

    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT [PROMPT ...]", help_behavior_hint="")]
    """What to draw, one picture or more for each."""
    model: Annotated[str, arg(metavar="MODEL")] = "emoji-canvas"
    """A hub id, a diffusers folder, or emoji-canvas."""
    seed: Count = 0
    """Noise of the first picture of each prompt, 32 bits; the next ones take the next seeds."""
    images: Count = 1
    """Pictures per prompt."""
    steps: Steps = None
    """Denoising steps."""
    guidance: Guidance = None
    """Classifier-free guidance."""
    eta: Eta = None
    """DDIM noise: 0 is deterministic, 1 is ancestral."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    out: Place = None
    """A folder, or a FILE.png for the picture alone (for several: their grid)."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Evaluate:
    """Score a model."""

    subject: Annotated[Positional[str], arg(metavar="MODEL")]
    """A hub id, a diffusers folder, emoji-canvas, a run folder or a LoRA file."""
    benchmark: Annotated[str, arg(metavar="NAME")] = "canvas"
    """Which benchmark; see `cgru list benchmarks`."""
    images: Count = 4
    """Pictures per prompt; a target gets at least 80 in all."""
    target: Text = None
    """The class or style that is meant to be forgotten: adds UA, IRA and CRA."""
    model: Text = None
    """The base of a LoRA file (default: the run's own, else emoji-canvas)."""
    no_base: bool = False
    """Leave out the base model's numbers, which cost as much again."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=BATCH)] = None
    """Pictures drawn at once."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    out: Place = None
    """Folder for jobs, predictions, scores and grid; the same folder again continues."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class ListNames:
    """List names."""

    what: Annotated[Positional[str], arg(metavar="WHAT", help_behavior_hint="(default: all)")] = "all"
    """models, classes, styles, hazards, everyday, benchmarks, methods or rewards."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Doctor:
    """Check the installation."""

    json: bool = False
    """Print one JSON document and nothing else."""


DESCRIPTION = f"""cgru {__version__}: remove a concept from a text-to-image diffusion model, and prove what was done.
The embedded model Emoji Canvas needs no download.

Examples:
  cgru generate "a poodle on a red background" --images 4
  cgru evaluate emoji-canvas --benchmark canvas --images 1
  cgru list classes
  cgru doctor

`cgru COMMAND --help` explains a command; `cgru --version` prints the version."""
GENERATE = """Draw pictures: one PNG each and a captioned grid.

Examples:
  cgru generate "a poodle on a red background" "a cat" --images 4
  cgru generate "a lighthouse" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --device cuda --dtype fp16
  cgru generate "a frog" --seed 3 --out frog.png"""
EVALUATE = """Score a model with judges that no training ever saw; every number comes with its interval.

Examples:
  cgru evaluate emoji-canvas --images 1
  cgru evaluate runs/dogs-cgru-s0-3f9a1c2e --target Dogs
  cgru evaluate pytorch_lora_weights.safetensors --model emoji-canvas --target Dogs --json"""
LIST = """List what can be named: models, classes, styles, hazards, everyday, benchmarks, methods, rewards.

Examples:
  cgru list
  cgru list classes --json"""
DOCTOR = """Check versions, device, memory, extras and the checksums of the embedded assets.

Examples:
  cgru doctor
  cgru doctor --json"""

COMMANDS: dict[str, tuple[type, str]] = {
    "generate": (Generate, GENERATE),
    "evaluate": (Evaluate, EVALUATE),
    "list": (ListNames, LIST),
    "doctor": (Doctor, DOCTOR),
}


def parse(arguments: Sequence[str]) -> Any:  # noqa: ANN401 - one of the option classes
    """Options from arguments; a mistake is a ValueError of one line, help and version end the program."""
    if arguments and arguments[0] == "--version":
        print(f"cgru {__version__}")
        raise SystemExit(0)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise ValueError(catalog.unknown("command", arguments[0], COMMANDS, "See `cgru --help`."))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                command_types(is_brief=arguments[:1] not in [[name] for name in COMMANDS]),
                prog="cgru",
                description=DESCRIPTION,
                args=arguments or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(unboxed(printed.getvalue())) from None
        raise


def command_types(*, is_brief: bool) -> Any:  # noqa: ANN401 - a union made at run time
    """The union tyro parses into; examples are left out (brief) where all commands are listed together."""
    described = (
        Annotated[options, subcommand(name, description=text.split("\n")[0] if is_brief else text)]
        for name, (options, text) in COMMANDS.items()
    )
    return functools.reduce(operator.or_, described)


def unboxed(message: str) -> str:
    """tyro's framed error as one line: title, rules and the option's help text left out."""
    # Inside the frame a blank row is a rule between two sections.
    rows = [line.strip("│╭╮╰╯─ ") for line in message.splitlines()[1:-1]]
    sections = [" ".join(section.split("\n")) for section in "\n".join(rows).split("\n\n")]
    kept = [text.replace("Error parsing ", "") for text in sections if not text.startswith("Argument helptext:")]
    return "; ".join(text.rstrip(".; ") for text in kept) + "."
