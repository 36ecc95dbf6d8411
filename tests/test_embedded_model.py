"""Emoji Canvas as it ships: loads in plain diffusers, small, whole, and judged by networks of another family."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPModel, CLIPTokenizer, CLIPVisionModelWithProjection

from cgru.backbones import load_model
from cgru.backbones.sd import StableDiffusion
from cgru.embedded import ROOT, load_vocabulary, verify
from cgru.evaluation.distances import load_reference
from cgru.evaluation.judges.classifiers import load_judge
from cgru.mdp.rollout import noise_for, sample

FOLDER = ROOT / "emoji-canvas"
UNLEARNCANVAS_CLASSES = (
    "Architectures Bears Birds Butterfly Cats Dogs Fishes Flame Flowers Frogs Horses Human Jellyfish Rabbits "
    "Sandwiches Sea Statues Towers Trees Waterfalls"
).split()
CLASSIFIERS = [
    ROOT / "judges" / "object",
    ROOT / "judges" / "style",
    ROOT / "judges" / "hazard",
    ROOT / "detector",
]


@pytest.fixture(scope="module")
def model() -> StableDiffusion:
    loaded = load_model("emoji-canvas", device="cpu")
    assert isinstance(loaded, StableDiffusion)
    return loaded


def test_plain_diffusers_loads_and_samples_it_without_our_code(tmp_path: Path) -> None:
    code = (
        "import sys; from diffusers import StableDiffusionPipeline\n"
        f"pipe = StableDiffusionPipeline.from_pretrained({str(FOLDER)!r})\n"
        "image = pipe('a red fire truck with a dog', num_inference_steps=2).images[0]\n"
        "assert image.size == (64, 64), image.size\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'cgru']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_our_pictures_are_those_of_plain_diffusers(model: StableDiffusion) -> None:
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    prompt = "A Dogs image in Flat style"
    start = noise_for(5, model.latent_shape, 0)  # (1, 4, 16, 16)
    theirs = pipe(prompt, num_inference_steps=4, guidance_scale=3.0, latents=start, output_type="pt").images
    kernel = model.kernel(4, eta=0.0)
    ours = model.decode(sample(model, model.encode_text([prompt]), [5], kernel=kernel, guidance=3.0))
    assert (ours - theirs).abs().max() < 1e-4


def test_every_file_is_as_shipped_and_the_whole_is_small() -> None:
    assert set(verify().values()) == {"ok"}
    files = [path for path in ROOT.rglob("*") if path.is_file()]
    assert {path.relative_to(ROOT).as_posix() for path in files} - set(verify()) == {"SHA256SUMS"}
    assert sum(path.stat().st_size for path in files) <= 48 * 2**20
    assert max(path.stat().st_size for path in files) <= 16 * 2**20
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}]


HALF = ("unet", "vae", "clip", "reward/clip", "reward/swin")


@pytest.mark.parametrize(("part", "dtype"), [("text_encoder", "F32"), *((part, "F16") for part in HALF)])
def test_stored_precision(part: str, dtype: str) -> None:
    for path in (FOLDER / part).glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} - {"I64"} == {dtype}


def test_a_call_stays_within_its_budget(model: StableDiffusion) -> None:
    cond, x, time = model.encode_text(["a dog"]), torch.randn(1, *model.latent_shape), torch.tensor([500])
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as denoiser:
            model.predict(x, time, cond, guidance=1.0)
        with FlopCounterMode(display=False) as decoder:
            model.decode(x)
    assert denoiser.get_total_flops() <= 0.5e9  # 160 pictures in a minute on two cores; version 1 had 0.89e9
    assert decoder.get_total_flops() <= 0.6e9


def test_it_knows_the_papers_classes_eight_styles_and_more() -> None:
    words = load_vocabulary()
    assert list(words.classes) == UNLEARNCANVAS_CLASSES
    assert len(words.styles) == 8 and len(words.hazard) == 6 and len(words.everyday) >= 30
    assert set(words.missing_cells) <= {(label, style) for label in words.classes for style in words.styles}


def test_unseen_words_are_split_not_lost() -> None:
    tokenizer = CLIPTokenizer.from_pretrained(FOLDER / "tokenizer")
    for text in ("a dog in zürich", "x1y2 floccinaucinihilipilification", "猫 and 🐸"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.eos_token_id not in ids[1:-1]
        assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("folder", CLASSIFIERS, ids=lambda folder: folder.name)
def test_classifiers_are_another_family_and_see_nothing_in_nothing(folder: Path) -> None:
    judge = load_judge(folder)
    assert judge.lineage["family"] not in ("CLIP", "ViT")
    assert judge.lineage["weights_sha256"] == judge.weights_sha256
    assert judge.lineage["started_from"] == []
    noise = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    empty = torch.cat([noise, torch.ones(1, 3, 64, 64), torch.full((1, 3, 64, 64), 0.3)])
    assert [judge.labels[i] for i in judge.probabilities(empty).argmax(1)] == ["nothing"] * 10


def test_no_two_networks_share_weights() -> None:
    rows = {path.parent: json.loads(path.read_text()) for path in ROOT.rglob("lineage.json")}
    hashes = [row["weights_sha256"] for row in rows.values()]
    # object, style and hazard judge, detector, CLIP, evaluation CLIP, two reward networks
    assert len(hashes) == len(set(hashes)) == 8
    # Only the CLIP reward network starts from another network, and that one is the generator's own CLIP.
    ancestors = {folder: row["started_from"] for folder, row in rows.items() if row["started_from"]}
    assert ancestors == {FOLDER / "reward" / "clip": [rows[FOLDER / "clip"]["weights_sha256"]]}


@pytest.mark.parametrize("name", ["clip", "swin"])
def test_reward_networks_saw_no_art_of_the_judges_and_are_of_no_judge_family(name: str) -> None:
    def lineage(folder: Path) -> dict[str, Any]:
        row: dict[str, Any] = json.loads((folder / "lineage.json").read_text())
        return row

    reward = lineage(FOLDER / "reward" / name)
    assert reward["family"] not in {lineage(folder)["family"] for folder in CLASSIFIERS}
    assert set(reward["trained_on"]) == set(lineage(FOLDER / "clip")["trained_on"])
    for folder in (ROOT / "judges" / "object", ROOT / "judges" / "hazard", ROOT / "detector"):
        assert set(reward["trained_on"]) < set(lineage(folder)["trained_on"])
    weights = (FOLDER / "reward" / name / "model.safetensors").read_bytes()
    assert reward["weights_sha256"] == hashlib.sha256(weights).hexdigest()


def test_the_two_clips_load_and_rank_their_own_captions(model: StableDiffusion) -> None:
    """The evaluation CLIP, never trained with the generator, must still prefer the caption of what was drawn."""
    tokenizer = CLIPTokenizer.from_pretrained(FOLDER / "tokenizer")
    CLIPVisionModelWithProjection.from_pretrained(FOLDER / "clip", dtype=torch.float32)
    clip = CLIPModel.from_pretrained(ROOT / "clip-eval", dtype=torch.float32).eval()
    names = ["a frog", "a butterfly", "a hamburger", "a flame"]
    kernel = model.kernel(10, eta=0.0)
    images = model.decode(sample(model, model.encode_text(names), range(4), kernel=kernel, guidance=3.0))
    ids = tokenizer(names, padding="max_length", max_length=48, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = clip(input_ids=ids, pixel_values=images * 2 - 1).logits_per_image
    assert scores.argmax(1).tolist() == [0, 1, 2, 3]


def test_reference_statistics_fit_the_object_judge() -> None:
    reference = load_reference()
    features = load_judge("object").look(torch.ones(1, 3, 64, 64))[1]
    assert reference.mean.shape == (features.shape[1],)
    assert reference.n >= 4000
