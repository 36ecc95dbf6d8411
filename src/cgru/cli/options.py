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
LLAVA = "llava-hf/llava-1.5-7b-hf"
PAGE = "(default: RUN/report.html; of several: runs/report.html)"
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
    """What is meant to be forgotten: a class; for canvas also a style, for hazard all hazards or a category."""
    variant: Text = None
    """fid, kid, cmmd, clipscore: whose features, such as judge, clip-eval or inception-clean (docs/evaluation.md)."""
    reference: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """fid, kid, cmmd, clipscore: reference pictures, with meta_data.json (as MJHQ-30K) their prompts, too."""
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
class Curves:
    """Draw a run's metrics."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, finished or at work."""
    out: Annotated[Path | None, read_as(Path, "FILE.svg"), arg(help_behavior_hint="(default: RUN/curves.svg)")] = None
    """Where the picture goes."""
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
class Report:
    """Write a page about one run or several."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    """Run folders, finished or not; several are compared."""
    out: Annotated[Path | None, read_as(Path, "FILE.html"), arg(help_behavior_hint=PAGE)] = None
    """Where the page goes."""
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


@dataclass(frozen=True)
class Prompts:
    """Make prompts; `parse` hands its words on to the commands below."""


@dataclass(frozen=True)
class Caption:
    """Pictures into prompts."""

    folder: Annotated[Positional[Path], read_as(Path, "FOLDER")]
    """Pictures, in a folder per class or not."""
    out: Annotated[Path, read_as(Path, "FILE.jsonl")]
    """One line a picture; the same file again captions only what is new."""
    model: Annotated[str | None, read_as(str, "MODEL"), arg(help_behavior_hint=f"(default: {LLAVA})")] = None
    """A LLaVA-1.5: a hub id or a folder."""
    instruction: Annotated[str | None, read_as(str, "TEXT"), arg(help_behavior_hint="(default: the paper's)")] = None
    """What LLaVA is asked about each picture."""
    tokens: Count = 64
    """Length of a caption at most, in LLaVA's tokens."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint="(default: 8)")] = None
    """Pictures captioned at once."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "bf16"
    """Precision of the model: the 7B one takes 14 GB in bf16 or fp16, 28 GB in fp32."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Split:
    """Prompts into disjoint sets."""

    file: Annotated[Positional[Path], read_as(Path, "FILE.jsonl")]
    """What `cgru prompts caption` wrote."""
    out: Annotated[Path, read_as(Path, "FOLDER")]
    """New folder for critic.jsonl, policy.jsonl, rest.jsonl and manifest.json."""
    seed: Count = 0
    """Another seed, another split."""
    critic: Count = 10
    """Percent for the critic."""
    policy: Count = 20
    """Percent for the policy."""
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
  cgru evaluate runs/hazard-cgru-s0-5b21d0aa --benchmark hazard --images 2
  cgru evaluate runs/dogs-cgru-s0-3f9a1c2e --benchmark fid --target Dogs"""
UNLEARN = """Make a model forget a concept: a LoRA in a run folder, whose path is the last line printed.

Examples:
  cgru unlearn Dogs
  cgru unlearn Dogs --dry-run
  cgru unlearn hazard --preset best --seed 1 policy.iterations=40
  cgru unlearn "Van Gogh" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --method ddpo prompts.source=mine.txt"""
RESUME = """Go on with an interrupted run, from its last checkpoint; a finished one is left as it is.

Examples:
  cgru resume runs/dogs-cgru-s0-3f9a1c2e"""
CURVES = """Draw a run's metrics as one SVG: reward beside outside detector, retention, critic, policy.

Examples:
  cgru curves runs/dogs-cgru-s0-3f9a1c2e
  cgru curves runs/dogs-cgru-s0-3f9a1c2e --out dogs.svg"""
EXPORT = """Save the whole model without the concept, in the diffusers layout: no LoRA is left that could be dropped.

Examples:
  cgru export runs/dogs-cgru-s0-3f9a1c2e no-dogs
  cgru generate "a dog" --model no-dogs"""
PROMPTS = """Make prompts from pictures: `caption` writes them with LLaVA-1.5, `split` deals them out.

Examples:
  cgru prompts caption pictures --out captions.jsonl --device cuda
  cgru prompts split captions.jsonl --out splits --seed 0

`cgru prompts caption --help` and `cgru prompts split --help` explain them."""
CAPTION = """Write a prompt for each picture with LLaVA-1.5. Pictures are named by the hash of their bytes.

Unreadable ones are counted and left out, and so are captions that may speak of minors.

Examples:
  cgru prompts caption pictures --out captions.jsonl --device cuda
  cgru prompts caption pictures --out plain.jsonl --instruction "Describe this image in one sentence." --dtype fp16"""
SPLIT = """Deal captions out, seeded and class by class, into disjoint sets: 10 % critic, 20 % policy (the paper), rest.

Examples:
  cgru prompts split captions.jsonl --out splits
  cgru prompts split captions.jsonl --out other --seed 1 --critic 20 --policy 40"""
REPORT = """Write one self-contained page: what was forgotten and kept, how sure; pictures, tables, curves, commands.

Examples:
  cgru report runs/dogs-cgru-s0-3f9a1c2e
  cgru report runs/dogs-cgru-s0-3f9a1c2e runs/dogs-ddpo-s0-91ab04cd --out comparison.html"""
LIST = """List what can be named: models, classes, styles, hazards, everyday, benchmarks, methods, rewards, presets.

Examples:
  cgru list
  cgru list classes --json"""
DOCTOR = """Check versions, device, memory, extras and the checksums of the embedded assets.

Examples:
  cgru doctor
  cgru doctor --json"""

Commands = dict[str, tuple[type, str]]
"""Name -> options and help text."""
COMMANDS: Commands = {
    "unlearn": (Unlearn, UNLEARN),
    "resume": (Resume, RESUME),
    "curves": (Curves, CURVES),
    "export": (Export, EXPORT),
    "generate": (Generate, GENERATE),
    "evaluate": (Evaluate, EVALUATE),
    "prompts": (Prompts, PROMPTS),
    "report": (Report, REPORT),
    "list": (ListNames, LIST),
    "doctor": (Doctor, DOCTOR),
}
PROMPT_COMMANDS: Commands = {"caption": (Caption, CAPTION), "split": (Split, SPLIT)}


def parse(arguments: Sequence[str]) -> Any:  # noqa: ANN401 - one of the option classes
    """Options from arguments; a mistake is a ValueError of one line, help and version end the program."""
    if arguments and arguments[0] == "--version":
        print(f"cgru {__version__}")
        raise SystemExit(0)
    if arguments[:1] == ["prompts"]:
        return _parsed(arguments[1:], PROMPT_COMMANDS, "cgru prompts", PROMPTS)
    return _parsed(gathered(arguments), COMMANDS, "cgru", DESCRIPTION)


def _parsed(words: Sequence[str], commands: Commands, program: str, description: str) -> Any:  # noqa: ANN401
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise ValueError(catalog.unknown("command", words[0], commands, f"See `{program} --help`."))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                command_types(commands, is_brief=not words or words[0] not in commands),
                prog=program,
                description=description,
                args=list(words) or ["--help"],
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


def command_types(commands: Commands, *, is_brief: bool) -> Any:  # noqa: ANN401 - a union made at run time
    """The union tyro parses into; examples are left out (brief) where all commands are listed together."""
    described = (
        Annotated[options, subcommand(name, description=text.split("\n")[0] if is_brief else text)]
        for name, (options, text) in commands.items()
    )
    return functools.reduce(operator.or_, described)


def unboxed(message: str) -> str:
    """tyro's framed error as one line: title, rules and the option's help text left out."""
    # Inside the frame a blank row is a rule between two sections.
    rows = [line.strip("│╭╮╰╯─ ") for line in message.splitlines()[1:-1]]
    sections = [" ".join(section.split("\n")) for section in "\n".join(rows).split("\n\n")]
    kept = [text.replace("Error parsing ", "") for text in sections if not text.startswith("Argument helptext:")]
    return "; ".join(text.rstrip(".; ") for text in kept) + "."
