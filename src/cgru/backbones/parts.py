"""The parts of a Stable Diffusion model, read from a folder or the hub: whole, or an error of one line.

diffusers and transformers load an incomplete model with no more than a warning: missing tensors stay random, and a
tokenizer without its vocabulary knows two tokens. Here each of these is an error, and so is a part of another shape.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, UNet2DConditionModel
from safetensors import SafetensorError
from transformers import CLIPTextModel, CLIPTokenizer

from cgru.backbones.base import one_line

logger = logging.getLogger(__name__)

EMOJI_CANVAS = "emoji-canvas"
ALLOWED = f"'{EMOJI_CANVAS}', a diffusers folder, or a hub id 'owner/name'"

# Component -> (its classes, a file that must be in its folder). Old folders name the fast tokenizer, now the only one.
COMPONENTS = {
    "unet": ({"UNet2DConditionModel"}, "config.json"),
    "vae": ({"AutoencoderKL"}, "config.json"),
    "text_encoder": ({"CLIPTextModel"}, "config.json"),
    "tokenizer": ({"CLIPTokenizer", "CLIPTokenizerFast"}, "tokenizer_config.json"),
    "scheduler": (None, "scheduler_config.json"),
}
WITH_WEIGHTS = ("unet", "vae", "text_encoder")
VOCABULARIES = ({"tokenizer.json"}, {"vocab.json", "merges.txt"})
START_AND_END = 2


def check_folder(folder: Path) -> None:
    """Every file that a model needs must be there; what is in them is checked on reading."""
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no model_index.json, so it is not a diffusers model; allowed: {ALLOWED}. "
            "Give the folder that save_pretrained wrote."
        )
    missing = [f"{part}/{file}" for part, (_, file) in COMPONENTS.items() if not (folder / part / file).is_file()]
    missing += [f"{part}/*.safetensors" for part in WITH_WEIGHTS if not _has_weights(folder / part)]
    present = {file.name for file in (folder / "tokenizer").glob("*")}
    if not any(files <= present for files in VOCABULARIES):
        missing.append("tokenizer/tokenizer.json (or vocab.json and merges.txt)")
    if missing:
        raise FileNotFoundError(
            f"model folder {str(folder)!r} lacks {', '.join(missing)}; it needs {', '.join(COMPONENTS)}. "
            "Save the whole pipeline again with save_pretrained."
        )


def _has_weights(folder: Path) -> bool:
    return any(file.suffix in (".safetensors", ".bin") for file in folder.glob("*"))


def read_parts(origin: Path | str, dtype: torch.dtype, revision: str | None) -> dict[str, Any]:
    """Read all components of a folder or a hub id, on the CPU."""
    where = {} if revision is None else {"revision": revision}
    with _reading(origin):
        index = DiffusionPipeline.load_config(origin, **where)
    _check_index(str(origin), index)
    # The dtype is said for all networks: left out, diffusers casts to float32 while transformers keeps what is stored.
    parts = {
        "denoiser": _network(UNet2DConditionModel, origin, "unet", torch_dtype=dtype, **where),
        "vae": _network(AutoencoderKL, origin, "vae", torch_dtype=dtype, **where),
        "text_encoder": _network(CLIPTextModel, origin, "text_encoder", dtype=dtype, **where),
    }
    with _reading(origin):
        parts["tokenizer"] = CLIPTokenizer.from_pretrained(origin, subfolder="tokenizer", **where)
        schedule = DDIMScheduler.load_config(origin, subfolder="scheduler", **where)
    parts["scheduler"] = ddim_scheduler(schedule)
    _check_sizes(str(origin), parts)
    return parts


@contextmanager
def _reading(origin: Path | str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FileNotFoundError(_read_failure(origin, one_line(error))) from error
    except Exception as error:  # on files that contradict each other the libraries raise almost any type
        raise ValueError(_read_failure(origin, one_line(error))) from error


def _read_failure(origin: Path | str, reason: str) -> str:
    if isinstance(origin, Path):
        return f"cannot read the model in {str(origin)!r}: {reason.rstrip('.')}. Save or download it again."
    return (
        f"{origin!r} is no folder here and could not be read from the hub ({reason.rstrip('.')}); "
        f"allowed: {ALLOWED}. Check the spelling, the network and, for a gated model, `hf auth login`."
    )


def _network(kind: Any, origin: Path | str, part: str, **options: Any) -> Any:  # noqa: ANN401 - untyped libraries
    with _reading(origin):
        # With wrong shapes ignored, both libraries list them, as they list what is missing; both are errors below.
        network, found = kind.from_pretrained(
            origin, subfolder=part, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    tensors = network.state_dict().keys()  # without buffers that are computed, such as position_ids: no file needs them
    missing = sorted(tensors & set(found["missing_keys"]))
    misshapen = sorted(name for name, *_ in found["mismatched_keys"])
    if missing or misshapen:
        raise ValueError(
            f"the {part} of {str(origin)!r} lacks {len(missing)} of its {len(tensors)} tensors and has "
            f"{len(misshapen)} of another shape than its config.json says, first {(missing + misshapen)[0]!r}; "
            "all must be there. Save or download it again."
        )
    return network


def _check_index(name: str, index: object) -> None:
    if not isinstance(index, Mapping):
        raise ValueError(f"model_index.json of {name!r} is {index!r}; it must list components. Save the model again.")
    for part, (classes, _) in COMPONENTS.items():
        entry = index.get(part)
        found = entry[1] if isinstance(entry, list | tuple) and len(entry) == 2 else entry
        if found is None or (classes is not None and found not in classes):
            wanted = "a scheduler" if classes is None else " or ".join(sorted(classes))
            raise ValueError(
                f"{name!r} is a {index.get('_class_name')} whose {part} is {found}; Stable Diffusion 1.x and 2.x have "
                f"{wanted} there. Use such a model."
            )


def _check_sizes(name: str, parts: Mapping[str, Any]) -> None:
    # An inpainting UNet takes 9 channels; XL's cross-attention is wider than its first text encoder.
    unet, vae, text = (parts[part].config for part in ("denoiser", "vae", "text_encoder"))
    if unet.in_channels != vae.latent_channels or unet.cross_attention_dim != text.hidden_size:
        raise ValueError(
            f"{name!r} has a UNet for {unet.in_channels} channels and text width {unet.cross_attention_dim}, "
            f"but its VAE gives {vae.latent_channels} and its text encoder {text.hidden_size}; "
            "use a text-to-image Stable Diffusion 1.x or 2.x model"
        )
    words = len(parts["tokenizer"])
    if not START_AND_END < words <= text.vocab_size:
        raise ValueError(
            f"the tokenizer of {name!r} knows {words} tokens; its text encoder allows {START_AND_END + 1} to "
            f"{text.vocab_size}. Save or download the tokenizer's files again."
        )


def ddim_scheduler(config: Mapping[str, Any]) -> DDIMScheduler:
    """Read any Stable Diffusion scheduler config as DDIM.

    Clipping or thresholding x̂0 is for pixel models; our kernel does neither, so a config that asks for it is an error.
    A config that is silent on it (Euler, DPM) means no clipping, where DDIM's own default is to clip. The steps offset
    is 1, as diffusers' StableDiffusionPipeline sets it whatever the file says, so that both give the same pictures.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"scheduler/scheduler_config.json is {config!r}; it must be a table of settings. Save it again."
        )
    for setting in ("clip_sample", "thresholding"):
        if config.get(setting):
            raise ValueError(
                f"the scheduler config has {setting} = true, which is for pixel models; "
                f"set {setting} to false in scheduler/scheduler_config.json"
            )
    if config.get("steps_offset", 1) != 1 and config.get("timestep_spacing", "leading") == "leading":
        logger.warning("scheduler steps_offset %s read as 1, as diffusers does", config["steps_offset"])
    try:
        scheduler = DDIMScheduler.from_config({**config, "clip_sample": False, "steps_offset": 1})
        scheduler.set_timesteps(1)  # an unknown timestep_spacing shows only now
    except (
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # beta_schedule: NotImplementedError
        raise ValueError(
            f"the scheduler config is not one of Stable Diffusion ({one_line(error)}); "
            "correct scheduler/scheduler_config.json"
        ) from error
    return scheduler
