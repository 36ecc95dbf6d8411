"""The reward heads that ship with Emoji Canvas say the right thing about what Emoji Canvas draws.

NEEDS THE ASSETS `emoji-canvas/reward/{clip,swin}`, which `tools.emoji_canvas reward-clip reward-swin package` builds.
"""

import json

import pytest
import torch

from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.mdp.rollout import sample
from cgru.rewards.base import checked, load_reward
from cgru.rewards.heads import EMOJI_CANVAS, SHIPPED, ClassHeads, load_heads

# prompt -> (head, label): nouns and styles that the model draws reliably
PROMPTS = {
    "a dog": ("object", "Dogs"),
    "a cat": ("object", "Cats"),
    "a butterfly": ("object", "Butterfly"),
    "a tree": ("object", "Trees"),
    "a frog": ("object", "Frogs"),
    "a horse": ("object", "Horses"),
    "a skull": ("hazard", "skulls"),
    "a bomb": ("hazard", "explosives"),
}
EACH = 2


@pytest.fixture(scope="module")
def model() -> StableDiffusion:
    return load_stable_diffusion("emoji-canvas", device="cpu")


@pytest.fixture(scope="module")
def drawn(model: StableDiffusion) -> torch.Tensor:
    """Two pictures of every prompt, in order."""
    prompts = [prompt for prompt in PROMPTS for _ in range(EACH)]
    kernel = model.kernel(8, eta=0.0)
    return model.decode(sample(model, model.encode_text(prompts), range(len(prompts)), kernel=kernel, guidance=3.0))


@pytest.fixture(scope="module", params=sorted(SHIPPED))
def network(request: pytest.FixtureRequest) -> ClassHeads:
    return load_heads(SHIPPED[request.param])


def test_labels_are_the_vocabulary(network: ClassHeads) -> None:
    words = json.loads((EMOJI_CANVAS / "canvas.json").read_text())
    assert network.labels == {
        "object": (*words["classes"], "other", "nothing"),
        "hazard": (*words["hazard"], "none", "nothing"),
        "style": (*words["styles"], "nothing"),
    }


def test_drawn_pictures_get_the_right_label(network: ClassHeads, drawn: torch.Tensor) -> None:
    truth = [PROMPTS[prompt] for prompt in PROMPTS for _ in range(EACH)]
    tables = network(drawn)
    right = [network.labels[head][int(tables[head][row].argmax())] == label for row, (head, label) in enumerate(truth)]
    assert sum(right) >= 0.85 * len(right), right


def test_benign_pictures_are_no_hazard(network: ClassHeads, drawn: torch.Tensor) -> None:
    labels = [network.labels["hazard"][k] for k in network(drawn[:12])["hazard"].argmax(1)]
    assert labels.count("none") >= 11, labels


def test_noise_and_emptiness_are_nothing(network: ClassHeads) -> None:
    noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    empty = torch.cat([noise, torch.ones(1, 3, 64, 64), torch.full((1, 3, 64, 64), 0.3)])
    for head, logits in network(empty).items():
        assert {network.labels[head][k] for k in logits.argmax(1)} == {"nothing"}


@pytest.mark.parametrize("form", ["probability", "log-odds"])
def test_the_ensembles_reward_is_low_for_dogs_only(model: StableDiffusion, drawn: torch.Tensor, form: str) -> None:
    reward = load_reward("concept", backbone=model, concept="Dogs", networks=("clip", "swin"), views=3, form=form)
    scores = checked(reward, drawn, [""] * len(drawn))
    # Log-odds rise slowly where p is near 1: a reward of 4 is p = 0.77, of 2 p = 0.97.
    assert scores[:EACH].mean() < (2 if form == "probability" else 4) and scores[EACH:].mean() > 8


def test_clean_pictures_of_anything_else_are_paid_for(model: StableDiffusion, drawn: torch.Tensor) -> None:
    reward = load_reward("replaced", backbone=model, concept="Dogs", networks=("clip", "swin"))
    scores = checked(reward, drawn[:12], [""] * 12)  # the six classes; dogs first
    mush = torch.stack([(drawn[2 * i] + drawn[2 * i + 2]) / 2 for i in range(5)])  # one thing over another
    noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert scores[:EACH].max() < 2 and scores[EACH:].mean() > 8
    assert checked(reward, mush, [""] * 5).mean() < 7
    assert checked(reward, noise, [""] * 4).max() < 1
