"""The libraries' own progress bars, switched off where a local folder loads in milliseconds."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

LIBRARIES = (transformers_logging, diffusers_logging)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Draw no bars inside; what was on before is on again after."""
    drawing = [library for library in LIBRARIES if library.is_progress_bar_enabled()]
    for library in drawing:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in drawing:
            library.enable_progress_bar()
