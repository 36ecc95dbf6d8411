"""CLIP similarity, NSFW detector, aesthetic score and JPEG size, each against its own definition."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from reward_folders import CLIP_PREPROCESS, clip_vision, save_classifier, save_clip
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import CLIPModel, CLIPTextModel, CLIPTokenizer, CLIPVisionModelWithProjection

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.embedded import sha256_of
from cgru.mdp.rollout import sample
from cgru.rewards.base import Reward, checked, load_reward
from cgru.rewards.detectors import AestheticReward, ClipReward, JpegReward, NsfwReward, read_layers
from cgru.rewards.pictures import normalise

PROMPTS = [""] * 5


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory, sd_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        save_clip(folder, CLIPTokenizer.from_pretrained(sd_folder / "tokenizer"))
    return folder


@pytest.fixture(scope="module")
def clip_id(clip_folder: Path) -> str:
    """The same CLIP as a hub id whose files are in the hub's cache."""
    repository = Path(os.environ["HF_HUB_CACHE"]) / "models--tiny--clip"
    shutil.copytree(clip_folder, repository / "snapshots" / ("1" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    return "tiny/clip"


def expected_cosines(folder: Path, images: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """From CLIPModel's own logits, which are cosines times the scale."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokens = CLIPTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    pixels = normalise(images, tuple(CLIP_PREPROCESS["image_mean"]), tuple(CLIP_PREPROCESS["image_std"]))
    with torch.no_grad():
        return model(pixel_values=pixels, **tokens).logits_per_image / model.logit_scale.exp()


def test_clip_is_one_minus_the_share_of_the_concept(
    tiny: StableDiffusion, clip_folder: Path, images: torch.Tensor
) -> None:
    reward = load_reward("clip", backbone=tiny, concept="a dog", negatives=("a cat", "x"), model=clip_folder)
    assert isinstance(reward, ClipReward)
    logits = expected_cosines(clip_folder, images, ["a dog", "a cat", "x"]) * reward.clip.logit_scale
    assert torch.allclose(checked(reward, images, PROMPTS), 10 * (1 - logits.softmax(-1)[:, 0]), atol=1e-4)


def test_clip_without_negatives_is_the_cosine_in_a_fixed_span(
    tiny: StableDiffusion, clip_folder: Path, images: torch.Tensor
) -> None:
    reward = load_reward("clip", backbone=tiny, concept="a dog", scale=2.0, model=str(clip_folder))
    cosine = expected_cosines(clip_folder, images, ["a dog"])[:, 0]
    # cosines from 0 to 0.4 are mapped to 2..0
    assert torch.allclose(checked(reward, images, PROMPTS), 2 * (1 - (cosine / 0.4).clamp(0, 1)), atol=1e-4)
    assert reward.lineage["weights"] == [sha256_of(clip_folder / "model.safetensors")]


def test_a_hub_id_is_the_same_and_says_where_it_is_from(
    tiny: StableDiffusion, clip_folder: Path, clip_id: str, images: torch.Tensor
) -> None:
    local = load_reward("clip", backbone=tiny, concept="a dog", model=clip_folder)
    hub = load_reward("clip", backbone=tiny, concept="a dog", model=clip_id)
    assert torch.equal(local(images, PROMPTS), hub(images, PROMPTS))
    assert hub.lineage == {**local.lineage, "started_from": ["tiny/clip"]}


def test_a_pipeline_with_its_own_clip_uses_it(sd_folder: Path, tmp_path: Path, images: torch.Tensor) -> None:
    """As in Emoji Canvas: the vision tower in `clip`, the projection beside it, the pipeline's text encoder."""
    folder = tmp_path / "model"
    shutil.copytree(sd_folder, folder)
    torch.manual_seed(0)
    vision, projection = clip_vision(), torch.randn(8, 16)
    vision.save_pretrained(folder / "clip")
    stored = {"text_projection.weight": projection, "logit_scale": torch.tensor(2.0)}
    save_file(stored, folder / "clip" / "text_projection.safetensors")
    reward = load_reward("clip", backbone=load_stable_diffusion(folder, device="cpu"), concept="dog", negatives=["cat"])
    text = CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
    tokens = CLIPTokenizer.from_pretrained(folder / "tokenizer")(["dog", "cat"], return_tensors="pt")
    with torch.no_grad():
        words = functional.normalize(text(**tokens).pooler_output @ projection.T, dim=-1)
        looks = functional.normalize(vision(pixel_values=images * 2 - 1).image_embeds, dim=-1)
    share = (torch.tensor(2.0).exp() * looks @ words.T).softmax(-1)[:, 0]
    assert torch.allclose(reward(images, PROMPTS), 10 * (1 - share), atol=1e-4)
    assert len(reward.lineage["weights"]) == 3  # vision tower, projection, text encoder


def test_the_embedded_clip_tells_dogs_from_cats() -> None:
    backbone = load_stable_diffusion("emoji-canvas", device="cpu")
    cond = backbone.encode_text(["a dog", "a cat", "a tree"])
    latents = sample(backbone, cond, [0, 1, 2], kernel=backbone.kernel(10, eta=0.0), guidance=3.0)
    images = backbone.decode(latents)
    raw = load_reward("clip", backbone=backbone, concept="a dog")(images, PROMPTS[:3])
    sure = load_reward("clip", backbone=backbone, concept="a dog", negatives=("a cat", "a tree"))(images, PROMPTS[:3])
    assert raw[0] + 2 < raw[1:].min()
    assert sure[0] < 1 and sure[1:].min() > 9


def test_nsfw_is_one_minus_p(tiny: StableDiffusion, tmp_path: Path, images: torch.Tensor) -> None:
    model = save_classifier(tmp_path)
    reward = load_reward("nsfw", backbone=tiny, model=str(tmp_path), concept="ignored", scale=1.0)
    assert isinstance(reward, NsfwReward) and (reward.low, reward.high) == (0.0, 1.0)
    with torch.no_grad():
        p = model(pixel_values=images * 2 - 1).logits.softmax(-1)[:, 1]  # label 1 is nsfw, mean and std 0.5
    assert torch.allclose(checked(reward, images, PROMPTS), 1 - p, atol=1e-5)
    other = load_reward("nsfw", backbone=tiny, model=tmp_path, label="normal", scale=10.0)
    assert torch.allclose(checked(other, images, PROMPTS), 10 * p, atol=1e-4)
    with pytest.raises(ValueError, match="Did you mean 'nsfw'"):
        load_reward("nsfw", backbone=tiny, model=tmp_path, label="nfsw")


def v2_stack(width: int) -> nn.Sequential:
    """LAION's v2 as published: linear layers and dropout, no nonlinearity; 768 is `width` here."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    ).eval()


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    clip_vision().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(CLIP_PREPROCESS))
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_the_stack_on_the_normalised_embedding(
    tiny: StableDiffusion, vision_folder: Path, tmp_path: Path, images: torch.Tensor, version: int, suffix: str
) -> None:
    stack = v2_stack(8) if version == 2 else nn.Linear(8, 1)
    prefix = "layers." if version == 2 else ""
    final = stack[-1] if isinstance(stack, nn.Sequential) else stack
    nn.init.constant_(final.bias, 5.0)  # mid-range, so that nothing is clipped
    tensors = {prefix + key: value.detach() for key, value in stack.state_dict().items()}
    path = tmp_path / f"predictor{suffix}"
    torch.save(tensors, path) if suffix == ".pth" else save_file(tensors, path)
    reward = load_reward("aesthetic", backbone=tiny, weights=str(path), model=vision_folder)
    assert isinstance(reward, AestheticReward) and len(reward.layers) == (5 if version == 2 else 1)
    vision = CLIPVisionModelWithProjection.from_pretrained(vision_folder).eval()
    pixels = normalise(images, tuple(CLIP_PREPROCESS["image_mean"]), tuple(CLIP_PREPROCESS["image_std"]))
    with torch.no_grad():
        embeddings = vision(pixel_values=pixels).image_embeds
        expected = stack(embeddings / embeddings.norm(dim=-1, keepdim=True))[:, 0]
    assert torch.allclose(checked(reward, images, PROMPTS), expected, atol=1e-4)
    assert sha256_of(path) in reward.lineage["weights"] and len(reward.lineage["weights"]) == 2


def test_aesthetic_stays_within_its_range(tiny: StableDiffusion, vision_folder: Path, tmp_path: Path) -> None:
    for bias, expected in ((50.0, 10.0), (-50.0, 0.0)):
        save_file({"weight": torch.zeros(1, 8), "bias": torch.tensor([bias])}, tmp_path / "v1.safetensors")
        reward = load_reward("aesthetic", backbone=tiny, weights=tmp_path / "v1.safetensors", model=vision_folder)
        assert checked(reward, torch.rand(1, 3, 16, 16), [""]).item() == expected


def test_aesthetic_mistakes(tiny: StableDiffusion, vision_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        load_reward("aesthetic", backbone=tiny, weights=tmp_path / "no.pth", model=vision_folder)
    save_file({"weight": torch.zeros(1, 768), "bias": torch.zeros(1)}, tmp_path / "wide.safetensors")
    with pytest.raises(ValueError, match="length 768, but .* gives 8"):
        load_reward("aesthetic", backbone=tiny, weights=tmp_path / "wide.safetensors", model=vision_folder)
    save_file({"weight": torch.zeros(2, 8), "bias": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="ends in 1"):
        read_layers(tmp_path / "two.safetensors")


@pytest.mark.parametrize(
    "table",
    [
        {"weight": torch.ones(1, 4)},
        {"weight": torch.ones(4), "bias": torch.ones(1)},
        {"weight": torch.ones(1, 4), "bias": torch.ones(3)},
        {"weight": "x", "bias": 3},
        {3: torch.ones(1, 4)},
        {},
        [1, 2],
        3,
    ],
    ids=str,
)
def test_an_odd_table_is_one_line(table: object, tmp_path: Path) -> None:
    torch.save(table, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match=r"cannot read the network|is a chain of them") as error:
        read_layers(tmp_path / "odd.pth")
    assert "\n" not in str(error.value)


def test_a_pickle_that_is_more_than_weights_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(8, 1), tmp_path / "module.pth")
    with pytest.raises(ValueError, match="cannot read") as caught:
        read_layers(tmp_path / "module.pth")
    assert "\n" not in str(caught.value)


def test_jpeg_is_the_exact_size_in_kb(tiny: StableDiffusion, images: torch.Tensor, tmp_path: Path) -> None:
    reward = load_reward("jpeg", backbone=tiny)
    sizes = []
    for picture in images:
        pixels = (picture * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / "x.jpg", quality=95)
        sizes.append((tmp_path / "x.jpg").stat().st_size)
    assert checked(reward, images, PROMPTS).tolist() == pytest.approx([-size / 1000 for size in sizes])
    other = load_reward("jpeg", backbone=tiny, direction="incompress")
    assert torch.equal(other(images, PROMPTS), -reward(images, PROMPTS))
    # 3 bytes a pixel and 1 kB for 16×16 pictures: 0.768 + 1
    assert (reward.low, reward.high, other.low, other.high) == (-1.768, 0.0, 0.0, 1.768)


def test_jpeg_prefers_plain_pictures_and_noise_stays_in_range() -> None:
    noise = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    flat = torch.full((1, 3, 64, 64), 0.5)
    extreme = noise.round()  # black and white in every channel: the worst there is
    reward = JpegReward("compress", largest=(3 * 64 * 64 + 1000) / 1000)
    scores = checked(reward, torch.cat([flat, noise, extreme]), PROMPTS[:3])
    assert scores[0] > scores[1] > scores[2] > reward.low


def test_jpeg_direction_is_checked() -> None:
    with pytest.raises(ValueError, match="Did you mean 'compress'"):
        JpegReward("compres", largest=1.0)


@pytest.mark.parametrize("name", ["clip", "nsfw", "aesthetic"])
def test_without_a_network_one_line_says_what_to_do(tiny: StableDiffusion, name: str) -> None:
    """The hub is switched off in tests, and none of these models is in its cache."""
    with pytest.raises(FileNotFoundError, match="could not be read from the hub") as caught:
        load_reward(name, backbone=tiny, concept="a dog")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["clip", "nsfw"])
def test_a_mistyped_folder_is_one_line(tiny: StableDiffusion, tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no network"):
        load_reward(name, backbone=tiny, concept="a dog", model=tmp_path / "missing")


def test_a_sum_over_real_rewards(tiny: StableDiffusion, clip_folder: Path, images: torch.Tensor) -> None:
    total: Reward = load_reward("0.5*clip+2*jpeg", backbone=tiny, concept="a dog", model=clip_folder)
    clip = load_reward("clip", backbone=tiny, concept="a dog", model=clip_folder)
    jpeg = load_reward("jpeg", backbone=tiny)
    expected = 0.5 * clip(images, PROMPTS) + 2 * jpeg(images, PROMPTS)
    assert torch.allclose(checked(total, images, PROMPTS), expected)
    assert (total.low, total.high) == pytest.approx((-2 * 1.768, 5.0))


def test_grey_pictures_are_scored_as_colours_of_one_shade(tiny: StableDiffusion, clip_folder: Path) -> None:
    grey = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    rewards = [
        load_reward("jpeg", backbone=tiny),
        load_reward("clip", backbone=tiny, concept="a dog", model=clip_folder),
    ]
    for reward in rewards:
        expected = checked(reward, grey.expand(-1, 3, -1, -1), ["a"] * 3)
        assert torch.equal(checked(reward, grey, ["a"] * 3), expected)
