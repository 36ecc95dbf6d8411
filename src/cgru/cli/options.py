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
IMAGES = "(default: 4; unlearncanvas: 5, variant paper 20)"
MODEL = "(default: the preset's; without one, emoji-canvas)"
PRESET = "(default: demo on emoji-canvas, else paper-object)"
LLAVA = "llava-hf/llava-1.5-7b-hf"
WORKERS = "(default: one per core, on a GPU 1)"
BENCHMARKS = "(default on emoji-canvas: canvas, for hazards hazard)"
CLUSTER = "(default: one is started on this machine)"
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
    images: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=IMAGES)] = None
    """Pictures per prompt; a target gets at least 80 in all, except in unlearncanvas."""
    target: Text = None
    """What is meant to be forgotten: a class; for canvas also a style, for hazard all hazards or a category."""
    variant: Text = None
    """fid, kid, cmmd, clipscore: whose features; unlearncanvas, i2p: which protocol (docs/evaluation.md)."""
    reference: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """fid, kid, cmmd, clipscore: reference pictures, with meta_data.json (as MJHQ-30K) their prompts, too."""
    judges: Annotated[str | None, read_as(str, "FOLDER"), arg(help_behavior_hint="")] = None
    """unlearncanvas: the official classifiers style50.pth and style50_cls.pth, in a folder or under a hub id."""
    source: Annotated[Path | None, read_as(Path, "FILE.csv"), arg(help_behavior_hint="")] = None
    """i2p: its prompts, with seeds, in the columns of the hub or of MACE."""
    subset: Text = None
    """i2p: all rows (default), one of I2P's categories such as sexual, nudity or nudity-over-50."""
    threshold: Text = None
    """i2p: the score from which a detection counts: paper (0.6, default), unlearndiffatk, ... or a number."""
    judge: Text = None
    """i2p: nudenet (default), or nudenet=FILE.onnx."""
    allow_judge: Text = None
    """Use this judge (or several, with commas) though it shares lineage with what trained the run; scores say so."""
    model: Text = None
    """The base of a LoRA file (default: the run's own, else emoji-canvas); with --judges, --source: of any model."""
    no_base: bool = False
    """Leave out the base model's numbers, which cost as much again."""
    batch_size: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=BATCH)] = None
    """Pictures drawn at once."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    dtype: Dtype = "fp32"
    """Precision of the model."""
    compile: bool = False
    """torch.compile the denoiser: about a minute first, faster after; for large jobs on a GPU."""
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
    """Prompts for a concept that emoji-canvas does not know (.txt, .csv, .jsonl; I2P with seeds); needs --judge."""
    judge: Text = None
    """nudenet, resnet50 (or NAME=PATH), or module:function of images (n, 3, h, w) to n booleans; needs --source."""
    pictures: Annotated[
        Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="(default: drawn by the base)")
    ] = None
    """Target pictures, one per prompt in the order of their names."""
    allow_judge: Text = None
    """Use this judge though it shares lineage with what trained the run; scores say so."""
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
    figures: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """Write every drawing there too, as SVG and PNG (needs cgru[figures])."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments."""

    scale: Annotated[str, arg(metavar="NAME")] = "smoke"
    """smoke (three classes, minutes), small (every table complete) or full (the paper's size)."""
    only: Text = None
    """Some of objects, safety, ddpo, critic, with commas between."""
    model: Text = None
    """A hub id or diffusers folder instead of emoji-canvas: the official protocols, which need --data."""
    data: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="")] = None
    """What another model needs and cgru cannot ship: judges, prompts, pictures (docs/reproduce.md)."""
    workers: Annotated[int | None, read_as(int, "N"), arg(help_behavior_hint=WORKERS)] = None
    """Cells worked on side by side."""
    device: Device = "auto"
    """Where to compute: auto (cuda if there is one), cpu, cuda, cuda:1, ..."""
    out: Annotated[Path | None, read_as(Path, "FOLDER"), arg(help_behavior_hint="(default: runs/reproduce-SCALE)")] = (
        None
    )
    """Folder of runs, results and the page; the same folder again continues."""
    dry_run: bool = False
    """Only list the cells and the commands that make them."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Sweep:
    """Run concepts × seeds × methods on Ray."""

    words: Annotated[
        Positional[tuple[str, ...]], arg(metavar="CONCEPT [CONCEPT ...] [KEY=VALUE ...]", help_behavior_hint="")
    ]
    """What to forget, each in runs of its own; and settings of all runs, such as policy.iterations=60."""
    seeds: Annotated[str, arg(metavar="N[,N...]")] = "0"
    """Roots of everything random, with commas between."""
    methods: Annotated[str, arg(metavar="NAME[,NAME...]")] = "cgru"
    """Some of cgru, ddpo, dpok, with commas between."""
    model: Annotated[str | None, read_as(str, "MODEL"), arg(help_behavior_hint=MODEL)] = None
    """A hub id, a diffusers folder, or emoji-canvas."""
    preset: Annotated[str | None, read_as(str, "NAME"), arg(help_behavior_hint=PRESET)] = None
    """Where the settings start; see `cgru list presets`."""
    benchmarks: Annotated[str | None, read_as(str, "NAME[,NAME...]"), arg(help_behavior_hint=BENCHMARKS)] = None
    """What is measured of each run, with commas between; see `cgru list benchmarks`."""
    images: Count = 1
    """Pictures per prompt of the benchmarks."""
    share: Annotated[float | None, read_as(float, "X"), arg(help_behavior_hint="(default: 1)")] = None
    """Of a GPU for each run, such as 0.25; on a cluster without GPUs, of its cores."""
    retries: Count = 2
    """How often a run that failed is tried again, from its last checkpoint."""
    address: Annotated[str | None, read_as(str, "HOST:PORT"), arg(help_behavior_hint=CLUSTER)] = None
    """An existing Ray cluster, given on one of its nodes; auto finds the one of this machine."""
    device: Device = "auto"
    """Where to compute: auto (GPUs if the cluster has some), cpu or cuda; which GPU is Ray's choice."""
    out: Annotated[Path, read_as(Path, "FOLDER")] = Path("runs/sweep")
    """Folder of runs, results and the page, on storage that all nodes see; the same folder again continues."""
    dry_run: bool = False
    """Only list the cells and the commands that make them; needs no Ray."""
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
