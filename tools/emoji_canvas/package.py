"""Put the built parts into `src/cgru/assets`: what ships, in half precision, with sources, lineage and checksums.

The text encoder stays float32: transformers keeps the stored dtype while diffusers casts, so an all-half folder would
fail in plain diffusers. The CLIP parts' values are half-precision values in either case.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForImageClassification,
    CLIPModel,
    CLIPTokenizer,
    CLIPVisionModelWithProjection,
    SwinModel,
)

from tools.emoji_canvas import art
from tools.emoji_canvas.canvas import Composer, Layout
from tools.emoji_canvas.denoiser import scheduler, text_tower
from tools.emoji_canvas.judges import CLASS_NAMES, HAZARD_NAMES, INPUT_SIZE, prepared
from tools.emoji_canvas.training import generator_for, log
from tools.emoji_canvas.vocabulary import CLASSES, EVERYDAY, HELD_OUT_SET, JUDGE_SETS, STYLES

ASSETS = Path(__file__).resolve().parents[2] / "src" / "cgru" / "assets"
SAMPLING = {"steps": 20, "guidance": 3.0, "eta": 0.0}  # chosen by `check`, under the judges (docs/lab.md)
REFERENCE_IMAGES = 4800
LARGEST_FILE, LARGEST_TOTAL = 16 * 2**20, 48 * 2**20
GENERATOR_ART = [f"Iconify {name}" for name in STYLES.values()]
JUDGE_ART = [*(f"Iconify {name}" for name in JUDGE_SETS), "Debian openclipart"]


def main(work: Path) -> None:
    """Write every asset anew and check the sizes."""
    model = ASSETS / "emoji-canvas"
    for folder in ("emoji-canvas", "clip-eval", "judges", "detector", "reference"):
        shutil.rmtree(ASSETS / folder, ignore_errors=True)
    pipeline(work, model)
    vision_tower(work, model / "clip")
    for name in ("clip", "swin"):
        reward(work, name, model / "reward" / name)
    (model / "canvas.json").write_text(json.dumps(vocabulary(work), indent=1) + "\n")
    CLIPModel.from_pretrained(work / "clip-eval", dtype=torch.float16).save_pretrained(ASSETS / "clip-eval")
    _write_json(
        ASSETS / "clip-eval" / "lineage.json",
        {
            "name": "clip-eval",
            "family": "CLIP",
            "started_from": [],
            "trained_on": GENERATOR_ART,
            "weights_sha256": _sha256(ASSETS / "clip-eval" / "model.safetensors"),
        },
    )
    for name in ("object", "style", "hazard"):
        classifier(work, name, ASSETS / "judges" / name)
    classifier(work, "detector", ASSETS / "detector")
    reference(work, ASSETS / "reference" / "canvas.safetensors")
    (ASSETS / "SOURCES.md").write_text(sources(work))
    checksums()


def pipeline(work: Path, folder: Path) -> None:
    """The diffusers folder: UNet and VAE in half precision, text encoder in float32."""
    unet = UNet2DConditionModel.from_pretrained(work / "unet", torch_dtype=torch.float16)
    vae = AutoencoderKL.from_pretrained(work / "vae", torch_dtype=torch.float16)
    StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        text_encoder=text_tower(work),
        scheduler=scheduler(),
        tokenizer=CLIPTokenizer.from_pretrained(work / "tokenizer"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    shutil.rmtree(folder / "unet")
    unet.save_pretrained(folder / "unet", max_shard_size="15MB")
    shutil.copy(work / "tokenizer" / "vocab.json", folder / "tokenizer")
    shutil.copy(work / "tokenizer" / "merges.txt", folder / "tokenizer")
    for config in folder.rglob("config.json"):
        _drop_private_paths(config)


def _drop_private_paths(config: Path) -> None:
    """diffusers records where a part was loaded from; that is our build folder."""
    table = json.loads(config.read_text())
    table.pop("_name_or_path", None)
    config.write_text(json.dumps(table, indent=2) + "\n")


def vision_tower(work: Path, folder: Path) -> None:
    """What rewards and critics start from, and the text projection that makes text and pictures comparable."""
    CLIPVisionModelWithProjection.from_pretrained(work / "clip", dtype=torch.float16).save_pretrained(folder)
    weights = load_file(work / "clip" / "model.safetensors")
    text = {key: weights[key].half() for key in ("text_projection.weight", "logit_scale")}
    save_file(text, folder / "text_projection.safetensors", metadata={"format": "pt"})
    _write_json(
        folder / "lineage.json",
        {
            "name": "emoji-canvas-clip",
            "family": "CLIP",
            "started_from": [],
            "trained_on": GENERATOR_ART,
            "weights_sha256": _sha256(folder / "model.safetensors"),
        },
    )


def reward(work: Path, name: str, folder: Path) -> None:
    """A reward network in half precision: tower, heads, labels; only the first starts from our CLIP."""
    source = work / f"reward-{name}"
    kind = CLIPVisionModelWithProjection if name == "clip" else SwinModel
    kind.from_pretrained(source, dtype=torch.float16, trust_remote_code=False).save_pretrained(folder)
    heads = {key: value.half() for key, value in load_file(source / "heads.safetensors").items()}
    save_file(heads, folder / "heads.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "heads.json", folder)
    _write_json(
        folder / "lineage.json",
        {
            "name": f"emoji-canvas-reward-{name}",
            "family": "CLIP" if name == "clip" else "Swin",
            "started_from": [_sha256(folder.parents[1] / "clip" / "model.safetensors")] if name == "clip" else [],
            "trained_on": GENERATOR_ART,
            "weights_sha256": _sha256(folder / "model.safetensors"),
            "accuracy": json.loads((source / "accuracy.json").read_text()),
        },
    )


def vocabulary(work: Path) -> dict[str, object]:
    """canvas.json: the names the model knows, cells without art, how to sample."""
    records = art.load(work, "main")[1]
    present = {(record["label"], record["style"]) for record in records}
    stand_ins = {icon for noun in CLASSES for icon in noun.substitutes}
    return {
        "name": "emoji-canvas",
        "version": 3,
        "classes": CLASS_NAMES,
        "styles": list(STYLES),
        "hazard": HAZARD_NAMES,
        "everyday": [noun.label for noun in EVERYDAY],
        "sampling": SAMPLING,
        "missing_cells": [[c, s] for c in CLASS_NAMES for s in STYLES if (c, s) not in present],
        "substituted_cells": [[r["label"], r["style"], r["icon"]] for r in records if r["icon"] in stand_ins],
        "lexicon": {
            noun.label: {
                "singular": noun.words[0],
                "plural": noun.plural,
                "synonyms": list(noun.words[1:]),
                "breeds": sorted({word for words in noun.icons.values() for word in words}),
            }
            for nouns in art.GROUPS.values()
            for noun in nouns
        },
    }


def classifier(work: Path, name: str, folder: Path) -> None:
    """A judge or the detector in half precision, with its preprocessing and lineage."""
    source = work / "judges" / name
    network = AutoModelForImageClassification.from_pretrained(source, dtype=torch.float16, trust_remote_code=False)
    network.save_pretrained(folder)
    shutil.copy(source / "preprocessor_config.json", folder)
    trained_on = GENERATOR_ART if name == "style" else GENERATOR_ART + JUDGE_ART
    _write_json(
        folder / "lineage.json",
        {
            "name": f"emoji-canvas-{name}",
            "family": "ConvNeXt V2" if name == "detector" else "ResNet",
            "started_from": [],
            "trained_on": trained_on,
            "never_saw": f"Iconify {HELD_OUT_SET}",
            "weights_sha256": _sha256(folder / "model.safetensors"),
            "accuracy": json.loads((source / "accuracy.json").read_text()),
        },
    )


@torch.no_grad()
def reference(work: Path, path: Path) -> None:
    """Mean and covariance of object-judge features over real composites, the grid's cells drawn evenly."""
    device = torch.device("cpu")
    icons, records = art.load(work, "main")
    folder = ASSETS / "judges" / "object"
    judge = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    composer, generator = Composer(icons, device), generator_for(device, "reference")
    cells = [
        [i for i, r in enumerate(records) if r["label"] == c and r["style"] == s] for c in CLASS_NAMES for s in STYLES
    ]
    cells = [cell for cell in cells if cell]
    chosen = []
    for k in range(REFERENCE_IMAGES):
        cell = cells[k % len(cells)]
        chosen.append(cell[int(torch.randint(0, len(cell), (1,), generator=generator))])
    features = [
        _features(judge, composer, torch.tensor(chosen[k : k + 100]), generator) for k in range(0, len(chosen), 100)
    ]
    table = torch.cat(features).double()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"mean": table.mean(0), "covariance": torch.cov(table.T), "n": torch.tensor([len(table)])}, path)


def _features(judge: torch.nn.Module, composer: Composer, index: Tensor, generator: torch.Generator) -> Tensor:
    alone, white = torch.full_like(index, -1), torch.zeros_like(index)
    images = composer.scenes(Layout(index, alone, white), generator)
    return judge.base_model(prepared(images, INPUT_SIZE["object"])).pooler_output.flatten(1)  # type: ignore[operator]


def sources(work: Path) -> str:
    """SOURCES.md: art, authors, licences, checksums of the archives it came in."""
    uses = {name: f"style {style}" for style, name in STYLES.items()}
    uses |= dict.fromkeys(JUDGE_SETS, "judges only") | {HELD_OUT_SET: "held out: measures the judges, trains nothing"}
    rows = []
    for name, use in uses.items():
        icons = art.IconSet(work / "art", name)
        author, licence = icons.info["author"], icons.info["license"]
        package = "@".join(icons.archive.stem.removeprefix("iconify-json-").rsplit("-", 1))
        rows.append(
            f"| {icons.info['name']} | `@iconify-json/{package}` | {author['name']} | {licence['title']} | {use} "
            f"| `{_sha256(icons.archive)}` |"
        )
    deb = next((work / "art").glob("openclipart-svg_*.deb"))
    rows.append(
        f"| Open Clip Art Library | Debian `openclipart-svg` | its contributors | public domain | judges only "
        f"| `{_sha256(deb)}` |"
    )
    return SOURCES_HEAD + "\n".join(rows) + SOURCES_TAIL


SOURCES_HEAD = """# Sources of the embedded assets

Emoji Canvas and the networks beside it were trained from scratch, by `tools/emoji_canvas`, on the pictures listed here.
No pretrained weights of anybody were used. The pictures themselves are not shipped; the weights are ours, Apache-2.0.
CC BY asks for attribution: the authors are named in the table. Captions were written by our own generator.

| art | package | author | licence | used for | sha256 of the archive |
|---|---|---|---|---|---|
"""
SOURCES_TAIL = """

Which network saw what is in `lineage.json` beside each network; `SHA256SUMS` lists every shipped file
(`cgru doctor` checks it). To build all this again: `python -m tools.emoji_canvas` (see `tools/emoji_canvas`).
"""


def checksums() -> None:
    """SHA256SUMS over everything that ships, and the size limits."""
    files = sorted(path for path in ASSETS.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    rows = [f"{_sha256(path)}  {path.relative_to(ASSETS).as_posix()}\n" for path in files]
    (ASSETS / "SHA256SUMS").write_text("".join(rows))
    total, largest = sum(path.stat().st_size for path in files), max(files, key=lambda path: path.stat().st_size)
    log.info(
        "assets: %d files, %.1f MiB, largest %s %.1f MiB",
        len(files),
        total / 2**20,
        largest.name,
        largest.stat().st_size / 2**20,
    )
    assert total <= LARGEST_TOTAL and largest.stat().st_size <= LARGEST_FILE, "assets are larger than we allow"


def _write_json(path: Path, table: dict[str, object]) -> None:
    path.write_text(json.dumps(table, indent=1) + "\n")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
