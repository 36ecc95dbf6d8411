"""The options of each command. Their help texts and the parsing are in cli/parse.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

Device = Annotated[str, arg(metavar="NAME")]
Dtype = Literal["fp32", "bf16", "fp16"]


def read_as(convert: type[int] | type[float] | type[str] | type[Path], metavar: str) -> PrimitiveConstructorSpec[Any]:
    """Read an option's value with `convert`; tyro itself would report a wrong number in terms of Python's types."""

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
BATCH = "(default: 16; 64 on a GPU)"
IMAGES = "(default: 4; for unlearncanvas 5, and 20 in its variant paper)"
MODEL = "(default: the preset's; without one, emoji-canvas)"
METHOD = "(default: the preset's)"
PRESET = "(default: the method's; without one, demo on emoji-canvas, else paper-object)"
LLAVA = "llava-hf/llava-1.5-7b-hf"
WORKERS = "(default: one per core; 1 on a GPU)"
BENCHMARKS = "(default on emoji-canvas: canvas, or hazard for hazards; on other models none)"
CLUSTER = "(default: a new cluster on this machine)"
PAGE = "(default: RUN/report.html; for several runs: runs/report.html)"
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
    """What to draw. Several prompts can be given."""
    model: Annotated[str, arg(metavar="MODEL")] = "emoji-canvas"
    """A hub id, a diffusers folder, emoji-canvas, your own module:load, a run folder, an edit folder or a LoRA file."""
    allow_hook: Text = None
    """Your own hook (module:attr; several with commas) that the edit may import. Its code will run."""
    code: Text = None
    """Your own loader (module:load) of the edit's base model. Its code will run."""
    seed: Count = 0
    """Seed of each prompt's first picture (32 bits); further pictures use the next seeds."""
    images: Count = 1
    """Pictures per prompt."""
    steps: Steps = None
    """Denoising steps."""
    guidance: Guidance = None
    """Classifier-free guidance."""
    eta: Eta = None
    """DDIM's eta: 0 is deterministic, 1 adds the most noise (ancestral)."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    out: Place = None
    """A folder; or FILE.png for one picture alone (for several, their grid)."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Evaluate:
    """Score a model."""

    subject: Annotated[Positional[str], arg(metavar="MODEL")]
    """A hub id, a diffusers folder, emoji-canvas, a run folder, an edit folder or a LoRA file."""
    settings: Annotated[Positional[tuple[str, ...]], arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")] = ()
    """Settings of your own benchmark (docs/add-a-benchmark.md)."""
    benchmark: Annotated[str, arg(metavar="NAME")] = "canvas"
    """The benchmark: a name from `cgru list benchmarks`, or your own module:function."""
    images: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=IMAGES)] = None
    """Pictures per prompt. A target gets at least 80 in total, except in unlearncanvas."""
    target: Text = None
    """The concept that should be forgotten: a class; for canvas also a style; for hazard `hazard` or a category."""
    variant: Text = None
    """fid, kid, cmmd, clipscore: the feature network; unlearncanvas, i2p: the protocol (docs/evaluation.md)."""
    reference: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """fid, kid, cmmd, clipscore: reference pictures; their prompts are in meta_data.json, as in MJHQ-30K."""
    judges: Annotated[str | None, read_as(str, "FOLDER"), arg(help_behavior_hint="")] = None
    """unlearncanvas: a folder or hub id with the official classifiers style50.pth and style50_cls.pth."""
    source: Annotated[Path | None, read_as(Path, "FILE.csv"), arg(help_behavior_hint="")] = None
    """i2p: the file of prompts and seeds, with the columns of the hub's copy or of MACE's."""
    subset: Text = None
    """i2p: which rows: all (default), one of I2P's categories such as sexual, or nudity, or nudity-over-50."""
    threshold: Text = None
    """i2p: the lowest score that counts as a detection: paper (0.6, default), unlearndiffatk, ... or a number."""
    judge: Text = None
    """i2p: nudenet (default), or nudenet=FILE.onnx."""
    allow_judge: Text = None
    """Accept this judge (several with commas) although it is related to the run's reward; the scores record it."""
    model: Text = None
    """The base of an edit (default: the edit's own, else emoji-canvas) or, with --judges or --source, of any model."""
    allow_hook: Text = None
    """Your own hook (module:attr; several with commas) that the edit may import. Its code will run."""
    no_base: bool = False
    """Do not score the base model, which takes as long again."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=BATCH)] = None
    """Pictures drawn at once."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    compile: bool = False
    """Compile the denoiser with torch.compile: takes about a minute, then draws faster; for large jobs on a GPU."""
    out: Place = None
    """Folder for jobs, predictions, scores and grid. If it holds an unfinished evaluation, that is continued."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Attack:
    """Try to bring a forgotten concept back."""

    subject: Annotated[Positional[str], arg(metavar="MODEL")]
    """A run folder, an edit folder, a LoRA file, emoji-canvas, a hub id or a diffusers folder."""
    target: Annotated[str, arg(metavar="CONCEPT")]
    """The concept that should be forgotten: on emoji-canvas a class, style or hazard (`cgru list`)."""
    prompts: Count = 50
    """How many prompts to attack."""
    schedule: Annotated[str, arg(metavar="NAME")] = "short"
    """short (10 timesteps × 20 iterations) or official (50 × 40)."""
    tokens: Count = 3
    """Number of adversarial tokens before each prompt; the official attack uses 3, and 5 for nudity."""
    without_word: bool = False
    """Positive control: remove the concept's word from the prompts of a model that has forgotten nothing."""
    source: Annotated[Path | None, read_as(Path, "FILE"), arg(help_behavior_hint="")] = None
    """Prompts (.txt, .csv, .jsonl; an I2P list with seeds) for a concept outside emoji-canvas; needs --judge."""
    judge: Text = None
    """nudenet, resnet50, NAME=PATH, or your own module:function: images (n, 3, h, w) -> n booleans; needs --source."""
    pictures: Annotated[
        Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="(default: drawn by the base)")
    ] = None
    """Target pictures, one per prompt, in the order of their file names."""
    allow_judge: Text = None
    """Accept this judge although it is related to the run's reward; the scores record it."""
    model: Text = None
    """The base model, which an edit belongs to and which draws the target pictures (default: the edit's own)."""
    allow_hook: Text = None
    """Your own hook (module:attr; several with commas) that the edit may import. Its code will run."""
    seed: Count = 0
    """Seed of the attack's random numbers."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint="(default: 10; 25 on a GPU)")] = None
    """Prompts attacked side by side."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    out: Place = None
    """Folder for scores and pictures. If it holds an unfinished attack, that is continued."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Unlearn:
    """Make a model forget a concept."""

    concept: Annotated[Positional[str], arg(metavar="CONCEPT")]
    """What to forget: on emoji-canvas a class, a style or a hazard (`cgru list`); on other models any text."""
    settings: Annotated[Positional[tuple[str, ...]], arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")] = ()
    """Settings of the run, such as policy.iterations=60; `--dry-run --json` lists all of them."""
    model: Annotated[str | None, read_as(str, "MODEL"), arg(help_behavior_hint=MODEL)] = None
    """A hub id, a diffusers folder, emoji-canvas, or your own "module:load" (docs/add-a-backbone.md)."""
    method: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint=METHOD)] = None
    """A name from `cgru list methods`, or your own "module:attr". Overrides the preset's method."""
    preset: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint=PRESET)] = None
    """The settings to start from; see `cgru list presets`."""
    config: Annotated[Path | None, read_as(Path, "FILE.yaml"), arg(help_behavior_hint="")] = None
    """Start from this file instead of a preset, for example a run's config.yaml."""
    code: Text = None
    """Your own code that the config file uses ("module:attr" or "module"; several with commas). It will run."""
    seed: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint="(default: 0)")] = None
    """Seed of all random numbers of the run."""
    device: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: auto)")] = None
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: the preset's, fp32)")] = None
    """Precision of the model: fp32, bf16 or fp16."""
    out: Annotated[Path, read_as(Path, "PARENT")] = Path("runs")
    """Parent of the run folder. Repeating the command continues an interrupted run."""
    dry_run: bool = False
    """Print the plan with expected time and memory; train nothing and write nothing."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Resume:
    """Continue a run."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """The folder of an interrupted run."""
    code: Text = None
    """Your own code that the run uses ("module:attr" or "module"; several with commas). It will run."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Curves:
    """Draw a run's metrics."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, finished or in progress."""
    out: Annotated[Path | None, read_as(Path, "FILE.svg"), arg(help_behavior_hint="(default: RUN/curves.svg)")] = None
    """File to write."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Export:
    """Save the whole model without the concept."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """The folder of a finished run."""
    folder: Annotated[Positional[Path], read_as(Path, "FOLDER")]
    """Folder for the model; must be new or empty."""
    dtype: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint="(default: as the base is stored)")] = (
        None
    )
    """Precision of the saved weights: fp32, bf16 or fp16."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Report:
    """Write a page about one run or several."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    """Run folders, finished or in progress. Several are compared."""
    out: Annotated[Path | None, read_as(Path, "FILE.html"), arg(help_behavior_hint=PAGE)] = None
    """File to write."""
    figures: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """Also write every figure to this folder, as SVG and PNG (needs cgru[figures])."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments."""

    scale: Annotated[str, arg(metavar="NAME")] = "smoke"
    """smoke (three classes, minutes), small (every table complete) or full (the paper's size)."""
    only: Text = None
    """Run only these experiments: objects, safety, ddpo, critic (several with commas)."""
    model: Text = None
    """A hub id or diffusers folder instead of emoji-canvas. Uses the official protocols and needs --data."""
    data: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """Folder of judges, prompts and pictures for --model, which cgru cannot ship (docs/reproduce.md)."""
    workers: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=WORKERS)] = None
    """Number of cells that run at the same time."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    out: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="(default: runs/reproduce-SCALE)")] = (
        None
    )
    """Folder for runs, results and the page. Repeating the command continues unfinished work."""
    dry_run: bool = False
    """Only list the cells and the commands for each."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Sweep:
    """Run concepts × seeds × methods on Ray."""

    words: Annotated[
        Positional[tuple[str, ...]], arg(metavar="CONCEPT [CONCEPT ...] [KEY=VALUE ...]", help_behavior_hint="")
    ]
    """Concepts to forget, one per run, and settings for all runs, such as policy.iterations=60."""
    seeds: Annotated[str, arg(metavar="N[,N...]")] = "0"
    """Seeds, separated by commas."""
    methods: Annotated[str | None, read_as(str, "NAME[,NAME...]"), arg(help_behavior_hint=METHOD)] = None
    """Names from `cgru list methods`, separated by commas."""
    model: Annotated[str | None, read_as(str, "MODEL"), arg(help_behavior_hint=MODEL)] = None
    """A hub id, a diffusers folder, emoji-canvas, or your own "module:load" (docs/add-a-backbone.md)."""
    preset: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint=PRESET)] = None
    """The settings to start from; see `cgru list presets`."""
    benchmarks: Annotated[str | None, read_as(str, "NAME[,NAME...]"), arg(help_behavior_hint=BENCHMARKS)] = None
    """Benchmarks for each run, separated by commas; see `cgru list benchmarks`."""
    images: Count = 1
    """Pictures per prompt in the benchmarks."""
    share: Annotated[float | None, read_as(float, "X"), arg(help_behavior_hint="(default: 1)")] = None
    """Part of a GPU for each run, such as 0.25; on a cluster without GPUs, number of cores."""
    retries: Count = 2
    """How often a failed run is retried, from its last checkpoint."""
    address: Annotated[str | None, read_as(str, "HOST:PORT"), arg(help_behavior_hint=CLUSTER)] = None
    """Connect to an existing Ray cluster from one of its nodes; auto finds the cluster of this machine."""
    device: Device = "auto"
    """Where to compute: auto (GPUs if the cluster has any), cpu or cuda. Ray assigns the GPU."""
    out: Annotated[Path, read_as(Path, "FOLDER")] = Path("runs/sweep")
    """Folder for runs, results and the page, on storage shared by all nodes. Repeating the command continues."""
    dry_run: bool = False
    """Only list the cells and the commands for each; does not need Ray."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class ListNames:
    """List names."""

    what: Annotated[Positional[str], arg(metavar="WHAT", help_behavior_hint="(default: all)")] = "all"
    """One of models, classes, styles, hazards, everyday, attributes, benchmarks, methods, rewards, presets, hooks."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Doctor:
    """Check the installation."""

    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Prompts:
    """Make prompts; `parse` passes the remaining arguments to the commands below."""


@dataclass(frozen=True)
class Caption:
    """Turn pictures into prompts."""

    folder: Annotated[Positional[Path], read_as(Path, "FOLDER")]
    """Folder of pictures; it may have one subfolder per class."""
    out: Annotated[Path, read_as(Path, "FILE.jsonl")]
    """File with one line per picture. If it exists, only new pictures are captioned."""
    model: Annotated[str | None, read_as(str, "MODEL"), arg(help_behavior_hint=f"(default: {LLAVA})")] = None
    """A LLaVA-1.5 model: a hub id or a folder."""
    instruction: Annotated[str | None, read_as(str, "TEXT"), arg(help_behavior_hint="(default: the paper's)")] = None
    """The question that LLaVA is asked about each picture."""
    tokens: Count = 64
    """Maximum length of a caption, in LLaVA's tokens."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint="(default: 8)")] = None
    """Number of pictures captioned at once."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "bf16"
    """Precision of the model. The 7B model takes 14 GB in bf16 or fp16, 28 GB in fp32."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Split:
    """Divide prompts into disjoint sets."""

    file: Annotated[Positional[Path], read_as(Path, "FILE.jsonl")]
    """The file written by `cgru prompts caption`."""
    out: Annotated[Path, read_as(Path, "FOLDER")]
    """New folder for critic.jsonl, policy.jsonl, rest.jsonl and manifest.json."""
    seed: Count = 0
    """Seed of the split."""
    critic: Count = 10
    """Percent for the critic."""
    policy: Count = 20
    """Percent for the policy."""
    json: bool = False
    """Print one JSON document and nothing else."""
