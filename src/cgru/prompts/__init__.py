"""Prompts of a run: generated from a lexicon or from templates (`sets`, `grammar`), or read from a file (`files`)."""

from cgru.prompts.files import prompts_from_file
from cgru.prompts.grammar import words_of
from cgru.prompts.sets import (
    Counts,
    Prompt,
    PromptSets,
    class_prompts,
    generated_prompts,
    retain_label_table,
    template_prompts,
)
from cgru.prompts.task import sentence, task_for

__all__ = [
    "Counts",
    "Prompt",
    "PromptSets",
    "class_prompts",
    "generated_prompts",
    "prompts_from_file",
    "retain_label_table",
    "sentence",
    "task_for",
    "template_prompts",
    "words_of",
]
