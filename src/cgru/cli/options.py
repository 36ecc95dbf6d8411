"""The options of each command, their help texts, and parsing with mistakes told in one line."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand
from tyro.constructors import PrimitiveConstructorSpec

from cgru import __version__, catalog

FLAGS = ("--dry-run", "--json", "--help")
SETTING = re.compile(r"[\w.]+=")
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
MODEL = "(default: the preset's; without one, emoji-canvas)"
PRESET = "(default: demo on emoji-canvas, else paper-object)"
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
    """What is meant to be forgotten. canvas: a class or style, adds UA, IRA, CRA; hazard: all hazards or a category."""
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
class Attack:
    """Try to bring a forgotten concept back."""

    subject: Annotated[Positional[str], arg(metavar="MODEL")]
    """A run folder, a LoRA file, emoji-canvas, a hub id or a diffusers folder."""
    target: Annotated[str, arg(metavar="CONCEPT")]
    """What is meant to be forgotten: on emoji-canvas a class, style or hazard (`cgru list`)."""
    prompts: Count = 50
    """How many prompts to attack."""
    schedule: Annotated[str, arg(metavar="NAME")] = "short"
    """short (10 timesteps × 20 iterations) or official (50 × 40)."""
    tokens: Count = 3
    """Adversarial tokens before each prompt; the official attack has 3, for nudity 5."""
    without_word: bool = False
    """Take the concept's word out of the prompts: on a model that forgot nothing, shows that the attack works."""
    source: Annotated[Path | None, read_as(Path, "FILE"), arg(help_behavior_hint="")] = None
    """Prompts for a concept that emoji-canvas does not know (.txt, .csv, .jsonl); needs --judge."""
    judge: Text = None
    """Your own judge, module:function of images (n, 3, h, w) in [0, 1], which returns n booleans; needs --source."""
    pictures: Annotated[
        Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="(default: drawn by the base)")
    ] = None
    """Target pictures, one per prompt in the order of their names."""
    model: Text = None
    """The base: what a LoRA file belongs to, and what draws the target pictures (default: the run's own)."""
    seed: Count = 0
    """Root of the attack's random numbers."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint="(default: 10, on a GPU 25)")] = None
    """Prompts attacked side by side."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    out: Place = None
    """Folder for scores and pictures; the same folder again continues."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Unlearn:
    """Make a model forget a concept."""

    concept: Annotated[Positional[str], arg(metavar="CONCEPT")]
    """What to forget: on emoji-canvas a class, a style or hazard (`cgru list`), on another model any text."""
    settings: Annotated[Positional[tuple[str, ...]], arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")] = ()
    """Any setting of the run, such as policy.iterations=60; `--dry-run --json` shows all of them."""
    model: Annotated[str | None, read_as(str, "MODEL"), arg(help_behavior_hint=MODEL)] = None
    """A hub id, a diffusers folder, or emoji-canvas."""
    method: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: cgru)")] = None
    """cgru, ddpo or dpok; wins over the preset."""
    preset: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint=PRESET)] = None
    """Where the settings start; see `cgru list presets`."""
    config: Annotated[Path | None, read_as(Path, "FILE.yaml"), arg(help_behavior_hint="")] = None
    """Start from this file instead of a preset, e.g. a run's config.yaml."""
    seed: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint="(default: 0)")] = None
    """Root of everything random in the run."""
    device: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: auto)")] = None
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: the preset's, fp32)")] = None
    """Precision of the model: fp32, bf16 or fp16."""
    out: Annotated[Path, read_as(Path, "PARENT")] = Path("runs")
    """Folder in which the run's own folder is made; the same command again continues the run."""
    dry_run: bool = False
    """Print the plan with expected time and memory, and write nothing."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Resume:
    """Go on with a run."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder that was interrupted."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Export:
    """Save the whole model without the concept."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A finished run folder."""
    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """Where the model goes; new or empty."""
    dtype: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: as the base is stored)")] = (
        None
    )
    """Precision of the stored weights: fp32, bf16 or fp16."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class ListNames:
    """List names."""

    what: Annotated[Positional[str], arg(metavar="WHAT", help_behavior_hint="(default: all)")] = "all"
    """models, classes, styles, hazards, everyday, benchmarks, methods, rewards or presets."""
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
  cgru unlearn Dogs
  cgru evaluate runs/dogs-cgru-s0-3f9a1c2e --target Dogs
  cgru generate "a poodle on a red background" --images 4
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
  cgru evaluate pytorch_lora_weights.safetensors --model emoji-canvas --target Dogs --json
  cgru evaluate runs/hazard-cgru-s0-5b21d0aa --benchmark hazard --images 2"""
ATTACK = """Try to bring a forgotten concept back: UnlearnDiffAtk, with success rates before and after the attack.

Examples:
  cgru attack runs/dogs-cgru-s0-3f9a1c2e --target Dogs
  cgru attack emoji-canvas --target Dogs --without-word --prompts 10
  cgru attack no-church --model CompVis/stable-diffusion-v1-4 --target church --source church.csv --judge m:f"""
UNLEARN = """Make a model forget a concept: a LoRA in a run folder, whose path is the last line printed.

Examples:
  cgru unlearn Dogs
  cgru unlearn Dogs --dry-run
  cgru unlearn hazard --preset best --seed 1 policy.iterations=40
  cgru unlearn "Van Gogh" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --method ddpo prompts.source=mine.txt"""
RESUME = """Go on with an interrupted run, from its last checkpoint; a finished one is left as it is.

Examples:
  cgru resume runs/dogs-cgru-s0-3f9a1c2e"""
EXPORT = """Save the whole model without the concept, in the diffusers layout: no LoRA is left that could be dropped.

Examples:
  cgru export runs/dogs-cgru-s0-3f9a1c2e no-dogs
  cgru generate "a dog" --model no-dogs"""
LIST = """List what can be named: models, classes, styles, hazards, everyday, benchmarks, methods, rewards, presets.

Examples:
  cgru list
  cgru list classes --json"""
DOCTOR = """Check versions, device, memory, extras and the checksums of the embedded assets.

Examples:
  cgru doctor
  cgru doctor --json"""

COMMANDS: dict[str, tuple[type, str]] = {
    "unlearn": (Unlearn, UNLEARN),
    "resume": (Resume, RESUME),
    "export": (Export, EXPORT),
    "generate": (Generate, GENERATE),
    "evaluate": (Evaluate, EVALUATE),
    "attack": (Attack, ATTACK),
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
                args=gathered(arguments) or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(unboxed(printed.getvalue())) from None
        raise


def gathered(arguments: Sequence[str]) -> list[str]:
    """`unlearn`'s key=value words brought together behind the others: tyro takes them in one place only."""
    words = list(arguments)
    if words[:1] != ["unlearn"]:
        return words
    follows_option = [False, *(word.startswith("--") and word not in FLAGS and "=" not in word for word in words[:-1])]
    is_setting = [
        SETTING.match(word) is not None and not taken for word, taken in zip(words, follows_option, strict=True)
    ]
    rest = [word for word, found in zip(words, is_setting, strict=True) if not found]
    return rest + [word for word, found in zip(words, is_setting, strict=True) if found]


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
