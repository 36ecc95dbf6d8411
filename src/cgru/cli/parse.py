"""The commands with their help texts, and the parser, which reports invalid input in one line."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import re
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from cgru import __version__, catalog
from cgru.cli.options import (
    Attack,
    Caption,
    Curves,
    Doctor,
    Evaluate,
    Export,
    Generate,
    ListNames,
    Prompts,
    Report,
    Reproduce,
    Resume,
    Split,
    Sweep,
    Unlearn,
)

FLAGS = ("--dry-run", "--json", "--help")
SETTING = re.compile(r"[\w.]+=")
DESCRIPTION = f"""cgru {__version__}: remove a concept from a text-to-image diffusion model and measure what is left.
The embedded model Emoji Canvas needs no download.

Examples:
  cgru unlearn Dogs
  cgru evaluate runs/dogs-cgru-s0-3f9a1c2e --target Dogs
  cgru generate "a poodle on a red background" --images 4
  cgru list classes
  cgru doctor

`cgru COMMAND --help` explains a command; `cgru --version` prints the version."""
GENERATE = """Draw pictures from prompts. Each is saved as a PNG file, and all of them as a captioned grid.

Examples:
  cgru generate "a poodle on a red background" "a cat" --images 4
  cgru generate "a lighthouse" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --device cuda --dtype fp16
  cgru generate "a frog" --seed 3 --out frog.png"""
EVALUATE = """Score a model with judges that are never used in training. Scores come with 95 % intervals.

Examples:
  cgru evaluate emoji-canvas --images 1
  cgru evaluate runs/dogs-cgru-s0-3f9a1c2e --target Dogs
  cgru evaluate pytorch_lora_weights.safetensors --model emoji-canvas --target Dogs --json
  cgru evaluate runs/hazard-cgru-s0-5b21d0aa --benchmark hazard --images 2
  cgru evaluate runs/dogs-cgru-s0-3f9a1c2e --benchmark fid --target Dogs
  cgru evaluate runs/dogs-cgru-s0-91ab04cd --benchmark unlearncanvas --judges cls_model --target Dogs --dtype fp16
  cgru evaluate safe --benchmark i2p --source i2p_benchmark.csv --model CompVis/stable-diffusion-v1-4"""
ATTACK = """Try to bring a forgotten concept back with adversarial prompts (UnlearnDiffAtk); report success rates.

Examples:
  cgru attack runs/dogs-cgru-s0-3f9a1c2e --target Dogs
  cgru attack emoji-canvas --target Dogs --without-word --prompts 10
  cgru attack no-church --model CompVis/stable-diffusion-v1-4 --target church --source church.csv --judge resnet50
  cgru attack safe --model CompVis/stable-diffusion-v1-4 --target nudity --source nudity.csv --judge nudenet"""
UNLEARN = """Make a model forget a concept. Saves the edit (by default a LoRA) in a run folder and prints its path last.

Examples:
  cgru unlearn Dogs
  cgru unlearn Dogs --dry-run
  cgru unlearn hazard --preset best --seed 1 policy.iterations=40
  cgru unlearn "Van Gogh" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --method ddpo prompts.source=mine.txt"""
RESUME = """Continue an interrupted run from its last checkpoint. A finished run is left unchanged.

Examples:
  cgru resume runs/dogs-cgru-s0-3f9a1c2e"""
CURVES = """Plot a run's metrics as one SVG file: reward and outside detector, retention, critic, policy.

Examples:
  cgru curves runs/dogs-cgru-s0-3f9a1c2e
  cgru curves runs/dogs-cgru-s0-3f9a1c2e --out dogs.svg"""
EXPORT = """Save a complete diffusers model without the concept: the edit is merged, so there is no LoRA to remove.

Examples:
  cgru export runs/dogs-cgru-s0-3f9a1c2e no-dogs
  cgru generate "a dog" --model no-dogs"""
PROMPTS = """Make prompts from pictures: `caption` writes them with LLaVA-1.5, `split` divides them into sets.

Examples:
  cgru prompts caption pictures --out captions.jsonl --device cuda
  cgru prompts split captions.jsonl --out splits --seed 0

`cgru prompts caption --help` and `cgru prompts split --help` list their options."""
CAPTION = """Write a prompt for each picture with LLaVA-1.5. Pictures are identified by the hash of their bytes.

Unreadable pictures, and captions that may refer to minors, are skipped and counted.

Examples:
  cgru prompts caption pictures --out captions.jsonl --device cuda
  cgru prompts caption pictures --out plain.jsonl --instruction "Describe this image in one sentence." --dtype fp16"""
SPLIT = """Divide captions, class by class, into disjoint sets: 10 % critic, 20 % policy (as in the paper), rest.

Examples:
  cgru prompts split captions.jsonl --out splits
  cgru prompts split captions.jsonl --out other --seed 1 --critic 20 --policy 40"""
REPORT = """Write one HTML page about one or more runs: scores with intervals, pictures, tables, curves, commands.

Examples:
  cgru report runs/dogs-cgru-s0-3f9a1c2e
  cgru report runs/dogs-cgru-s0-3f9a1c2e runs/dogs-ddpo-s0-91ab04cd --out comparison.html"""
REPRODUCE = """Run the paper's experiments and write one page with its tables and figures. Can be resumed.

Examples:
  cgru reproduce
  cgru reproduce --scale small --device cuda --workers 12
  cgru reproduce --scale full --model stable-diffusion-v1-5/stable-diffusion-v1-5 --data data --dry-run"""
SWEEP = """Train and measure concepts × seeds × methods on Ray and compare them on one page. Can be resumed.

Examples:
  cgru sweep Dogs Cats --seeds 0,1,2 --methods cgru,ddpo --preset best
  cgru sweep Dogs Cats --share 0.1 policy.iterations=40
  cgru sweep hazard --seeds 0,1,2 --address 10.0.0.5:6379 --out /shared/hazard --share 0.5
  cgru sweep Dogs Cats --seeds 0,1 --dry-run"""
LIST = """List the names that other commands accept: concepts, models, methods, presets, benchmarks, rewards, hooks.

Examples:
  cgru list
  cgru list classes --json"""
DOCTOR = """Check the installation: versions, device, memory, optional extras, checksums of the embedded assets.

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
    "reproduce": (Reproduce, REPRODUCE),
    "sweep": (Sweep, SWEEP),
    "attack": (Attack, ATTACK),
    "list": (ListNames, LIST),
    "doctor": (Doctor, DOCTOR),
}
PROMPT_COMMANDS: Commands = {"caption": (Caption, CAPTION), "split": (Split, SPLIT)}


def parse(arguments: Sequence[str]) -> Any:  # noqa: ANN401 - one of the option classes
    """Options from arguments. Invalid input raises a one-line ValueError; --help and --version end the program."""
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
    """The arguments with all settings of `unlearn` and `sweep` (for `sweep` also all concepts) put side by side.

    tyro accepts a list of positional arguments only if nothing stands between them.
    """
    words = list(arguments)
    if words[:1] not in (["unlearn"], ["sweep"]):
        return words
    has_many = words[0] == "sweep"  # concepts
    follows_option = [False, *(word.startswith("--") and word not in FLAGS and "=" not in word for word in words[:-1])]
    rest: list[str] = []
    settings: list[str] = []
    concepts: list[int] = []
    for word, taken in zip(words, follows_option, strict=True):
        is_concept = has_many and rest and not word.startswith("-")
        if not taken and (SETTING.match(word) or is_concept):
            settings.append(word)
            continue
        rest.append(word)
        if not taken and not word.startswith("--"):
            concepts.append(len(rest))
    # The first is the command itself.
    place = 1 if has_many else concepts[1] if len(concepts) > 1 else len(rest)
    return rest[:place] + settings + rest[place:]


def command_types(commands: Commands, *, is_brief: bool) -> Any:  # noqa: ANN401 - a union made at run time
    """The union of option classes that tyro parses into; `is_brief` leaves out the examples, for a list of commands."""
    described = (
        Annotated[options, subcommand(name, description=text.split("\n")[0] if is_brief else text)]
        for name, (options, text) in commands.items()
    )
    return functools.reduce(operator.or_, described)


def unboxed(message: str) -> str:
    """tyro's framed error as one line, without its title, rules and the option's help text."""
    # Inside the frame a blank row is a rule between two sections.
    rows = [line.strip("│╭╮╰╯─ ") for line in message.splitlines()[1:-1]]
    sections = [" ".join(section.split("\n")) for section in "\n".join(rows).split("\n\n")]
    kept = [text.replace("Error parsing ", "") for text in sections if not text.startswith("Argument helptext:")]
    return "; ".join(text.rstrip(".; ") for text in kept) + "."
