"""Keeps other libraries' notes and loading bars off the terminal; their errors still raise."""

from __future__ import annotations

import importlib
import logging
import warnings


def quiet_libraries() -> None:
    """Silence diffusers, transformers and huggingface_hub for this process; call it before they load anything."""
    transformers_logging = importlib.import_module("transformers.utils.logging")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    importlib.import_module("diffusers")  # it sets its own level while it is imported
    # huggingface_hub warns at each retry; if all fail, our own message reports it.
    for library in ("diffusers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # They warn about each other's deprecated arguments, which our users cannot change.
    warnings.filterwarnings("ignore", module="huggingface_hub|diffusers|transformers|peft")
