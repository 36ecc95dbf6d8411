"""Presets: the paper's tables and our own choices as typed configs. Each value is marked paper, code or ours.

paper: its hyper-parameter table and §5. code: DDPO's or DPOK's published code, on whose loop the paper builds.
ours: the paper gives no value; docs/lab.md gives the evidence. Fields that a preset does not set keep their defaults
(ours). `resolve_config` turns a user's input into a config: preset, then the method's settings, then key=value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from inspect import signature
from pathlib import Path

from cgru.catalog import call_own, resolve
from cgru.config import (
    CriticConfig,
    PolicyConfig,
    PromptConfig,
    RetentionConfig,
    RewardConfig,
    RLConfig,
    RunConfig,
    SamplingConfig,
    StoredConfig,
    code_in,
    is_code,
    load,
    override,
    refuse_unnamed_code,
)
from cgru.embedded import EMBEDDED, load_lexicon, main_benchmark
from cgru.method import find_method
from cgru.rl.head_classes import paper_classes
from cgru.tasks import find_concept

# Keys that other settings follow from: changed alone, the config would say one thing and do another.
BY_OPTION = {"concept": "the first argument", "method": "--method", "preset": "--preset", "model": "--model"}
MICRO_BATCH = "policy.micro_batch"


def preset(name: str, concept: str, model: str | None = None) -> RunConfig:
    """The config of a preset for a concept; `name` is a catalog name or the user's own "module:attr".

    `model` is passed to presets whose signature names it, because they are other settings for other models.
    """
    make = resolve("preset", name)
    if not callable(make):
        raise ValueError(f"the preset {name!r} is a {type(make).__name__}; allowed: a function of a concept.")
    told = {"model": model} if model is not None and "model" in signature(make).parameters else {}
    made = call_own("preset", name, make, concept, **told)
    if not isinstance(made, RunConfig):
        raise ValueError(f"the preset {name!r} returns a {type(made).__name__}; allowed: the config of a method.")
    return replace(made, preset=name)


def resolve_config(
    concept: str,
    *,
    model: str | None = None,
    method: str | None = None,
    preset_name: str | None = None,
    config_file: str | Path | None = None,
    overrides: Iterable[str] = (),
    code: Collection[str] = (),
) -> RunConfig:
    """The checked config for a user's input: the method overrides the preset, and key=value overrides both.

    Args:
        concept: what to forget.
        model: None for the preset's own; without a preset, Emoji Canvas.
        method: a catalog name or "module:attr"; None for the preset's, or the file's own.
        preset_name: None for the method's default on the model; without a method, that of `default_preset`.
        config_file: a YAML file to start from instead of a preset.
        overrides: `key=value` settings.
        code: user code ("module:attr") that the file may name; code that the other arguments name may run as well.
    """
    settings = list(overrides)
    _refuse_options(settings)
    if config_file is not None and preset_name is not None:
        raise ValueError(
            f"--preset {preset_name} and --config {str(config_file)!r}; allowed: one of them. Leave one out."
        )
    if config_file is not None:
        named = (*code, *code_in(*(text.partition("=")[2] for text in settings), method or "", model or ""))
        config = replace(load(config_file, code=named), concept=concept)
        if method is None and isinstance(config, StoredConfig):  # before its method would be imported
            refuse_unnamed_code(config, named, f"--config {str(config_file)!r}", "--code")
        made = find_method(method or config.method)
        what = f"--config {str(config_file)!r}"
    else:
        config, preset_name = _started(concept, model, method, preset_name)
        made = find_method(method or config.method)
        what = f"--preset {preset_name}"
    if type(config) is not made.config:
        raise ValueError(
            f"{what} holds settings of the method {config.method!r}, and --method is {method!r}, whose settings are "
            "others; allowed: a preset of its own. Leave one of the two out."
        )
    config = config if model is None else replace(config, model=model)
    config = _without_looks(config, settings)
    if method is not None or config_file is None:
        config = override(config, [text for text in settings if text.partition("=")[0].strip() in made.decisive])
        name = method or config.method
        config = replace(made.adjust(config), method=name)
    config = override(config, settings)
    if config_file is not None:
        refuse_unnamed_code(config, named, what, "--code")
    elif isinstance(config, RLConfig) and is_on_cuda(config):
        config = on_cuda(config, settings)
    name = _spelled(config)
    if name == concept:
        return config
    return resolve_config(
        name,
        model=model,
        method=method,
        preset_name=preset_name,
        config_file=config_file,
        overrides=settings,
        code=code,
    )


def _without_looks(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    # Stopping goes by looks at validation prompts: who turns these off need not turn off a preset's stop as well.
    given = {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in settings)}
    is_blind = "0" in (given.get("watch.every"), given.get("prompts.validation"))
    if not isinstance(config, RLConfig) or not is_blind or "watch.stop" in given:
        return config
    return replace(config, watch=replace(config.watch, stop=False))


def default_preset(model: str | None) -> str:
    """The preset where the user names neither one nor a method."""
    return "demo" if model in (None, EMBEDDED) else "paper-object"


def on_cuda(config: RLConfig, settings: Iterable[str]) -> RLConfig:
    """The config as it was measured on a GPU: in bf16 and compiled, where the user's settings leave that open.

    The ratio right after collection is checked in any precision. A KL on forget states and merged rollouts are not
    compiled. Emoji Canvas, whose results are in fp32, and models and presets of one's own stay as they are.
    """
    given = {text.partition("=")[0].strip() for text in settings}
    can_compile = config.retention.kl_forget == 0 and not config.sampling.merged
    return replace(
        config,
        dtype=config.dtype if "dtype" in given or config.sampling.merged else "bf16",
        compile=config.compile if "compile" in given else can_compile,
    )


def is_on_cuda(config: RLConfig) -> bool:
    """Whether a shipped preset would train a published model on a GPU that computes in bf16."""
    is_own = is_code(config.preset) or (is_code(config.model) and not Path(config.model).exists())
    if is_own or config.model == EMBEDDED or not config.device.startswith(("auto", "cuda")):
        return False
    import torch  # here, because the settings of Emoji Canvas must be read without it

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return config.device != "auto"  # of another machine: a sweep names the runs of its workers


def _started(
    concept: str, model: str | None, method: str | None, preset_name: str | None
) -> tuple[RunConfig, str | None]:
    """The config to start from and the name of its preset; a method without presets starts from its own defaults."""
    if method is None:
        preset_name = preset_name or default_preset(model)
    elif preset_name is None:
        made = find_method(method)
        preset_name = made.default_preset(model or EMBEDDED)
        if preset_name is None:
            return made.config(concept=concept, method=method), None
    return preset(preset_name, concept, model), preset_name


def _spelled(config: RunConfig) -> str:
    """The concept as the model's vocabulary spells it, so that "dog" and "Dogs" are one run; any text for others."""
    if config.model != EMBEDDED:
        return config.concept
    lexicon = load_lexicon()
    return find_concept(config.concept, lexicon.vocabulary, lexicon.aliases).name


def _refuse_options(settings: Iterable[str]) -> None:
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if key in BY_OPTION:
            raise ValueError(f"{setting!r}, but other settings go by it; allowed: {BY_OPTION[key]}. Give it there.")
        if key == MICRO_BATCH and re.fullmatch(r"0|-\d+", value):  # in a config 0 stands for what fits
            raise ValueError(f"{setting!r}; allowed: 1 pair or more. Leave it out: the run then finds what fits.")


def paper_object(concept: str) -> RLConfig:
    """Object removal on Stable Diffusion 1.5 (paper §5.2 and its hyper-parameter table)."""
    return RLConfig(
        concept=concept,
        model="stable-diffusion-v1-5/stable-diffusion-v1-5",  # paper
        dtype="fp32",  # ours; not given. On a GPU bf16 and compiled unless the user says otherwise (`on_cuda`)
        sampling=SamplingConfig(
            steps=50,  # paper
            guidance=5.0,  # code: DDPO's; the paper gives none
            eta=1.0,  # code: DDPO's
        ),
        prompts=PromptConfig(
            count=60,  # ours; paper: 80 prompts a class in disjoint parts, so a file of 80 is enough
            critic=20,  # ours: the other 20
            retain=80,  # ours: looked at only, nothing is trained on them
        ),
        reward=RewardConfig(
            name="concept",  # paper: CLIP ViT-B/32 with a class head
            form="probability",  # paper
            scale=10.0,  # paper: 0..10
            networks=("clip",),  # paper
            classes=paper_classes(concept),  # paper: 20 classes; ours for other concepts: the concept and "other"
            nothing=0.0,  # paper
        ),
        critic=CriticConfig(
            kind="film",  # paper
            head="value",  # ours; paper: "classification head", fitted by MSE: a number fits that, `classes` also goes
            view="noisy",  # paper: decoded x_t
            trajectories=64,  # ours
            learning_rate=1e-4,  # code: DPOK's value network
            online_learning_rate=1e-4,  # code: DPOK's
        ),
        policy=PolicyConfig(
            iterations=250,  # paper: 100..250 epochs, by class; the most
            trajectories=16,  # paper: 4 batches of 4 an epoch
            updates=2,  # paper: 16 / (batch 2 × accumulation 4)
            learning_rate=3e-4,  # paper
            weight_decay=1e-4,  # code: DDPO's
            beta1=0.9,  # code: DDPO's
            beta2=0.999,  # code: DDPO's
            gradient_norm=1.0,  # paper
            clip=1e-4,  # paper: ratios in 1 ± 1e-4
            clip_mode="pessimistic",  # code: DDPO's; the paper says "PPO-style"
            advantage="critic",  # paper: r - V(x_t, c, t)
            rank=4,  # code: DDPO's LoRA
            alpha=4.0,  # code: DDPO's, whose LoRA counts once: alpha / rank = 1
            targets="attention",  # code: DDPO's
        ),
        retention=RetentionConfig(),  # paper: no retention loss
    )


def paper_nsfw(concept: str) -> RLConfig:
    """NSFW removal (paper §5.3). Its prompts are captions of a data set: prompts.source=FILE, or it stops."""
    parent = paper_object(concept)
    reward = replace(parent.reward, name="nsfw", classes="", scale=1.0)  # paper: 1 - p_nsfw
    prompts = replace(parent.prompts, policy_share=0.2, critic_share=0.1)  # paper: disjoint 20 % and 10 % splits
    return replace(parent, reward=reward, prompts=prompts)


def paper_aesthetic(concept: str) -> RLConfig:
    """The paper's comparison with DDPO (§5.1): nothing is forgotten, the LAION aesthetic score goes up.

    The concept only words the prompts. DDPO's side of it: the same with --method ddpo.
    """
    parent = paper_object(concept)
    return replace(parent, reward=replace(parent.reward, name="aesthetic", classes=""))  # paper


def best(concept: str) -> RLConfig:
    """Our strongest on Emoji Canvas, by `anchored`; tuned on Dogs, Horses and Flowers (sweep c of docs/lab.md)."""
    config = RLConfig(
        concept=concept,
        method="anchored",
        model=EMBEDDED,
        sampling=SamplingConfig(
            steps=10,  # ours: the model's own number
            guidance=3.0,  # ours: the model's own
            eta=1.0,  # code: DDPO's
            explore=0.5,  # ours: without it UA was 31 % after as many trajectories (sweep c)
        ),
        prompts=PromptConfig(
            count=80,  # paper: 80 prompts a class
            retain=160,  # ours: what is explored and what is kept, so the more the better
        ),
        reward=RewardConfig(
            name="concept",  # paper
            form="log-odds",  # ours: a slope where p saturates
            scale=10.0,  # paper
            networks=("clip", "swin"),  # ours: two architectures are harder to fool than one
            nothing=1.0,  # ours: an emptied picture pays nothing
        ),
        critic=CriticConfig(
            kind="film",  # paper
            head="value",  # paper
            view="clean",  # ours: the decoded x̂0 says more than the decoded x_t
            trajectories=128,  # ours
        ),
        policy=PolicyConfig(
            iterations=60,  # ours: the reward is flat from about 15 on; the rest is settling under the KL
            trajectories=64,  # ours
            updates=2,  # paper
            learning_rate=3e-3,  # ours: 1e-3 is slower, 1e-2 no better (sweep c)
            warmup=6,  # ours: Adam's first steps are its longest
            beta2=0.95,  # ours: sweep b; 0.999 remembers the large first gradients for the whole run
            clip=1e-2,  # ours; 1e-4 is the paper's at 16,384 latent dimensions
            advantage="critic",  # paper
            step_weights="balanced",  # ours: else one step drowns the others
            targets="attention+ff",  # ours: sweep b
            average=0.8,  # ours
            rank=8,  # ours
            alpha=8.0,  # code: DDPO's alpha / rank = 1
        ),
        retention=RetentionConfig(
            kl=0.3,  # ours: from 0.1 to 3 IRA is 97 to 99 % (sweep c)
            kl_form="noise",  # code: DPOK's form
            bank=128,  # ours
        ),
    )
    adjusted = {"hazard": _for_hazards, "attribute": _for_attributes}
    return adjusted.get(main_benchmark(concept), lambda config: config)(config)


def on_policy(concept: str) -> RLConfig:
    """`best` without relabelling, so for `cgru`, `ddpo` and `dpok` alike: what the paper's gradient needs here."""
    parent = best(concept)
    return replace(
        parent,
        method="cgru",
        # ours: noise in the first half of 8 steps, where a picture's content is decided
        sampling=replace(parent.sampling, explore=0.0, steps=8, noisy_steps=4),
        # ours: 6,400 trajectories; advantages of unit size, since r - V shrinks as V learns
        policy=replace(parent.policy, iterations=100, normalise=True),
        # ours: single runs swing, and the detector sees it, unless it is an attribute; the same rule for every method
        watch=replace(parent.watch, stop=main_benchmark(concept) != "attribute"),
    )


def demo(concept: str) -> RLConfig:
    """`best` in minutes on two cores: the same algorithm, fewer and smaller iterations."""
    parent = best(concept)
    return replace(
        parent,
        # ours: only the first half has noise, so an update has half the pairs; the rest hardly changes what is drawn
        sampling=replace(parent.sampling, steps=8, noisy_steps=4),
        prompts=replace(parent.prompts, validation=16),  # ours: a look takes 4 s
        critic=replace(
            parent.critic, trajectories=48, epochs=2, batch=96, online_updates=2
        ),  # ours: what minutes allow
        # ours: 672 trajectories, about 6 minutes; steps are shared so that only the noisy half of the states is decoded
        policy=replace(parent.policy, iterations=14, trajectories=48, step_choice="shared"),
        # ours: a stronger pull for a shorter way; 18 iterations with 0.3 ended at UA 91, IRA 92 %, with 1 at 98, 99 %
        retention=replace(parent.retention, kl=parent.retention.kl * 10 / 3, bank=64, batch=32),
    )


def fast(concept: str, model: str = EMBEDDED) -> RLConfig:
    """`best` on Emoji Canvas, `paper-object` on other models, at less work an iteration (docs/performance.md)."""
    parent = best(concept) if model == EMBEDDED else replace(paper_object(concept), model=model)
    return replace(
        parent,
        # ours: three steps in ten, the same for the whole batch, so that only their states are decoded
        policy=replace(parent.policy, step_fraction=0.3, step_choice="shared"),
        critic=replace(parent.critic, decode="half"),  # ours: a quarter of the decoder's work
    )


def _for_hazards(config: RLConfig) -> RLConfig:
    reward = replace(config.reward, form="probability", scale=1.0)  # paper: 1 - p_nsfw
    # ours: rewards a tenth the size give policy gradients a tenth the size, so the pull to the base shrinks with them
    retention = replace(config.retention, kl=config.retention.kl / 10)
    return replace(config, reward=reward, retention=retention)


def _for_attributes(config: RLConfig) -> RLConfig:
    return replace(config, reward=replace(config.reward, name="attribute"))
