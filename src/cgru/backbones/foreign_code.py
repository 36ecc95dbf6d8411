"""Model folders are data: a folder whose configs refer to its own Python code is refused, and that code never runs.

transformers can run the files that `auto_map` names, and asks at a terminal unless it is forbidden; an attention
implementation `owner/name` is code from the hub. Every loader here also passes `trust_remote_code=False`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGS = (
    "config.json",
    "model_index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
)
LIBRARIES = ("diffusers", "transformers", "stable_diffusion")
"""Libraries that the parts of a pipeline may come from; the last is diffusers' own safety checker."""


def refuse_code(folder: Path, name: str | Path | None = None) -> None:
    """Refuse a folder whose configs, at any depth, name their own code; `name` is the user's name for the folder."""
    for file in CONFIGS:
        named = next(_named_code(_table(folder / file)), None)
        if named is None and file == "model_index.json":
            named = next(_foreign_parts(_table(folder / file)), None)
        if named is not None:
            raise ValueError(
                f"{str(name or folder)!r} asks for Python code of its own ({named:.80} in {file}), which cgru never "
                "runs; allowed: classes of transformers and diffusers. Give another model, or remove that entry."
            )


def _table(path: Path) -> object:
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None  # the code that reads this file reports what is wrong with it


def _named_code(value: object) -> Iterator[str]:
    todo = [value]  # not by recursion: a file may nest deeper than Python's stack
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            for key, inner in found.items():
                names = inner.values() if isinstance(inner, dict) else [inner]
                words = [name for name in names if isinstance(name, str)]
                is_hub_kernel = key.endswith("attn_implementation") and any("/" in word for word in words)
                if is_hub_kernel or (key in ("auto_map", "custom_pipelines") and inner):
                    yield f"{key} {', '.join(words)}".strip()
            todo += found.values()
        elif isinstance(found, list):
            todo += found


def _foreign_parts(index: Any) -> Iterator[str]:  # noqa: ANN401 - what a JSON file holds
    # "unet": ["diffusers", "UNet2DConditionModel"]; another first word is a module, of the folder or of this machine.
    for part, entry in index.items() if isinstance(index, dict) else ():
        is_class = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        if (is_class and entry[0] not in LIBRARIES) or (part == "_class_name" and isinstance(entry, list)):
            yield f"{part} {entry[:1]}"
