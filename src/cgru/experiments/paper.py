"""The experiments of the paper as cells, by table and figure.

    objects  Table 1, per-class table, confusions, trade-off and progression (§5.2, §6, App. B): each class is removed
    safety   nudity table and attack table (§5.3, §6): on Emoji Canvas `hazard` stands in for nudity
    ddpo     reward curve and gradient variance, CGRU against DDPO on a reward that forgets nothing (§5.1, App. B)
    critic   accuracy and macro precision with and without FiLM (§5.4)

Importance ratios (App. B) are logged by every CGRU run, so they need no separate cell. The base model is a cell in each
experiment that compares with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cgru.catalog import unknown
from cgru.embedded import EMBEDDED, load_lexicon
from cgru.experiments.cells import Assault, Cell, Measure, Options
from cgru.experiments.scales import Scale
from cgru.tasks import HAZARD

TEMPLATE_PROMPTS = 400
"""Most prompts of a set that templates are asked for; a few more are possible."""
STUDIED = "Dogs"
"""The concept whose prompts `ddpo` and `critic` use; it is not forgotten."""
NEUTRAL = ("retention.kl=0", "watch.every=0")
"""Settings of Emoji Canvas' presets that only unlearning needs."""
DATA = {
    "prompts": "prompts/sd_prompt_CLASS.txt: 80 training prompts of each class, one a line",
    "judges": "judges: the official UnlearnCanvas classifiers",
    "nsfw": "nsfw.jsonl: training prompts of NSFW removal, from `cgru prompts caption`",
    "i2p": "i2p.csv: the I2P prompts",
    "nudity": "nudity.csv: the prompts of UnlearnDiffAtk on nudity",
    "mjhq": "MJHQ-30K: pictures and meta_data.json",
}
"""Contents of the data folder for a model other than Emoji Canvas; each text starts with the path."""


@dataclass(frozen=True)
class World:
    """What the experiments are made of on one kind of model."""

    model: str
    classes: tuple[str, ...]
    methods: Mapping[str, str]
    """Method -> its preset in object removal, ours first; `safety` uses the first."""
    presets: Mapping[str, str]
    """Experiment -> preset."""
    settings: Mapping[str, tuple[str, ...]]
    """Experiment -> settings laid over it."""
    objects: str
    """The benchmark of objects."""
    beside: tuple[Measure, ...]
    """Further benchmarks for the same models, with the same target if the benchmark takes one."""
    concept: str
    """What the safety experiment removes."""
    safety: Measure
    clipscore: Measure
    assault: Assault
    has_bare_prompts: bool
    """Whether the positive control is possible: attacking the base with the concept's word removed."""
    options: Options = ()
    """Of the objects benchmark."""
    images: int | None = None
    """Of it, pictures per prompt; None: its own number."""
    missing: Mapping[str, str] | None = None
    """Experiment -> what it needs and was not given."""
    prompts: Path | None = None
    """A folder of training prompts by class."""


def emoji_world(scale: Scale) -> World:
    """Emoji Canvas: everything is in the package."""
    lexicon = load_lexicon()
    iterations = () if scale.iterations is None else (f"policy.iterations={scale.iterations}", "samples_every=4")
    study = (
        "reward.name=jpeg",
        *NEUTRAL,
        f"policy.iterations={scale.study_iterations}",
        f"policy.trajectories={scale.study_trajectories}",
        f"diagnostics.every={_every(scale)}",
    )
    names = ("safety", "ddpo", "critic")
    return World(
        model=EMBEDDED,
        classes=lexicon.classes,
        methods=scale.methods,
        presets=dict.fromkeys(names, scale.preset),
        settings={"objects": iterations, "safety": iterations, "ddpo": study, "critic": _critic_settings(scale)},
        objects="canvas",
        beside=(Measure("paraphrase", 1),) if scale.is_thorough else (),  # canvas has a Fréchet distance of its own
        concept=HAZARD,
        safety=Measure("hazard", scale.images, HAZARD),
        clipscore=Measure("clipscore", 1),
        assault=Assault(HAZARD, scale.attacked, scale.schedule),
        has_bare_prompts=True,
        images=scale.images,
    )


def hub_world(scale: Scale, model: str, data: Path | None) -> World:
    """Stable Diffusion, with the official protocols; `data` holds what cannot be shipped."""
    folder = data or Path()
    found = {
        name: (folder / words.partition(":")[0].partition("/")[0]).exists() and data for name, words in DATA.items()
    }
    iterations = () if scale.iterations is None else (f"policy.iterations={scale.iterations}",)
    study = (f"policy.iterations={scale.study_iterations}", f"diagnostics.every={_every(scale)}")
    reference: Options = (("reference", str(folder / "MJHQ-30K")),)
    quality = (Measure("fid", 1, None, reference),) if found["mjhq"] and scale.is_thorough else ()
    is_paper = scale.name == "full"
    return World(
        model=model,
        classes=load_lexicon().classes,
        methods=dict.fromkeys(scale.published, "paper-object"),
        presets={
            "safety": "paper-nsfw",
            "ddpo": "paper-aesthetic",
            "critic": "paper-object",
        },
        settings={
            "objects": iterations,
            "safety": (*iterations, f"prompts.source={folder / 'nsfw.jsonl'}"),
            "ddpo": study,
            "critic": _critic_settings(scale, most_prompts=TEMPLATE_PROMPTS),
        },
        objects="unlearncanvas",
        beside=quality,
        concept="nudity",
        safety=Measure("i2p", None, None, (("source", str(folder / "i2p.csv")),)),
        clipscore=Measure("clipscore", 1, None, reference),
        assault=Assault(
            "nudity",
            scale.attacked,
            scale.schedule,
            tokens=5,
            options=(("source", str(folder / "nudity.csv")), ("judge", "nudenet")),
        ),
        has_bare_prompts=False,
        options=(("judges", str(folder / "judges")), *((("variant", "paper"),) if is_paper else ())),
        images=None,  # the protocol's own number: official 5, paper 20
        missing={
            "objects": _needs(found, "judges"),
            "safety": _needs(found, "nsfw", "i2p", "nudity", "mjhq"),
        },
        prompts=folder / "prompts" if found["prompts"] else None,
    )


def plan(scale: Scale, model: str = EMBEDDED, data: Path | None = None, only: Iterable[str] = ()) -> tuple[Cell, ...]:
    """All cells in the best starting order: first those that others reuse, then the longest ones."""
    chosen = list(only) or list(EXPERIMENTS)
    for name in chosen:
        if name not in EXPERIMENTS:
            raise ValueError(unknown("experiment", name, EXPERIMENTS, "Give some of these after --only, or none."))
    world = emoji_world(scale) if model == EMBEDDED else hub_world(scale, model, data)
    missing = world.missing or {}
    cells = [
        replace(cell, missing=missing.get(name, ""))
        for name in EXPERIMENTS
        if name in chosen
        for cell in EXPERIMENTS[name](scale, world)
    ]
    return tuple(sorted(cells, key=lambda cell: cell.concept is not None))  # stable: the base first


def objects(scale: Scale, world: World) -> list[Cell]:
    """One run for each class, method and seed, and the base."""
    base = Cell("objects-base", "objects", world.model, measures=_objects(world, None))
    runs = [
        Cell(
            f"objects-{label.lower()}-{method}-s{seed}",
            "objects",
            world.model,
            label,
            method,
            preset,
            seed,
            (*world.settings["objects"], *_source(world, label)),
            measures=_objects(world, label),
        )
        for method, preset in world.methods.items()
        for label in (scale.classes or world.classes)
        for seed in scale.seeds
    ]
    return [base, *runs]


def safety(scale: Scale, world: World) -> list[Cell]:
    """Cells of `safety`: the hazard (or nudity) is removed, counted and attacked; the base is the positive control."""
    measures = (world.safety, world.clipscore)
    method = next(iter(world.methods))
    bare = (replace(world.assault, without_word=True),) if world.has_bare_prompts else ()
    base = Cell("safety-base", "safety", world.model, measures=measures, assaults=bare)
    runs = [
        Cell(
            f"safety-{method}-s{seed}",
            "safety",
            world.model,
            world.concept,
            method,
            world.presets["safety"],
            seed,
            world.settings["safety"],
            measures=measures,
            assaults=(world.assault,),
        )
        for seed in scale.seeds
    ]
    return [base, *runs]


def ddpo(scale: Scale, world: World) -> list[Cell]:
    """CGRU and DDPO on one reward, alike in everything else."""
    return [
        Cell(
            f"ddpo-{method}-s{seed}",
            "ddpo",
            world.model,
            STUDIED,
            method,
            world.presets["ddpo"],
            seed,
            world.settings["ddpo"],
        )
        for seed in scale.study_seeds
        for method in ("cgru", "ddpo")
    ]


def critic(scale: Scale, world: World) -> list[Cell]:
    """Cells of `critic`: with and without FiLM, each fitted to the same trajectories of the base."""
    return [
        Cell(
            f"critic-{kind}-s{seed}",
            "critic",
            world.model,
            STUDIED,
            "cgru",
            world.presets["critic"],
            seed,
            (*world.settings["critic"], f"critic.kind={kind}"),
            stage="critic",
        )
        for seed in scale.study_seeds
        for kind in ("film", "plain")
    ]


EXPERIMENTS: Mapping[str, Callable[[Scale, World], list[Cell]]] = {
    "objects": objects,
    "safety": safety,
    "ddpo": ddpo,
    "critic": critic,
}


def _objects(world: World, target: str | None) -> tuple[Measure, ...]:
    # Prompts from a folder do not name our classes, so none of them can be the target.
    beside = (measure if measure.options else replace(measure, target=target) for measure in world.beside)
    return (Measure(world.objects, world.images, target, world.options), *beside)


def _source(world: World, label: str) -> tuple[str, ...]:
    if world.prompts is None:
        return ()
    return (f"prompts.source={world.prompts / f'sd_prompt_{label}.txt'}",)


def _critic_settings(scale: Scale, most_prompts: int | None = None) -> tuple[str, ...]:
    count = scale.critic_trajectories
    return (
        "critic.head=classes",  # paper: 20 classes
        "critic.view=noisy",  # paper
        "reward.form=probability",  # paper
        f"critic.trajectories={count}",
        # A fifth of the retain prompts names no class: still one prompt for each trajectory, so that those held out
        # have prompts that were not fitted to.
        f"prompts.critic={min(2 * count, most_prompts or 2 * count)}",
        "critic.epochs=4",
        "watch.every=0",
    )


def _every(scale: Scale) -> int:
    """Iterations between measurements of the gradient's variance, which cost as much as an iteration."""
    return max(2, scale.study_iterations // 8)


def _needs(found: Mapping[str, object], *names: str) -> str:
    lacking: Sequence[str] = [DATA[name] for name in names if not found[name]]
    return f"--data FOLDER with {'; '.join(lacking)}" if lacking else ""
