"""A folder that brings Python code of its own: it never runs, though someone at the terminal says yes to everything."""

import ast
import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rewards.reward_folders import clip_vision, save_classifier, save_clip, save_tower_with_heads
from tiny_assets import write_judge
from tiny_llava import write_llava
from transformers import CLIPTokenizer

from cgru.backbones.base import Backbone
from cgru.backbones.families import SD
from cgru.backbones.foreign_code import refuse_code
from cgru.backbones.sd import StableDiffusion, load_stable_diffusion
from cgru.cli import main
from cgru.critic.tower import load_tower as load_critic_tower
from cgru.evaluation.judges.classifiers import load_judge
from cgru.lora.merge import _pipeline
from cgru.rewards.clip import load_clip
from cgru.rewards.detectors import nsfw_reward
from cgru.rewards.heads import load_heads

ROOT = Path(__file__).parents[2]
AUTO = ("AutoConfig", "AutoModelForImageClassification", "AutoTokenizer", "AutoProcessor", "AutoModel")
CODE = """from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import CLIPTokenizer as Evil
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the code writes if it runs; stdin answers y to whatever is asked."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    (tmp_path / "work").mkdir()
    with contextlib.chdir(tmp_path / "work"):
        yield tmp_path / "marker"


def poison(folder: Path, file: str, marker: Path, entry: object = None) -> Path:
    """Have a config name a module beside it."""
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    path = folder / file
    table = json.loads(path.read_text()) if path.is_file() else {}
    names = {name: ["evil.Evil", "evil.Evil"] if name == "AutoTokenizer" else "evil.Evil" for name in AUTO}
    path.write_text(json.dumps(table | (entry if isinstance(entry, dict) else {"auto_map": names})))
    return folder


def unknown_kind(folder: Path, architecture: str) -> None:
    """A model_type that transformers does not have: it could be loaded by the folder's code alone."""
    path = folder / "config.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(table | {"model_type": "evil", "architectures": [architecture]}))


def classifier(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    save_classifier(folder)
    unknown_kind(folder, "EvilForImageClassification")
    poison(folder, "config.json", marker)
    return ["unlearn", "Dogs", "--dry-run", f"watch.detector={folder}#nsfw"]


def zero_shot(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    save_clip(folder, CLIPTokenizer.from_pretrained(sd_folder / "tokenizer"))
    (folder / "tokenizer_config.json").write_text("{}")
    poison(folder, "tokenizer_config.json", marker)
    return ["unlearn", "Dogs", "--dry-run", f"watch.detector={folder}#dog"]


def llava(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    write_llava(folder)
    (folder / "processor_config.json").unlink(missing_ok=True)
    poison(folder, "processor_config.json", marker)
    Path("pictures").mkdir()
    Image.new("RGB", (8, 8)).save("pictures/a.png")
    return ["prompts", "caption", "pictures", "--out", "c.jsonl", "--model", str(folder), "--dtype", "fp32"]


def nested(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    words = llava(folder, sd_folder, marker)
    (folder / "processor_config.json").write_text("{}")
    table = json.loads((folder / "config.json").read_text())
    table["text_config"] = {**table["text_config"], "auto_map": {"AutoModel": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(table))
    return words


def heads(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    save_tower_with_heads(clip_vision(), folder, mean=0.5, std=0.5)
    poison(folder, "config.json", marker)
    return ["unlearn", "Dogs", "--dry-run", f"reward.networks=[{folder}]"]


def component(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    shutil.copytree(sd_folder, folder)
    poison(folder / "text_encoder", "config.json", marker)
    return ["generate", "a", "--steps", "1", "--model", str(folder)]


def tokenizer(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    shutil.copytree(sd_folder, folder)
    poison(folder / "tokenizer", "tokenizer_config.json", marker)
    return ["generate", "a", "--steps", "1", "--model", str(folder)]


def pipeline_part(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    shutil.copytree(sd_folder, folder)
    (folder / "safety_checker").mkdir()
    poison(folder / "safety_checker", "config.json", marker, {})
    poison(folder, "model_index.json", marker, {"safety_checker": ["evil", "Evil"]})
    return ["evaluate", str(folder), "--images", "1"]


def pipeline_class(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    shutil.copytree(sd_folder, folder)
    poison(folder, "model_index.json", marker, {"_class_name": ["evil", "Evil"]})
    return ["attack", str(folder), "--target", "Dogs"]


def kernel(folder: Path, sd_folder: Path, marker: Path) -> list[str]:
    shutil.copytree(sd_folder, folder)
    poison(folder / "text_encoder", "config.json", marker, {"_attn_implementation": "nobody/evil-kernel"})
    return ["generate", "a", "--steps", "1", "--model", str(folder)]


COMMANDS = (
    classifier,
    zero_shot,
    llava,
    nested,
    heads,
    component,
    tokenizer,
    pipeline_part,
    pipeline_class,
    kernel,
)


@pytest.mark.parametrize("prepare", COMMANDS, ids=lambda prepare: prepare.__name__)
def test_a_command_refuses_it_in_one_line(
    prepare: Callable[[Path, Path, Path], list[str]],
    tmp_path: Path,
    sd_folder: Path,
    marker: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = prepare(tmp_path / "evil", sd_folder, marker)
    capsys.readouterr()  # bars of what was saved
    before = sorted(Path.cwd().rglob("*"))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert not marker.exists()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "asks for Python code of its own" in captured.err
    assert "trust_remote_code" not in captured.err
    assert sorted(Path.cwd().rglob("*")) == before


def reward_folder(folder: Path, sd_folder: Path, backbone: Backbone) -> object:
    return nsfw_reward(backbone, model=folder)


def clip_folder(folder: Path, sd_folder: Path, backbone: Backbone) -> object:
    shutil.rmtree(folder)
    save_clip(folder, CLIPTokenizer.from_pretrained(sd_folder / "tokenizer"))
    (folder / "evil.py").write_text("")
    table = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(table | {"auto_map": {"AutoTokenizer": [None, "evil.E"]}}))
    return load_clip(folder)


def judge_folder(folder: Path, sd_folder: Path, backbone: Backbone) -> object:
    table = json.loads((folder / "config.json").read_text())["auto_map"]
    write_judge(folder, ("a", "b"), seed=0)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"auto_map": table}))
    return load_judge(folder)


def heads_folder(folder: Path, sd_folder: Path, backbone: Backbone) -> object:
    table = json.loads((folder / "config.json").read_text())["auto_map"]
    save_tower_with_heads(clip_vision(), folder, mean=0.5, std=0.5)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"auto_map": table}))
    return load_heads(folder)


def critic_folder(folder: Path, sd_folder: Path, backbone: Backbone) -> object:
    return load_critic_tower(folder)


LOADERS = (reward_folder, clip_folder, judge_folder, heads_folder, critic_folder)


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
def test_a_loader_refuses_it(
    load: Callable[[Path, Path, Any], object], tmp_path: Path, sd_folder: Path, marker: Path, backbone: StableDiffusion
) -> None:
    folder = tmp_path / "network"
    save_classifier(folder)
    unknown_kind(folder, "EvilForImageClassification")
    poison(folder, "config.json", marker)
    with torch.random.fork_rng(), pytest.raises(ValueError, match="Python code of its own .*which cgru never runs"):
        load(folder, sd_folder, backbone)
    assert not marker.exists()


def test_a_hub_id_is_refused_too(
    tmp_path: Path, marker: Path, hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub_cache / "models--tiny--evil"
    snapshot = repository / "snapshots" / ("0" * 40)
    save_classifier(snapshot)
    unknown_kind(snapshot, "EvilForImageClassification")
    poison(snapshot, "config.json", marker)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert main(["unlearn", "Dogs", "--dry-run", "watch.detector=tiny/evil#nsfw"]) == 2
    assert "'tiny/evil' asks for Python code of its own" in capsys.readouterr().err
    assert not marker.exists()


def test_an_export_reads_no_other_part_either(sd_folder: Path, tmp_path: Path, marker: Path) -> None:
    """A merge loads the whole pipeline, with parts that a backbone does not have."""
    shutil.copytree(sd_folder, tmp_path / "model")
    (tmp_path / "model" / "safety_checker").mkdir()
    poison(tmp_path / "model" / "safety_checker", "config.json", marker, {})
    poison(tmp_path / "model", "model_index.json", marker, {"safety_checker": ["evil", "Evil"]})
    with pytest.raises(ValueError, match="safety_checker .*evil.*in model_index.json"):
        _pipeline(tmp_path / "model", SD, {"default": torch.float32})
    assert not marker.exists()


def test_ordinary_folders_are_not_refused(sd_folder: Path, tmp_path: Path) -> None:
    """As Stable Diffusion's own index is, and a config that names an attention of the library."""
    shutil.copytree(sd_folder, tmp_path / "model")
    parts = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "image_encoder": [None, None],
        "requires_safety_checker": True,
    }
    index = json.loads((sd_folder / "model_index.json").read_text())
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index | parts))
    config = json.loads((sd_folder / "text_encoder" / "config.json").read_text())
    text = json.dumps(config | {"attn_implementation": "sdpa", "auto_map": None})
    (tmp_path / "model" / "text_encoder" / "config.json").write_text(text)
    refuse_code(tmp_path / "model")
    load_stable_diffusion(tmp_path / "model", device="cpu")


def test_deep_nesting_is_left_to_the_reader(tmp_path: Path) -> None:
    """Python's own JSON reader gives up at about 1,000 levels; what it still reads must not be too deep here."""
    deep = "[" * 900 + '{"auto_map": ' + '{"a": ' * 20 + '"b"' + "}" * 21 + "]" * 900
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(ValueError, match="auto_map in config.json"):
        refuse_code(tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    refuse_code(tmp_path)


def calls_without_no(folder: Path) -> list[str]:
    """`X.from_pretrained(...)` that does not pass trust_remote_code=False, where X may be a class that runs code."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = ast.unparse(node.func.value)
            is_download = node.func.attr == "download" and owner.endswith("Pipeline")
            loads = is_download or (node.func.attr == "from_pretrained" and owner != "AutoencoderKL")
            # A class by its own name is that class; Auto classes, pipelines and variables may be any.
            is_open = owner.startswith("Auto") or owner.endswith("Pipeline") or owner[0].islower()
            no = [
                word for word in node.keywords if word.arg == "trust_remote_code" and ast.unparse(word.value) == "False"
            ]
            if loads and is_open and not no:
                found.append(f"{path.relative_to(folder)}:{node.lineno} {owner}")
    return found


@pytest.mark.parametrize("folder", ["src", "tools", "benchmarks"])
def test_every_open_class_is_told_not_to_run_code(folder: str) -> None:
    assert calls_without_no(ROOT / folder) == []


def test_the_reader_of_calls_sees_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "AutoTokenizer.from_pretrained(x)\nkind.from_pretrained(x, trust_remote_code=True)\n"
        "CLIPModel.from_pretrained(x)\nAutoModel.from_pretrained(x, trust_remote_code=False)\n"
        "DiffusionPipeline.download(x)\n"
    )
    assert calls_without_no(tmp_path) == ["a.py:1 AutoTokenizer", "a.py:2 kind", "a.py:5 DiffusionPipeline"]
