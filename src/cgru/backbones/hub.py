"""Check once whether the hub can be reached, before the libraries try six times with growing pauses.

A mistyped path such as runs/nope looks like a hub id; without this check, a machine without a network would hang
silently for up to a minute.
"""

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from cgru.backbones.base import one_line

SECONDS = 4.0
"""For the one question."""


def check_reachable(hub_id: str, file: str, *, revision: str | None = None, endpoint: str | None = None) -> None:
    """Raise ConnectionError if a file of a hub id is not on this disk and the hub does not answer at all."""
    is_here = isinstance(try_to_load_from_cache(hub_id, file, revision=revision), str)
    if is_here or constants.HF_HUB_OFFLINE:
        return  # offline the libraries do not wait
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, file, revision=revision, endpoint=endpoint), timeout=SECONDS)
    except HfHubHTTPError:
        return  # it answered: who reads the file says what is wrong with it
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        raise ConnectionError(f"the hub does not answer: {one_line(error)}") from error
