"""One run of the policy gradient at the real size of SDXL or SD3-medium: `python benchmarks/families.py sdxl`.

Nothing is downloaded: a folder in the layout of the hub's is written with random weights at the sizes of the published
configs, and `cgru.unlearn` reads and trains it as it would the real one, in bf16, with the paper's critic on a random
CLIP B/32 and the reward `jpeg`. Two iterations: the first also checks that every ratio is 1 before the first update;
the second is the one that is timed. Speed and memory do not depend on the weights' values; pictures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from sd15 import CLIP_MEAN, CLIP_STD, random_clip_b32
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from cgru.atomic_io import atomic_write
from cgru.embedded import ROOT
from cgru.pipeline.unlearning import unlearn
from cgru.presets import resolve_config
from cgru.runs import commit_of

Scalars = Mapping[str, Any]
CLIP_L: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
CLIP_L |= {"num_attention_heads": 12, "projection_dim": 768}
CLIP_G: dict[str, Any] = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
CLIP_G |= {"num_attention_heads": 20, "projection_dim": 1280, "hidden_act": "gelu"}
T5_XXL: dict[str, Any] = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
VAE: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 1024}
XL_UNET: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "addition_time_embed_dim": 256,
}
SD3_NET: dict[str, Any] = {
    "sample_size": 128,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}


def words(**settings: Any) -> CLIPTokenizer:  # noqa: ANN401 - passed on to transformers
    """The embedded model's tokens, which do not matter here."""
    return CLIPTokenizer.from_pretrained(ROOT / "emoji-canvas" / "tokenizer", model_max_length=77, **settings)


def text_config(tokenizer: CLIPTokenizer, sizes: Scalars) -> CLIPTextConfig:
    """Of a CLIP text encoder; 49,408 tokens as in the published ones."""
    marks = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, **sizes, **marks)


def vae(tiny: bool, **settings: Any) -> AutoencoderKL:  # noqa: ANN401
    """A VAE of four levels."""
    sizes = VAE | ({"block_out_channels": (32,) * 4, "sample_size": 64} if tiny else {})
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return AutoencoderKL(**sizes, **blocks, **settings)


def sdxl(tiny: bool) -> StableDiffusionXLPipeline:
    """Stable Diffusion XL base 1.0 without its weights."""
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "projection_dim": 32}
    first, second = words(), words(pad_token="!")
    one, two = (small, small) if tiny else (CLIP_L, CLIP_G)
    own = {"sample_size": 8, "block_out_channels": (32, 64, 64), "attention_head_dim": (2, 4, 4)} if tiny else {}
    own |= {"transformer_layers_per_block": (1, 1, 2), "addition_time_embed_dim": 8} if tiny else {}
    sizes = XL_UNET | own
    unet = UNet2DConditionModel(
        **sizes,
        cross_attention_dim=one["hidden_size"] + two["hidden_size"],
        projection_class_embeddings_input_dim=6 * sizes["addition_time_embed_dim"] + two["projection_dim"],
        addition_embed_type="text_time",
        use_linear_projection=True,
    )
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return StableDiffusionXLPipeline(
        vae=vae(tiny, scaling_factor=0.13025),
        text_encoder=CLIPTextModel(text_config(first, one)),
        text_encoder_2=CLIPTextModelWithProjection(text_config(second, two)),
        tokenizer=first,
        tokenizer_2=second,
        unet=unet,
        scheduler=EulerDiscreteScheduler(**schedule, steps_offset=1, timestep_spacing="leading"),
        add_watermarker=False,
    )


def sd3(tiny: bool) -> StableDiffusion3Pipeline:
    """Stable Diffusion 3 medium without its weights, T5-XXL included."""
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "projection_dim": 16}
    one, two = (small, small) if tiny else (CLIP_L, CLIP_G)
    t5_sizes = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2} if tiny else T5_XXL
    own = {"sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4} if tiny else {}
    own |= {"caption_projection_dim": 32, "pos_embed_max_size": 8} if tiny else {}
    first, second = words(), words(pad_token="!")
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in map(chr, range(33, 127)))]
    third = T5TokenizerFast(vocab=vocab + [(f"<extra_id_{i}>", 0.0) for i in range(100)], model_max_length=512)
    return StableDiffusion3Pipeline(
        vae=vae(
            tiny,
            latent_channels=16,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModelWithProjection(text_config(first, one)),
        text_encoder_2=CLIPTextModelWithProjection(text_config(second, two)),
        text_encoder_3=T5EncoderModel(T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **t5_sizes)),
        tokenizer=first,
        tokenizer_2=second,
        tokenizer_3=third,
        transformer=SD3Transformer2DModel(
            **(SD3_NET | own),
            patch_size=2,
            in_channels=16,
            out_channels=16,
            joint_attention_dim=t5_sizes["d_model"],
            pooled_projection_dim=one["projection_dim"] + two["projection_dim"],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


FAMILIES: Mapping[str, Callable[[bool], Any]] = {"sdxl": sdxl, "sd3": sd3}


def written(family: str, folder: Path, device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Write the folder in bf16; returns the parameters of each network in millions."""
    with torch.device(device):
        torch.manual_seed(0)
        pipeline = FAMILIES[family](tiny)
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    for network in networks.values():
        network.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    return {name: sum(p.numel() for p in part.parameters()) / 1e6 for name, part in networks.items()}


def write_clip(cache: Path, *, tiny: bool) -> None:
    """A random CLIP B/32 where the hub's cache would have it, for the critic."""
    model = cache / "hub" / "models--openai--clip-vit-base-patch32"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)  # the hub's commit
    snapshot = model / "snapshots" / ("0" * 40)
    random_clip_b32(0, tiny=tiny).save_pretrained(snapshot)
    pixels = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    (snapshot / "preprocessor_config.json").write_text(json.dumps(pixels))


def measured(folder: Path, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Two iterations; seconds of each, peak memory, the first ratio and the batch sizes that the run found."""
    device = torch.device(options.device)
    config = resolve_config(
        "a dog",
        model=str(folder),
        method="cgru",
        preset_name="paper-object",
        overrides=[
            f"device={device.type}",
            "dtype=bf16",
            "reward.name=jpeg",
            "critic.trajectories=0",
            "policy.iterations=2",
            f"policy.trajectories={options.trajectories}",
            f"sampling.steps={options.steps}",
            f"sampling.eta={0.7 if options.family == 'sd3' else 1.0}",
            "prompts.count=16",
            "prompts.retain=0",
            "prompts.critic=0",
            "watch.every=0",
            "samples_every=0",
            *options.set,
        ],
    )
    rows: list[dict[str, Any]] = []
    moments = [time.perf_counter()]

    def log(record: Mapping[str, Any]) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
        rows.append(dict(record))
        print(f"iteration {len(rows)}: {moments[-1] - moments[-2]:.1f} s since the last", flush=True)

    run = unlearn(config, out, listeners=(log,))
    cuda = torch.cuda if device.type == "cuda" else None
    return {
        "settings": {"steps": options.steps, "trajectories": options.trajectories, "dtype": "bf16", "set": options.set},
        "until_first_iteration_ends_s": moments[1] - moments[0],
        "iteration_s": moments[2] - moments[1],
        "peak_allocated_gib": cuda.max_memory_allocated() / 2**30 if cuda else None,
        "peak_reserved_gib": cuda.max_memory_reserved() / 2**30 if cuda else None,
        "first_ratio_off": rows[0]["policy/parity"],
        "sizes": run.manifest["extra"]["sizes"],
        "edit_mib": sum(file.stat().st_size for file in (run.path / "edit").iterdir()) / 2**20,
    }


def main() -> None:
    """Write the folder, run, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--tiny", action="store_true", help="a few channels, to try the program on a CPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of the run")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    given = os.environ.get("HF_HOME", "")
    home = Path(given)
    if not given or (home / "hub").exists():
        parser.error(f"HF_HOME is {given!r}; allowed: a folder without a hub, as a CLIP is written there. Set it.")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("cgru").setLevel(logging.INFO)
    place = Path(tempfile.mkdtemp(prefix="families-"))
    try:
        begun = time.perf_counter()
        millions = written(options.family, place / "model", torch.device(options.device), tiny=options.tiny)
        write_clip(home, tiny=options.tiny)
        print(f"folder written in {time.perf_counter() - begun:.0f} s: {millions}", flush=True)
        table = {
            "date": date.today().isoformat(),
            "commit": commit_of(Path(__file__)),
            "family": options.family + (" (tiny)" if options.tiny else ""),
            "machine": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
            "torch": str(torch.__version__),
            "million_parameters": millions,
            **measured(place / "model", options, place / "runs"),
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(json.dumps(table, indent=1))
    if options.out is not None:
        atomic_write(options.out, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
